//! All blocks of the cache: how often each is referenced, which are free, which hold a known prefix.
use std::collections::HashMap;

use super::free_list::FreeList;
use super::{BlockId, BlockTable, PrefixKey};

/// Counts references and hands out blocks.
///
/// A block is *used* (referenced by at least one table) or *free*. A free block may still be cached under its prefix;
/// it is then handed out last, least recently freed first, and forgotten at that moment.
pub struct BlockPool {
    block_size: usize,
    blocks: Vec<Block>,
    free: FreeList,
    cached: Option<HashMap<PrefixKey, BlockId>>,
}

#[derive(Clone, Default)]
struct Block {
    references: u32,
    key: Option<PrefixKey>,
}

/// What is cached of a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixHits {
    /// Blocks found, from the start.
    pub blocks: usize,
    /// How many of them are free, that is, would be taken from the free ones by adopting them.
    pub free: usize,
}

impl BlockPool {
    /// `num_blocks` free blocks of `block_size` tokens; without `prefix_cache` nothing is ever found again.
    pub fn new(num_blocks: u32, block_size: usize, prefix_cache: bool) -> Self {
        Self {
            block_size,
            blocks: vec![Block::default(); num_blocks as usize],
            free: FreeList::full(num_blocks),
            cached: prefix_cache.then(HashMap::new),
        }
    }

    /// Tokens of a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Used and free.
    pub fn num_total(&self) -> usize {
        self.blocks.len()
    }

    /// Cached ones included.
    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Blocks referenced by a table: zero when no sequence runs.
    pub fn num_used(&self) -> usize {
        self.num_total() - self.num_free()
    }

    /// Whether prefixes are kept.
    pub fn caches_prefixes(&self) -> bool {
        self.cached.is_some()
    }

    /// Blocks that `num_tokens` tokens need.
    pub fn blocks_for(&self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.block_size)
    }

    /// How much of a prefix is cached. Changes nothing.
    pub fn look_up(&self, keys: &[PrefixKey]) -> PrefixHits {
        let found = self.cached_blocks(keys);
        PrefixHits {
            blocks: found.len(),
            free: found.iter().filter(|block| self.block(**block).references == 0).count(),
        }
    }

    /// Puts the cached blocks of a prefix into an empty table and says how many there were.
    pub fn adopt(&mut self, table: &mut BlockTable, keys: &[PrefixKey]) -> usize {
        debug_assert!(table.blocks.is_empty(), "a prefix comes first");
        let found = self.cached_blocks(keys);
        for &block in &found {
            if self.block(block).references == 0 {
                self.free.remove(block);
            }
            self.blocks[block.0 as usize].references += 1;
        }
        table.blocks = found;
        table.blocks.len()
    }

    /// Makes the table long enough for `num_tokens` tokens; does nothing and returns false when too few blocks are free.
    pub fn grow(&mut self, table: &mut BlockTable, num_tokens: usize) -> bool {
        let missing = self.blocks_for(num_tokens).saturating_sub(table.blocks.len());
        if missing > self.free.len() {
            return false;
        }
        table.blocks.extend((0..missing).map_while(|_| self.take_free()));
        true
    }

    /// Makes the table's block at `index` findable: it is full and its tokens are committed. When another block already
    /// holds the same prefix that one stays the findable one.
    pub fn publish(&mut self, table: &BlockTable, index: usize, key: PrefixKey) {
        let Some(cached) = &mut self.cached else { return };
        let block = table.blocks[index];
        if self.blocks[block.0 as usize].key.is_none() {
            cached.entry(key).or_insert_with(|| {
                self.blocks[block.0 as usize].key = Some(key);
                block
            });
        }
    }

    /// Takes all blocks back. The end of a prefix is forgotten before its beginning: without the beginning the end
    /// cannot be found.
    pub fn release(&mut self, table: &mut BlockTable) {
        for block in std::mem::take(&mut table.blocks).into_iter().rev() {
            let entry = &mut self.blocks[block.0 as usize];
            entry.references -= 1;
            match (entry.references, entry.key) {
                (0, None) => self.free.push_front(block),
                (0, Some(_)) => self.free.push_back(block),
                _ => {}
            }
        }
    }

    fn block(&self, block: BlockId) -> &Block {
        &self.blocks[block.0 as usize]
    }

    fn cached_blocks(&self, keys: &[PrefixKey]) -> Vec<BlockId> {
        let Some(cached) = &self.cached else { return Vec::new() };
        keys.iter().map_while(|key| cached.get(key).copied()).collect()
    }

    fn take_free(&mut self) -> Option<BlockId> {
        let block = self.free.pop_front()?;
        let entry = &mut self.blocks[block.0 as usize];
        entry.references = 1;
        if let (Some(key), Some(cached)) = (entry.key.take(), &mut self.cached) {
            cached.remove(&key);
        }
        Some(block)
    }

    /// For tests: every reference is accounted for by `tables`, and nothing that is written is shared. A table's first
    /// `committed` tokens are the only ones that others may read.
    #[cfg(test)]
    pub(crate) fn check<'a>(&self, tables: impl Iterator<Item = (&'a BlockTable, usize)>) {
        let mut references = vec![0; self.blocks.len()];
        let mut written = Vec::new();
        for (table, committed) in tables {
            for (index, block) in table.blocks.iter().enumerate() {
                references[block.0 as usize] += 1;
                if (index + 1) * self.block_size > committed {
                    written.push(*block);
                }
            }
        }
        for (block, entry) in self.blocks.iter().enumerate() {
            assert_eq!(entry.references, references[block], "references of block {block}");
        }
        for block in written {
            assert_eq!(references[block.0 as usize], 1, "{block:?} is shared while it is written");
            assert!(self.block(block).key.is_none(), "{block:?} can be found while it is written");
        }
        assert_eq!(self.num_used(), references.iter().filter(|count| **count > 0).count(), "gauge");
    }
}

#[cfg(test)]
mod tests {
    use super::super::PrefixChain;
    use super::*;

    fn keys(tokens: &[u32]) -> Vec<PrefixKey> {
        PrefixChain::default().extend(tokens, 4).to_vec()
    }

    fn filled(pool: &mut BlockPool, tokens: &[u32]) -> BlockTable {
        let mut table = BlockTable::default();
        assert!(pool.grow(&mut table, tokens.len()));
        for (index, key) in keys(tokens).into_iter().enumerate() {
            pool.publish(&table, index, key);
        }
        table
    }

    #[test]
    fn grows_all_or_nothing() {
        let mut pool = BlockPool::new(3, 4, true);
        let mut table = BlockTable::default();
        assert!(pool.grow(&mut table, 5));
        assert_eq!((table.blocks().len(), pool.num_used()), (2, 2));
        assert!(!pool.grow(&mut table, 17));
        assert_eq!((table.blocks().len(), pool.num_used()), (2, 2));
        assert_eq!(table.slot(6, 4), i64::from(table.blocks()[1].0) * 4 + 2);
        pool.release(&mut table);
        assert_eq!(pool.num_used(), 0);
    }

    #[test]
    fn a_published_prefix_is_shared_and_survives_its_writer() {
        let mut pool = BlockPool::new(8, 4, true);
        let tokens: Vec<u32> = (0..10).collect();
        let mut writer = filled(&mut pool, &tokens);
        let mut reader = BlockTable::default();
        assert_eq!(pool.look_up(&keys(&tokens)), PrefixHits { blocks: 2, free: 0 });
        assert_eq!(pool.adopt(&mut reader, &keys(&tokens)), 2);
        assert_eq!(reader.blocks(), &writer.blocks()[..2]);
        pool.release(&mut writer);
        assert_eq!(pool.num_used(), 2);
        pool.release(&mut reader);
        assert_eq!(pool.num_used(), 0);
        assert_eq!(pool.look_up(&keys(&tokens)), PrefixHits { blocks: 2, free: 2 });
    }

    #[test]
    fn the_oldest_prefix_goes_first_and_its_end_before_its_beginning() {
        let mut pool = BlockPool::new(4, 4, true);
        let (old, new): (Vec<u32>, Vec<u32>) = ((0..8).collect(), (100..108).collect());
        let (mut a, mut b) = (filled(&mut pool, &old), filled(&mut pool, &new));
        pool.release(&mut a);
        pool.release(&mut b);
        let mut table = BlockTable::default();
        assert!(pool.grow(&mut table, 4));
        assert_eq!((pool.look_up(&keys(&old)).blocks, pool.look_up(&keys(&new)).blocks), (1, 2));
        assert!(pool.grow(&mut table, 8));
        assert_eq!((pool.look_up(&keys(&old)).blocks, pool.look_up(&keys(&new)).blocks), (0, 2));
        pool.release(&mut table);
    }

    #[test]
    fn without_the_flag_nothing_is_found() {
        let mut pool = BlockPool::new(4, 4, false);
        let tokens: Vec<u32> = (0..8).collect();
        let mut table = filled(&mut pool, &tokens);
        assert_eq!(pool.look_up(&keys(&tokens)).blocks, 0);
        pool.release(&mut table);
    }
}
