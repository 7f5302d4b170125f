//! What happened on a port, readable by metrics while it is served.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::telemetry::metrics::ReadKind;
use crate::telemetry::{MetricError, Metrics};

/// Counters of a port.
#[derive(Debug, Default)]
pub struct NetStats {
    accepted: AtomicU64,
    refused: AtomicU64,
    links: AtomicU64,
    open: AtomicU64,
    handshakes_failed: AtomicU64,
    unauthenticated: AtomicU64,
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
    /// Connections without a TLS handshake, where one was asked for.
    pub handshakes_failed: u64,
    /// Requests and links that did not prove who they are from.
    pub unauthenticated: u64,
}

impl NetStats {
    /// All counters; each is exact, together they are not one instant.
    pub fn counts(&self) -> NetCounts {
        NetCounts {
            accepted: self.accepted.load(Relaxed),
            refused: self.refused.load(Relaxed),
            links: self.links.load(Relaxed),
            open: self.open.load(Relaxed),
            handshakes_failed: self.handshakes_failed.load(Relaxed),
            unauthenticated: self.unauthenticated.load(Relaxed),
        }
    }

    /// Shows in `metrics` who was not let in.
    ///
    /// # Errors
    /// When a metric of the same name is registered already.
    pub fn count_access(self: &Arc<Self>, metrics: &Metrics) -> Result<(), MetricError> {
        let show = |name: &str, help: &str, read: fn(NetCounts) -> u64| {
            let stats = Arc::clone(self);
            metrics.read_one_when_asked(ReadKind::Counter, name, help, move || read(stats.counts()) as f64)
        };
        let help = "Connections without a TLS handshake where one was asked for.";
        show("afd_tls_handshakes_failed_total", help, |counts| counts.handshakes_failed)?;
        let help = "Requests and links refused for want of a token or a client certificate.";
        show("afd_unauthenticated_total", help, |counts| counts.unauthenticated)
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

    pub(super) fn handshake_failed(&self) {
        self.handshakes_failed.fetch_add(1, Relaxed);
    }

    pub(super) fn unauthenticated(&self) {
        self.unauthenticated.fetch_add(1, Relaxed);
    }
}
