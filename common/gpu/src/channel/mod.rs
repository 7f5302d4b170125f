//! Channels between two GPUs that a stream drives, so that a captured graph can hold whole steps.
//!
//! Where a `HopLink` hands frames to the host, a [`StepChannel`] only enqueues: rows travel when the stream gets there,
//! and the stream waits where the host would. [`DeviceChannel`] moves rows by kernels, over NVLink to another process or
//! within a device; [`NcclChannel`] by NCCL, also to another host. Both pass the one suite in [`contract`].
use std::sync::Arc;
use std::time::Duration;

use crate::ops::Ahead;
use crate::{GpuError, Region, Stream};

#[doc(hidden)]
pub mod contract;
mod device;
mod nccl;
mod shape;
mod state;

pub use device::{DeviceChannel, Landing, Offer};
pub use nccl::NcclChannel;
pub use shape::HopShape;

/// One end of a channel: what it puts arrives at the other end, and the other way round.
///
/// # Contract
/// - **Slots.** A frame goes through a slot, fixed when it is enqueued, so that a graph has fixed addresses. Within a
///   slot frames arrive in the order of their puts. A slot may be put again only when the peer has answered in the same
///   slot and this end has waited for the answer; then neither end can overwrite what is still being read.
/// - **Completion.** What [`put`](Self::put) reads may be written again by later work on the same stream. Behind a
///   [`wait`](Self::wait) the rows that it named are there for later work on the same stream, until the next put into
///   the same slot by this end. The host learns of completion from a [`mark`](Stream::mark) on the stream.
/// - **Both ends agree beforehand** on slot, identity, padded rows and form of every frame: what a step plan says. The
///   number of real rows travels with the frame.
/// - **Identity.** Every frame carries its identity and a sequence number that counts the slot's frames in device
///   memory, so that replays of a graph count on. A frame of another epoch, layer, stage or replay is never taken for
///   the expected one: it is [`StepError::Foreign`] or [`StepError::Ahead`].
/// - **Nothing hangs.** A wait gives up after the channel's patience and the channel is then broken: puts and waits that
///   are enqueued or replayed later end at once without touching rows, and [`check`](Self::check) says why. What ran
///   between them computed with whatever was there, so results of a step count only after `check`. A broken channel is
///   replaced by a new one with a new epoch.
/// - **Loss.** Whether a channel survives its peer's death inside the process is the implementation's to say.
pub trait StepChannel: Send {
    /// What both ends agreed on.
    fn limits(&self) -> &StepLimits;

    /// Enqueues: `rows`, dense, to the peer. `num_rows` is one i32 on the device; all rows are real when absent.
    ///
    /// # Errors
    /// [`StepError::BadFrame`] when it does not fit the limits; nothing was enqueued then.
    fn put(
        &mut self,
        stream: &Stream,
        frame: Frame,
        rows: &Region,
        num_rows: Option<&Region>,
    ) -> Result<(), StepError>;

    /// Enqueues: later work on `stream` finds the peer's rows in what is returned, and runs after they are there.
    ///
    /// # Errors
    /// [`StepError::BadFrame`]; nothing was enqueued then.
    fn wait(&mut self, stream: &Stream, frame: Frame) -> Result<Landed, StepError> {
        self.wait_fetching(stream, frame, Ahead::default())
    }

    /// The same. Where this channel can, what is `ahead` is brought into the device's second-level cache while the rows are
    /// awaited, and later work waits for that too.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    fn wait_fetching(&mut self, stream: &Stream, frame: Frame, ahead: Ahead<'_>)
    -> Result<Landed, StepError>;

    /// Says which frames a slot is about to carry, out and in, each in its order, as both ends know beforehand; until
    /// [`settle`](Self::settle) it carries no others. What can be sent and checked once for all of them then is. `num_rows`, one
    /// i32 on the device, counts the real rows of all that go out; all rows are real when absent. Not needed: frames that
    /// were not announced say by themselves what they are.
    ///
    /// # Errors
    /// [`StepError::BadFrame`], [`StepError::Gpu`], [`StepError::Lost`].
    fn begin(
        &mut self,
        _stream: &Stream,
        _out: &[Frame],
        _into: &[Frame],
        _num_rows: Option<&Region>,
    ) -> Result<(), StepError> {
        Ok(())
    }

    /// Where kernels can write a frame's rows by themselves, at the peer or for it, instead of a put that copies them; then
    /// [`put_written`](Self::put_written) follows on the same stream. `None` when this channel cannot, or not this frame.
    fn direct(&self, frame: &Frame) -> Option<Region>;

    /// Enqueues: the rows behind [`direct`](Self::direct) are written.
    ///
    /// # Errors
    /// [`StepError::BadFrame`], also when there is no `direct`.
    fn put_written(
        &mut self,
        stream: &Stream,
        frame: Frame,
        num_rows: Option<&Region>,
    ) -> Result<(), StepError>;

    /// Enqueues what [`check`](Self::check) needs to know of waits that no put followed in their slots, and ends what was
    /// [begun](Self::begin). At the end of whatever is enqueued or captured as one: a step.
    ///
    /// # Errors
    /// [`StepError::Gpu`].
    fn settle(&mut self, _stream: &Stream) -> Result<(), StepError> {
        Ok(())
    }

    /// Whether graphs and other work of this channel must not be on the device, or on their way to it, at the same time.
    fn keeps_graphs_apart(&self) -> bool {
        false
    }

    /// Whether every wait so far that has run and was settled got what it waited for. Cheap: it reads host memory.
    ///
    /// # Errors
    /// The first thing that went wrong, for ever.
    fn check(&self) -> Result<(), StepError>;

    /// Breaks the channel from this end: what waits on the device ends soon instead of being patient. For a peer that is
    /// known to be gone, before the channel is dropped. Where that is not possible, dropping it has to do.
    fn abort(&self) {}

    /// The same from any other thread, while the one that drives the stream may itself wait for it. `None` where
    /// [`abort`](Self::abort) does nothing.
    fn give_up(&self) -> Option<GiveUp> {
        None
    }
}

/// Breaks a channel from any thread; does nothing once the channel is gone.
#[derive(Clone)]
pub struct GiveUp(Arc<dyn Fn() + Send + Sync>);

impl GiveUp {
    /// What breaks it.
    pub fn new(how: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(how))
    }

    /// Breaks it. Does not wait.
    pub fn call(&self) {
        (self.0)();
    }
}

/// Sizes of a channel, equal at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Frames that can be on their way at once, each in a slot of its own: the stages.
    pub num_slots: usize,
    /// Most rows of a frame.
    pub max_rows: usize,
    /// Size of a row, a multiple of 16.
    pub row_bytes: usize,
    /// How long a wait waits.
    pub patience: Duration,
}

/// What one put or wait is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Through which slot.
    pub slot: usize,
    /// Which hop.
    pub identity: Identity,
    /// Padded rows.
    pub rows: usize,
    /// How it travels.
    pub form: Form,
}

/// Most bytes of a frame that travels as [`Form::Packets`]; channels have no room for more.
pub const MAX_PACKETS_BYTES: usize = 4 << 20;

/// How rows travel where there is a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// Every eight bytes carry their own flag: the least latency, twice the bytes, unpacked by the wait. Up to
    /// [`MAX_PACKETS_BYTES`].
    Packets,
    /// Dense rows, then a flag.
    Rows,
}

impl Form {
    /// The faster one for a frame that is copied, by measurement between two H200.
    pub fn for_bytes(bytes: usize) -> Self {
        if bytes <= 64 << 10 { Self::Packets } else { Self::Rows }
    }
}

/// Which hop a frame belongs to. Constant in a captured graph; the sequence number tells replays apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// Lifetime of the channel.
    pub epoch: u64,
    /// Decoder layer, below 4096.
    pub layer: u16,
    /// Stage, below 8.
    pub stage: u8,
    /// Whether it goes back from the FFN.
    pub combine: bool,
}

impl Identity {
    /// As it travels: of the epoch the low half-word, which neighbouring epochs differ in.
    pub fn word(self) -> u32 {
        let Self { epoch, layer, stage, combine } = self;
        (epoch as u32) << 16 | u32::from(layer & 0xfff) << 4 | u32::from(stage & 7) << 1 | u32::from(combine)
    }
}

/// Rows that a wait waits for.
#[derive(Clone, Debug)]
pub struct Landed {
    /// The frame's padded rows, dense.
    pub rows: Region,
    /// How many are real: one i32.
    pub num_rows: Region,
}

/// Why a channel cannot do what was asked, or cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    /// A mistake of the caller; the channel lives on.
    #[error("{0}")]
    BadFrame(String),
    /// The peer put nothing for as long as the channel is patient.
    #[error("slot {slot}: nothing came within {patience:?} (saw {seen:#x}, expected {expected:#x})")]
    Late {
        /// Which slot.
        slot: u32,
        /// As agreed.
        patience: Duration,
        /// Identity and sequence number that were there.
        seen: u64,
        /// Identity and sequence number that should have come.
        expected: u64,
    },
    /// The peer put another hop's frame.
    #[error("slot {slot}: a frame of another hop (saw {seen:#x}, expected {expected:#x})")]
    Foreign {
        /// Which slot.
        slot: u32,
        /// Identity and sequence number that came.
        seen: u64,
        /// Identity and sequence number that should have come.
        expected: u64,
    },
    /// The peer is further than this end.
    #[error("slot {slot}: frames were missed (saw {seen:#x}, expected {expected:#x})")]
    Ahead {
        /// Which slot.
        slot: u32,
        /// Identity and sequence number that came.
        seen: u64,
        /// Identity and sequence number that should have come.
        expected: u64,
    },
    /// The memory is not the peer's: it is on another host, or another process took its place. Another kind of channel may
    /// work.
    #[error("no memory is shared with the peer: {0}")]
    NotShared(String),
    /// This end gave the channel up.
    #[error("this end gave the channel up")]
    Aborted,
    /// The transport broke.
    #[error("channel lost: {0}")]
    Lost(String),
    /// The device refused.
    #[error("{0}")]
    Gpu(String),
}

impl From<GpuError> for StepError {
    fn from(error: GpuError) -> Self {
        Self::Gpu(error.to_string())
    }
}

impl StepLimits {
    fn check(&self) -> Result<(), StepError> {
        let bytes = self.num_slots.checked_mul(self.max_rows).and_then(|n| n.checked_mul(self.row_bytes));
        let fits = bytes.is_some_and(|b| (1..=1 << 30).contains(&b)) && self.row_bytes.is_multiple_of(16);
        if fits { Ok(()) } else { Err(StepError::BadFrame(format!("a channel cannot be {self:?}"))) }
    }

    fn check_frame(&self, frame: &Frame, rows: Option<&Region>) -> Result<(), StepError> {
        let bad = |what: String| Err(StepError::BadFrame(what));
        if frame.slot >= self.num_slots {
            return bad(format!("slot {} of {}", frame.slot, self.num_slots));
        }
        if frame.rows > self.max_rows {
            return bad(format!("{} rows of at most {}", frame.rows, self.max_rows));
        }
        if frame.form == Form::Packets && frame.rows * self.row_bytes > MAX_PACKETS_BYTES {
            return bad(format!("{} rows of {} bytes as packets", frame.rows, self.row_bytes));
        }
        if frame.identity.layer > 0xfff || frame.identity.stage > 7 {
            return bad(format!("{:?} does not fit its word", frame.identity));
        }
        match rows {
            Some(rows) if rows.len() < frame.rows * self.row_bytes => {
                bad(format!("{} rows of {} bytes in {} bytes", frame.rows, self.row_bytes, rows.len()))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_that_differ_have_different_words() {
        let base = Identity { epoch: 7, layer: 3, stage: 1, combine: false };
        let others = [
            Identity { epoch: 8, ..base },
            Identity { layer: 4, ..base },
            Identity { stage: 2, ..base },
            Identity { combine: true, ..base },
        ];
        assert!(others.iter().all(|other| other.word() != base.word()));
    }

    #[test]
    fn frames_are_checked_against_the_limits() {
        let limits =
            StepLimits { num_slots: 2, max_rows: 8, row_bytes: 32, patience: Duration::from_secs(1) };
        let identity = Identity { epoch: 1, layer: 0, stage: 0, combine: false };
        let frame = Frame { slot: 1, identity, rows: 8, form: Form::Rows };
        assert!(limits.check().is_ok() && limits.check_frame(&frame, None).is_ok());
        assert!(limits.check_frame(&Frame { slot: 2, ..frame }, None).is_err());
        assert!(limits.check_frame(&Frame { rows: 9, ..frame }, None).is_err());
        let large = StepLimits { max_rows: MAX_PACKETS_BYTES, ..limits };
        let frame_of = |form| Frame { rows: MAX_PACKETS_BYTES / 32 + 1, form, ..frame };
        assert!(large.check_frame(&frame_of(Form::Packets), None).is_err());
        assert!(large.check_frame(&frame_of(Form::Rows), None).is_ok());
        assert!(StepLimits { row_bytes: 24, ..limits }.check().is_err());
        assert!(StepLimits { max_rows: usize::MAX, ..limits }.check().is_err());
    }
}
