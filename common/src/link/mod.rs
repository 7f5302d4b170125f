//! Registered tensor channels between one attention rank and one FFN rank: the seam that the host drives.
//!
//! On a token's path a [`HopLink`] stands between attention's remote FFN and the FFN's hop queue. It moves frames and
//! nothing else: it does not schedule, retry, reconnect or look into rows. `loopback`, `tcp`, `inline`
//! and `shm` implement it; [`grants`] and [`attach`] say how two processes get one. Channels that a CUDA stream drives
//! (`cuda-ipc`, `nccl`) have a seam of their own: `StepChannel` of the crate `afd-gpu`.
use std::fmt;
use std::sync::Arc;

use crate::frame::{Checksum, FrameHeader, FrameLimits};
use crate::ids::Epoch;

pub mod attach;
#[doc(hidden)]
pub mod bare;
pub mod book;
#[doc(hidden)]
pub mod contract;
mod credits;
mod doorbell;
pub mod features;
pub mod grants;
mod in_frame;
mod inbox;
pub mod inline;
mod intake;
pub mod loopback;
pub mod pairs;
pub mod pool;
mod port;
pub mod shm;
mod socket;
mod stats;
mod stream;
pub mod tcp;
pub mod timing;

pub use doorbell::Doorbell;
pub use in_frame::{Body, InFrame};
pub use stats::{LinkCounts, LinkStats};
pub use stream::LinkStream;

/// One end of a link.
///
/// # Contract
/// Every implementation passes the one suite in `link::contract`.
/// - **Ordering.** Frames arrive in the order they were sent, whole, at most once. Receivers must nevertheless match by
///   key, never by order.
/// - **Never blocks.** [`send`](Self::send) returns at once. At most [`Limits::credits`] dispatches are unanswered per
///   direction, where a combine or error frame with the dispatch's key is its answer; rings are sized for that when the
///   link is opened, so a sender within its credits always has room, and two ends can never wait for each other. One
///   dispatch more is [`LinkError::NoCredit`]; a key that is already in flight, or an answer to what was not asked, is
///   [`LinkError::BadFrame`]: mistakes of the caller, the link lives on.
/// - **Buffer lifetime.** `send` has copied or written everything when it returns; the caller may reuse its memory. A
///   received [`InFrame`] owns its body until it is dropped; dropping gives the buffer back to the link's pool. The
///   body's address is aligned to nothing in particular.
/// - **Verified.** A received frame has the link's epoch, a known kind, a body of the size its header announces, at
///   most [`Limits::max_rows`] rows, and correct checksums. A frame of another epoch, an answer nobody waits for and a
///   dispatch that is already here are dropped and counted ([`LinkStats`]); any other fault breaks the link.
/// - **Wake-up.** The link wakes who waits at the [`Doorbell`] it was made with whenever `poll_recv` may have something new to say,
///   the end of the link included.
/// - **Loss.** Once broken, `poll_recv` first hands out what had arrived whole, then reports the same error for ever;
///   `send` reports it at once.
/// - **Cancellation.** [`close`](Self::close) is idempotent; the peer sees [`LinkError::Closed`] with the reason after
///   the frames sent before it. Dropping the link closes it; where it broke by what the peer had sent
///   ([`LinkError::Corrupt`]), that is the reason, as far as the transport can still tell it.
pub trait HopLink: Send {
    /// What was agreed when the link was opened.
    fn limits(&self) -> &Limits;

    /// Hands a frame to the link. `body` is the concatenation of these parts; their total must equal
    /// `header.body_bytes`. The header's epoch is set by the link.
    ///
    /// # Errors
    /// [`LinkError`]; nothing was sent then. Retrying on the same link helps only after `NoCredit`.
    fn send(&mut self, header: FrameHeader, body: &[&[u8]]) -> Result<(), LinkError>;

    /// The next frame that has arrived whole, or `None`.
    ///
    /// # Errors
    /// [`LinkError`] once the link is broken or closed and everything before that was handed out.
    fn poll_recv(&mut self) -> Result<Option<InFrame>, LinkError>;

    /// Ends the link in both directions and tells the peer why.
    fn close(&mut self, reason: &str);

    /// What went through it so far; outlives the link.
    fn stats(&self) -> Arc<LinkStats>;
}

/// Kinds of links.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkKind {
    /// Two ends in one process.
    Loopback,
    /// Frames on a TCP connection.
    Tcp,
    /// Frames as messages of a gRPC stream.
    Inline,
    /// A ring in POSIX shared memory.
    Shm,
    /// A pair of NCCL communicators, driven by a stream.
    Nccl,
    /// Device memory mapped into the peer's process, driven by a stream.
    CudaIpc,
}

impl LinkKind {
    /// Whether a CUDA stream drives it rather than the host.
    pub fn is_stream_driven(self) -> bool {
        matches!(self, Self::Nccl | Self::CudaIpc)
    }
}

impl fmt::Display for LinkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Loopback => "loopback",
            Self::Tcp => "tcp",
            Self::Inline => "inline",
            Self::Shm => "shm",
            Self::Nccl => "nccl",
            Self::CudaIpc => "cuda-ipc",
        })
    }
}

/// What both ends of a link agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Which implementation.
    pub kind: LinkKind,
    /// Who is on the other end, for messages: "F0 at 127.0.0.1:7001".
    pub peer: String,
    /// Lifetime of this link.
    pub epoch: Epoch,
    /// Frames that may be unanswered, per direction.
    pub credits: u32,
    /// Most rows of a frame.
    pub max_rows: u32,
    /// Most bytes of a frame's body.
    pub max_body_bytes: u32,
    /// How bodies are summed.
    pub checksum: Checksum,
}

impl Limits {
    /// Bytes of the largest body: `max_rows` rows of `row_bytes` (hidden states, and the widest side tensors of any
    /// layer). Both ends compute it from what they agreed on. `None` when a frame cannot be that large.
    pub fn body_bytes(max_rows: u32, row_bytes: usize) -> Option<u32> {
        u64::from(max_rows).checked_mul(row_bytes as u64)?.try_into().ok()
    }

    /// What a receiver checks headers against.
    pub fn frame_limits(&self) -> FrameLimits {
        let Self { max_rows, max_body_bytes, checksum, .. } = *self;
        FrameLimits { max_rows, max_body_bytes, checksum }
    }
}

/// Why a link cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// The caller sent more dispatches than its credits allow before any was answered.
    #[error("{peer}: {credits} dispatches are already in flight")]
    NoCredit {
        /// The other end.
        peer: String,
        /// What was agreed.
        credits: u32,
    },
    /// The frame is larger than what was agreed, or its parts do not add up to what its header says.
    #[error("{peer}: {what}")]
    BadFrame {
        /// The other end.
        peer: String,
        /// Expected and found.
        what: String,
    },
    /// A checksum or a header was wrong: nothing after it can be trusted.
    #[error("{peer}: corrupt frame: {what}")]
    Corrupt {
        /// The other end.
        peer: String,
        /// Expected and found.
        what: String,
    },
    /// The peer closed the link, or this end did.
    #[error("{peer}: link closed: {reason}")]
    Closed {
        /// The other end.
        peer: String,
        /// As given to [`HopLink::close`].
        reason: String,
    },
    /// The transport broke.
    #[error("{peer}: link lost: {what}")]
    Lost {
        /// The other end.
        peer: String,
        /// The transport's own words.
        what: String,
    },
}
