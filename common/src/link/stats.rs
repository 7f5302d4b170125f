//! What went through a link, counted without locks and readable by metrics while the engine runs.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters of one end of a link.
#[derive(Debug, Default)]
pub struct LinkStats {
    frames_sent: AtomicU64,
    bytes_sent: AtomicU64,
    frames_received: AtomicU64,
    bytes_received: AtomicU64,
    dropped_epoch: AtomicU64,
    dropped_unasked: AtomicU64,
    dropped_duplicate: AtomicU64,
    frames_held: AtomicU64,
    buffers_grown: AtomicU64,
}

/// The counters at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkCounts {
    /// Frames handed to the link by `send`.
    pub frames_sent: u64,
    /// Their headers and bodies.
    pub bytes_sent: u64,
    /// Frames that arrived whole and verified, dropped ones not included.
    pub frames_received: u64,
    /// Their headers and bodies.
    pub bytes_received: u64,
    /// Frames of another epoch.
    pub dropped_epoch: u64,
    /// Answers to a dispatch that is not in flight.
    pub dropped_unasked: u64,
    /// Dispatches with the key of one that is here and unanswered.
    pub dropped_duplicate: u64,
    /// Received frames that have not been dropped by their receiver: a gauge that returns to zero.
    pub frames_held: u64,
    /// Buffers made beyond those the link was opened with.
    pub buffers_grown: u64,
}

impl LinkStats {
    /// All counters; each is exact, together they are not one instant.
    pub fn counts(&self) -> LinkCounts {
        LinkCounts {
            frames_sent: self.frames_sent.load(Relaxed),
            bytes_sent: self.bytes_sent.load(Relaxed),
            frames_received: self.frames_received.load(Relaxed),
            bytes_received: self.bytes_received.load(Relaxed),
            dropped_epoch: self.dropped_epoch.load(Relaxed),
            dropped_unasked: self.dropped_unasked.load(Relaxed),
            dropped_duplicate: self.dropped_duplicate.load(Relaxed),
            frames_held: self.frames_held.load(Relaxed),
            buffers_grown: self.buffers_grown.load(Relaxed),
        }
    }

    /// So many frames went out and so many came in, with these bytes, as the owner of a link that a stream drives knows.
    pub fn handle_step(&self, sent: (u64, u64), received: (u64, u64)) {
        self.frames_sent.fetch_add(sent.0, Relaxed);
        self.bytes_sent.fetch_add(sent.1, Relaxed);
        self.frames_received.fetch_add(received.0, Relaxed);
        self.bytes_received.fetch_add(received.1, Relaxed);
    }

    pub(super) fn sent(&self, bytes: usize) {
        self.frames_sent.fetch_add(1, Relaxed);
        self.bytes_sent.fetch_add(bytes as u64, Relaxed);
    }

    pub(super) fn received(&self, bytes: usize) {
        self.frames_received.fetch_add(1, Relaxed);
        self.bytes_received.fetch_add(bytes as u64, Relaxed);
    }

    pub(super) fn epoch_dropped(&self) {
        self.dropped_epoch.fetch_add(1, Relaxed);
    }

    pub(super) fn unasked_dropped(&self) {
        self.dropped_unasked.fetch_add(1, Relaxed);
    }

    pub(super) fn duplicate_dropped(&self) {
        self.dropped_duplicate.fetch_add(1, Relaxed);
    }

    pub(super) fn frame_held(&self) {
        self.frames_held.fetch_add(1, Relaxed);
    }

    pub(super) fn frame_released(&self) {
        self.frames_held.fetch_sub(1, Relaxed);
    }

    pub(super) fn buffer_grown(&self) {
        self.buffers_grown.fetch_add(1, Relaxed);
    }
}
