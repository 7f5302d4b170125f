//! Bookkeeping of the paged KV cache: which blocks are whose, and which can be used again for the same prefix. Pure: the
//! tensors are the model's, and which sequence gets blocks when is the scheduler's to say.
//!
//! The cache is `num_blocks` blocks of `block_size` tokens. A sequence's [`BlockTable`] lists its blocks in the order of
//! its tokens; token `p` lies in slot `table[p / block_size] * block_size + p % block_size`. Full blocks whose tokens
//! are committed may be [published](BlockPool::publish) under the hash of everything up to their end, and another
//! sequence that begins the same way [adopts](BlockPool::adopt) them instead of computing. A published block is never
//! written again, so any number of sequences can read it.
mod block_pool;
mod block_table;
mod free_list;
mod prefix;

pub use block_pool::{BlockPool, PrefixHits};
pub use block_table::{BlockId, BlockTable};
pub use prefix::{PrefixChain, PrefixKey};
