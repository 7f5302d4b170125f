//! What an engine is made with.
use std::time::Duration;

use super::EngineTracing;
use crate::scheduler::{SchedulerLimits, StageRules};

/// Sizes and rules of one engine. [`EngineConfig::check`] says whether they fit together.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Sequences that hold KV blocks at a time.
    pub max_num_seqs: usize,
    /// Tokens of a step, at least `max_num_seqs`.
    pub max_num_batched_tokens: usize,
    /// Tokens of a KV block.
    pub block_size: usize,
    /// KV blocks.
    pub num_blocks: u32,
    /// Sequences that may wait for their first step.
    pub max_queue: usize,
    /// Prompt and output of one sequence, tokens.
    pub max_model_len: usize,
    /// How steps are split.
    pub stages: StageRules,
    /// Whether equal beginnings are computed once.
    pub prefix_cache: bool,
    /// How long sequences wait for an FFN that is not ready, or was lost and did not come back, before they fail.
    pub ffn_loss_timeout: Duration,
    /// What is recorded for traces.
    pub tracing: EngineTracing,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            block_size: 16,
            num_blocks: 1024,
            max_queue: 1024,
            max_model_len: 4096,
            stages: StageRules::default(),
            prefix_cache: true,
            ffn_loss_timeout: Duration::from_secs(30),
            tracing: EngineTracing::default(),
        }
    }
}

/// A size that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{option} {what}")]
pub struct EngineConfigError {
    /// As on the command line.
    pub option: &'static str,
    /// Found and expected, as the sentence goes on behind the option.
    pub what: String,
}

impl EngineConfig {
    /// # Errors
    /// [`EngineConfigError`] names the first option that does not fit.
    pub fn check(&self) -> Result<(), EngineConfigError> {
        let refuse = |option, what| Err(EngineConfigError { option, what });
        let positive = [
            ("--max-num-seqs", self.max_num_seqs),
            ("--block-size", self.block_size),
            ("--kv-cache-blocks", self.num_blocks as usize),
            ("--max-queue", self.max_queue),
        ];
        if let Some((option, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return refuse(option, "is 0; expected at least 1".into());
        }
        if self.max_model_len < 2 {
            return refuse("--max-model-len", format!("is {}; expected at least 2", self.max_model_len));
        }
        if self.max_num_batched_tokens < self.max_num_seqs {
            let what = format!(
                "is {}, fewer than --max-num-seqs {}: running requests would starve",
                self.max_num_batched_tokens, self.max_num_seqs
            );
            return refuse("--max-num-batched-tokens", what);
        }
        if !(1..=4).contains(&self.stages.max_stages) {
            return refuse("--stages", format!("is {}; expected 1 to 4", self.stages.max_stages));
        }
        Ok(())
    }

    pub(super) fn limits(&self) -> SchedulerLimits {
        SchedulerLimits {
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            max_model_len: self.max_model_len,
        }
    }

    pub(super) fn pool_tokens(&self) -> usize {
        self.num_blocks as usize * self.block_size
    }
}
