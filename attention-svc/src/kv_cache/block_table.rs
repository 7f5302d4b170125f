//! The blocks of one sequence, in the order of its tokens.

/// Names one block of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// Made empty, filled and emptied by a [`BlockPool`](super::BlockPool), which counts every reference in it. It cannot be
/// cloned, and dropping one that still holds blocks is a leak that debug builds refuse.
#[derive(Debug, Default)]
pub struct BlockTable {
    pub(super) blocks: Vec<BlockId>,
}

impl BlockTable {
    /// In token order.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Cache slot of the token at `position`, which must lie in the table.
    pub fn slot(&self, position: usize, block_size: usize) -> i64 {
        i64::from(self.blocks[position / block_size].0) * block_size as i64 + (position % block_size) as i64
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        debug_assert!(self.blocks.is_empty() || std::thread::panicking(), "blocks leaked: {:?}", self.blocks);
    }
}
