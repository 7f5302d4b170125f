//! How long the other side of a session may say nothing before it counts as lost, whether or not anybody asks something of
//! it. Both sides judge alike. Pure.
//!
//! Each side speaks three times in a lease. The lease is not measured in one go: three times in a row a third of it has to
//! pass without a word, each counted from the moment when this process saw the last one end. Whatever keeps this process
//! from running for long (a busy machine, a stop of its own) costs at most one of the three, and what has come meanwhile is
//! read before the next one ends.
use std::time::{Duration, Instant};

/// Words that a peer says in a lease.
pub const WORDS_PER_LEASE: u32 = 3;

/// The time since a peer was last heard.
#[derive(Debug)]
pub struct Silence {
    third: Duration,
    heard: Instant,
    missed: u32,
    due: Instant,
}

impl Silence {
    /// Of a peer that has just been heard.
    pub fn new(lease: Duration, now: Instant) -> Self {
        let third = lease / WORDS_PER_LEASE;
        Self { third, heard: now, missed: 0, due: now + third }
    }

    /// When to look again, by [`handle_due`](Self::handle_due).
    pub fn due(&self) -> Instant {
        self.due
    }

    /// It said something.
    pub fn handle_heard(&mut self, now: Instant) {
        (self.heard, self.missed, self.due) = (now, 0, now + self.third);
    }

    /// The time to look has come, and nothing was heard. For how long that is so, once the lease is over.
    pub fn handle_due(&mut self, now: Instant) -> Option<Duration> {
        if now < self.due {
            return None;
        }
        (self.missed, self.due) = (self.missed + 1, now + self.third);
        (self.missed >= WORDS_PER_LEASE).then(|| now.saturating_duration_since(self.heard))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(3);
    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_peer_that_says_nothing_for_its_lease_is_lost_and_one_that_speaks_is_not() {
        let begun = Instant::now();
        let mut silence = Silence::new(LEASE, begun);
        for second in [1, 2] {
            assert_eq!(silence.due(), begun + SECOND * second);
            assert_eq!(silence.handle_due(silence.due()), None);
        }
        let spoke = begun + SECOND * 2 + SECOND / 2;
        silence.handle_heard(spoke);
        for second in [1, 2] {
            assert_eq!(silence.handle_due(spoke + SECOND * second), None);
        }
        assert_eq!(silence.handle_due(spoke + SECOND * 3 - Duration::from_millis(1)), None, "not yet");
        assert_eq!(silence.handle_due(spoke + LEASE), Some(LEASE));
    }

    #[test]
    fn time_in_which_this_process_did_not_run_is_not_held_against_the_peer() {
        let begun = Instant::now();
        let mut silence = Silence::new(LEASE, begun);
        assert_eq!(silence.handle_due(begun + SECOND), None);
        let woke = begun + 100 * LEASE;
        assert_eq!(silence.handle_due(woke), None, "its words may be there, unread");
        assert_eq!(silence.handle_due(woke), None);
        assert!(silence.handle_due(woke + SECOND).is_some());
    }
}
