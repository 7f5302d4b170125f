//! What a link hands to the engine.
use std::fmt;
use std::sync::Arc;

use afd_ffi::shm::Slot;
use bytes::Bytes;

use super::pool::PooledBuf;
use super::stats::LinkStats;
use crate::frame::{FrameHeader, HEADER_BYTES};

/// A received, verified frame. Dropping it gives the body's memory back to the link.
pub struct InFrame {
    /// Identity and shape.
    pub header: FrameHeader,
    body: Body,
    stats: Arc<LinkStats>,
}

/// Where a received body lies.
pub enum Body {
    /// In a buffer of the link's pool.
    Pooled(PooledBuf),
    /// In the message it came with.
    Message(Bytes),
    /// In the slot it was sent to, behind its header.
    Slot(Slot),
}

impl InFrame {
    /// For implementations of [`HopLink`](super::HopLink).
    pub fn new(header: FrameHeader, body: Body, stats: Arc<LinkStats>) -> Self {
        stats.frame_held();
        Self { header, body, stats }
    }

    /// The rows, and the side tensors behind them.
    pub fn body(&self) -> &[u8] {
        match &self.body {
            Body::Pooled(buf) => buf.bytes(),
            Body::Message(bytes) => bytes,
            Body::Slot(slot) => &slot[HEADER_BYTES..HEADER_BYTES + self.header.body_bytes as usize],
        }
    }
}

impl Drop for InFrame {
    fn drop(&mut self) {
        self.stats.frame_released();
    }
}

impl fmt::Debug for InFrame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFrame").field("header", &self.header).finish_non_exhaustive()
    }
}
