//! Frames through shared memory: the link between processes of one host.
//!
//! The dialed side allocates a segment, the dialer opens it by name and shows the nonce it found there: so both know that
//! they see the same memory, and the name is removed at once. A send copies the frame into a slot and advances a word; the
//! receiving engine sleeps on a word beside it ([`Doorbell`]) and reads the rows where they lie. The TCP connection
//! of the handshake stays open: when a process dies the kernel closes it, and that is how the other one learns of it.
use std::io::Read;
use std::net::Shutdown;
use std::sync::{Arc, OnceLock};
use std::thread::{Builder, JoinHandle};

use afd_ffi::shm::{PushError, Receiver, Segment, Sender, Shape, Side, Slot};

use super::doorbell::LaneWatch;
use super::inbox::Inbox;
use super::port::Port;
use super::socket::{AttachError, Socket};
use super::stream::LinkStream;
use super::{Body, Doorbell, HopLink, InFrame, Limits, LinkError, LinkStats};
use crate::frame::{BodyCheck, FrameHeader, FrameKind, HEADER_BYTES, MAX_TEXT_BYTES, verify_body};

mod handshake;
mod ringer;

/// Bytes that are summed and then copied while the processor's nearest cache still has them.
const PIECE_BYTES: usize = 16 << 10;

/// One end of a link through shared memory.
pub struct ShmLink {
    port: Port,
    out: Sender,
    into: Receiver,
    /// Given up when the link ends: what a peer that is cut off writes then wakes nobody.
    watch: Option<LaneWatch>,
    socket: LinkStream,
    gone: Arc<OnceLock<LinkError>>,
    ringer: Option<ringer::Ringer>,
    listening: Option<JoinHandle<()>>,
}

/// Slots for what is unanswered in both directions, and for the farewell.
fn shape(limits: &Limits) -> Option<Shape> {
    let slots = limits.credits.checked_mul(2)?.checked_add(1)?;
    Shape::new(slots, HEADER_BYTES + limits.max_body_bytes.max(MAX_TEXT_BYTES) as usize)
}

impl ShmLink {
    /// The dialed side's half of the handshake; see [`handshake`].
    pub(super) fn offer(socket: Socket, limits: Limits, bell: Doorbell) -> Result<Self, AttachError> {
        let (segment, socket) = handshake::offer(socket, shape(&limits))?;
        Self::over(segment, Side::Second, socket, limits, bell)
    }

    /// The dialing side's half of the handshake.
    pub(super) fn join(socket: Socket, limits: Limits, bell: Doorbell) -> Result<Self, AttachError> {
        let (segment, socket) = handshake::join(socket, shape(&limits))?;
        Self::over(segment, Side::First, socket, limits, bell)
    }

    fn over(
        segment: Segment,
        side: Side,
        socket: Socket,
        limits: Limits,
        bell: Doorbell,
    ) -> Result<Self, AttachError> {
        let (out, into) = segment.lanes(side);
        let failed = |error| socket.failed(error);
        socket.stream.socket().set_read_timeout(None).map_err(failed)?;
        let stream = socket.stream.clone();
        let port = Port::new(limits, bell.clone());
        let gone = Arc::new(OnceLock::new());
        let watch = bell.watch(into.watch());
        let ringer = match &watch {
            Some(_) => None,
            None => Some(ringer::Ringer::start(&into, bell.clone()).map_err(failed)?),
        };
        let (inbox, heard, listened) = (Arc::clone(&port.inbox), Arc::clone(&gone), stream.clone());
        let listening = Builder::new()
            .name("shm-peer".into())
            .spawn(move || {
                heard.get_or_init(|| listen(&listened, &inbox));
                bell.ring();
            })
            .map_err(failed)?;
        Ok(Self { port, out, into, watch, socket: stream, gone, ringer, listening: Some(listening) })
    }

    fn push(&mut self, header: &FrameHeader, body: &[&[u8]]) -> Result<(), PushError> {
        let mut check = BodyCheck::new(self.port.limits.checksum);
        let mut claim = self.out.claim(HEADER_BYTES, header.body_bytes as usize)?;
        for piece in body.iter().flat_map(|part| part.chunks(PIECE_BYTES)) {
            check.update(piece);
            claim.write(piece);
        }
        claim.send(&header.encode(check.sum()));
        Ok(())
    }

    /// Brings everything that lies in the lane to the inbox.
    fn take_arrived(&mut self) {
        if self.port.inbox.ended().is_some() {
            return;
        }
        // Looked at first: what a peer sent before it was gone is in the lane by now.
        let gone = self.gone.get().cloned();
        let end = loop {
            match self.into.pop() {
                Ok(Some(slot)) => match handle_slot(&self.port, slot) {
                    Ok(()) => {}
                    Err(end) => break Some(end),
                },
                Ok(None) => break gone,
                Err(broken) => break Some(self.port.inbox.corrupt(broken)),
            }
        };
        if let Some(end) = end {
            self.end(end);
        }
    }

    fn end(&mut self, error: LinkError) {
        // A peer whose frames were damaged is still to be told, before it learns that this end is gone.
        let is_to_be_told = matches!(error, LinkError::Corrupt { .. });
        self.port.inbox.end(error);
        self.watch = None;
        self.ringer = None;
        if !is_to_be_told {
            let _ = self.socket.socket().shutdown(Shutdown::Both);
        }
    }
}

/// Waits for the end of the connection: nothing is ever sent on it.
fn listen(mut socket: &LinkStream, inbox: &Inbox) -> LinkError {
    match socket.read(&mut [0]) {
        Ok(0) => inbox.lost("the peer's process ended, or closed the connection without a word"),
        Ok(_) => inbox.corrupt("bytes on the connection of a link through shared memory"),
        Err(error) => inbox.lost(error),
    }
}

fn handle_slot(port: &Port, slot: Slot) -> Result<(), LinkError> {
    let corrupt = |what: &dyn std::fmt::Display| port.inbox.corrupt(what);
    // Copied out of the shared memory before anything is decided by it.
    let header: [u8; HEADER_BYTES] =
        *slot.first_chunk().ok_or_else(|| corrupt(&"a slot has no room for a header"))?;
    let limits = port.limits.frame_limits();
    let (header, sum) = FrameHeader::decode(&header, &limits).map_err(|error| corrupt(&error))?;
    let body = &slot[HEADER_BYTES..HEADER_BYTES + header.body_bytes as usize];
    let sum = sum.ok_or_else(|| corrupt(&"a slot has nothing behind its body"))?;
    verify_body(body, sum).map_err(|error| corrupt(&error))?;
    if header.kind == FrameKind::Close {
        return Err(port.inbox.closed(String::from_utf8_lossy(body)));
    }
    if port.inbox.admits(&header) {
        port.inbox.place(port.inbox.frame(header, Body::Slot(slot)));
    }
    Ok(())
}

impl HopLink for ShmLink {
    fn limits(&self) -> &Limits {
        &self.port.limits
    }

    fn send(&mut self, mut header: FrameHeader, body: &[&[u8]]) -> Result<(), LinkError> {
        self.port.check_send(&mut header, body)?;
        if let Some(gone) = self.gone.get() {
            return Err(gone.clone());
        }
        if let Err(error) = self.push(&header, body) {
            let Limits { peer, credits, max_body_bytes, .. } = self.port.limits.clone();
            return Err(match error {
                PushError::Full => LinkError::NoCredit { peer, credits },
                PushError::TooLarge => {
                    LinkError::BadFrame { peer, what: format!("more than {max_body_bytes} bytes of body") }
                }
            });
        }
        self.port.handle_sent(&header);
        Ok(())
    }

    fn poll_recv(&mut self) -> Result<Option<InFrame>, LinkError> {
        self.take_arrived();
        self.port.poll_recv()
    }

    fn close(&mut self, reason: &str) {
        let Some((header, text)) = self.port.close(reason) else { return };
        // Without a free slot the peer only learns that the link is gone.
        let _ = self.push(&header, &[text]);
        self.end(self.port.inbox.closed(reason));
    }

    fn stats(&self) -> Arc<LinkStats> {
        Arc::clone(&self.port.inbox.stats)
    }
}

impl Drop for ShmLink {
    fn drop(&mut self) {
        self.close("the other end was dropped");
        if let Some((header, text)) = self.port.blame() {
            let _ = self.push(&header, &[text.as_bytes()]);
        }
        let _ = self.socket.socket().shutdown(Shutdown::Both);
        if let Some(listening) = self.listening.take() {
            let _ = listening.join();
        }
    }
}

#[cfg(test)]
mod tests;
