//! Sequences whose blocks lie all over the cache, and stages made of their next rows.
use attention_svc::model::{BlockId, SequenceRows, StageBatch};

/// A cache's free blocks, in an order that is not the cache's.
pub(crate) struct Blocks {
    free: Vec<BlockId>,
    pub(crate) block_size: usize,
}

impl Blocks {
    pub(crate) fn new(count: u32, block_size: usize) -> Self {
        let mut free: Vec<BlockId> = (0..count).map(BlockId).collect();
        let mut state = 12_345u64;
        for i in (1..free.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            free.swap(i, (state >> 33) as usize % (i + 1));
        }
        Self { free, block_size }
    }
}

/// A sequence and what of it is in the cache.
pub(crate) struct Sequence {
    pub(crate) ids: Vec<u32>,
    pub(crate) cached: usize,
    table: Vec<BlockId>,
}

impl Sequence {
    pub(crate) fn new(ids: &[u32]) -> Self {
        Self { ids: ids.to_vec(), cached: 0, table: Vec::new() }
    }
}

/// A stage of the next `len` rows of each sequence; takes the blocks they need.
pub(crate) fn stage(blocks: &mut Blocks, sequences: &mut [(&mut Sequence, usize)]) -> StageBatch {
    let mut batch = StageBatch::default();
    for (sequence, len) in sequences {
        let (from, to) = (sequence.cached, sequence.cached + *len);
        while sequence.table.len() * blocks.block_size < to {
            sequence.table.push(blocks.free.pop().expect("the test's cache is large enough"));
        }
        batch.sequences.push(SequenceRows {
            start: batch.positions.len(),
            len: *len,
            context_len: to,
            block_table: sequence.table.clone(),
        });
        for position in from..to {
            let block = sequence.table[position / blocks.block_size].0 as usize;
            batch.input_ids.push(sequence.ids[position]);
            batch.positions.push(position as u32);
            batch.slot_mapping.push((block * blocks.block_size + position % blocks.block_size) as i64);
        }
        sequence.cached = to;
    }
    batch
}
