//! Whether the FFN is there, and what becomes of those who wait for it.
use std::time::Instant;

use afd_common::spelling::span;

use super::AttentionPort;
use super::active::Active;
use super::run::{Engine, Loss};
use crate::request::SequenceError;

impl<A: AttentionPort> Engine<A> {
    /// Whether steps can run. Fails those who have waited long enough for an FFN that cannot be used, or, where its ranks are
    /// about to stop, for one that they may begin with.
    pub(super) fn is_ffn_ready(&mut self, ready: bool, now: Instant) -> bool {
        let is_leaving = ready && self.ffn.is_leaving();
        self.metrics.ffn_ready.set((ready && !is_leaving).into());
        self.scheduler.hold_new(is_leaving);
        if !is_leaving {
            self.leaving_since = None;
        }
        if ready {
            // Lost steps in a row are forgotten only when one succeeds.
            self.loss.take_if(|loss| loss.steps == 0);
        }
        if ready && !is_leaving {
            self.was_ready = true;
            return true;
        }
        let (since, lost_with) = match is_leaving {
            true => (*self.leaving_since.get_or_insert(now), None),
            false => {
                let loss = self.loss.get_or_insert(Loss { since: now, steps: 0, what: None });
                (loss.since, loss.what.clone())
            }
        };
        self.fail_overdue(since, is_leaving, lost_with.as_deref(), now);
        ready
    }

    /// Fails those for whom the FFN has been missing too long `since` then: where it is leaving, those who have not run yet.
    fn fail_overdue(&mut self, since: Instant, is_leaving: bool, lost_with: Option<&str>, now: Instant) {
        let timeout = self.config.ffn_loss_timeout;
        // When others have been told so already, whoever comes is told at once. At the start everybody waits alike.
        let begins = |active: &Active| if self.was_ready { since } else { since.max(active.submitted) };
        let is_overdue =
            |active: &Active| now - begins(active) >= timeout && (!is_leaving || active.is_queued());
        let overdue = self.sequences.iter().filter(|(_, active)| is_overdue(active));
        let overdue = overdue.map(|(id, active)| (*id, active.submitted)).collect::<Vec<_>>();
        if overdue.is_empty() {
            return;
        }
        let (limit, standing) = (span(timeout), self.ffn.standing());
        for (id, submitted) in overdue {
            let waited = match now - submitted >= timeout {
                true => format!("waited {limit} (--ffn-loss-timeout) for FFN ranks: {standing}"),
                false => {
                    let missing = span(now - since);
                    format!(
                        "FFN ranks have been missing for {missing}, --ffn-loss-timeout is {limit}: {standing}"
                    )
                }
            };
            // Whoever came later was in no step that was lost.
            let what = match lost_with.filter(|_| submitted <= since) {
                Some(lost_with) => format!("{waited}; the last step was lost with {lost_with}"),
                None => waited,
            };
            self.fail(id, SequenceError::FfnUnavailable(what));
        }
    }
}
