//! A connection while it becomes a link: every read and write has one deadline, and what goes wrong is said in the
//! words of whoever dialed. Knows no kind of link.
use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use super::grants::Refusal;
use super::stream::LinkStream;

const ANSWER_MAGIC: [u8; 4] = *b"AFDL";

/// Why a link could not be attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The FFN rank said no. Another attempt needs another grant.
    #[error("{peer} refused: {refusal}")]
    Refused {
        /// Who.
        peer: String,
        /// Why.
        refusal: Refusal,
    },
    /// The other side does not speak this protocol.
    #[error("{peer} does not speak the link protocol: {what}")]
    Protocol {
        /// Who.
        peer: String,
        /// What it said instead.
        what: String,
    },
    /// The transport failed. Worth another attempt.
    #[error("attaching a link to {peer}: {what}")]
    Transport {
        /// Who.
        peer: String,
        /// The transport's own words.
        what: String,
    },
    /// The processes share no memory. Worth another attempt with another kind of link.
    #[error("no memory is shared with {peer}: {what}")]
    NotShared {
        /// Who.
        peer: String,
        /// Why not.
        what: String,
    },
    /// It took too long.
    #[error("attaching a link to {peer} took longer than {after:?}")]
    Timeout {
        /// Who.
        peer: String,
        /// The limit.
        after: Duration,
    },
}

/// A connection during its handshake: every read and write has the one deadline.
pub(super) struct Socket {
    pub(super) stream: LinkStream,
    pub(super) peer: String,
    timeout: Duration,
    deadline: Instant,
}

impl Socket {
    pub(super) fn dialed(stream: LinkStream, peer: String, timeout: Duration, deadline: Instant) -> Self {
        Self { stream, peer, timeout, deadline }
    }

    pub(super) fn accepted(stream: LinkStream, timeout: Duration) -> Self {
        let peer = stream.socket().peer_addr();
        let peer = peer.map_or_else(|_| "a peer that is gone".into(), |address| address.to_string());
        Self { stream, peer, timeout, deadline: Instant::now() + timeout }
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), AttachError> {
        let socket = self.stream.socket();
        let written = socket
            .set_nonblocking(false)
            .and_then(|()| socket.set_nodelay(true))
            .and_then(|()| socket.set_write_timeout(Some(self.timeout)))
            .and_then(|()| (&self.stream).write_all(bytes));
        written.map_err(|error| self.failed(error))
    }

    /// The next `N` bytes, however slowly the peer writes them.
    pub(super) fn read<const N: usize>(&mut self) -> Result<[u8; N], AttachError> {
        let mut buf = [0; N];
        match read_by(&self.stream, &mut buf, self.deadline) {
            Ok(()) => Ok(buf),
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Reads what [`answer_bytes`] made.
    pub(super) fn read_answer(&mut self) -> Result<(), AttachError> {
        let answer: [u8; 8] = self.read()?;
        let [m0, m1, m2, m3, code @ ..] = answer;
        match u32::from_le_bytes(code) {
            _ if [m0, m1, m2, m3] != ANSWER_MAGIC => Err(self.protocol(format!("answered {answer:02x?}"))),
            0 => Ok(()),
            code => Err(AttachError::Refused { peer: self.peer.clone(), refusal: Refusal::from_wire(code) }),
        }
    }

    /// Tells the peer no.
    pub(super) fn refuse(&mut self, refusal: Refusal) -> AttachError {
        match self.write(&answer_bytes(refusal as u32)) {
            Ok(()) => AttachError::Refused { peer: self.peer.clone(), refusal },
            Err(error) => error,
        }
    }

    pub(super) fn failed(&self, error: io::Error) -> AttachError {
        failed(&self.peer, self.timeout, error)
    }

    pub(super) fn protocol(&self, what: String) -> AttachError {
        AttachError::Protocol { peer: self.peer.clone(), what }
    }
}

/// What the listener says: 0, or the number of a [`Refusal`].
pub(super) fn answer_bytes(code: u32) -> [u8; 8] {
    let mut out = [0; 8];
    out[..4].copy_from_slice(&ANSWER_MAGIC);
    out[4..].copy_from_slice(&code.to_le_bytes());
    out
}

/// Fills `buf` before `deadline`, however slowly the peer writes.
fn read_by(mut stream: &LinkStream, buf: &mut [u8], deadline: Instant) -> io::Result<()> {
    stream.socket().set_nonblocking(false)?;
    let mut filled = 0;
    while filled < buf.len() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.socket().set_read_timeout(Some(left))?;
        match stream.read(&mut buf[filled..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

pub(super) fn failed(peer: &str, after: Duration, error: io::Error) -> AttachError {
    let peer = peer.to_owned();
    match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => AttachError::Timeout { peer, after },
        _ => AttachError::Transport { peer, what: error.to_string() },
    }
}
