//! Whether steps can run: the device is warm and the FFN is there.
use std::time::Instant;

use afd_common::ids::StepId;
use afd_common::spelling::span;

use super::forward::{ForwardTimes, forward};
use super::run::{Engine, Loss};
use super::{AttentionPort, EngineDeath, EngineState, FfnLoss, StepOutline};
use crate::model::{BlockId, SequenceRows, StageBatch};
use crate::request::SequenceError;
use crate::scheduler::{Phase, Stage};

/// More than any warm-up has.
const MAX_WARM_UP_STEPS: u64 = 1000;
/// Rows of a stage of the two steps that warm an FFN rank up: one as in decode, some as in a prompt.
const WARM_UP_ROWS: [usize; 2] = [1, 8];

impl<A: AttentionPort> Engine<A> {
    /// Warms the FFN ranks up, once, and makes whole decode steps ready on the device. Whether that is done, or there is
    /// nothing to do.
    pub(super) fn warm_up(&mut self) -> Result<bool, EngineDeath> {
        if !self.ranks_are_warm {
            self.ranks_are_warm = self.warm_ranks()?;
            if !self.ranks_are_warm {
                return Ok(false);
            }
        }
        if self.attention.is_warm(&mut *self.ffn) {
            self.change_state(&EngineState::Warming, EngineState::Running);
            return Ok(true);
        }
        self.change_state(&EngineState::Running, EngineState::Warming);
        let first = StepId(self.last_step.0 + 1);
        match self.attention.warm_up(&mut *self.ffn, first) {
            Ok(steps) => {
                self.last_step = StepId(self.last_step.0 + steps);
                self.change_state(&EngineState::Warming, EngineState::Running);
                Ok(true)
            }
            Err(FfnLoss::Fatal { what }) => Err(EngineDeath(what)),
            Err(loss) => {
                // Ids of steps that were begun are not used again.
                self.last_step = StepId(self.last_step.0 + MAX_WARM_UP_STEPS);
                tracing::warn!(loss = %loss, "warming up was cut short");
                Ok(false)
            }
        }
    }

    /// Runs steps whose results nobody wants until every rank that is there has had all stages of all shapes. No sequence
    /// has run yet, so the first blocks of the cache are free; what is written there is overwritten before it is read.
    fn warm_ranks(&mut self) -> Result<bool, EngineDeath> {
        if !self.ffn.begin_warm_up() {
            return Ok(true);
        }
        let (begun, mut steps) = (Instant::now(), 0);
        loop {
            for rows in WARM_UP_ROWS {
                self.last_step = StepId(self.last_step.0 + 1);
                let (step, stages) = (self.last_step, self.padding(rows));
                let outline = StepOutline {
                    step,
                    phase: if rows == 1 { Phase::Decode } else { Phase::Prefill },
                    stage_rows: stages.iter().map(|stage| stage.batch.input_ids.len()).collect(),
                    profile: false,
                    warmup: true,
                    trace: None,
                };
                let (attention, ffn, mut times) =
                    (&mut self.attention, &mut *self.ffn, ForwardTimes::default());
                let outcomes = ffn
                    .begin_step(&outline)
                    .and_then(|()| forward(attention, ffn, step, &stages, &mut times, None));
                ffn.end_step(step);
                match outcomes {
                    // The rank has answered, so it is there; a request that it refuses too says so itself.
                    Ok(outcomes) => outcomes.into_iter().filter_map(Result::err).for_each(|error| {
                        tracing::error!(%error, "a stage of the warm-up failed");
                    }),
                    Err(FfnLoss::Fatal { what }) => return Err(EngineDeath(what)),
                    Err(loss) => {
                        tracing::warn!(loss = %loss, "warming up was cut short");
                        return Ok(false);
                    }
                }
                steps += 1;
            }
            if !self.ffn.handle_warm() {
                break;
            }
        }
        tracing::info!(steps, took_ms = begun.elapsed().as_millis() as u64, "FFN ranks are warm");
        Ok(true)
    }

    /// Stages of a warm-up step, as many as a step may have, each with one made-up sequence of at most `rows` tokens.
    fn padding(&self, rows: usize) -> Vec<Stage> {
        let config = &self.config;
        let num_stages = config.stages.max_stages.min(self.ffn.max_stages());
        let most =
            config.pool_tokens().min(config.max_model_len).min(config.max_num_batched_tokens / num_stages);
        let rows = rows.min(most).max(1);
        let num_blocks = rows.div_ceil(config.block_size);
        let sequence = SequenceRows {
            start: 0,
            len: rows,
            context_len: rows,
            block_table: (0..num_blocks as u32).map(BlockId).collect(),
        };
        let batch = StageBatch {
            input_ids: vec![0; rows],
            positions: (0..rows as u32).collect(),
            slot_mapping: (0..rows as i64).collect(),
            sequences: vec![sequence],
        };
        (0..num_stages).map(|_| Stage { items: Vec::new(), batch: batch.clone() }).collect()
    }

    /// Whether the FFN can be used. While it cannot, fails those who have waited long enough for it.
    pub(super) fn is_ffn_ready(&mut self, ready: bool, now: Instant) -> bool {
        self.metrics.ffn_ready.set(ready.into());
        if ready {
            // Lost steps in a row are forgotten only when one succeeds.
            self.loss.take_if(|loss| loss.steps == 0);
            return true;
        }
        let loss = self.loss.get_or_insert(Loss { since: now, steps: 0, what: None });
        let (since, lost_with) = (loss.since, loss.what.clone());
        let timeout = self.config.ffn_loss_timeout;
        let overdue =
            self.sequences.iter().filter(|(_, active)| now - since.max(active.submitted) >= timeout);
        let overdue = overdue.map(|(id, active)| (*id, active.submitted <= since)).collect::<Vec<_>>();
        if overdue.is_empty() {
            return false;
        }
        let (waited, standing) = (span(timeout), self.ffn.standing());
        let waited = format!("waited {waited} (--ffn-loss-timeout) for FFN ranks: {standing}");
        for (id, was_there) in overdue {
            // Whoever came later was in no step that was lost.
            let what = match lost_with.as_ref().filter(|_| was_there) {
                Some(lost_with) => format!("{waited}; the last step was lost with {lost_with}"),
                None => waited.clone(),
            };
            self.fail(id, SequenceError::FfnUnavailable(what));
        }
        false
    }
}
