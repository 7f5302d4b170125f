//! An FFN rank whose link a CUDA stream drives: opened in the control task, held by the engine thread, which enqueues puts
//! and waits and learns at the end of a step whether they went well.
use std::sync::Arc;
use std::time::Instant;

use afd_common::ids::{Epoch, LayerIdx, Shard};
use afd_common::link::{LinkKind, LinkStats};
use afd_gpu::channel::{Frame, HopShape, StepChannel};

use super::hop_table::EdgeId;
use super::life::EdgeControl;

/// This end of an open link.
pub struct StreamLink {
    /// `cuda-ipc` or `nccl`.
    pub kind: LinkKind,
    /// Lifetime of the link.
    pub epoch: Epoch,
    /// Most rows of a stage.
    pub max_rows: usize,
    /// How rows travel.
    pub shape: HopShape,
    /// Where rows travel.
    pub channel: Box<dyn StepChannel>,
}

/// A joined FFN rank with an open link, as the engine holds it.
pub struct StreamEdge {
    /// Never reused.
    pub id: EdgeId,
    /// For people: "F0 at 127.0.0.1:7001".
    pub peer: Arc<str>,
    /// Which part of every layer it owns.
    pub shard: Shard,
    /// Where rows travel.
    pub link: StreamLink,
    /// The way to its control task.
    pub control: EdgeControl,
    /// What went over the link, set when the engine takes the edge in.
    pub stats: Option<Arc<LinkStats>>,
    /// It said that it is about to stop.
    pub draining: bool,
}

impl StreamLink {
    /// The frames of a hop, on its way out and back. The FFN comes to the same.
    pub fn frames(&self, layer: LayerIdx, stage: usize, rows: usize) -> (Frame, Frame) {
        self.shape.frames(self.epoch.0, layer.0, stage, rows)
    }
}

impl StreamEdge {
    /// Tells both the rank and the control task that this edge is given up, and ends it.
    pub fn abandon(self, why: &str, now: Instant) {
        // What still waits on the device ends at once; dropping the channel waits for that.
        self.link.channel.abort();
        self.control.abandon(why, now);
    }
}
