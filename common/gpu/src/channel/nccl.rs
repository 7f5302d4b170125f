//! A channel by NCCL: one communicator of two ranks for each direction, so that neither direction waits for the other.
//! Works over several hosts by NCCL's own choice of network.
//!
//! NCCL orders and delivers by itself, but knows no identities: sixteen bytes go before the rows of every frame. What a hop
//! costs beyond NCCL's own calls is counted in kernels, so there is one for each frame: it puts header and rows together,
//! for one message, and looks at the header that was received before. A peer that is lost inside a captured graph is not
//! survived in the process: the process restarts.
use std::time::Duration;

use crate::channel::state::State;
use crate::channel::{Frame, Landed, StepChannel, StepError, StepLimits};
use crate::nccl::{Communicator, NcclError, UniqueId};
use crate::{Device, Kernel, Launch, Module, Region, Source, Stream};

/// See the module's head.
pub struct NcclChannel {
    state: State,
    /// From the end that made the ids, and to it; rank 0 is the sender. Given up in this order at both ends: NCCL ends a
    /// communicator well only when both of its ranks do.
    communicators: [Communicator; 2],
    /// Which of them this end sends by.
    outgoing: usize,
    stage: Kernel,
    check: Kernel,
    /// Slots of frames that are put together here.
    staging: Region,
    /// Slots of frames that arrive.
    landing: Region,
    /// Of each slot the frame that was waited for and not checked yet, by its identity.
    unchecked: Vec<Option<u32>>,
}

/// Before the rows of a slot: so much that these are aligned as memory itself is.
const ROWS_AT: usize = 256;
/// Right before the rows.
const HEADER_BYTES: usize = 16;
/// Frames beyond that travel as they are, behind their header: there a copy costs more than a second message.
const MAX_STAGED_BYTES: usize = 2 << 20;
/// Of the kernel that puts frames together: most threads of a block, units of 16 bytes for each, most blocks.
const THREADS: usize = 256;
const UNITS_EACH: usize = 2;
const MAX_BLOCKS: usize = 128;

impl From<NcclError> for StepError {
    fn from(error: NcclError) -> Self {
        Self::Lost(error.to_string())
    }
}

impl NcclChannel {
    /// Joins both directions; `first` says that this end made the ids, and `ids` are (from the first end, to it).
    /// Both ends call this within `deadline` of each other. Ends with one exchange, so that the connection is there
    /// before anything is captured.
    ///
    /// # Errors
    /// [`StepError::Lost`] with NCCL's words, [`StepError::Gpu`].
    pub fn join(
        device: &Device,
        stream: &Stream,
        limits: StepLimits,
        first: bool,
        ids: [UniqueId; 2],
        deadline: Duration,
    ) -> Result<Self, StepError> {
        limits.check()?;
        let rank = usize::from(!first);
        let from_first = Communicator::join(device, ids[0], rank, 2, deadline)?;
        let to_first = Communicator::join(device, ids[1], 1 - rank, 2, deadline)?;
        let module = Module::load(device, Source::Channel, &[])?;
        let slots = |row_bytes| Region::zeroed(device, limits.num_slots * (ROWS_AT + row_bytes));
        let channel = Self {
            state: State::new(device, limits)?,
            communicators: [from_first, to_first],
            outgoing: rank,
            stage: module.kernel("channel_stage", 0)?,
            check: module.kernel("channel_check", 0)?,
            staging: slots(staged_bytes(&limits))?,
            landing: slots(landing_bytes(&limits))?,
            unchecked: vec![None; limits.num_slots],
        };
        let probe = Region::zeroed(device, 64)?;
        // A first send ends when the peer receives: one direction after the other, the same at both ends.
        let (outgoing, incoming) = (channel.outgoing(), channel.incoming());
        let send = || outgoing.group(|| outgoing.send(stream, &probe.part(0..32)?, 1));
        let receive = || incoming.group(|| incoming.receive(stream, &probe.part(32..64)?, 0));
        if first {
            send()?;
            receive()?;
        } else {
            receive()?;
            send()?;
        }
        stream.mark(false)?.wait(deadline)?;
        Ok(channel)
    }

    fn outgoing(&self) -> &Communicator {
        &self.communicators[self.outgoing]
    }

    fn incoming(&self) -> &Communicator {
        &self.communicators[1 - self.outgoing]
    }

    /// Header and `bytes` of rows of a slot.
    fn frame(memory: &Region, slot: usize, slot_bytes: usize, bytes: usize) -> Result<Region, StepError> {
        let rows_at = slot * (ROWS_AT + slot_bytes) + ROWS_AT;
        Ok(memory.part(rows_at - HEADER_BYTES..rows_at + bytes)?)
    }

    fn landed(&self, slot: usize, bytes: usize) -> Result<Region, StepError> {
        Self::frame(&self.landing, slot, landing_bytes(&self.state.limits), bytes)
    }

    /// Enqueues the check of what was received through a slot, if that was not done yet.
    fn check_slot(&mut self, stream: &Stream, slot: usize) -> Result<(), StepError> {
        let Some(identity) = self.unchecked[slot].take() else { return Ok(()) };
        let (header, sequence) = (self.landed(slot, 0)?, self.state.received(slot)?);
        let launch = Launch::new(&self.check, (1, 1), 1).region(&header).region(&sequence);
        let launch = self.state.report(launch).size(slot)?.u32(identity);
        // SAFETY: channel_check's arguments.
        Ok(unsafe { launch.enqueue(stream) }?)
    }
}

/// Rows that a slot of the staging memory has room for, bytes.
fn staged_bytes(limits: &StepLimits) -> usize {
    (limits.max_rows * limits.row_bytes).min(MAX_STAGED_BYTES).next_multiple_of(ROWS_AT)
}

/// The same of the landing memory: any frame.
fn landing_bytes(limits: &StepLimits) -> usize {
    (limits.max_rows * limits.row_bytes).next_multiple_of(ROWS_AT)
}

impl StepChannel for NcclChannel {
    fn limits(&self) -> &StepLimits {
        &self.state.limits
    }

    fn put(
        &mut self,
        stream: &Stream,
        frame: Frame,
        rows: &Region,
        num_rows: Option<&Region>,
    ) -> Result<(), StepError> {
        self.state.limits.check_frame(&frame, Some(rows))?;
        let (slot, bytes) = (frame.slot, frame.rows * self.state.limits.row_bytes);
        let is_staged = bytes <= MAX_STAGED_BYTES;
        let units = if is_staged { bytes / 16 } else { 0 };
        let message = Self::frame(&self.staging, slot, staged_bytes(&self.state.limits), units * 16)?;
        let (sequence, seen_sequence) = (self.state.sent(slot)?, self.state.received(slot)?);
        let seen = self.unchecked[slot].take();
        let landed = self.landed(slot, 0)?;
        let threads = units.next_multiple_of(32).clamp(32, THREADS);
        let blocks = units.div_ceil(threads * UNITS_EACH).clamp(1, MAX_BLOCKS) as u32;
        let launch = Launch::new(&self.stage, (blocks, 1), threads as u32).overlap(true);
        let launch = launch.region(rows).region(&message).region(&sequence).u32(frame.identity.word());
        let launch = launch.maybe(num_rows).size(frame.rows)?.size(units)?;
        let launch = self.state.report(launch.maybe(seen.map(|_| &landed)).region(&seen_sequence));
        let launch = launch.size(slot)?.u32(seen.unwrap_or_default());
        // SAFETY: channel_stage's arguments: the message has room for the units, which the rows have.
        unsafe { launch.enqueue(stream) }?;
        let rows = rows.part(0..bytes)?;
        let outgoing = self.outgoing();
        outgoing.group(|| {
            outgoing.send(stream, &message, 1)?;
            if is_staged { Ok(()) } else { outgoing.send(stream, &rows, 1) }
        })?;
        Ok(())
    }

    fn wait(&mut self, stream: &Stream, frame: Frame) -> Result<Landed, StepError> {
        self.state.limits.check_frame(&frame, None)?;
        self.check_slot(stream, frame.slot)?;
        let bytes = frame.rows * self.state.limits.row_bytes;
        let message = self.landed(frame.slot, bytes)?;
        let (header, rows) =
            (message.part(0..HEADER_BYTES)?, message.part(HEADER_BYTES..HEADER_BYTES + bytes)?);
        let incoming = self.incoming();
        incoming.group(|| {
            if bytes <= MAX_STAGED_BYTES {
                return incoming.receive(stream, &message, 0);
            }
            incoming.receive(stream, &header, 0)?;
            incoming.receive(stream, &rows, 0)
        })?;
        self.unchecked[frame.slot] = Some(frame.identity.word());
        Ok(Landed { rows, num_rows: header.part(0..4)? })
    }

    fn settle(&mut self, stream: &Stream) -> Result<(), StepError> {
        (0..self.state.limits.num_slots).try_for_each(|slot| self.check_slot(stream, slot))
    }

    fn direct(&self, _slot: usize) -> Option<Region> {
        None
    }

    fn put_written(
        &mut self,
        _stream: &Stream,
        _frame: Frame,
        _rows: Option<&Region>,
    ) -> Result<(), StepError> {
        Err(StepError::BadFrame("kernels cannot write to an NCCL peer".to_owned()))
    }

    fn check(&self) -> Result<(), StepError> {
        self.state.check()?;
        Ok(self.communicators.iter().try_for_each(Communicator::check)?)
    }
}
