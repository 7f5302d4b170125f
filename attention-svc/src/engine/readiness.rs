//! Whether the FFN is there, and what becomes of those who wait for it.
use std::time::Instant;

use afd_common::spelling::span;

use super::AttentionPort;
use super::run::{Engine, Loss};
use crate::request::SequenceError;

impl<A: AttentionPort> Engine<A> {
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
