//! What every implementation of a link does the same way around its transport: check what goes out, account for
//! credits, sort what came in.
use std::sync::Arc;

use super::credits::{Arrival, Credits, Refused};
use super::inbox::Inbox;
use super::{Doorbell, InFrame, Limits, LinkError};
use crate::frame::{FrameHeader, FrameKind, HEADER_BYTES, MAX_TEXT_BYTES, RowType, SideKind};
use crate::ids::HopKey;

/// The engine's half of one end.
pub(super) struct Port {
    pub(super) limits: Limits,
    pub(super) inbox: Arc<Inbox>,
    credits: Credits,
    has_blamed: bool,
}

impl Port {
    pub(super) fn new(limits: Limits, bell: Doorbell) -> Self {
        let inbox = Inbox::new(&limits, bell);
        Self { credits: Credits::new(limits.credits), inbox, limits, has_blamed: false }
    }

    /// Whether `header` and `body` may go out; sets the header's epoch.
    pub(super) fn check_send(&self, header: &mut FrameHeader, body: &[&[u8]]) -> Result<(), LinkError> {
        if let Some(end) = self.inbox.ended() {
            return Err(end);
        }
        let bad = |what: String| LinkError::BadFrame { peer: self.limits.peer.clone(), what };
        let parts: usize = body.iter().map(|part| part.len()).sum();
        if parts != header.body_bytes as usize {
            return Err(bad(format!("the header says {} bytes, the parts have {parts}", header.body_bytes)));
        }
        header.check(&self.limits.frame_limits()).map_err(|error| bad(error.to_string()))?;
        self.credits.may_send(header.kind, &header.hop).map_err(|refused| match refused {
            Refused::NoCredit => {
                LinkError::NoCredit { peer: self.limits.peer.clone(), credits: self.limits.credits }
            }
            Refused::InFlight => bad(format!("{} is in flight already", header.hop)),
            Refused::NotAsked => bad(format!("{} was not asked for, or was answered", header.hop)),
        })?;
        header.epoch = self.limits.epoch;
        Ok(())
    }

    /// To be called once the transport has taken a checked frame.
    pub(super) fn handle_sent(&mut self, header: &FrameHeader) {
        self.credits.handle_sent(header.kind, header.hop);
        self.inbox.stats.sent(HEADER_BYTES + header.body_bytes as usize);
    }

    /// See [`HopLink::poll_recv`](super::HopLink::poll_recv).
    pub(super) fn poll_recv(&mut self) -> Result<Option<InFrame>, LinkError> {
        while let Some(frame) = self.inbox.poll()? {
            let taken = self.sort(frame);
            if taken.is_some() {
                return Ok(taken);
            }
        }
        Ok(None)
    }

    /// A frame that the engine's own thread has just read, if it is for the engine. Nothing may lie in the inbox.
    pub(super) fn take(&mut self, frame: InFrame) -> Option<InFrame> {
        self.inbox.stats.received(HEADER_BYTES + frame.header.body_bytes as usize);
        self.sort(frame)
    }

    /// Accounts for a frame; returns it if it is for the engine.
    fn sort(&mut self, frame: InFrame) -> Option<InFrame> {
        match self.credits.handle_arrival(frame.header.kind, frame.header.hop) {
            Arrival::Take => return Some(frame),
            Arrival::Unasked => self.inbox.stats.unasked_dropped(),
            Arrival::Duplicate => self.inbox.stats.duplicate_dropped(),
            Arrival::OverCredit => {
                let what = format!("the peer has more than {} dispatches in flight", self.limits.credits);
                self.inbox.end(self.inbox.corrupt(what));
            }
        }
        None
    }

    /// Ends this end. Returns the farewell that is still to be sent, the first time.
    pub(super) fn close<'a>(&self, reason: &'a str) -> Option<(FrameHeader, &'a [u8])> {
        if self.inbox.ended().is_some() {
            return None;
        }
        self.inbox.end(self.inbox.closed(reason));
        Some(self.close_frame(reason))
    }

    /// The farewell of an end that broke by what the peer sent, which says what was wrong with that. The first time.
    pub(super) fn blame(&mut self) -> Option<(FrameHeader, String)> {
        let Some(LinkError::Corrupt { what, .. }) = self.inbox.ended() else { return None };
        if std::mem::replace(&mut self.has_blamed, true) {
            return None;
        }
        let reason = format!("what came over it was corrupt: {what}");
        let (header, text) = self.close_frame(&reason);
        let kept = text.len();
        Some((header, reason[..kept].to_owned()))
    }

    /// The frame that tells the peer why the link ends, and as much of the reason as fits into it.
    fn close_frame<'a>(&self, reason: &'a str) -> (FrameHeader, &'a [u8]) {
        let reason = &reason[..reason.floor_char_boundary(MAX_TEXT_BYTES as usize)];
        let header = FrameHeader {
            kind: FrameKind::Close,
            dtype: RowType::F32,
            side: SideKind::None,
            epoch: self.limits.epoch,
            hop: HopKey::default(),
            rows: 0,
            columns: 0,
            side_columns: 0,
            body_bytes: reason.len() as u32,
        };
        (header, reason.as_bytes())
    }
}
