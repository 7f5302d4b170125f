//! Frames on a TCP connection: the link of hosts without a GPU fabric.
//!
//! `send` tries a non-blocking write from the caller's memory, which nearly always takes the whole frame; what is left
//! goes to a [writer thread](outbox). The engine that polls reads the socket itself, into pooled buffers, and its bell sleeps
//! on the socket: between a frame's arrival and the engine stands no other thread. A [reader thread](reader) takes over for
//! the rest of a large body, so that it comes in while the engine computes; after a farewell, so that the peer gets rid of
//! what it still sends; and for good where the engine's bell cannot sleep on sockets. [`attach`](super::attach) says how a
//! connection becomes a link. A shutdown of the socket ends every blocking call, so both threads are joined when the link
//! is dropped.
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};

use super::doorbell::SocketWatch;
use super::intake::{FrameReader, Intake, Progress};
use super::port::Port;
use super::socket::{AttachError, Socket};
use super::stream::LinkStream;
use super::{Doorbell, HopLink, InFrame, Limits, LinkError, LinkStats};
use crate::frame::{Checksum, FrameHeader, HEADER_BYTES, MAX_TEXT_BYTES, TRAILER_BYTES, body_sum};

mod outbox;
mod reader;

use outbox::Outbox;
use reader::{Errand, Thread, end_link};

/// Longest time that dropping a link waits for a peer that does not take what was sent before.
const LINGER: Duration = Duration::from_millis(250);
/// A body of which more than this is still to come is left to the reader thread: less is held by the socket while the engine
/// computes.
const LARGE_BYTES: usize = 4 << 20;
/// A body of more than this is summed and sent in pieces of so many bytes, where both ends agreed to have its sum behind it:
/// the system copies each while the processor's cache still has it, and the peer reads it while the next one is summed. Each
/// piece wakes the peer, who then takes the processor away if it has the same one: smaller ones cost more than they save.
const PIECE_BYTES: usize = 2 << 20;

/// One end of a link over TCP.
pub struct TcpLink {
    port: Port,
    stream: LinkStream,
    outbox: Arc<Outbox>,
    bell: Doorbell,
    /// The engine reads; otherwise the thread does.
    reader: Option<FrameReader>,
    /// The engine's last look left nothing in the socket.
    is_dry: bool,
    /// Held while the bell sleeps on the socket.
    watch: Option<SocketWatch>,
    errands: Option<Sender<Errand>>,
    done: Receiver<FrameReader>,
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
        set_options(socket)?;
        socket.set_read_timeout(None)?;
        socket.set_write_timeout(None)?;
        let keepalive =
            TcpKeepalive::new().with_time(Duration::from_secs(5)).with_interval(Duration::from_secs(2));
        SockRef::from(&**socket).set_tcp_keepalive(&keepalive.with_retries(3))?;

        let frame_bytes = HEADER_BYTES + limits.max_body_bytes.max(MAX_TEXT_BYTES) as usize + TRAILER_BYTES;
        let outbox = Arc::new(Outbox::new(2 * limits.credits as usize + 1, frame_bytes));
        let port = Port::new(limits, bell.clone());
        let (errands, asked) = mpsc::channel();
        let (given_back, done) = mpsc::channel();
        let reader = Some(FrameReader::new(Intake::new(&port)));
        let mut link = Self {
            port,
            stream,
            outbox,
            bell,
            reader,
            is_dry: false,
            watch: None,
            errands: Some(errands),
            done,
            threads: Vec::with_capacity(2),
        };
        let (stream, outbox) = (link.stream.clone(), Arc::clone(&link.outbox));
        link.threads
            .push(Builder::new().name("tcp-write".into()).spawn(move || outbox.run(stream.socket()))?);
        let thread = Thread {
            stream: link.stream.clone(),
            outbox: Arc::clone(&link.outbox),
            errands: asked,
            done: given_back,
        };
        link.threads.push(Builder::new().name("tcp-read".into()).spawn(move || thread.run())?);
        Ok(link)
    }

    /// After its handshake.
    pub(super) fn over(socket: Socket, limits: Limits, bell: Doorbell) -> Result<Self, AttachError> {
        Self::new(socket.stream.clone(), limits, bell).map_err(|error| socket.failed(error))
    }

    fn write(&self, header: &FrameHeader, body: &[&[u8]]) -> io::Result<()> {
        let checksum = self.port.limits.checksum;
        if checksum == Checksum::Sum64 && header.body_bytes as usize > PIECE_BYTES {
            return self.outbox.write_in_pieces(&self.stream, &header.encode_before(), body, PIECE_BYTES);
        }
        self.outbox.write(&self.stream, &header.encode(body_sum(checksum, body)), body)
    }

    /// Reads on. `None` where nothing is to be read here, or the link has ended.
    fn read_frame(&mut self) -> Option<Option<InFrame>> {
        if self.watch.is_none() {
            self.watch = self.bell.watch_socket(self.stream.socket());
            if self.watch.is_none() {
                self.hand_over(Errand::Everything);
            }
        }
        let reader = self.reader.as_mut()?;
        match reader.read(&mut self.stream.now(&mut self.is_dry)) {
            Ok(Progress::Frame(frame)) => Some(frame),
            Ok(Progress::Waits { missing }) => {
                if missing > LARGE_BYTES {
                    self.hand_over(Errand::OneFrame);
                }
                None
            }
            Err(end) => {
                end_link(reader, &self.stream, &self.outbox, end);
                (self.reader, self.watch) = (None, None);
                None
            }
        }
    }

    /// Lets the thread read from here on.
    fn hand_over(&mut self, errand: impl FnOnce(FrameReader) -> Errand) {
        self.watch = None;
        if let (Some(reader), Some(errands)) = (self.reader.take(), &self.errands) {
            // It listens until `errands` is dropped.
            let _ = errands.send(errand(reader));
        }
    }
}

/// What a connection needs to carry frames without delay.
pub(super) fn set_options(socket: &TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    // Within a host there is no network to be congested. An algorithm that measures one and paces what is sent, as BBR does,
    // measures its own pace there: of equal connections some then take twice as long for the same frame, for as long as they
    // live. Reno is what every system has; without it the connection works, too.
    if socket.peer_addr()?.ip() == socket.local_addr()?.ip() {
        let _ = SockRef::from(socket).set_tcp_congestion(b"reno");
    }
    Ok(())
}

impl HopLink for TcpLink {
    fn limits(&self) -> &Limits {
        &self.port.limits
    }

    fn send(&mut self, mut header: FrameHeader, body: &[&[u8]]) -> Result<(), LinkError> {
        self.port.check_send(&mut header, body)?;
        if let Err(error) = self.write(&header, body) {
            // `poll_recv` still hands out what came before, the peer's farewell included; then it ends the link.
            let _ = self.stream.socket().shutdown(Shutdown::Both);
            return Err(self.port.inbox.lost(error));
        }
        self.port.handle_sent(&header);
        Ok(())
    }

    fn poll_recv(&mut self) -> Result<Option<InFrame>, LinkError> {
        loop {
            // What the thread has left comes first.
            if let Some(frame) = self.port.poll_recv()? {
                return Ok(Some(frame));
            }
            if self.reader.is_none() {
                match self.done.try_recv() {
                    // It has left a frame before.
                    Ok(reader) => self.reader = Some(reader),
                    Err(_) => return Ok(None),
                }
                continue;
            }
            match self.read_frame() {
                Some(frame) => {
                    if let Some(frame) = frame.and_then(|frame| self.port.take(frame)) {
                        return Ok(Some(frame));
                    }
                }
                // Whether or not that was the end.
                None => return self.port.poll_recv(),
            }
        }
    }

    fn close(&mut self, reason: &str) {
        let Some((header, text)) = self.port.close(reason) else { return };
        // A failure means that the peer is gone already.
        let _ = self.write(&header, &[text]);
        self.outbox.finish();
        self.hand_over(Errand::Everything);
    }

    fn stats(&self) -> Arc<LinkStats> {
        Arc::clone(&self.port.inbox.stats)
    }
}

impl Drop for TcpLink {
    fn drop(&mut self) {
        self.close("the other end was dropped");
        // Behind whatever still waits it would come too late.
        if let Some((header, text)) = self.port.blame()
            && self.outbox.is_idle()
        {
            let _ = self.write(&header, &[text.as_bytes()]);
        }
        self.outbox.finish();
        self.outbox.wait_done(LINGER);
        let _ = self.stream.socket().shutdown(Shutdown::Both);
        self.errands = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
