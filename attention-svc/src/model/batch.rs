//! What the engine hands to the model: the rows of a stage, and whose they are.
use crate::kv_cache::BlockId;

/// The rows of one stage: the new tokens of some sequences, one after the other.
#[derive(Clone, Debug, Default)]
pub struct StageBatch {
    /// Token ids, `[num_rows]`.
    pub input_ids: Vec<u32>,
    /// Position of each row in its sequence, `[num_rows]`.
    pub positions: Vec<u32>,
    /// Cache slot of each row: block * block_size + offset, `[num_rows]`.
    pub slot_mapping: Vec<i64>,
    /// Whose rows they are, in row order.
    pub sequences: Vec<SequenceRows>,
}

/// The rows of one sequence within a stage.
#[derive(Clone, Debug)]
pub struct SequenceRows {
    /// New tokens: the sequence's rows are `start..start + len` of the stage.
    pub start: usize,
    /// 1 in decode; a chunk of the prompt in prefill.
    pub len: usize,
    /// Tokens in the cache once these are written; the row at `start + i` attends to `context_len - len + i + 1`.
    pub context_len: usize,
    /// Blocks of the whole context, in order.
    pub block_table: Vec<BlockId>,
}
