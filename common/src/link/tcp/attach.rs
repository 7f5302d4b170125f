//! How a TCP connection becomes a link: 40 bytes one way, 8 bytes back, both within a deadline.
//!
//! ```text
//! dialer (attention)   0  "AFDLINK1"  8 B     8  link_id  u64     16  secret  16 B     32  reserved, zero  8 B
//! listener (FFN)       0  "AFDL"      4 B     4  code     u32: 0, or the number of a Refusal
//! ```
//! Little-endian. The first eight bytes let one port serve links beside HTTP.
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::TcpLink;
use crate::link::grants::{LinkId, Refusal, Secret, Ticket};
use crate::link::{Doorbell, Limits};

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
    /// It took too long.
    #[error("attaching a link to {peer} took longer than {after:?}")]
    Timeout {
        /// Who.
        peer: String,
        /// The limit.
        after: Duration,
    },
}

/// Connects to an FFN rank's listen address and attaches to the link that `ticket` is for.
///
/// # Errors
/// [`AttachError`]; the ticket is used up unless it is a failure to connect.
pub fn dial(
    address: SocketAddr,
    ticket: &Ticket,
    limits: Limits,
    bell: Doorbell,
    timeout: Duration,
) -> Result<TcpLink, AttachError> {
    let peer = limits.peer.clone();
    let attempt = || {
        let deadline = Instant::now() + timeout;
        let mut stream = TcpStream::connect_timeout(&address, timeout)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(timeout))?;
        stream.write_all(&preamble(ticket))?;
        let mut answer = [0; 8];
        read_by(&mut stream, &mut answer, deadline)?;
        Ok((stream, answer))
    };
    let (stream, answer) = attempt().map_err(|error| failed(&peer, timeout, error))?;
    let [m0, m1, m2, m3, code @ ..] = answer;
    match u32::from_le_bytes(code) {
        _ if [m0, m1, m2, m3] != ANSWER_MAGIC => {
            Err(AttachError::Protocol { peer, what: format!("answered {answer:02x?}") })
        }
        0 => TcpLink::new(stream, limits, bell).map_err(|error| failed(&peer, timeout, error)),
        code => Err(AttachError::Refused { peer, refusal: Refusal::from_wire(code) }),
    }
}

/// Answers a dialer of whom nothing was read yet. See [`answer`].
///
/// # Errors
/// As [`answer`].
pub fn accept<T>(
    mut stream: TcpStream,
    timeout: Duration,
    attach: impl FnOnce(&Ticket) -> Result<(Limits, Doorbell, T), Refusal>,
) -> Result<(TcpLink, T), AttachError> {
    let peer = name_of(&stream);
    let mut magic = [0; MAGIC.len()];
    stream
        .set_nonblocking(false)
        .and_then(|()| read_by(&mut stream, &mut magic, Instant::now() + timeout))
        .map_err(|error| failed(&peer, timeout, error))?;
    if magic != MAGIC {
        return Err(AttachError::Protocol { peer, what: format!("began with {magic:02x?}") });
    }
    answer(stream, timeout, attach)
}

/// Answers a dialer whose [`MAGIC`] was read already. Blocks, at most for `timeout`. `attach` looks the ticket up in the
/// grants and says what was agreed, whose bell to ring, and what the caller wants to know the link by.
///
/// # Errors
/// [`AttachError`]; the connection is closed then.
pub fn answer<T>(
    mut stream: TcpStream,
    timeout: Duration,
    attach: impl FnOnce(&Ticket) -> Result<(Limits, Doorbell, T), Refusal>,
) -> Result<(TcpLink, T), AttachError> {
    let peer = name_of(&stream);
    let fail = |error| failed(&peer, timeout, error);
    let mut rest = [0; PREAMBLE_BYTES - MAGIC.len()];
    stream.set_nonblocking(false).map_err(fail)?;
    stream.set_write_timeout(Some(timeout)).map_err(fail)?;
    read_by(&mut stream, &mut rest, Instant::now() + timeout).map_err(fail)?;
    let ticket = parse(&rest).ok_or_else(|| AttachError::Protocol {
        peer: peer.clone(),
        what: "reserved bytes of the preamble are not zero".into(),
    })?;
    match attach(&ticket) {
        Ok((limits, bell, session)) => {
            stream.write_all(&answer_bytes(0)).map_err(fail)?;
            Ok((TcpLink::new(stream, limits, bell).map_err(fail)?, session))
        }
        Err(refusal) => {
            stream.write_all(&answer_bytes(refusal as u32)).map_err(fail)?;
            Err(AttachError::Refused { peer, refusal })
        }
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

fn answer_bytes(code: u32) -> [u8; 8] {
    let mut out = [0; 8];
    out[..4].copy_from_slice(&ANSWER_MAGIC);
    out[4..].copy_from_slice(&code.to_le_bytes());
    out
}

/// Fills `buf` before `deadline`, however slowly the peer writes.
fn read_by(stream: &mut TcpStream, buf: &mut [u8], deadline: Instant) -> io::Result<()> {
    let mut filled = 0;
    while filled < buf.len() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut buf[filled..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn name_of(stream: &TcpStream) -> String {
    stream.peer_addr().map_or_else(|_| "a peer that is gone".into(), |address| address.to_string())
}

fn failed(peer: &str, after: Duration, error: io::Error) -> AttachError {
    let peer = peer.to_owned();
    match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => AttachError::Timeout { peer, after },
        _ => AttachError::Transport { peer, what: error.to_string() },
    }
}
