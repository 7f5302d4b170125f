//! Whether steps can run: the device is warm and the FFN is there.
use std::time::Instant;

use afd_common::ids::StepId;
use afd_common::spelling::span;

use super::run::{Engine, Loss};
use super::{AttentionPort, EngineDeath, EngineState, FfnLoss};
use crate::request::SequenceError;

/// More than any warm-up has.
const MAX_WARM_UP_STEPS: u64 = 1000;

impl<A: AttentionPort> Engine<A> {
    /// Makes whole decode steps ready on the device. Whether that is done, or there is nothing to do.
    pub(super) fn warm_up(&mut self) -> Result<bool, EngineDeath> {
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
