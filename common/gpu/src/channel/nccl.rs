//! A channel by NCCL: one communicator of two ranks for each direction, so that neither direction waits for the other.
//! Works over several hosts by NCCL's own choice of network.
//!
//! NCCL orders and delivers by itself, but knows no identities: a header of sixteen bytes says what comes. What a hop costs
//! beyond NCCL's own calls is counted in kernels. A step that was [begun](StepChannel::begin) has one header in each direction
//! for all frames of a slot, sent before the first and checked behind the last; in between go bare rows, from where
//! their kernels write them. A frame by itself has a header of its own: one kernel puts it and the rows together, for one message,
//! and looks at the header that was received before. A peer that is lost inside a captured graph is not survived in the
//! process: the process restarts.
use std::time::Duration;

use crate::channel::state::State;
use crate::channel::{Frame, Landed, StepChannel, StepError, StepLimits};
use crate::nccl::{Communicator, NcclError, UniqueId};
use crate::ops::Ahead;
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
    /// Of each slot what was begun.
    begun: Vec<Option<Begun>>,
}

/// A step under way in a slot.
#[derive(Clone, Copy, Debug)]
struct Begun {
    /// What the header that comes must say.
    into: u32,
    /// Whether this end's header and the peer's are still to be sent and received.
    sends: bool,
    receives: bool,
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
            begun: vec![None; limits.num_slots],
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

    /// Enqueues: header, and behind it `units` times 16 bytes of `rows`, in the slot's staging memory; and the check of what was
    /// received before. Gives the message.
    fn stage(
        &mut self,
        stream: &Stream,
        (slot, identity, max_rows): (usize, u32, usize),
        rows: &Region,
        units: usize,
        num_rows: Option<&Region>,
    ) -> Result<Region, StepError> {
        let message = self.staged(slot, units * 16)?;
        let (sequence, seen_sequence) = (self.state.sent(slot)?, self.state.received(slot)?);
        let seen = self.unchecked[slot].take();
        let landed = self.landed(slot, 0)?;
        let threads = units.next_multiple_of(32).clamp(32, THREADS);
        let blocks = units.div_ceil(threads * UNITS_EACH).clamp(1, MAX_BLOCKS) as u32;
        let launch = Launch::new(&self.stage, (blocks, 1), threads as u32).overlap(true);
        let launch = launch.region(rows).region(&message).region(&sequence).u32(identity);
        let launch = launch.maybe(num_rows).size(max_rows)?.size(units)?;
        let launch = self.state.report(launch.maybe(seen.map(|_| &landed)).region(&seen_sequence));
        let launch = launch.size(slot)?.u32(seen.unwrap_or_default());
        // SAFETY: channel_stage's arguments: the message has room for the units, which the rows have.
        unsafe { launch.enqueue(stream) }?;
        Ok(message)
    }

    fn staged(&self, slot: usize, bytes: usize) -> Result<Region, StepError> {
        Self::frame(&self.staging, slot, staged_bytes(&self.state.limits), bytes)
    }

    /// Enqueues: rows of a step that was begun, and before the first of them its header.
    fn send_rows(&mut self, stream: &Stream, slot: usize, rows: &Region) -> Result<(), StepError> {
        let is_first = self.begun[slot].as_mut().is_some_and(|begun| std::mem::take(&mut begun.sends));
        let header = self.staged(slot, 0)?;
        let outgoing = self.outgoing();
        outgoing.group(|| {
            if is_first {
                outgoing.send(stream, &header, 1)?;
            }
            if rows.is_empty() { Ok(()) } else { outgoing.send(stream, rows, 1) }
        })?;
        Ok(())
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

/// What a header says of several frames: which they are, in which order, how large.
fn word_of(frames: &[Frame]) -> u32 {
    // FNV-1a, by words.
    let mix = |hash: u32, word: u32| (hash ^ word).wrapping_mul(16_777_619);
    frames.iter().fold(2_166_136_261, |hash, frame| mix(mix(hash, frame.identity.word()), frame.rows as u32))
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
        if self.begun[slot].is_some() {
            return self.send_rows(stream, slot, &rows.part(0..bytes)?);
        }
        let is_staged = bytes <= MAX_STAGED_BYTES;
        let units = if is_staged { bytes / 16 } else { 0 };
        let what = (slot, frame.identity.word(), frame.rows);
        let message = self.stage(stream, what, rows, units, num_rows)?;
        let rows = rows.part(0..bytes)?;
        let outgoing = self.outgoing();
        outgoing.group(|| {
            outgoing.send(stream, &message, 1)?;
            if is_staged { Ok(()) } else { outgoing.send(stream, &rows, 1) }
        })?;
        Ok(())
    }

    fn wait_fetching(
        &mut self,
        stream: &Stream,
        frame: Frame,
        _ahead: Ahead<'_>,
    ) -> Result<Landed, StepError> {
        self.state.limits.check_frame(&frame, None)?;
        self.check_slot(stream, frame.slot)?;
        let bytes = frame.rows * self.state.limits.row_bytes;
        let message = self.landed(frame.slot, bytes)?;
        let (header, rows) =
            (message.part(0..HEADER_BYTES)?, message.part(HEADER_BYTES..HEADER_BYTES + bytes)?);
        if let Some(begun) = self.begun[frame.slot].as_mut() {
            let is_first = std::mem::take(&mut begun.receives);
            let incoming = self.incoming();
            incoming.group(|| {
                if is_first {
                    incoming.receive(stream, &header, 0)?;
                }
                if rows.is_empty() { Ok(()) } else { incoming.receive(stream, &rows, 0) }
            })?;
            return Ok(Landed { rows, num_rows: header.part(0..4)? });
        }
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

    fn begin(
        &mut self,
        stream: &Stream,
        out: &[Frame],
        into: &[Frame],
        num_rows: Option<&Region>,
    ) -> Result<(), StepError> {
        let all = || out.iter().chain(into);
        all().try_for_each(|frame| self.state.limits.check_frame(frame, None))?;
        let Some(first) = out.first() else { return Ok(()) };
        if all().any(|frame| frame.slot != first.slot) || into.is_empty() {
            return Err(StepError::BadFrame("a step's frames go out and in through one slot".to_owned()));
        }
        // Nothing is staged but the header: what it is given as rows does not matter.
        let (slot, rows) = (first.slot, self.staged(first.slot, 0)?);
        self.stage(stream, (slot, word_of(out), first.rows), &rows, 0, num_rows)?;
        self.begun[slot] = Some(Begun { into: word_of(into), sends: true, receives: true });
        Ok(())
    }

    fn settle(&mut self, stream: &Stream) -> Result<(), StepError> {
        for slot in 0..self.state.limits.num_slots {
            if let Some(begun) = self.begun[slot].take().filter(|begun| !begun.receives) {
                self.unchecked[slot] = Some(begun.into);
            }
            self.check_slot(stream, slot)?;
        }
        Ok(())
    }

    fn direct(&self, frame: &Frame) -> Option<Region> {
        let limits = &self.state.limits;
        limits.check_frame(frame, None).ok()?;
        let bytes = frame.rows * limits.row_bytes;
        let fits = self.begun[frame.slot].is_some() && bytes <= staged_bytes(limits);
        let message = fits.then(|| self.staged(frame.slot, bytes).ok()).flatten()?;
        message.part(HEADER_BYTES..HEADER_BYTES + bytes).ok()
    }

    fn put_written(
        &mut self,
        stream: &Stream,
        frame: Frame,
        _num_rows: Option<&Region>,
    ) -> Result<(), StepError> {
        let unwritten =
            || StepError::BadFrame("kernels write to an NCCL peer in a step that was begun".to_owned());
        let rows = self.direct(&frame).ok_or_else(unwritten)?;
        self.send_rows(stream, frame.slot, &rows)
    }

    fn keeps_graphs_apart(&self) -> bool {
        true
    }

    fn check(&self) -> Result<(), StepError> {
        self.state.check()?;
        Ok(self.communicators.iter().try_for_each(Communicator::check)?)
    }
}
