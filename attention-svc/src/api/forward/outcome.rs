//! How a request that was forwarded ended, counted once by the rank that its client talks to. The rank that serves it counts
//! its sequences as it counts those of its own clients.
use std::sync::Arc;

use super::super::Api;

/// Of one request. Dropped without a word, its client has gone.
pub(super) struct Outcome {
    api: Arc<Api>,
    is_counted: bool,
}

impl Outcome {
    /// Nothing yet.
    pub(super) fn of(api: &Arc<Api>) -> Self {
        Self { api: Arc::clone(api), is_counted: false }
    }

    /// It ended in one of the ways that `afd_requests_forwarded_total` knows; what comes later is not counted.
    pub(super) fn count(&mut self, outcome: &str) {
        if !std::mem::replace(&mut self.is_counted, true) {
            self.api.counts.forwarded(outcome);
        }
    }
}

impl Drop for Outcome {
    fn drop(&mut self) {
        self.count("cancelled");
    }
}
