//! One recording at a time: two would take each other's steps and reports. Whoever asks meanwhile is told who records, and
//! how long that may still last. Pure.
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use afd_common::spelling::{count, span};

/// What is being recorded, and for whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Recording {
    pub(super) by: SocketAddr,
    pub(super) steps: u64,
    pub(super) begun: Instant,
    pub(super) limit: Duration,
}

/// The place of the one recording.
#[derive(Clone, Debug, Default)]
pub(super) struct UnderWay(Arc<Mutex<Option<Recording>>>);

/// The place is taken for as long as this lives: a caller that goes away gives it back.
#[derive(Debug)]
pub(super) struct Taken(UnderWay);

impl Drop for Taken {
    fn drop(&mut self) {
        *self.0.lock() = None;
    }
}

/// Somebody else records; it helps to try again once that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "another profile is under way: {} for {}, since {}; it ends within {}",
    count(.recording.steps, "step"), .recording.by, span(*.since), span(*.left)
)]
pub(super) struct Busy {
    recording: Recording,
    since: Duration,
    left: Duration,
}

impl UnderWay {
    /// Takes the place for `wanted`, which begins now.
    ///
    /// # Errors
    /// [`Busy`] while another one has it.
    pub(super) fn begin(&self, wanted: Recording) -> Result<Taken, Busy> {
        let mut place = self.lock();
        if let Some(recording) = *place {
            let since = wanted.begun.saturating_duration_since(recording.begun);
            return Err(Busy { recording, since, left: recording.limit.saturating_sub(since) });
        }
        *place = Some(wanted);
        drop(place);
        Ok(Taken(self.clone()))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Recording>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_records_at_a_time_and_who_comes_meanwhile_is_told_of_it() {
        let (place, begun) = (UnderWay::default(), Instant::now());
        let wanted = |port, after_ms| Recording {
            by: ([10, 0, 0, 1], port).into(),
            steps: 20,
            begun: begun + Duration::from_millis(after_ms),
            limit: Duration::from_secs(30),
        };
        let first = place.begin(wanted(1, 0)).unwrap();
        let refused = place.begin(wanted(2, 3500)).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "another profile is under way: 20 steps for 10.0.0.1:1, since 3.5 s; it ends within 26.5 s"
        );
        drop(first);
        assert!(place.begin(wanted(2, 4000)).is_ok(), "whoever goes gives the place back");
    }
}
