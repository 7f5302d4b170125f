//! What happened on a port, readable by metrics while it is served.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters of a port.
#[derive(Debug, Default)]
pub struct NetStats {
    accepted: AtomicU64,
    refused: AtomicU64,
    links: AtomicU64,
    open: AtomicU64,
}

/// The counters at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetCounts {
    /// Connections served.
    pub accepted: u64,
    /// Connections closed at once because there were too many.
    pub refused: u64,
    /// Connections that wanted to be a link.
    pub links: u64,
    /// Connections open now: a gauge. An attached link is no longer one of them.
    pub open: u64,
}

impl NetStats {
    /// All counters; each is exact, together they are not one instant.
    pub fn counts(&self) -> NetCounts {
        NetCounts {
            accepted: self.accepted.load(Relaxed),
            refused: self.refused.load(Relaxed),
            links: self.links.load(Relaxed),
            open: self.open.load(Relaxed),
        }
    }

    pub(super) fn opened(&self) {
        self.accepted.fetch_add(1, Relaxed);
        self.open.fetch_add(1, Relaxed);
    }

    pub(super) fn closed(&self) {
        self.open.fetch_sub(1, Relaxed);
    }

    pub(super) fn refused(&self) {
        self.refused.fetch_add(1, Relaxed);
    }

    pub(super) fn link(&self) {
        self.links.fetch_add(1, Relaxed);
    }
}
