//! How the engine reaches the control task of an edge, and the few times that both write and read without a lock.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use afd_common::proto::v1;
use tokio::sync::mpsc;

/// The engine's way to the control task of an edge.
#[derive(Clone)]
pub struct EdgeControl {
    /// Plans and withdrawals, in order. Full means that the control plane is slow: the message is dropped and counted.
    pub plans: mpsc::Sender<v1::steps_request::Message>,
    /// Why the engine gave the edge up.
    pub abandon: mpsc::Sender<String>,
    /// How far the rank says it is, and whether it was given up.
    pub life: Arc<Life>,
}

impl EdgeControl {
    /// The engine gives the edge up.
    pub fn abandon(&self, why: &str, now: Instant) {
        self.life.handle_lost(now);
        // A full queue holds an earlier reason; a closed one means that the task has ended by itself.
        let _ = self.abandon.try_send(why.to_owned());
    }
}

/// When an FFN rank last said that it had begun another hop, and when the engine gave it up. Written by the control task
/// and the engine, read by both.
#[derive(Debug)]
pub struct Life {
    started: Instant,
    /// Microseconds since `started`; 0 for never.
    moved_us: AtomicU64,
    lost_us: AtomicU64,
    is_draining: AtomicBool,
}

impl Life {
    /// Of an edge that is new. `started` is some moment in the past.
    pub fn new(started: Instant) -> Self {
        let (moved_us, lost_us) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { started, moved_us, lost_us, is_draining: AtomicBool::new(false) }
    }

    /// It moved on.
    pub fn handle_moved(&self, now: Instant) {
        self.note(&self.moved_us, now);
    }

    /// It said that it is about to stop.
    pub fn handle_draining(&self) {
        self.is_draining.store(true, Ordering::Relaxed);
    }

    /// Whether it said so.
    pub fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Relaxed)
    }

    /// The engine gave it up.
    pub fn handle_lost(&self, now: Instant) {
        self.note(&self.lost_us, now);
    }

    /// When it last moved on; `None` before the first time.
    pub fn moved_at(&self) -> Option<Instant> {
        self.read(&self.moved_us)
    }

    /// When the engine gave it up.
    pub fn lost_at(&self) -> Option<Instant> {
        self.read(&self.lost_us)
    }

    fn note(&self, at_us: &AtomicU64, now: Instant) {
        let now_us = now.saturating_duration_since(self.started).as_micros() as u64;
        at_us.fetch_max(now_us.max(1), Ordering::Relaxed);
    }

    fn read(&self, at_us: &AtomicU64) -> Option<Instant> {
        let at_us = at_us.load(Ordering::Relaxed);
        (at_us > 0).then(|| self.started + Duration::from_micros(at_us))
    }
}
