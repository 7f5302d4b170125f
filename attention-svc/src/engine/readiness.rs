//! Whether steps can run: the device is warm and the FFN is there.
use std::time::Instant;

use afd_common::ids::StepId;

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
        let unready = || Loss { since: now, steps: 0, what: String::new() };
        let since = self.loss.get_or_insert_with(unready).since;
        let timeout = self.config.ffn_loss_timeout;
        let overdue =
            self.sequences.iter().filter(|(_, active)| now - since.max(active.submitted) >= timeout);
        let overdue = overdue.map(|(id, _)| *id).collect::<Vec<_>>();
        if !overdue.is_empty() {
            let (waited_ms, standing) = (timeout.as_millis(), self.ffn.standing());
            let mut what = format!("waited {waited_ms} ms (--ffn-loss-timeout) for FFN ranks: {standing}");
            if let Some(Loss { steps: 1.., what: lost, .. }) = &self.loss {
                what = format!("{what}; the last step was lost with {lost}");
            }
            overdue.into_iter().for_each(|id| self.fail(id, SequenceError::FfnUnavailable(what.clone())));
        }
        false
    }
}
