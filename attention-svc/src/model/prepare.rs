//! What is the same for all layers of a stage, computed once: angles, slots, and how each sequence's rows reach their
//! context.
//!
//! Rows reach it in one of two ways. **Direct**: each row reads the paged cache in place (decode, short pieces of a
//! prompt; MLA in its absorbed form). **Gathered**: the sequence's blocks are copied together and all its rows attend at
//! once (long pieces of a prompt; MLA in its expanded form). Both give the same numbers up to rounding.
use std::sync::Arc;

use afd_common::ids::LayerIdx;
use afd_ffi::Crew;
use afd_ffi::cpu_attention::{PagedRow, PagedRows};
use afd_ffi::cpu_rows::RopeRows;
use tch::{Device, TchError, Tensor};

use super::batch::{SequenceRows, StageBatch};
use super::device_rows::{DeviceRows, SpanNumbers};
use super::error::{ModelError, outside_layers};
use super::rope::Rope;

/// How rows reach their context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reach {
    /// Whichever is faster for a sequence.
    #[default]
    Auto,
    /// All in place; for tests and measurements.
    Direct,
    /// All by copies; for tests and measurements.
    Gathered,
}

/// What a direct row's number counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Numbering {
    /// All rows of the stage.
    Stage,
    /// The direct rows alone, which are then picked by [`PreparedStage::direct_index`].
    DirectOnly,
}

/// A stage, ready for every layer.
pub struct PreparedStage {
    pub(super) num_rows: usize,
    pub(super) slots: Vec<i64>,
    pub(super) direct: PagedRows,
    /// Which rows of the stage are direct, `[direct rows]` i64; `None` when all or none are.
    pub(super) direct_index: Option<Tensor>,
    pub(super) gathered: Vec<GatheredRows>,
    /// Threads of the loops for few rows.
    pub(super) crew: Arc<Crew>,
    /// What operations take, when the rows are not on the CPU.
    pub(super) on_device: Option<DeviceRows>,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

/// One sequence whose rows attend together.
pub(super) struct GatheredRows {
    /// First row in the stage.
    pub(super) start: usize,
    /// Its rows.
    pub(super) len: usize,
    /// Tokens of its context, these rows included.
    pub(super) context_len: usize,
    /// `[blocks]` i64
    pub(super) blocks: Tensor,
    /// The largest of them.
    last_block: u32,
}

impl PreparedStage {
    /// Rows of the stage.
    pub fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// How many of them reach their context in place.
    pub fn num_direct_rows(&self) -> usize {
        self.direct.rows.len()
    }

    /// `prefers_direct(len, context_len)` decides for each sequence; with kernels, the cache's blocks have `block_size`
    /// tokens.
    pub(super) fn new(
        batch: &StageBatch,
        rope: &Rope,
        max_model_len: usize,
        (device, block_size): (Device, Option<usize>),
        crew: &Arc<Crew>,
        numbering: Numbering,
        prefers_direct: impl Fn(usize, usize) -> bool,
    ) -> Result<Self, ModelError> {
        check(batch, max_model_len)?;
        let failed = outside_layers("preparing a stage");
        let (cos, sin) = match block_size {
            None => rope.rows(&batch.positions).map_err(&failed)?,
            // Kernels have the angles of all positions.
            Some(_) => (Vec::new(), Vec::new()),
        };
        let mut direct = PagedRows::default();
        let mut index = Vec::new();
        let mut gathered = Vec::new();
        for sequence in &batch.sequences {
            let &SequenceRows { start, len, context_len, .. } = sequence;
            if prefers_direct(len, context_len) {
                let first = match numbering {
                    Numbering::Stage => start,
                    Numbering::DirectOnly => direct.rows.len(),
                };
                add_direct(&mut direct, sequence, first);
                index.extend((start..start + len).map(|row| row as i64));
            } else {
                gathered.push(GatheredRows::new(sequence, device).map_err(&failed)?);
            }
        }
        let slots = batch.slot_mapping.clone();
        let num_rows = batch.positions.len();
        let direct_index = (!index.is_empty() && index.len() < num_rows)
            .then(|| Tensor::f_from_slice(&index)?.f_to_device(device))
            .transpose()
            .map_err(&failed)?;
        let is_gathered = |sequence: &SequenceRows| !prefers_direct(sequence.len, sequence.context_len);
        let spans = block_size.map(|size| SpanNumbers::of(batch, size, is_gathered)).transpose()?;
        let on_device = (device != Device::Cpu)
            .then(|| {
                let places = (&slots[..], &batch.positions[..]);
                DeviceRows::new(device, (&cos, &sin), places, &direct, spans.unwrap_or_default())
            })
            .transpose()
            .map_err(&failed)?;
        Ok(Self {
            num_rows,
            slots,
            direct,
            direct_index,
            gathered,
            crew: Arc::clone(crew),
            on_device,
            cos,
            sin,
        })
    }

    /// Rows alone, for tests of what happens to them; with `device`, as operations take them.
    #[cfg(test)]
    pub(super) fn of_rows(
        rope: &Rope,
        positions: &[u32],
        slots: Vec<i64>,
        direct: PagedRows,
        device: Option<Device>,
    ) -> Result<Self, TchError> {
        let (cos, sin) = rope.rows(positions)?;
        let on_device =
            device.map(|device| DeviceRows::new(device, (&cos, &sin), (&slots, positions), &direct, vec![]));
        let on_device = on_device.transpose()?;
        let (num_rows, gathered) = (slots.len(), Vec::new());
        Ok(Self {
            num_rows,
            slots,
            direct,
            direct_index: None,
            gathered,
            crew: Arc::new(Crew::new(1).expect("no thread is started")),
            on_device,
            cos,
            sin,
        })
    }

    /// Whether the cache has every slot and context that operations reach for: beyond it they would read foreign memory
    /// on a device, or take the whole device down. The loops of the CPU check for themselves.
    fn check_device(&self, layer: LayerIdx, num_blocks: usize, block_size: usize) -> Result<(), ModelError> {
        let slots = 0..(num_blocks * block_size) as i64;
        if let Some(slot) = self.slots.iter().find(|slot| !slots.contains(slot)) {
            return Err(ModelError::Stage { what: format!("{layer}: slot {slot} of {}", slots.end) });
        }
        for row in &self.direct.rows {
            let table = &self.direct.blocks[row.table.clone()];
            let known = table.iter().all(|&block| (block as usize) < num_blocks);
            if !known || row.num_tokens > table.len() * block_size {
                let what = format!(
                    "{layer}: attention: {} tokens in blocks {table:?} of {num_blocks}",
                    row.num_tokens
                );
                return Err(ModelError::Stage { what });
            }
        }
        Ok(())
    }

    /// Whether the cache has every context that is copied from it; direct rows are checked where they are read.
    pub(super) fn check_gathered(
        &self,
        layer: LayerIdx,
        num_blocks: usize,
        block_size: usize,
    ) -> Result<(), ModelError> {
        // The same for all layers.
        if self.on_device.is_some() && layer == LayerIdx(0) {
            self.check_device(layer, num_blocks, block_size)?;
        }
        for rows in &self.gathered {
            let room = rows.blocks.size()[0] as usize * block_size;
            if rows.context_len > room || rows.last_block as usize >= num_blocks {
                let what = format!(
                    "{layer}: attention: a context of {} in blocks for {room}, up to block {} of {num_blocks}",
                    rows.context_len, rows.last_block
                );
                return Err(ModelError::Stage { what });
            }
        }
        Ok(())
    }

    /// The rows' angles.
    pub(super) fn rope<'a>(&'a self, rope: &Rope) -> RopeRows<'a> {
        RopeRows { cos: &self.cos, sin: &self.sin, half: rope.dim / 2, pairing: rope.pairing }
    }
}

impl GatheredRows {
    fn new(sequence: &SequenceRows, device: Device) -> Result<Self, TchError> {
        let &SequenceRows { start, len, context_len, ref block_table } = sequence;
        let last_block = block_table.iter().map(|block| block.0).max().unwrap_or_default();
        let blocks: Vec<i64> = block_table.iter().map(|block| i64::from(block.0)).collect();
        let blocks = Tensor::f_from_slice(&blocks)?.f_to_device(device)?;
        Ok(Self { start, len, context_len, blocks, last_block })
    }
}

/// Adds the rows of a sequence, which are numbered from `first` on.
fn add_direct(direct: &mut PagedRows, sequence: &SequenceRows, first: usize) {
    let &SequenceRows { len, context_len, ref block_table, .. } = sequence;
    let from = direct.blocks.len();
    direct.blocks.extend(block_table.iter().map(|block| block.0));
    direct.rows.extend((0..len).map(|i| PagedRow {
        row: first + i,
        table: from..direct.blocks.len(),
        num_tokens: context_len - len + i + 1,
    }));
}

/// Slots and blocks are compared with the cache when they are used.
fn check(batch: &StageBatch, max_model_len: usize) -> Result<(), ModelError> {
    let refuse = |what: String| Err(ModelError::Stage { what });
    let rows = batch.positions.len();
    if batch.input_ids.len() != rows || batch.slot_mapping.len() != rows {
        let (ids, slots) = (batch.input_ids.len(), batch.slot_mapping.len());
        return refuse(format!("{rows} positions, {ids} ids, {slots} slots"));
    }
    let mut next = 0;
    for (i, sequence) in batch.sequences.iter().enumerate() {
        let &SequenceRows { start, len, context_len, .. } = sequence;
        if start != next || len == 0 {
            return refuse(format!(
                "sequence {i} has rows {start}..{}, expected some from {next} on",
                start + len
            ));
        }
        if context_len < len || context_len > max_model_len {
            return refuse(format!(
                "sequence {i}: {len} rows in a context of {context_len}, at most {max_model_len} are served"
            ));
        }
        next += len;
    }
    if let Some(position) = batch.positions.iter().find(|&&position| position as usize >= max_model_len) {
        return refuse(format!("position {position}, at most {max_model_len} are served"));
    }
    if next != rows {
        return refuse(format!("sequences have {next} rows, the stage {rows}"));
    }
    Ok(())
}
