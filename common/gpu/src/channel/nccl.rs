//! A channel by NCCL: one communicator of two ranks for each direction, so that neither direction waits for the other.
//! Works over several hosts by NCCL's own choice of network.
//!
//! NCCL orders and delivers by itself, but knows no identities: sixteen bytes that a kernel stamps go with every frame,
//! and a kernel checks them behind the receive. A peer that is lost inside a captured graph is not survived in the
//! process: the process restarts.
use std::time::Duration;

use crate::channel::device::read_status;
use crate::channel::{Frame, Landed, StepChannel, StepError, StepLimits};
use crate::nccl::{Communicator, NcclError, UniqueId};
use crate::{Device, HostWords, Kernel, Launch, Module, Region, Source, Stream};

/// See the module's head.
pub struct NcclChannel {
    limits: StepLimits,
    // Rank 0 of a direction is its sender.
    outgoing: Communicator,
    incoming: Communicator,
    stamp: Kernel,
    check: Kernel,
    /// Of each slot: the header put, the header received, both sequence numbers, the number of rows.
    headers: Region,
    landing: Region,
    status: Region,
    host_status: HostWords,
}

/// Bytes of a slot in `headers`.
const HEADER_STRIDE: usize = 256;

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
        let (outgoing, incoming) = if first { (from_first, to_first) } else { (to_first, from_first) };
        let module = Module::load(device, Source::Channel, &[])?;
        let channel = Self {
            limits,
            outgoing,
            incoming,
            stamp: module.kernel("channel_stamp", 0)?,
            check: module.kernel("channel_check", 0)?,
            headers: Region::zeroed(device, limits.num_slots * HEADER_STRIDE)?,
            landing: Region::zeroed(device, limits.num_slots * limits.max_rows * limits.row_bytes)?,
            status: Region::zeroed(device, 32)?,
            host_status: HostWords::new(device, 8)?,
        };
        let probe = Region::zeroed(device, 64)?;
        // A first send ends when the peer receives: one direction after the other, the same at both ends.
        let send = || channel.outgoing.group(|| channel.outgoing.send(stream, &probe.part(0..32)?, 1));
        let receive = || channel.incoming.group(|| channel.incoming.receive(stream, &probe.part(32..64)?, 0));
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

    fn header(&self, slot: usize, at: usize, bytes: usize) -> Result<Region, StepError> {
        let base = slot * HEADER_STRIDE + at;
        Ok(self.headers.part(base..base + bytes)?)
    }
}

impl StepChannel for NcclChannel {
    fn limits(&self) -> &StepLimits {
        &self.limits
    }

    fn put(
        &mut self,
        stream: &Stream,
        frame: Frame,
        rows: &Region,
        num_rows: Option<&Region>,
    ) -> Result<(), StepError> {
        self.limits.check_frame(&frame, Some(rows))?;
        let (header, sequence) = (self.header(frame.slot, 0, 16)?, self.header(frame.slot, 64, 4)?);
        let launch = Launch::new(&self.stamp, (1, 1), 1).region(&header).region(&sequence);
        let launch = launch.u32(frame.identity.word()).maybe(num_rows).size(frame.rows)?;
        // SAFETY: channel_stamp's arguments, all inside the slot's header.
        unsafe { launch.enqueue(stream) }?;
        let bytes = frame.rows * self.limits.row_bytes;
        let rows = rows.part(0..bytes)?;
        self.outgoing.group(|| {
            self.outgoing.send(stream, &header, 1)?;
            if bytes > 0 { self.outgoing.send(stream, &rows, 1) } else { Ok(()) }
        })?;
        Ok(())
    }

    fn wait(&mut self, stream: &Stream, frame: Frame) -> Result<Landed, StepError> {
        self.limits.check_frame(&frame, None)?;
        let (header, sequence) = (self.header(frame.slot, 128, 16)?, self.header(frame.slot, 192, 4)?);
        let num_rows = self.header(frame.slot, 208, 4)?;
        let begin = frame.slot * self.limits.max_rows * self.limits.row_bytes;
        let rows = self.landing.part(begin..begin + frame.rows * self.limits.row_bytes)?;
        self.incoming.group(|| {
            self.incoming.receive(stream, &header, 0)?;
            if rows.is_empty() { Ok(()) } else { self.incoming.receive(stream, &rows, 0) }
        })?;
        let launch =
            Launch::new(&self.check, (1, 1), 1).region(&header).region(&sequence).region(&self.status);
        let launch = launch.u64(self.host_status.address()).size(frame.slot)?.u32(frame.identity.word());
        let launch = launch.region(&num_rows);
        // SAFETY: channel_check's arguments; the host's words live as long as the channel, which waits for its device
        // when it is dropped.
        unsafe { launch.enqueue(stream) }?;
        Ok(Landed { rows, num_rows })
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
        read_status(&self.host_status, &self.limits)?;
        self.outgoing.check()?;
        self.incoming.check()?;
        Ok(())
    }
}
