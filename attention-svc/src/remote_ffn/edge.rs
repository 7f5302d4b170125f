//! What the engine thread and the control task of one FFN rank say to each other.
//!
//! The control task (tokio) joins, opens links and keeps the session's lease; the engine thread moves rows. An edge is
//! born in the control task, crosses over once in [`EdgeEvent::Up`], and dies on whichever side notices first: the
//! engine through [`Edge::abandon`], the control task through [`EdgeEvent::Down`].
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use afd_common::frame::RowType;
use afd_common::ids::Shard;
use afd_common::link::HopLink;
use afd_common::proto::v1;
use afd_common::telemetry::metrics::Histogram;
use tokio::sync::mpsc;

use super::hop_table::EdgeId;
use super::rehearsal::WarmUp;
use super::stream_edge::StreamEdge;

/// A joined FFN rank with an open link, as the engine holds it.
pub struct Edge {
    /// Never reused.
    pub id: EdgeId,
    /// For people: "F0 at 127.0.0.1:7001".
    pub peer: Arc<str>,
    /// Which part of every layer it owns.
    pub shard: Shard,
    /// Element type of what comes back.
    pub combine_dtype: RowType,
    /// Where rows travel.
    pub link: Box<dyn HopLink>,
    /// The way to its control task; none in the monolithic mode.
    pub control: Option<EdgeControl>,
    /// Where the times of its hops are counted; set when the engine takes it in.
    pub hop_seconds: Option<Histogram>,
    /// It said that it is about to stop: used only while nothing else serves its shard.
    pub draining: bool,
    /// While it is cold: used only while nothing else serves its shard. Set when the engine takes it in.
    pub warm_up: Option<WarmUp>,
}

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

impl Edge {
    /// Tells both the rank and the control task that this edge is given up, and ends it.
    pub fn abandon(mut self, why: &str, now: Instant) {
        self.link.close(why);
        if let Some(control) = &self.control {
            control.abandon(why, now);
        }
    }
}

impl EdgeControl {
    /// The engine gives the edge up.
    pub fn abandon(&self, why: &str, now: Instant) {
        self.life.handle_lost(now);
        // A full queue holds an earlier reason; a closed one means that the task has ended by itself.
        let _ = self.abandon.try_send(why.to_owned());
    }
}

/// What control tasks tell the engine thread.
pub enum EdgeEvent {
    /// A rank has joined and its link is open.
    Up(Edge),
    /// The same, over a link that a stream drives.
    StreamUp(Box<StreamEdge>),
    /// The session of an edge has ended.
    Down {
        /// Which edge.
        id: EdgeId,
        /// For people.
        why: String,
    },
    /// The rank is about to stop; it finishes what it has.
    Draining {
        /// Which edge.
        id: EdgeId,
    },
}
