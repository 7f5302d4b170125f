//! The thread that reads one end's frames.
use std::io::{self, BufReader, Read};
use std::net::Shutdown;
use std::sync::Arc;

use super::outbox::Outbox;
use crate::frame::{FrameHeader, FrameKind, FrameLimits, HEADER_BYTES, verify_body};
use crate::link::inbox::Inbox;
use crate::link::pool::Pool;
use crate::link::stream::LinkStream;
use crate::link::{Body, LinkError};

/// Small frames are read together with their header; a larger body goes straight into its pooled buffer.
const READ_AHEAD_BYTES: usize = 16 << 10;

pub(super) struct Reader {
    pub(super) stream: LinkStream,
    pub(super) inbox: Arc<Inbox>,
    pub(super) outbox: Arc<Outbox>,
    pub(super) pool: Pool,
    pub(super) limits: FrameLimits,
}

impl Reader {
    pub(super) fn run(self) {
        let mut input = BufReader::with_capacity(READ_AHEAD_BYTES, &self.stream);
        let end = loop {
            if let Err(end) = self.read_frame(&mut input) {
                break end;
            }
        };
        self.inbox.end(end);
        // Frees a writer that waits for a peer which will not read any more.
        let _ = self.stream.socket().shutdown(Shutdown::Both);
    }

    fn read_frame(&self, input: &mut impl Read) -> Result<(), LinkError> {
        let mut header = [0; HEADER_BYTES];
        let read = read_up_to(input, &mut header).map_err(|error| self.lost(&error.to_string()))?;
        if read < HEADER_BYTES {
            let at = if read == 0 { "between two frames" } else { "within a header" };
            return Err(self.lost(&format!("the connection ended {at}")));
        }
        let (header, crc) =
            FrameHeader::decode(&header, &self.limits).map_err(|error| self.inbox.corrupt(error))?;
        let mut body = self.pool.take(header.body_bytes as usize);
        input.read_exact(body.bytes_mut()).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => self.lost("the connection ended within a body"),
            _ => self.lost(&error.to_string()),
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

    fn lost(&self, what: &str) -> LinkError {
        match self.outbox.error() {
            Some(error) => self.inbox.lost(format!("{what}; writing failed: {error}")),
            None => self.inbox.lost(what),
        }
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
