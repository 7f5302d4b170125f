//! The scheduler: which tokens of which sequences a step runs, and which sequences hold blocks of the KV cache. It stands
//! between the API's queue and the engine, and refuses to know text, tensors, threads or the time.
//!
//! - **Order.** Every choice follows arrival (the order of sequence ids). Running sequences that need one token come
//!   first, so a long prompt never stalls them; prompts share what is left of `max_num_batched_tokens`.
//! - **Blocks.** A sequence is admitted once blocks for all its present tokens are free, so prompts never wait for blocks
//!   halfway; only decoding takes more. When none is left, the latest arrival gives up its blocks and goes back to its
//!   place in the queue. It keeps its tokens and computes them again.
//! - **Steps.** [`Scheduler::schedule`] promises nothing: tokens count as computed, and their blocks can be reused by
//!   others, only once [`Scheduler::commit`] says so. A step that failed is simply not committed.
mod batch;
mod sequence;
mod stage_count;
mod stages;
mod step;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

pub use self::batch::Stage;
use self::sequence::Sequence;
pub use self::sequence::{NewSequence, SequenceView};
pub use self::stage_count::{ChosenStages, StageCounts, StepLoad};
pub use self::stages::{StagePick, StageRules};
pub use self::step::{LogitRows, Phase, Step, StepItem};
use crate::kv_cache::BlockPool;
use crate::request::{FinishReason, SequenceError, SequenceId, Usage};

/// What a step and a sequence may take.
#[derive(Clone, Copy, Debug)]
pub struct SchedulerLimits {
    /// Sequences that hold blocks at a time, at least 1.
    pub max_num_seqs: usize,
    /// Tokens of a step; at least `max_num_seqs`, so that every running sequence can decode in every step.
    pub max_num_batched_tokens: usize,
    /// Prompt and output of one sequence, tokens.
    pub max_model_len: usize,
}

/// See the module's head.
pub struct Scheduler {
    limits: SchedulerLimits,
    pool: BlockPool,
    waiting: BTreeMap<SequenceId, Sequence>,
    running: BTreeMap<SequenceId, Sequence>,
    deadlines: BTreeSet<(Instant, SequenceId)>,
    totals: SchedulerTotals,
    /// Who has not run yet stays in the queue.
    holds_new: bool,
}

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerTotals {
    /// Times a sequence gave up its blocks.
    pub preemptions: u64,
    /// Tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Tokens found there.
    pub prefix_hits: u64,
}

impl Scheduler {
    /// Nothing runs, nothing waits.
    pub fn new(limits: SchedulerLimits, pool: BlockPool) -> Self {
        Self {
            limits,
            pool,
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            totals: SchedulerTotals::default(),
            holds_new: false,
        }
    }

    /// Sequences that hold blocks.
    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// Sequences that hold none: new and preempted ones.
    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether there is nothing to schedule.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// The cache's blocks.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Counts since the start.
    pub fn totals(&self) -> SchedulerTotals {
        self.totals
    }

    /// What is known of a sequence that runs or waits.
    pub fn view(&self, id: SequenceId) -> Option<SequenceView<'_>> {
        self.running.get(&id).or_else(|| self.waiting.get(&id)).map(Sequence::view)
    }

    /// The earliest deadline of all sequences.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// Whether a sequence of so many tokens, prompt and output, could run if it were alone.
    ///
    /// # Errors
    /// [`SequenceError::TooLarge`]; only a shorter request helps.
    pub fn check_size(
        limits: &SchedulerLimits,
        pool_tokens: usize,
        tokens: usize,
    ) -> Result<(), SequenceError> {
        if tokens > limits.max_model_len {
            return Err(SequenceError::TooLarge {
                tokens,
                limit: limits.max_model_len,
                option: "--max-model-len",
            });
        }
        // The last token is never fed back, so it needs no slot.
        if tokens - 1 > pool_tokens {
            return Err(SequenceError::TooLarge {
                tokens,
                limit: pool_tokens + 1,
                option: "--kv-cache-blocks",
            });
        }
        Ok(())
    }

    /// Queues a sequence. Its id is its place in line.
    ///
    /// # Errors
    /// [`SequenceError::TooLarge`] when it could never run.
    pub fn submit(&mut self, new: NewSequence) -> Result<(), SequenceError> {
        let pool_tokens = self.pool.num_total() * self.pool.block_size();
        Self::check_size(&self.limits, pool_tokens, new.prompt.len() + new.stop.max_tokens as usize)?;
        if let Some(deadline) = new.deadline {
            self.deadlines.insert((deadline, new.id));
        }
        self.waiting.insert(new.id, Sequence::new(new));
        Ok(())
    }

    /// From now on sequences that have not run yet do not begin, or do again.
    pub fn hold_new(&mut self, holds: bool) {
        self.holds_new = holds;
    }

    /// Takes a sequence out, finished or not, and frees its blocks. `None` when there is no such sequence.
    pub fn remove(&mut self, id: SequenceId) -> Option<Usage> {
        let mut sequence = self.running.remove(&id).or_else(|| self.waiting.remove(&id))?;
        self.pool.release(&mut sequence.table);
        if let Some(deadline) = sequence.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        Some(sequence.view().usage())
    }

    /// The sequences whose deadline has passed; the caller removes them.
    pub fn expired(&self, now: Instant) -> Vec<SequenceId> {
        self.deadlines.iter().take_while(|(deadline, _)| *deadline <= now).map(|(_, id)| *id).collect()
    }

    /// An item of a step was computed, and `token` was chosen from its last row if logits were wanted. Returns why the
    /// sequence is finished, if it is; the caller removes it then.
    pub fn commit(&mut self, item: &StepItem, token: Option<u32>) -> Option<FinishReason> {
        let sequence = self.running.get_mut(&item.sequence)?;
        sequence.num_computed = item.tokens.end;
        sequence.publish(&mut self.pool);
        token.and_then(|token| sequence.push(token))
    }

    /// The next step, or `None` when nothing can run. Must not be called before the last step was committed or given up.
    pub fn schedule(&mut self) -> Option<Step> {
        let mut step = Step::new(self.limits.max_num_batched_tokens);
        let running: Vec<SequenceId> = self.running.keys().copied().collect();
        for &id in &running {
            self.schedule_decode(&mut step, id);
        }
        for &id in &running {
            let Some(sequence) = self.running.get(&id).filter(|sequence| sequence.num_pending() > 1) else {
                continue;
            };
            step.add_chunk(sequence, self.limits.min_chunk());
        }
        // Whoever just gave up blocks would only take them again.
        if step.preempted.is_empty() {
            while step.budget > 0 && self.admit(&mut step) {}
        }
        step.spend_rest(|id| self.running.get(&id));
        (!step.items.is_empty()).then_some(step)
    }

    /// The step behind one that only decodes and is not committed yet: one token more of each of its sequences, in the same
    /// order, where all of them are sure to have it unless they end with a stop token, and nobody else is there. `None` where
    /// that is not so, or blocks are short.
    pub fn ahead(&mut self, step: &Step) -> Option<Step> {
        let are_all = step.items.len() == self.running.len() && self.waiting.is_empty();
        if step.phase() != Phase::Decode || !are_all {
            return None;
        }
        let mut next = Step::new(self.limits.max_num_batched_tokens);
        for item in &step.items {
            let sequence = self.running.get_mut(&item.sequence)?;
            let position = item.tokens.end;
            if sequence.tokens.len() != position || sequence.ends_with_next() {
                return None;
            }
            if !self.pool.grow(&mut sequence.table, position + 1) {
                return None;
            }
            next.add_behind(item);
        }
        Some(next)
    }

    fn schedule_decode(&mut self, step: &mut Step, id: SequenceId) {
        loop {
            let Some(sequence) = self.running.get_mut(&id).filter(|sequence| sequence.num_pending() == 1)
            else {
                return;
            };
            if step.budget == 0 {
                return;
            }
            let num_tokens = sequence.tokens.len();
            if self.pool.grow(&mut sequence.table, num_tokens) {
                return step.add(sequence, 1);
            }
            // Later arrivals have not been scheduled yet, so whoever is preempted is not in the step.
            self.preempt_latest(step);
        }
    }

    fn preempt_latest(&mut self, step: &mut Step) {
        let Some((id, mut sequence)) = self.running.pop_last() else { return };
        self.pool.release(&mut sequence.table);
        sequence.num_computed = 0;
        sequence.num_published = 0;
        self.waiting.insert(id, sequence);
        self.totals.preemptions += 1;
        step.preempted.push(id);
    }

    /// Lets the first of the queue run if there is room. False when there is not.
    fn admit(&mut self, step: &mut Step) -> bool {
        if self.running.len() >= self.limits.max_num_seqs {
            return false;
        }
        let Some(mut entry) = self.waiting.first_entry() else { return false };
        let sequence = entry.get_mut();
        if self.holds_new && !sequence.was_admitted {
            return false;
        }
        let keys = sequence.reusable_keys(&self.pool);
        let (num_queried, hits) = (keys.len() * self.pool.block_size(), self.pool.look_up(keys));
        // A little stays free for those that decode, or they would preempt the newcomer at once.
        let reserve = if self.running.is_empty() { 0 } else { self.pool.num_total().div_ceil(100) };
        let needed = self.pool.blocks_for(sequence.tokens.len()) - hits.blocks;
        if needed + hits.free + reserve > self.pool.num_free() {
            return false;
        }
        let (id, mut sequence) = entry.remove_entry();
        sequence.adopt(&mut self.pool);
        let num_tokens = sequence.tokens.len();
        let grown = self.pool.grow(&mut sequence.table, num_tokens);
        debug_assert!(grown, "blocks were counted before");
        self.totals.prefix_queries += num_queried as u64;
        self.totals.prefix_hits += sequence.num_computed as u64;
        if !std::mem::replace(&mut sequence.was_admitted, true) {
            sequence.num_cached = sequence.num_computed;
            step.admitted.push(id);
        }
        step.add_chunk(&sequence, self.limits.min_chunk());
        self.running.insert(id, sequence);
        true
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        for sequence in self.running.values_mut() {
            self.pool.release(&mut sequence.table);
        }
    }
}

impl SchedulerLimits {
    /// Least a prompt is cut down to for fairness' sake: an eighth of a step.
    fn min_chunk(&self) -> usize {
        self.max_num_batched_tokens.div_ceil(8)
    }
}
