//! What the scheduler knows of one sequence.
use std::sync::Arc;
use std::time::Instant;

use crate::kv_cache::{BlockPool, BlockTable, PrefixChain, PrefixKey};
use crate::request::{FinishReason, SequenceId, StopRules, Usage};

/// A sequence to queue.
#[derive(Debug)]
pub struct NewSequence {
    /// Its place in line; never used before.
    pub id: SequenceId,
    /// At least one token.
    pub prompt: Arc<[u32]>,
    /// When it is finished.
    pub stop: StopRules,
    /// When it is given up.
    pub deadline: Option<Instant>,
    /// Logits of the prompt's rows are wanted too. Such a sequence computes its whole prompt, cached or not.
    pub prompt_logits: bool,
}

/// The part of a sequence that others may look at.
#[derive(Clone, Copy, Debug)]
pub struct SequenceView<'a> {
    /// Prompt and output so far.
    pub tokens: &'a [u32],
    /// How many of them are prompt.
    pub num_prompt: usize,
    /// How many of the prompt's were found in the prefix cache when the sequence was first admitted.
    pub num_cached: usize,
}

impl SequenceView<'_> {
    /// What it cost so far.
    pub fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.num_prompt as u32,
            completion_tokens: (self.tokens.len() - self.num_prompt) as u32,
            cached_tokens: self.num_cached as u32,
        }
    }
}

/// Invariant: `num_published * block_size <= num_computed < tokens.len()` while it may run.
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    pub(super) tokens: Vec<u32>,
    pub(super) num_prompt: usize,
    /// Tokens whose keys and values are in the cache, for certain.
    pub(super) num_computed: usize,
    /// Blocks that others can find.
    pub(super) num_published: usize,
    pub(super) num_cached: usize,
    pub(super) table: BlockTable,
    pub(super) deadline: Option<Instant>,
    pub(super) prompt_logits: bool,
    pub(super) was_admitted: bool,
    chain: PrefixChain,
    stop: StopRules,
}

impl Sequence {
    pub(super) fn new(new: NewSequence) -> Self {
        Self {
            id: new.id,
            tokens: new.prompt.to_vec(),
            num_prompt: new.prompt.len(),
            num_computed: 0,
            num_published: 0,
            num_cached: 0,
            table: BlockTable::default(),
            deadline: new.deadline,
            prompt_logits: new.prompt_logits,
            was_admitted: false,
            chain: PrefixChain::default(),
            stop: new.stop,
        }
    }

    pub(super) fn view(&self) -> SequenceView<'_> {
        SequenceView { tokens: &self.tokens, num_prompt: self.num_prompt, num_cached: self.num_cached }
    }

    /// Tokens still to compute; at least 1.
    pub(super) fn num_pending(&self) -> usize {
        self.tokens.len() - self.num_computed
    }

    /// Whether the prompt's rows still have to tell their logits.
    pub(super) fn wants_prompt_logits(&self) -> bool {
        self.prompt_logits && self.tokens.len() == self.num_prompt
    }

    /// Names of the blocks that may come from the cache: all full ones, but never the last token, whose logits are needed.
    pub(super) fn reusable_keys(&mut self, pool: &BlockPool) -> &[PrefixKey] {
        if !pool.caches_prefixes() || self.wants_prompt_logits() {
            return &[];
        }
        let most = (self.tokens.len() - 1) / pool.block_size();
        &self.chain.extend(&self.tokens, pool.block_size())[..most]
    }

    /// Takes what the cache has.
    pub(super) fn adopt(&mut self, pool: &mut BlockPool) {
        let keys = self.reusable_keys(pool).to_vec();
        self.num_published = pool.adopt(&mut self.table, &keys);
        self.num_computed = self.num_published * pool.block_size();
    }

    /// Lets others find the blocks that are full of computed tokens.
    pub(super) fn publish(&mut self, pool: &mut BlockPool) {
        if !pool.caches_prefixes() {
            return;
        }
        let full = self.num_computed / pool.block_size();
        let keys = self.chain.extend(&self.tokens, pool.block_size());
        for (index, key) in keys.iter().enumerate().take(full).skip(self.num_published) {
            pool.publish(&self.table, index, *key);
        }
        self.num_published = full;
    }

    /// Whether its next output token is its last one, whichever it is.
    pub(super) fn ends_with_next(&self) -> bool {
        (self.tokens.len() + 1 - self.num_prompt) as u32 >= self.stop.max_tokens
    }

    /// Appends an output token. Why the sequence is finished, if it is.
    pub(super) fn push(&mut self, token: u32) -> Option<FinishReason> {
        self.tokens.push(token);
        let num_output = (self.tokens.len() - self.num_prompt) as u32;
        if num_output > self.stop.min_tokens && self.stop.stop_token_ids.contains(&token) {
            Some(FinishReason::Stop)
        } else if num_output >= self.stop.max_tokens {
            Some(FinishReason::Length)
        } else {
            None
        }
    }
}
