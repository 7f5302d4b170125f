//! From bytes to verified frames in the inbox: what every transport of encoded frames does the same way.
use std::io::{self, Read};
use std::sync::Arc;

use super::inbox::Inbox;
use super::loopback::receive_pool;
use super::pool::Pool;
use super::port::Port;
use super::{Body, LinkError};
use crate::frame::{FrameHeader, FrameKind, FrameLimits, HEADER_BYTES, verify_body};

/// One end's way in.
pub(super) struct Intake {
    pub(super) inbox: Arc<Inbox>,
    pool: Pool,
    limits: FrameLimits,
}

impl Intake {
    /// Into the inbox of `port`.
    pub(super) fn new(port: &Port) -> Self {
        let (inbox, limits) = (Arc::clone(&port.inbox), port.limits.frame_limits());
        Self { inbox, pool: receive_pool(port), limits }
    }

    /// Reads one frame. The error is how the link ends; a peer's farewell is one.
    pub(super) fn read_frame(&self, input: &mut impl Read) -> Result<(), LinkError> {
        let mut header = [0; HEADER_BYTES];
        let read = read_up_to(input, &mut header).map_err(|error| self.inbox.lost(error))?;
        if read < HEADER_BYTES {
            let at = if read == 0 { "between two frames" } else { "within a header" };
            return Err(self.inbox.lost(format!("the connection ended {at}")));
        }
        let (header, crc) =
            FrameHeader::decode(&header, &self.limits).map_err(|error| self.inbox.corrupt(error))?;
        let mut body = self.pool.take(header.body_bytes as usize);
        input.read_exact(body.bytes_mut()).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => self.inbox.lost("the connection ended within a body"),
            _ => self.inbox.lost(error),
        })?;
        verify_body(body.bytes(), crc).map_err(|error| self.inbox.corrupt(error))?;
        if header.kind == FrameKind::Close {
            return Err(self.inbox.closed(String::from_utf8_lossy(body.bytes())));
        }
        if self.inbox.admits(&header) {
            self.inbox.deliver(header, Body::Pooled(body));
        }
        Ok(())
    }
}

/// Like `read_exact`, but an end of the input is not an error: returns how much there was.
fn read_up_to(input: &mut impl Read, buf: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buf.len() {
        match input.read(&mut buf[filled..]) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}
