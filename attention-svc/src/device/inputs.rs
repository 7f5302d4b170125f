//! What a stage of a decode step says about its rows, brought to the device by one copy: token ids, positions, lengths,
//! cache slots, rules by which tokens are chosen, block tables.
use std::ops::Range;

use afd_gpu::ops::{DrawRule, Follow, RULE_WORDS, Rows};
use afd_gpu::{Device, GpuError, Region, Staging, Stream};

use crate::engine::DecodeStage;
use crate::model::StageBatch;

/// The numbers of one stage, on the host and on the device.
pub(super) struct Inputs {
    staging: Staging,
    memory: Region,
    places: Places,
    pub(super) num_rows: Region,
    pub(super) ids: Region,
    pub(super) positions: Region,
    pub(super) seq_lens: Region,
    pub(super) slots: Region,
    /// `[max_rows, RULE_WORDS]` u32
    pub(super) rules: Region,
    /// `[max_rows, max_blocks]` i32
    pub(super) block_table: Region,
}

/// Where what is, bytes. Block tables come last, so that only those in use are copied.
#[derive(Clone, Debug)]
struct Places {
    num_rows: Range<usize>,
    ids: Range<usize>,
    positions: Range<usize>,
    seq_lens: Range<usize>,
    slots: Range<usize>,
    rules: Range<usize>,
    block_table: Range<usize>,
    max_rows: usize,
    max_blocks: usize,
}

impl Places {
    fn new(max_rows: usize, max_blocks: usize) -> Self {
        let mut next = 0;
        let mut take = |bytes: usize| {
            let range = next..next + bytes;
            next = range.end.next_multiple_of(256);
            range
        };
        Self {
            num_rows: take(4),
            ids: take(max_rows * 4),
            positions: take(max_rows * 4),
            seq_lens: take(max_rows * 4),
            slots: take(max_rows * 8),
            rules: take(max_rows * RULE_WORDS * 4),
            block_table: take(max_rows * max_blocks * 4),
            max_rows,
            max_blocks,
        }
    }
}

impl Inputs {
    pub(super) fn new(device: &Device, max_rows: usize, max_blocks: usize) -> Result<Self, GpuError> {
        let places = Places::new(max_rows, max_blocks);
        let memory = Region::zeroed(device, places.block_table.end)?;
        let part = |range: &Range<usize>| memory.part(range.clone());
        Ok(Self {
            staging: Staging::new(device, places.block_table.end)?,
            num_rows: part(&places.num_rows)?,
            ids: part(&places.ids)?,
            positions: part(&places.positions)?,
            seq_lens: part(&places.seq_lens)?,
            slots: part(&places.slots)?,
            rules: part(&places.rules)?,
            block_table: part(&places.block_table)?,
            memory,
            places,
        })
    }

    /// Whether a stage's numbers have a place, of which every sequence has one row.
    pub(super) fn fits(&self, batch: &StageBatch) -> bool {
        let Places { max_rows, max_blocks, .. } = self.places;
        let single = batch.sequences.iter().all(|s| s.len == 1 && s.block_table.len() <= max_blocks);
        single && batch.sequences.len() == batch.input_ids.len() && batch.input_ids.len() <= max_rows
    }

    /// Enqueues the copy of a stage that has nothing but padding.
    pub(super) fn upload_padding(
        &mut self,
        kernels: &Rows,
        stream: &Stream,
        padded: usize,
    ) -> Result<(), GpuError> {
        let nothing = DecodeStage { batch: &StageBatch::default(), rules: &[] };
        self.upload(kernels, stream, nothing, padded, None)
    }

    /// Enqueues the copy of a stage that [`fits`](Self::fits), its rows padded to `padded`. Where there are `tokens`, `[rows]` i32,
    /// those are its ids.
    pub(super) fn upload(
        &mut self,
        kernels: &Rows,
        stream: &Stream,
        DecodeStage { batch, rules }: DecodeStage<'_>,
        padded: usize,
        tokens: Option<&Region>,
    ) -> Result<(), GpuError> {
        let rows = batch.input_ids.len();
        let places = self.places.clone();
        let first =
            |range: &Range<usize>, count: usize, bytes: usize| range.start..range.start + count * bytes;
        let staging = &mut self.staging;
        staging.elements::<i32>(places.num_rows.clone())?.fill(rows as i32);
        let words = staging.elements::<i32>(first(&places.ids, padded, 4))?;
        fill(words, batch.input_ids.iter().map(|&id| id as i32), 0);
        let words = staging.elements::<i32>(first(&places.positions, padded, 4))?;
        fill(words, batch.positions.iter().map(|&position| position as i32), 0);
        let words = staging.elements::<i32>(first(&places.seq_lens, padded, 4))?;
        fill(words, batch.sequences.iter().map(|sequence| sequence.context_len as i32), 0);
        let words = staging.elements::<i64>(first(&places.slots, padded, 8))?;
        fill(words, batch.slot_mapping.iter().copied(), -1);
        let words = staging.elements::<u32>(first(&places.rules, padded, RULE_WORDS * 4))?;
        fill(words.as_chunks_mut().0, rules.iter().map(|rule| rule.words()), DrawRule::Best.words());
        let table = first(&places.block_table, padded * places.max_blocks, 4);
        let end = table.end;
        let words = staging.elements::<i32>(table)?;
        for (row, sequence) in words.chunks_exact_mut(places.max_blocks.max(1)).zip(&batch.sequences) {
            // What is behind a sequence's own blocks is never reached.
            for (word, block) in row.iter_mut().zip(&sequence.block_table) {
                *word = block.0 as i32;
            }
        }
        let follow = tokens.map(|tokens| Follow { tokens, rows, at: places.ids.start });
        kernels.carry_in(stream, staging, &self.memory, end, follow)
    }
}

/// `values`, then `rest`.
fn fill<T: Copy>(words: &mut [T], values: impl Iterator<Item = T>, rest: T) {
    let mut values = values;
    for word in words {
        *word = values.next().unwrap_or(rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_aligned_and_apart() {
        let places = Places::new(5, 7);
        let all = [
            &places.num_rows,
            &places.ids,
            &places.positions,
            &places.seq_lens,
            &places.slots,
            &places.rules,
            &places.block_table,
        ];
        assert!(all.windows(2).all(|pair| pair[0].end <= pair[1].start));
        assert!(all.iter().all(|place| place.start % 256 == 0));
        assert_eq!((places.slots.len(), places.block_table.len()), (40, 140));
    }

    #[test]
    fn what_is_missing_is_padding() {
        let mut words = [7i64; 4];
        fill(&mut words, [1, 2].into_iter(), -1);
        assert_eq!(words, [1, 2, -1, -1]);
    }
}
