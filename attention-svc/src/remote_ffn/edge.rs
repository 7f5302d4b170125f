//! What the engine thread and the control task of one FFN rank say to each other.
//!
//! The control task (tokio) joins, opens links and keeps the session's lease; the engine thread moves rows. An edge is
//! born in the control task, crosses over once in [`EdgeEvent::Up`], and dies on whichever side notices first: the
//! engine through [`Edge::abandon`], the control task through [`EdgeEvent::Down`].
use std::sync::Arc;
use std::time::Instant;

use afd_common::frame::RowType;
use afd_common::ids::Shard;
use afd_common::link::HopLink;
use afd_common::telemetry::metrics::Histogram;

use super::hop_table::EdgeId;
use super::life::EdgeControl;
use super::stream_edge::StreamEdge;
use super::warm_up::WarmUp;

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

impl Edge {
    /// Tells both the rank and the control task that this edge is given up, and ends it.
    pub fn abandon(mut self, why: &str, now: Instant) {
        self.link.close(why);
        if let Some(control) = &self.control {
            control.abandon(why, now);
        }
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
