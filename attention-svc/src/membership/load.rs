//! Requests of this rank and of its peers while they run, counted from their beginning until their guards are dropped.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use tokio::sync::Notify;
use tokio::time::timeout_at;
use tokio_util::sync::CancellationToken;

/// Requests of a peer.
#[derive(Debug, Default)]
pub(super) struct Load {
    /// That it serves: what it last said, and what has been forwarded to it or come back since.
    pub(super) all: AtomicU32,
    /// That it serves for this rank.
    pub(super) forwarded: AtomicU32,
}

/// Requests that all peers serve for this rank.
#[derive(Debug, Default)]
pub(super) struct Forwarding {
    count: AtomicU32,
    /// Notified at the end of each.
    ended: Notify,
    closed: AtomicBool,
    /// Cancelled when those that are left may not go on.
    cut: CancellationToken,
}

impl Forwarding {
    /// Whether there are to be no more.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Closes it, and waits for the last one or for `deadline`, at which those that are left are [cut](Forwarded::cut). Returns
    /// how many these are.
    pub(super) async fn close(&self, deadline: Instant) -> u32 {
        self.closed.store(true, Ordering::Release);
        loop {
            // Before looking, so that no end between looking and waiting is missed.
            let ended = self.ended.notified();
            let count = self.count.load(Ordering::Acquire);
            if count == 0 || timeout_at(deadline.into(), ended).await.is_err() {
                self.cut.cancel();
                return count;
            }
        }
    }
}

/// A request that this rank serves itself; dropped at its end.
pub struct Serving(Arc<AtomicU32>);

impl Serving {
    /// One more of `count`.
    pub(super) fn begin(count: &Arc<AtomicU32>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(count))
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A request that a peer serves for this rank; dropped at its end.
pub struct Forwarded {
    there: Arc<Load>,
    all: Arc<Forwarding>,
}

impl Forwarded {
    /// One more of both.
    pub(super) fn begin(there: &Arc<Load>, all: &Arc<Forwarding>) -> Self {
        for count in [&there.all, &there.forwarded, &all.count] {
            count.fetch_add(1, Ordering::AcqRel);
        }
        Self { there: Arc::clone(there), all: Arc::clone(all) }
    }

    /// Waits until this rank has no more time for it.
    pub(crate) async fn cut(&self) {
        self.all.cut.cancelled().await;
    }
}

impl Drop for Forwarded {
    fn drop(&mut self) {
        self.there.forwarded.fetch_sub(1, Ordering::AcqRel);
        // The peer may have said in the meantime that it is gone.
        let one_less = |num_requests: u32| num_requests.checked_sub(1);
        let _ = self.there.all.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_less);
        self.all.count.fetch_sub(1, Ordering::AcqRel);
        self.all.ended.notify_waiters();
    }
}
