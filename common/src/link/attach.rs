//! How a connection to the one port becomes a link: 40 bytes one way, 8 bytes back, both within a deadline. Of a `tcp`
//! link frames follow; a `shm` link goes on with its own part of the handshake and keeps the connection as a sign of life.
//!
//! ```text
//! dialer (attention)   0  "AFDLINK1"  8 B     8  link_id  u64     16  secret  16 B     32  reserved, zero  8 B
//! listener (FFN)       0  "AFDL"      4 B     4  code     u32: 0, or the number of a Refusal
//! ```
//! Little-endian. The first eight bytes let one port serve links beside HTTP.
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::grants::{LinkId, Refusal, Secret, Ticket};
use super::shm::ShmLink;
pub use super::socket::AttachError;
use super::socket::{Socket, answer_bytes, failed};
use super::stream::LinkStream;
use super::tcp::TcpLink;
use super::{Doorbell, HopLink, Limits, LinkKind};
use crate::net::tls::PeerTls;

/// First bytes of a connection that wants to be a link.
pub const MAGIC: [u8; 8] = *b"AFDLINK1";
const PREAMBLE_BYTES: usize = 40;

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
    let mut socket = Socket::dialed(stream, peer, timeout, deadline);
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
