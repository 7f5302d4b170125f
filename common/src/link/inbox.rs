//! Where a transport's reader leaves verified frames for the engine thread, and says when and why the link ended.
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::in_frame::{Body, InFrame};
use super::{Doorbell, Limits, LinkError, LinkStats};
use crate::frame::{FrameHeader, HEADER_BYTES};
use crate::ids::Epoch;

/// Shared by one end of a link and whatever receives for it.
pub(super) struct Inbox {
    pub(super) stats: Arc<LinkStats>,
    peer: String,
    epoch: Epoch,
    bell: Doorbell,
    /// Dispatches and answers that an honest peer can have on their way at once.
    max_frames: usize,
    ended: AtomicBool,
    /// Frames in `state`: an engine that finds none takes no lock.
    waiting: AtomicUsize,
    state: Mutex<State>,
}

struct State {
    frames: VecDeque<InFrame>,
    end: Option<LinkError>,
}

impl Inbox {
    pub(super) fn new(limits: &Limits, bell: Doorbell) -> Arc<Self> {
        let max_frames = 2 * limits.credits as usize;
        Arc::new(Self {
            stats: Arc::default(),
            peer: limits.peer.clone(),
            epoch: limits.epoch,
            bell,
            max_frames,
            ended: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
            state: Mutex::new(State { frames: VecDeque::with_capacity(max_frames), end: None }),
        })
    }

    /// Whether a frame belongs to this link; one of another epoch is counted.
    pub(super) fn admits(&self, header: &FrameHeader) -> bool {
        if header.epoch != self.epoch {
            self.stats.epoch_dropped();
        }
        header.epoch == self.epoch
    }

    /// Leaves a verified frame for the engine and rings. After the end of the link it is dropped; more frames than
    /// credits allow for end the link.
    pub(super) fn deliver(&self, header: FrameHeader, body: Body) {
        if self.place(self.frame(header, body)) {
            self.bell.ring();
        }
    }

    /// A verified frame.
    pub(super) fn frame(&self, header: FrameHeader, body: Body) -> InFrame {
        InFrame::new(header, body, Arc::clone(&self.stats))
    }

    /// Leaves a frame without ringing. Returns whether it was left.
    pub(super) fn place(&self, frame: InFrame) -> bool {
        let mut state = self.lock();
        if state.end.is_some() {
            return false;
        }
        if state.frames.len() >= self.max_frames {
            drop(state);
            self.end(self.corrupt("the peer has more frames in flight than its credits allow"));
            return false;
        }
        self.stats.received(HEADER_BYTES + frame.header.body_bytes as usize);
        state.frames.push_back(frame);
        self.waiting.store(state.frames.len(), Ordering::Release);
        true
    }

    /// Tells the engine that something was left.
    pub(super) fn ring(&self) {
        self.bell.ring();
    }

    /// Ends the link; the first reason stays.
    pub(super) fn end(&self, error: LinkError) {
        self.lock().end.get_or_insert(error);
        self.ended.store(true, Ordering::Release);
        self.bell.ring();
    }

    /// Why the link ended, if it did. Costs one load while it lives.
    pub(super) fn ended(&self) -> Option<LinkError> {
        if !self.ended.load(Ordering::Acquire) {
            return None;
        }
        self.lock().end.clone()
    }

    /// The oldest frame, else the end, else nothing.
    pub(super) fn poll(&self) -> Result<Option<InFrame>, LinkError> {
        if self.waiting.load(Ordering::Acquire) == 0 && !self.ended.load(Ordering::Acquire) {
            return Ok(None);
        }
        let mut state = self.lock();
        let oldest = state.frames.pop_front();
        self.waiting.store(state.frames.len(), Ordering::Release);
        match (oldest, &state.end) {
            (Some(frame), _) => Ok(Some(frame)),
            (None, Some(end)) => Err(end.clone()),
            (None, None) => Ok(None),
        }
    }

    pub(super) fn corrupt(&self, what: impl ToString) -> LinkError {
        LinkError::Corrupt { peer: self.peer.clone(), what: what.to_string() }
    }

    pub(super) fn closed(&self, reason: impl ToString) -> LinkError {
        LinkError::Closed { peer: self.peer.clone(), reason: reason.to_string() }
    }

    pub(super) fn lost(&self, what: impl ToString) -> LinkError {
        LinkError::Lost { peer: self.peer.clone(), what: what.to_string() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
