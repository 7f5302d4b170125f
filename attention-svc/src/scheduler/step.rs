//! What the scheduler hands to the engine for one step, and how the step's budget is shared.
use std::ops::Range;

use super::sequence::Sequence;
use crate::request::SequenceId;

/// What a step does, seen by its sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Several tokens of every sequence: prompts, or recomputation after a preemption.
    Prefill,
    /// One new token of every sequence.
    Decode,
    /// Both.
    Mixed,
}

/// One step. Every sequence occurs at most once.
#[derive(Debug)]
pub struct Step {
    /// What to run: decoding sequences first, then prompts, each in order of arrival.
    pub items: Vec<StepItem>,
    /// Sequences that run for the first time.
    pub admitted: Vec<SequenceId>,
    /// Sequences that gave up their blocks to make room.
    pub preempted: Vec<SequenceId>,
    /// Tokens that may still be added.
    pub(super) budget: usize,
    /// Items that were cut short for others' sake.
    cut: Vec<usize>,
}

/// New tokens of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepItem {
    /// Whose.
    pub sequence: SequenceId,
    /// Their positions; never empty.
    pub tokens: Range<usize>,
    /// Whose logits are wanted.
    pub logits: LogitRows,
}

/// Rows of an item whose logits are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRows {
    /// None: the prompt goes on in a later step.
    None,
    /// The last row: a token will be chosen.
    Last,
    /// All rows, for the prompt's log probabilities; from the last one a token is chosen if it ends the prompt.
    All {
        /// Whether it does.
        choose: bool,
    },
}

impl LogitRows {
    /// Whether a token is to be chosen from the last row.
    pub fn choose(self) -> bool {
        matches!(self, Self::Last | Self::All { choose: true })
    }
}

impl Step {
    pub(super) fn new(budget: usize) -> Self {
        Self { items: Vec::new(), admitted: Vec::new(), preempted: Vec::new(), budget, cut: Vec::new() }
    }

    /// Tokens of all items.
    pub fn num_tokens(&self) -> usize {
        self.items.iter().map(|item| item.tokens.len()).sum()
    }

    /// What the step does.
    pub fn phase(&self) -> Phase {
        let num_single = self.items.iter().filter(|item| item.tokens.len() == 1).count();
        match num_single {
            0 => Phase::Prefill,
            all if all == self.items.len() => Phase::Decode,
            _ => Phase::Mixed,
        }
    }

    pub(super) fn add(&mut self, sequence: &Sequence, num_tokens: usize) {
        let tokens = sequence.num_computed..sequence.num_computed + num_tokens;
        self.budget -= num_tokens;
        self.items.push(StepItem { sequence: sequence.id, logits: logit_rows(sequence, tokens.end), tokens });
    }

    /// The token that comes of `item`, of the same sequence.
    pub(super) fn add_behind(&mut self, item: &StepItem) {
        let tokens = item.tokens.end..item.tokens.end + 1;
        self.budget = self.budget.saturating_sub(1);
        self.items.push(StepItem { sequence: item.sequence, logits: LogitRows::Last, tokens });
    }

    /// As much of a prompt as is fair: one that cannot end in this step leaves half of the budget (but not less than
    /// `min_chunk` for itself) to those behind it.
    pub(super) fn add_chunk(&mut self, sequence: &Sequence, min_chunk: usize) {
        let pending = sequence.num_pending();
        let chunk =
            if pending <= self.budget { pending } else { self.budget.min(min_chunk.max(self.budget / 2)) };
        if chunk == 0 {
            return;
        }
        if chunk < pending {
            self.cut.push(self.items.len());
        }
        self.add(sequence, chunk);
    }

    /// Gives what nobody behind them wanted back to the prompts that were cut short, first come first served.
    pub(super) fn spend_rest<'a>(&mut self, sequence: impl Fn(SequenceId) -> Option<&'a Sequence>) {
        for &cut in &self.cut {
            let item = &mut self.items[cut];
            let Some(sequence) = sequence(item.sequence) else { continue };
            let more = (sequence.tokens.len() - item.tokens.end).min(self.budget);
            item.tokens.end += more;
            item.logits = logit_rows(sequence, item.tokens.end);
            self.budget -= more;
        }
    }
}

fn logit_rows(sequence: &Sequence, end: usize) -> LogitRows {
    match (sequence.wants_prompt_logits(), end == sequence.tokens.len()) {
        (true, choose) => LogitRows::All { choose },
        (false, true) => LogitRows::Last,
        (false, false) => LogitRows::None,
    }
}
