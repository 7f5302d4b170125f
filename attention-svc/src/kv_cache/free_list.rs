//! The blocks nobody uses, in the order in which they will be used again: a doubly linked list over block numbers, so
//! that a cached block can be taken out of the middle at once.
use super::BlockId;

const NONE: u32 = u32::MAX;

/// Front: next to be handed out. Back: last.
pub(super) struct FreeList {
    links: Vec<Links>,
    front: u32,
    back: u32,
    len: usize,
}

#[derive(Clone, Copy)]
struct Links {
    before: u32,
    after: u32,
}

impl FreeList {
    /// All of `num_blocks` blocks, lowest number first.
    pub(super) fn full(num_blocks: u32) -> Self {
        let links = vec![Links { before: NONE, after: NONE }; num_blocks as usize];
        let mut list = Self { links, front: NONE, back: NONE, len: 0 };
        (0..num_blocks).for_each(|block| list.push_back(BlockId(block)));
        list
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn push_front(&mut self, BlockId(block): BlockId) {
        self.links[block as usize] = Links { before: NONE, after: self.front };
        match self.front {
            NONE => self.back = block,
            front => self.links[front as usize].before = block,
        }
        self.front = block;
        self.len += 1;
    }

    pub(super) fn push_back(&mut self, BlockId(block): BlockId) {
        self.links[block as usize] = Links { before: self.back, after: NONE };
        match self.back {
            NONE => self.front = block,
            back => self.links[back as usize].after = block,
        }
        self.back = block;
        self.len += 1;
    }

    pub(super) fn pop_front(&mut self) -> Option<BlockId> {
        let block = (self.front != NONE).then_some(BlockId(self.front))?;
        self.remove(block);
        Some(block)
    }

    /// Takes out a block that is in the list.
    pub(super) fn remove(&mut self, BlockId(block): BlockId) {
        let Links { before, after } = self.links[block as usize];
        match before {
            NONE => self.front = after,
            before => self.links[before as usize].after = after,
        }
        match after {
            NONE => self.back = before,
            after => self.links[after as usize].before = before,
        }
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_its_order_when_blocks_leave_from_anywhere() {
        let mut list = FreeList::full(5);
        list.remove(BlockId(0));
        list.remove(BlockId(2));
        list.remove(BlockId(4));
        list.push_front(BlockId(2));
        list.push_back(BlockId(0));
        let order: Vec<u32> = std::iter::from_fn(|| list.pop_front()).map(|block| block.0).collect();
        assert_eq!(order, [2, 1, 3, 0]);
        assert_eq!(list.len(), 0);
    }
}
