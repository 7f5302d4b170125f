//! The sampler: from one row of logits to one token. Pure; the logits come from the engine, which tells the token to the
//! scheduler and to the API.
//!
//! What happens to a row, in this order:
//! 1. repetition, frequency and presence penalties ([`adjust`]);
//! 2. logit bias; stop tokens are ruled out before `min_tokens`;
//! 3. temperature 0: the best token, the lowest id among equals. Otherwise logits are divided by the temperature;
//! 4. top-k, then top-p over what top-k left, then min-p ([`truncate`]): the order of Hugging Face's warpers. (vLLM
//!    applies min-p before the other two, which can differ where top-p and min-p meet);
//! 5. a draw ([`draw`]): the token in whose interval the uniform number falls when what is left, renormalised, is laid out
//!    **in order of token id**. That order needs no sort and does not jump when two probabilities swap places.
//!
//! Log probabilities are those of the row as it came, before any of this.
mod adjust;
mod draw;
mod exp;
mod logprobs;
mod row;
mod truncate;

use std::collections::{HashMap, HashSet};

use afd_gpu::ops::DrawRule;

pub use self::draw::Draw;
pub use self::logprobs::logprobs;
use self::truncate::Candidate;
use crate::request::{SamplingParams, StopRules};

/// What one sequence's choices depend on, besides the logits. Survives preemption: nothing in it is recomputed.
#[derive(Debug)]
pub struct SequenceSampler {
    params: SamplingParams,
    seed: u64,
    stop: StopRules,
    num_output: u32,
    /// How often each token was generated.
    output_counts: HashMap<u32, u32>,
    /// Tokens of prompt and output.
    seen: HashSet<u32>,
}

/// A chosen token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub token: u32,
    /// How it was drawn; `None` when greedy.
    pub draw: Option<Draw>,
}

/// Why no token can be chosen from a row: the model or its input is at fault, for this sequence only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    /// A logit is not a number, or is infinitely large.
    #[error("logit of token {token} is {}", if *.infinite { "infinite" } else { "not a number" })]
    NotFinite {
        /// The first such token.
        token: u32,
        /// Infinite, or not a number.
        infinite: bool,
    },
    /// Every token is ruled out.
    #[error("every token is ruled out")]
    NoCandidate,
}

impl SequenceSampler {
    /// `seed` is used when the parameters bring none.
    pub fn new(params: SamplingParams, stop: StopRules, prompt: &[u32], seed: u64) -> Self {
        let seen =
            if params.repetition_penalty == 1.0 { HashSet::new() } else { prompt.iter().copied().collect() };
        let seed = params.seed.unwrap_or(seed);
        Self { params, seed, stop, num_output: 0, output_counts: HashMap::new(), seen }
    }

    /// Output tokens so far.
    pub fn num_output(&self) -> u32 {
        self.num_output
    }

    /// By which rule a device, where the logits are, comes to the token that [`sample`](Self::sample) would. `None` where
    /// logits have to be changed first.
    pub fn rule(&self) -> Option<DrawRule> {
        self.rule_at(self.num_output)
    }

    /// The same for the token behind the next one, as far as that can be told before the next one is known.
    pub fn rule_ahead(&self) -> Option<DrawRule> {
        let SamplingParams { repetition_penalty, frequency_penalty, presence_penalty, .. } = self.params;
        // The next token would count. What else needs no change now needs none later.
        let counts = repetition_penalty != 1.0 || frequency_penalty != 0.0 || presence_penalty != 0.0;
        if counts { None } else { self.rule_at(self.num_output + 1) }
    }

    fn rule_at(&self, index: u32) -> Option<DrawRule> {
        let SamplingParams { temperature, top_k, top_p, min_p, .. } = self.params;
        if adjust::adjusts(self) {
            return None;
        }
        if temperature == 0.0 {
            return Some(DrawRule::Best);
        }
        let uniform = draw::uniform(self.seed, index);
        Some(DrawRule::Draw { scale: 1.0 / temperature, top_k: top_k.unwrap_or(0), top_p, min_p, uniform })
    }

    /// `token` became part of the output.
    pub fn commit(&mut self, token: u32) {
        self.num_output += 1;
        if self.params.frequency_penalty != 0.0 || self.params.presence_penalty != 0.0 {
            *self.output_counts.entry(token).or_default() += 1;
        }
        if self.params.repetition_penalty != 1.0 {
            self.seen.insert(token);
        }
    }

    /// The next token, from the logits after the last one. The same for the same sequence, however often it is asked.
    ///
    /// # Errors
    /// [`SampleError`]; asking again does not help.
    pub fn sample(&self, logits: &[f32], scratch: &mut Scratch) -> Result<Sampled, SampleError> {
        let row = adjust::adjust(self, logits, &mut scratch.row);
        if self.params.temperature == 0.0 {
            return Ok(Sampled { token: row::best(row)?, draw: None });
        }
        let Scratch { weights, candidates, .. } = scratch;
        let total = exp::weights(row, row::max(row)?, 1.0 / self.params.temperature, weights);
        let uniform = draw::uniform(self.seed, self.num_output);
        let (token, draw) = if truncate::truncates(&self.params) {
            truncate::truncate(&self.params, weights, total, candidates);
            draw::draw(candidates.iter().copied(), truncate::weight(candidates), uniform)
        } else {
            let all = weights.iter().zip(0..).map(|(weight, token)| Candidate { token, weight: *weight });
            draw::draw(all, total, uniform)
        };
        Ok(Sampled { token, draw: Some(draw) })
    }
}

/// Memory that is used again from row to row.
#[derive(Debug, Default)]
pub struct Scratch {
    row: Vec<f32>,
    weights: Vec<f32>,
    candidates: Vec<Candidate>,
}

#[cfg(test)]
mod tests;
