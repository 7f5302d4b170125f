//! How long a peer has said nothing, and whether that is too long: then what it serves for others is lost. Pure.
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

/// See the module's head. Runs from one answer of the process at an address to the next.
#[derive(Debug)]
pub(super) struct Lease {
    heard: Instant,
    /// Of who answered last; 0 before anybody did.
    incarnation: u64,
    lost: CancellationToken,
    /// Something that went wrong since the last answer was logged.
    is_told: bool,
}

impl Lease {
    pub(super) fn new(now: Instant) -> Self {
        Self { heard: now, incarnation: 0, lost: CancellationToken::new(), is_told: false }
    }

    /// Cancelled when the process that answers now is given up.
    pub(super) fn lost(&self) -> CancellationToken {
        self.lost.clone()
    }

    /// A process has answered. What another one served there before it is lost.
    pub(super) fn handle_answer(&mut self, incarnation: u64, now: Instant) {
        if self.incarnation != incarnation {
            self.lost.cancel();
        }
        if self.lost.is_cancelled() {
            self.lost = CancellationToken::new();
        }
        (self.heard, self.incarnation, self.is_told) = (now, incarnation, false);
    }

    /// Gives the process up if it has said nothing for `limit`. Returns whether it was given up just now.
    pub(super) fn check(&mut self, limit: Duration, now: Instant) -> bool {
        let is_over = now.saturating_duration_since(self.heard) >= limit && !self.lost.is_cancelled();
        if is_over {
            self.lost.cancel();
        }
        is_over
    }

    /// This process stood still for so long, and could not have heard anybody.
    pub(super) fn handle_pause(&mut self, pause: Duration) {
        self.heard += pause;
    }

    /// Whether what goes wrong now is news: it is said once until the peer answers again.
    pub(super) fn is_news(&mut self) -> bool {
        !std::mem::replace(&mut self.is_told, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    #[test]
    fn a_process_that_says_nothing_is_given_up_once() {
        let begun = Instant::now();
        let mut lease = Lease::new(begun);
        lease.handle_answer(7, begun);
        let lost = lease.lost();
        lease.handle_answer(7, begun + LIMIT / 2);
        assert!(!lease.check(LIMIT, begun + LIMIT) && !lost.is_cancelled(), "it has answered since");
        assert!(lease.check(LIMIT, begun + LIMIT / 2 + LIMIT) && lost.is_cancelled());
        assert!(!lease.check(LIMIT, begun + 2 * LIMIT), "once");
        lease.handle_answer(7, begun + 2 * LIMIT);
        assert!(!lease.lost().is_cancelled() && lost.is_cancelled(), "what was given up stays so");
    }

    #[test]
    fn what_an_older_process_served_is_lost_with_it() {
        let now = Instant::now();
        let mut lease = Lease::new(now);
        lease.handle_answer(7, now);
        let lost = lease.lost();
        lease.handle_answer(8, now);
        assert!(lost.is_cancelled() && !lease.lost().is_cancelled());
    }

    #[test]
    fn a_pause_of_this_process_is_nobody_elses_silence() {
        let begun = Instant::now();
        let mut lease = Lease::new(begun);
        lease.handle_answer(7, begun);
        lease.handle_pause(2 * LIMIT);
        assert!(!lease.check(LIMIT, begun + 2 * LIMIT));
        assert!(lease.check(LIMIT, begun + 3 * LIMIT));
    }

    #[test]
    fn one_event_is_told_once() {
        let now = Instant::now();
        let mut lease = Lease::new(now);
        assert!(lease.is_news() && !lease.is_news());
        lease.handle_answer(7, now);
        assert!(lease.is_news());
    }
}
