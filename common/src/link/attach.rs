//! How a connection to the one port becomes a link: 40 bytes one way, 8 bytes back, both within a deadline. Of a `tcp`
//! link frames follow; a `shm` link goes on with its own part of the handshake and keeps the connection as a sign of life.
//!
//! ```text
//! dialer (attention)   0  "AFDLINK1"  8 B     8  link_id  u64     16  secret  16 B     32  reserved, zero  8 B
//! listener (FFN)       0  "AFDL"      4 B     4  code     u32: 0, or the number of a Refusal
//! ```
//! Little-endian. The first eight bytes let one port serve links beside HTTP.
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::grants::{LinkId, Refusal, Secret, Ticket};
use super::shm::ShmLink;
use super::stream::LinkStream;
use super::tcp::TcpLink;
use super::{Doorbell, HopLink, Limits, LinkKind};
use crate::net::tls::PeerTls;

/// First bytes of a connection that wants to be a link.
pub const MAGIC: [u8; 8] = *b"AFDLINK1";
const ANSWER_MAGIC: [u8; 4] = *b"AFDL";
const PREAMBLE_BYTES: usize = 40;

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

/// Connects to an FFN rank's listen address, under `tls` where the port speaks it, and attaches to the link that `ticket`
/// is for, as the kind that `limits` name. Blocks, at most for `timeout`.
///
/// # Errors
/// [`AttachError`]; the ticket is used up unless it is a failure to connect.
pub fn dial(
    address: SocketAddr,
    tls: Option<&PeerTls>,
    ticket: &Ticket,
    limits: Limits,
    bell: Doorbell,
    timeout: Duration,
) -> Result<Box<dyn HopLink>, AttachError> {
    let (peer, deadline) = (limits.peer.clone(), Instant::now() + timeout);
    let stream = connect(address, tls, timeout).map_err(|error| failed(&peer, timeout, error))?;
    let mut socket = Socket { stream, peer, timeout, deadline };
    socket.write(&preamble(ticket))?;
    socket.read_answer()?;
    match limits.kind {
        LinkKind::Shm => Ok(Box::new(ShmLink::join(socket, limits, bell)?)),
        _ => Ok(Box::new(TcpLink::over(socket, limits, bell)?)),
    }
}

/// Answers a dialer of whom nothing was read yet. See [`answer`].
///
/// # Errors
/// As [`answer`].
pub fn accept<T>(
    stream: impl Into<LinkStream>,
    timeout: Duration,
    attach: impl FnOnce(&Ticket) -> Result<(Limits, Doorbell, T), Refusal>,
) -> Result<(Box<dyn HopLink>, T), AttachError> {
    let mut socket = Socket::accepted(stream.into(), timeout);
    let magic: [u8; MAGIC.len()] = socket.read()?;
    if magic != MAGIC {
        return Err(socket.protocol(format!("began with {magic:02x?}")));
    }
    answer_socket(socket, attach)
}

/// Answers a dialer whose [`MAGIC`] was read already. Blocks, at most for `timeout`. `attach` looks the ticket up in the
/// grants and says what was agreed, whose bell to ring, and what the caller wants to know the link by.
///
/// # Errors
/// [`AttachError`]; the connection is closed then.
pub fn answer<T>(
    stream: impl Into<LinkStream>,
    timeout: Duration,
    attach: impl FnOnce(&Ticket) -> Result<(Limits, Doorbell, T), Refusal>,
) -> Result<(Box<dyn HopLink>, T), AttachError> {
    answer_socket(Socket::accepted(stream.into(), timeout), attach)
}

fn answer_socket<T>(
    mut socket: Socket,
    attach: impl FnOnce(&Ticket) -> Result<(Limits, Doorbell, T), Refusal>,
) -> Result<(Box<dyn HopLink>, T), AttachError> {
    let rest = socket.read()?;
    let ticket =
        parse(&rest).ok_or_else(|| socket.protocol("reserved bytes of the preamble are not zero".into()))?;
    match attach(&ticket) {
        Ok((limits, bell, session)) => {
            let link: Box<dyn HopLink> = match limits.kind {
                LinkKind::Shm => Box::new(ShmLink::offer(socket, limits, bell)?),
                _ => {
                    socket.write(&answer_bytes(0))?;
                    Box::new(TcpLink::over(socket, limits, bell)?)
                }
            };
            Ok((link, session))
        }
        Err(refusal) => Err(socket.refuse(refusal)),
    }
}

fn connect(address: SocketAddr, tls: Option<&PeerTls>, timeout: Duration) -> io::Result<LinkStream> {
    let stream = TcpStream::connect_timeout(&address, timeout)?;
    let Some(tls) = tls else { return Ok(stream.into()) };
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    let session = tls.handshake(&stream)?;
    Ok(LinkStream::under_tls(stream, session))
}

/// A connection during its handshake: every read and write has the one deadline.
pub(super) struct Socket {
    pub(super) stream: LinkStream,
    pub(super) peer: String,
    timeout: Duration,
    deadline: Instant,
}

impl Socket {
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

fn preamble(ticket: &Ticket) -> [u8; PREAMBLE_BYTES] {
    let mut out = [0; PREAMBLE_BYTES];
    out[..8].copy_from_slice(&MAGIC);
    out[8..16].copy_from_slice(&ticket.link_id.0.to_le_bytes());
    out[16..32].copy_from_slice(ticket.secret.expose());
    out
}

/// From what follows the magic; `None` unless the reserved bytes are zero.
fn parse(rest: &[u8; PREAMBLE_BYTES - MAGIC.len()]) -> Option<Ticket> {
    let link_id = u64::from_le_bytes(rest[..8].try_into().ok()?);
    let secret = Secret::from_slice(&rest[8..24])?;
    rest[24..].iter().all(|byte| *byte == 0).then_some(Ticket { link_id: LinkId(link_id), secret })
}

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

fn failed(peer: &str, after: Duration, error: io::Error) -> AttachError {
    let peer = peer.to_owned();
    match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => AttachError::Timeout { peer, after },
        _ => AttachError::Transport { peer, what: error.to_string() },
    }
}
