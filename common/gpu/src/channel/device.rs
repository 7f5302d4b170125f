//! Channels by kernels: the sender writes into memory that the receiver allocated, through a mapping of it (GPUs of one
//! host, over NVLink) or as it is (both ends on one device, for tests and the monolithic mode).
//!
//! What `kill -9` of one end does to the other is written in `deploy/bench/results/`.
use std::sync::Arc;

use cudarc::driver::sys;

use crate::channel::state::{BLOCKS, State};
use crate::channel::{Form, Frame, GiveUp, Landed, MAX_PACKETS_BYTES, StepChannel, StepError, StepLimits};
use crate::ops::Ahead;
use crate::{Device, GpuError, HostWords, Kernel, Launch, Module, Region, Source, Stream};

/// As in the kernels: the host has given the channel up.
const GIVEN_UP: u32 = 4;
const ROWS_AT: usize = 256;
/// In the first slot: what proves that a mapping is of the right memory.
const NONCE_AT: usize = 384;
const DATA_AT: usize = 512;
/// Exported allocations are at least this large, so that they share no page with anything else.
const LEAST_BYTES: usize = 2 << 20;
/// Blocks of a wait that fetch ahead: about one for each multiprocessor, so that all ask at once.
const FETCHING_BLOCKS: u32 = 128;

/// What a receiver tells its peer: how to open its memory, and the sizes to agree on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Opens the memory in another process of the same host.
    pub handle: [u8; 64],
    /// What whoever has opened it finds in it; not a secret.
    pub nonce: [u8; 16],
    /// Frames at once.
    pub num_slots: usize,
    /// Rows of a frame.
    pub max_rows: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
}

/// Memory that one end receives into, fresh for this channel and never used by another.
#[derive(Debug)]
pub struct Landing {
    device: Device,
    limits: StepLimits,
    memory: Region,
    nonce: [u8; 16],
}

impl Landing {
    /// `nonce` must differ from channel to channel: random, or a counter of the process.
    ///
    /// # Errors
    /// [`StepError::BadFrame`] for impossible limits, [`StepError::Gpu`].
    pub fn new(device: &Device, limits: StepLimits, nonce: [u8; 16]) -> Result<Self, StepError> {
        limits.check()?;
        let bytes = (limits.num_slots * slot_bytes(&limits)).max(LEAST_BYTES);
        let memory = Region::zeroed(device, bytes)?;
        memory.part(NONCE_AT..NONCE_AT + nonce.len())?.write(&nonce)?;
        Ok(Self { device: device.clone(), limits, memory, nonce })
    }

    /// For the peer process.
    ///
    /// # Errors
    /// [`StepError::Gpu`] where memory cannot be shared between processes.
    pub fn offer(&self) -> Result<Offer, StepError> {
        let StepLimits { num_slots, max_rows, row_bytes, .. } = self.limits;
        let (handle, nonce) = (self.memory.export()?, self.nonce);
        Ok(Offer { handle, nonce, num_slots, max_rows, row_bytes })
    }
}

/// See the module's head.
pub struct DeviceChannel {
    state: State,
    kernels: Kernels,
    landing: Region,
    peer: Region,
    breaker: Arc<Breaker>,
    open_early: bool,
}

struct Kernels {
    put: Kernel,
    flag: Kernel,
    wait: Kernel,
    put_packets: Kernel,
    wait_packets: Kernel,
}

/// Gives the channel up, on a stream of its own: the compute stream may be waiting. By a write and not by a kernel, whose block
/// would have to wait for those of the kernels that stand ready behind the wait, until the wait itself gives up.
struct Breaker {
    status: Region,
    words: Arc<HostWords>,
    aside: Stream,
}

impl Breaker {
    fn run(&self) {
        // What went wrong first stays, here; kernels only ask whether anything did.
        self.words.set_first(0, GIVEN_UP);
        let bind = self.aside.device().context().bind_to_thread();
        // SAFETY: the status begins with a word that kernels read as volatile, aligned, and lives as long as this; the driver lets
        // any thread enqueue. A device that refuses this has no wait left that could be ended.
        let _ = bind.map(|()| unsafe {
            sys::cuStreamWriteValue32_v2(self.aside.inner().cu_stream(), self.status.address(), GIVEN_UP, 0)
        });
    }
}

impl Drop for Breaker {
    fn drop(&mut self) {
        // What it was given is freed behind this.
        let _ = self.aside.synchronize();
    }
}

impl DeviceChannel {
    /// Opens the peer's memory. Both ends have exchanged offers then.
    ///
    /// # Errors
    /// [`StepError::BadFrame`] when the two ends' sizes differ, [`StepError::NotShared`] when the memory cannot be opened
    /// here or is not what was offered, [`StepError::Gpu`].
    pub fn connect(landing: Landing, offer: &Offer) -> Result<Self, StepError> {
        let own = landing.limits;
        if (offer.num_slots, offer.max_rows, offer.row_bytes) != (own.num_slots, own.max_rows, own.row_bytes)
        {
            return Err(StepError::BadFrame(format!("own sizes are {own:?}, the peer's are {offer:?}")));
        }
        let bytes = landing.memory.len();
        let peer = Region::open_handle(&landing.device, &offer.handle, bytes)
            .map_err(|error| StepError::NotShared(error.to_string()))?;
        let found: Vec<u8> = peer.part(NONCE_AT..NONCE_AT + offer.nonce.len())?.read()?;
        if found != offer.nonce {
            return Err(StepError::NotShared("the memory behind the handle is another".to_owned()));
        }
        Self::new(landing, peer)
    }

    /// Both ends, on one device.
    ///
    /// # Errors
    /// As [`Landing::new`].
    pub fn local_pair(device: &Device, limits: StepLimits) -> Result<(Self, Self), StepError> {
        let (a, b) = (Landing::new(device, limits, [1; 16])?, Landing::new(device, limits, [2; 16])?);
        let (memory_a, memory_b) = (a.memory.clone(), b.memory.clone());
        Ok((Self::new(a, memory_b)?, Self::new(b, memory_a)?))
    }

    fn new(landing: Landing, peer: Region) -> Result<Self, StepError> {
        let Landing { device, limits, memory, .. } = landing;
        let module = Module::load(&device, Source::Channel, &[])?;
        // Kernels for few rows take most of it, and are to take their places while these still run.
        let split_alike = |name| {
            let kernel = module.kernel(name, 0)?;
            kernel.prefer_shared_memory()?;
            Ok::<_, GpuError>(kernel)
        };
        let kernels = Kernels {
            put: split_alike("channel_put")?,
            flag: split_alike("channel_flag")?,
            wait: split_alike("channel_wait")?,
            put_packets: split_alike("channel_put_packets")?,
            wait_packets: split_alike("channel_wait_packets")?,
        };
        let state = State::new(&device, limits)?;
        let (status, words) = state.reported();
        let breaker = Arc::new(Breaker { status, words, aside: device.stream()? });
        Ok(Self { state, kernels, landing: memory, peer, breaker, open_early: false })
    }

    /// Lets kernels behind a wait that were launched to overlap take their places while it waits: weights are then read
    /// while rows are on their way. Only where nothing else must run on the device meanwhile than what comes behind on the
    /// same stream: what has taken a place does not leave it.
    pub fn set_open_early(&mut self, open_early: bool) {
        self.open_early = open_early;
    }

    fn slot(&self, memory: &Region, slot: usize) -> Result<Region, GpuError> {
        let bytes = slot_bytes(&self.state.limits);
        memory.part(slot * bytes..(slot + 1) * bytes)
    }
}

impl StepChannel for DeviceChannel {
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
        let (slot, sequences) = (self.slot(&self.peer, frame.slot)?, self.state.sent(frame.slot)?);
        let bytes = frame.rows * self.state.limits.row_bytes;
        let (kernel, threads) = match frame.form {
            Form::Rows => (&self.kernels.put, threads_for(bytes / 16)),
            Form::Packets => (&self.kernels.put_packets, threads_for(bytes / 8)),
        };
        let launch = Launch::new(kernel, (BLOCKS as u32, 1), threads).overlap(true).opens_late();
        let launch = launch.region(rows).region(&slot).region(&sequences).region(self.state.status());
        let launch = launch.u32(frame.identity.word()).maybe(num_rows).size(frame.rows)?;
        let launch = match frame.form {
            Form::Rows => launch.size(self.state.limits.row_bytes / 16)?,
            Form::Packets => launch.size(bytes / 8)?.size(packets_at(&self.state.limits))?,
        };
        // SAFETY: channel_put's or channel_put_packets' arguments; the frame fits the limits, and so do both slots.
        Ok(unsafe { launch.enqueue(stream) }?)
    }

    fn wait_fetching(
        &mut self,
        stream: &Stream,
        frame: Frame,
        ahead: Ahead<'_>,
    ) -> Result<Landed, StepError> {
        self.state.limits.check_frame(&frame, None)?;
        let (slot, sequences) = (self.slot(&self.landing, frame.slot)?, self.state.received(frame.slot)?);
        let bytes = frame.rows * self.state.limits.row_bytes;
        let (kernel, blocks, threads) = match frame.form {
            Form::Rows => (&self.kernels.wait, 1, 32),
            Form::Packets => (&self.kernels.wait_packets, BLOCKS as u32, threads_for(bytes / 8)),
        };
        // Behind a put it may start at once: the put let it only when everything before had ended.
        let blocks = blocks + if ahead.is_empty() { 0 } else { FETCHING_BLOCKS };
        let launch = Launch::new(kernel, (blocks, 1), threads).overlap(stream.opens_late());
        let launch = self.state.report(launch.region(&slot).region(&sequences));
        let launch = launch.size(frame.slot)?.u32(frame.identity.word());
        let launch = launch.u64(u64::try_from(self.state.limits.patience.as_nanos()).unwrap_or(u64::MAX));
        let launch = match frame.form {
            Form::Rows => launch,
            Form::Packets => launch.size(bytes / 8)?.size(packets_at(&self.state.limits))?,
        };
        let launch = ahead.arguments(launch.u32(u32::from(self.open_early)))?;
        // SAFETY: channel_wait's or channel_wait_packets' arguments; the frame fits the limits and so does the slot.
        unsafe { launch.enqueue(stream) }?;
        Ok(Landed { rows: slot.part(DATA_AT..DATA_AT + bytes)?, num_rows: slot.part(ROWS_AT..ROWS_AT + 4)? })
    }

    fn direct(&self, frame: &Frame) -> Option<Region> {
        let limits = &self.state.limits;
        limits.check_frame(frame, None).ok().filter(|()| frame.form == Form::Rows)?;
        let bytes = frame.rows * limits.row_bytes;
        self.slot(&self.peer, frame.slot).and_then(|slot| slot.part(DATA_AT..DATA_AT + bytes)).ok()
    }

    fn put_written(
        &mut self,
        stream: &Stream,
        frame: Frame,
        num_rows: Option<&Region>,
    ) -> Result<(), StepError> {
        self.state.limits.check_frame(&frame, None)?;
        if frame.form != Form::Rows {
            return Err(StepError::BadFrame("rows written by kernels cannot travel as packets".to_owned()));
        }
        let (slot, sequences) = (self.slot(&self.peer, frame.slot)?, self.state.sent(frame.slot)?);
        let launch = Launch::new(&self.kernels.flag, (1, 1), 32).overlap(true).opens_late();
        let launch = launch.region(&slot).region(&sequences).region(self.state.status());
        let launch = launch.u32(frame.identity.word()).maybe(num_rows).size(frame.rows)?;
        // SAFETY: channel_flag's arguments; the frame fits the limits and so does the slot.
        Ok(unsafe { launch.enqueue(stream) }?)
    }

    fn check(&self) -> Result<(), StepError> {
        self.state.check()
    }

    fn abort(&self) {
        self.breaker.run();
    }

    fn give_up(&self) -> Option<GiveUp> {
        let breaker = Arc::downgrade(&self.breaker);
        Some(GiveUp::new(move || breaker.upgrade().iter().for_each(|breaker| breaker.run())))
    }
}

/// Threads of each of the blocks that move `units`: few when there are few.
fn threads_for(units: usize) -> u32 {
    (units.div_ceil(BLOCKS).next_multiple_of(32) as u32).clamp(32, 512)
}

fn packets_at(limits: &StepLimits) -> usize {
    (DATA_AT + limits.max_rows * limits.row_bytes).next_multiple_of(128)
}

fn slot_bytes(limits: &StepLimits) -> usize {
    let packets_bytes = (limits.max_rows * limits.row_bytes).min(MAX_PACKETS_BYTES);
    (packets_at(limits) + 16 * (1 + packets_bytes / 8)).next_multiple_of(512)
}
