//! The engine's clock: comparable with other processes' as far as their machines agree on the time.
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Microseconds since the Unix epoch that never go back.
pub(super) struct Clock {
    started: Instant,
    started_us: u64,
}

impl Clock {
    pub(super) fn new() -> Self {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { started: Instant::now(), started_us: since_epoch.as_micros() as u64 }
    }

    pub(super) fn now_us(&self) -> u64 {
        self.us(Instant::now())
    }

    /// A moment of this process.
    pub(super) fn us(&self, moment: Instant) -> u64 {
        let since = moment.saturating_duration_since(self.started);
        self.started_us + since.as_micros() as u64
    }
}
