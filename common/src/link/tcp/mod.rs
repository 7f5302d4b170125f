//! Frames on a TCP connection: the link of hosts without a GPU fabric.
//!
//! `send` tries a non-blocking write from the caller's memory, which nearly always takes the whole frame; what is left
//! goes to a [writer thread](outbox). A reader thread reads whole frames into pooled buffers, verifies them and rings
//! the bell. [`attach`](super::attach) says how a connection becomes a link. A shutdown of the socket ends every blocking call, so both
//! threads are joined when the link is dropped.
use std::io;
use std::net::Shutdown;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};

use super::intake::Intake;
use super::port::Port;
use super::{Doorbell, HopLink, InFrame, Limits, LinkError, LinkStats};
use crate::frame::{FrameHeader, HEADER_BYTES, MAX_TEXT_BYTES, body_crc};

mod outbox;
mod reader;

use super::attach::{AttachError, Socket};
use super::stream::LinkStream;
use outbox::Outbox;

/// Longest time that dropping a link waits for a peer that does not take what was sent before.
const LINGER: Duration = Duration::from_millis(250);

/// One end of a link over TCP.
pub struct TcpLink {
    port: Port,
    stream: LinkStream,
    outbox: Arc<Outbox>,
    threads: Vec<JoinHandle<()>>,
}

impl TcpLink {
    /// Over a connection on which nothing but frames follows in either direction.
    ///
    /// # Errors
    /// The system refused a socket option or a thread.
    pub fn new(stream: impl Into<LinkStream>, limits: Limits, bell: Doorbell) -> io::Result<Self> {
        let stream = stream.into();
        let socket = stream.socket();
        socket.set_nonblocking(false)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(None)?;
        socket.set_write_timeout(None)?;
        let keepalive =
            TcpKeepalive::new().with_time(Duration::from_secs(5)).with_interval(Duration::from_secs(2));
        SockRef::from(socket).set_tcp_keepalive(&keepalive.with_retries(3))?;

        let frame_bytes = HEADER_BYTES + limits.max_body_bytes.max(MAX_TEXT_BYTES) as usize;
        let outbox = Arc::new(Outbox::new(2 * limits.credits as usize + 1, frame_bytes));
        let port = Port::new(limits, bell);
        let mut link = Self { port, stream, outbox, threads: Vec::with_capacity(2) };
        let (stream, outbox) = (link.stream.clone(), Arc::clone(&link.outbox));
        link.threads
            .push(Builder::new().name("tcp-write".into()).spawn(move || outbox.run(stream.socket()))?);
        let reader = reader::Reader {
            stream: link.stream.clone(),
            intake: Intake::new(&link.port),
            outbox: Arc::clone(&link.outbox),
        };
        link.threads.push(Builder::new().name("tcp-read".into()).spawn(move || reader.run())?);
        Ok(link)
    }

    /// After its handshake.
    pub(super) fn over(socket: Socket, limits: Limits, bell: Doorbell) -> Result<Self, AttachError> {
        Self::new(socket.stream.clone(), limits, bell).map_err(|error| socket.failed(error))
    }

    fn write(&self, header: &FrameHeader, body: &[&[u8]]) -> io::Result<()> {
        let encoded = header.encode(body_crc(body));
        self.outbox.write(&self.stream, &encoded, body)
    }
}

impl HopLink for TcpLink {
    fn limits(&self) -> &Limits {
        &self.port.limits
    }

    fn send(&mut self, mut header: FrameHeader, body: &[&[u8]]) -> Result<(), LinkError> {
        self.port.check_send(&mut header, body)?;
        if let Err(error) = self.write(&header, body) {
            // The reader still hands out what came before, the peer's farewell included; then it ends the link.
            let _ = self.stream.socket().shutdown(Shutdown::Both);
            return Err(self.port.inbox.lost(error));
        }
        self.port.handle_sent(&header);
        Ok(())
    }

    fn poll_recv(&mut self) -> Result<Option<InFrame>, LinkError> {
        self.port.poll_recv()
    }

    fn close(&mut self, reason: &str) {
        if self.port.inbox.ended().is_some() {
            return;
        }
        self.port.inbox.end(self.port.inbox.closed(reason));
        let (header, text) = self.port.close_frame(reason);
        // A failure means that the peer is gone already.
        let _ = self.write(&header, &[text]);
        self.outbox.finish();
    }

    fn stats(&self) -> Arc<LinkStats> {
        Arc::clone(&self.port.inbox.stats)
    }
}

impl Drop for TcpLink {
    fn drop(&mut self) {
        self.close("the other end was dropped");
        self.outbox.finish();
        self.outbox.wait_done(LINGER);
        let _ = self.stream.socket().shutdown(Shutdown::Both);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
