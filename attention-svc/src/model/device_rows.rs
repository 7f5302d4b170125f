//! A stage's numbers where its rows are, when that is not the CPU: as operations take them, and as kernels do.
use afd_ffi::cpu_attention::PagedRows;
use afd_ffi::cuda::PackedSequences;
use tch::{Device, TchError, Tensor};

use super::batch::{SequenceRows, StageBatch};
use super::error::ModelError;

/// The stage's numbers where its rows are.
pub(super) struct DeviceRows {
    /// `[num_rows, 1, dim / 2]` f32
    pub(super) cos: Tensor,
    /// The same.
    pub(super) sin: Tensor,
    /// `[num_rows]` i64
    pub(super) slots: Tensor,
    /// `[num_rows]` i32
    pub(super) positions: Tensor,
    pub(super) direct: Option<DeviceDirect>,
    /// The gathered rows again, as kernels take them; empty without kernels.
    pub(super) spans: Vec<Span>,
}

/// Sequences whose rows attend together to their own contexts and lie next to one another in the stage.
pub(super) struct Span {
    /// First row in the stage, and how many.
    pub(super) rows: (i64, i64),
    /// The cache slots of all contexts, one behind the other, `[context]` i64.
    pub(super) context: Tensor,
    pub(super) sequences: PackedSequences,
}

/// A span before it is on the device.
#[derive(Default)]
pub(super) struct SpanNumbers {
    begin: usize,
    end: usize,
    context: Vec<i64>,
    row_starts: Vec<i32>,
    context_starts: Vec<i32>,
    max_rows: usize,
    max_context: usize,
}

impl SpanNumbers {
    /// The sequences of a batch for which `is_gathered`, as few spans as there can be.
    pub(super) fn of(
        batch: &StageBatch,
        block_size: usize,
        is_gathered: impl Fn(&SequenceRows) -> bool,
    ) -> Result<Vec<Self>, ModelError> {
        let mut spans: Vec<Self> = Vec::new();
        for sequence in batch.sequences.iter().filter(|sequence| is_gathered(sequence)) {
            let &SequenceRows { start, len, context_len, ref block_table } = sequence;
            if spans.last().is_none_or(|span| span.end != start) {
                let starts = || vec![0];
                spans.push(Self {
                    begin: start,
                    row_starts: starts(),
                    context_starts: starts(),
                    ..Self::default()
                });
            }
            let Some(span) = spans.last_mut() else { continue };
            let slot = |position: usize| {
                let block = block_table.get(position / block_size)?;
                Some(i64::from(block.0) * block_size as i64 + (position % block_size) as i64)
            };
            for position in 0..context_len {
                let what = || format!("a context of {context_len} in {} blocks", block_table.len());
                span.context.push(slot(position).ok_or_else(|| ModelError::Stage { what: what() })?);
            }
            span.end = start + len;
            span.row_starts.push((span.end - span.begin) as i32);
            span.context_starts.push(span.context.len() as i32);
            span.max_rows = span.max_rows.max(len);
            span.max_context = span.max_context.max(context_len);
        }
        Ok(spans)
    }

    fn on(self, device: Device) -> Result<Span, TchError> {
        Ok(Span {
            rows: (self.begin as i64, (self.end - self.begin) as i64),
            context: Tensor::f_from_slice(&self.context)?.f_to_device(device)?,
            sequences: PackedSequences {
                row_starts: Tensor::f_from_slice(&self.row_starts)?.f_to_device(device)?,
                context_starts: Tensor::f_from_slice(&self.context_starts)?.f_to_device(device)?,
                max_rows: self.max_rows as i64,
                max_context: self.max_context as i64,
            },
        })
    }
}

/// Direct rows, their tables padded to the longest.
pub(super) struct DeviceDirect {
    /// Their indices in the queries, `[direct rows]` i64.
    pub(super) rows: Tensor,
    /// `[direct rows * blocks of the longest]` i64
    pub(super) blocks: Tensor,
    /// Tokens that each attends to, `[direct rows, 1, 1, 1]` i64.
    pub(super) lens: Tensor,
    /// The same for kernels: `[direct rows, max_blocks]` and `[direct rows]` i32.
    pub(super) table: Tensor,
    pub(super) max_blocks: usize,
    pub(super) seq_lens: Tensor,
}

impl DeviceRows {
    pub(super) fn new(
        device: Device,
        (cos, sin): (&[f32], &[f32]),
        (slots, positions): (&[i64], &[u32]),
        direct: &PagedRows,
        spans: Vec<SpanNumbers>,
    ) -> Result<Self, TchError> {
        let rows = slots.len() as i64;
        let positions: Vec<i32> = positions.iter().map(|&position| position as i32).collect();
        let angles = |x: &[f32]| {
            Tensor::f_from_slice(x)?.f_view([rows, 1, x.len() as i64 / rows.max(1)])?.f_to_device(device)
        };
        Ok(Self {
            cos: angles(cos)?,
            sin: angles(sin)?,
            slots: Tensor::f_from_slice(slots)?.f_to_device(device)?,
            positions: Tensor::f_from_slice(&positions)?.f_to_device(device)?,
            direct: DeviceDirect::new(device, direct)?,
            spans: spans.into_iter().map(|span| span.on(device)).collect::<Result<_, _>>()?,
        })
    }
}

impl DeviceDirect {
    fn new(device: Device, direct: &PagedRows) -> Result<Option<Self>, TchError> {
        let Some(longest) = direct.rows.iter().map(|row| row.table.len()).max() else { return Ok(None) };
        let mut blocks = Vec::with_capacity(direct.rows.len() * longest);
        for row in &direct.rows {
            let table = &direct.blocks[row.table.clone()];
            blocks.extend(table.iter().map(|&block| i64::from(block)));
            // Finite numbers that are masked.
            blocks.extend(std::iter::repeat_n(0, longest - table.len()));
        }
        let max_blocks = longest.next_multiple_of(4);
        let mut table = Vec::with_capacity(direct.rows.len() * max_blocks);
        for row in &direct.rows {
            let own = &direct.blocks[row.table.clone()];
            table.extend(own.iter().map(|&block| block as i32));
            table.extend(std::iter::repeat_n(0, max_blocks - own.len()));
        }
        let seq_lens: Vec<i32> = direct.rows.iter().map(|row| row.num_tokens as i32).collect();
        let rows: Vec<i64> = direct.rows.iter().map(|row| row.row as i64).collect();
        let lens: Vec<i64> = direct.rows.iter().map(|row| row.num_tokens as i64).collect();
        Ok(Some(Self {
            rows: Tensor::f_from_slice(&rows)?.f_to_device(device)?,
            blocks: Tensor::f_from_slice(&blocks)?.f_to_device(device)?,
            lens: Tensor::f_from_slice(&lens)?.f_view([-1, 1, 1, 1])?.f_to_device(device)?,
            table: Tensor::f_from_slice(&table)?.f_to_device(device)?,
            max_blocks,
            seq_lens: Tensor::f_from_slice(&seq_lens)?.f_to_device(device)?,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::BlockId;

    #[test]
    fn neighbours_that_attend_together_are_one_span() {
        let sequence = |start, len, context_len, blocks: &[u32]| SequenceRows {
            start,
            len,
            context_len,
            block_table: blocks.iter().map(|&block| BlockId(block)).collect(),
        };
        let sequences = vec![
            sequence(0, 2, 2, &[7]),
            sequence(2, 3, 5, &[1, 4]),
            sequence(5, 1, 9, &[]),
            sequence(6, 2, 2, &[3]),
        ];
        let batch = StageBatch { sequences, ..StageBatch::default() };
        let spans = SpanNumbers::of(&batch, 4, |sequence| sequence.len > 1).unwrap();
        let [first, second] = &spans[..] else { panic!("{} spans", spans.len()) };
        assert_eq!((first.begin, first.end, first.max_rows, first.max_context), (0, 5, 3, 5));
        assert_eq!(first.context, [28, 29, 4, 5, 6, 7, 16]);
        assert_eq!((&first.row_starts[..], &first.context_starts[..]), (&[0, 2, 5][..], &[0, 2, 7][..]));
        assert_eq!((second.begin, second.end, &second.context[..]), (6, 8, &[12, 13][..]));
        let short = StageBatch { sequences: vec![sequence(0, 2, 5, &[1])], ..StageBatch::default() };
        assert!(SpanNumbers::of(&short, 4, |_| true).is_err());
    }
}
