//! NCCL, as much of it as two ranks need: a communicator that is made, used and given up with deadlines.
//!
//! All calls are NCCL's non-blocking ones: a call that is in progress is asked after until it is done or its time is
//! over, and then the communicator is aborted on a thread of its own, because an abort may itself hang. Graphs that
//! hold sends or receives must be dropped before their communicator; dropping a communicator never panics nor blocks
//! for longer than [`GIVE_UP`].
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use cudarc::nccl::sys::{self, ncclResult_t};

use crate::{Device, GpuError, Region, Stream};

/// How long destroying or aborting a communicator may take before it is left behind.
pub const GIVE_UP: Duration = Duration::from_secs(10);

/// Why NCCL does not go on. The communicator is of no more use.
#[derive(Debug, thiserror::Error)]
pub enum NcclError {
    /// The device or the library.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// NCCL's own words.
    #[error("{call}: {what}")]
    Nccl {
        /// Which call.
        call: &'static str,
        /// NCCL's error and its last message.
        what: String,
    },
    /// Not done in time.
    #[error("{call} is not done after {waited_ms} ms")]
    Late {
        /// Which call.
        call: &'static str,
        /// How long.
        waited_ms: u128,
    },
}

/// Names a communicator to be: made by one rank, carried to the other.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(pub [u8; 128]);

impl UniqueId {
    /// # Errors
    /// [`GpuError::NoLibrary`] without NCCL.
    pub fn new() -> Result<Self, NcclError> {
        present()?;
        let mut id = sys::ncclUniqueId { internal: [0; 128] };
        // SAFETY: writes the id.
        done("ncclGetUniqueId", unsafe { sys::ncclGetUniqueId(&mut id) }, std::ptr::null_mut())?;
        Ok(Self(id.internal.map(|b| b as u8)))
    }
}

/// NCCL's version, such as 22809.
///
/// # Errors
/// [`GpuError::NoLibrary`] without NCCL.
pub fn version() -> Result<i32, NcclError> {
    present()?;
    let mut version = 0;
    // SAFETY: writes one int.
    done("ncclGetVersion", unsafe { sys::ncclGetVersion(&mut version) }, std::ptr::null_mut())?;
    Ok(version)
}

/// One rank of a group.
pub struct Communicator {
    device: Device,
    handle: Handle,
    deadline: Duration,
}

/// May be moved to the thread that gives it up.
struct Handle(sys::ncclComm_t);

// SAFETY: NCCL lets any thread use a communicator, one at a time; it is owned by one value.
unsafe impl Send for Handle {}

impl Communicator {
    /// Joins `id` as `rank` of `size`, on `device`. All ranks must, within `deadline`, which then holds for every call.
    ///
    /// # Errors
    /// [`NcclError`]; a new try needs a new id.
    pub fn join(
        device: &Device,
        id: UniqueId,
        rank: usize,
        size: usize,
        deadline: Duration,
    ) -> Result<Self, NcclError> {
        present()?;
        device.context().bind_to_thread().map_err(GpuError::driver("choosing the device"))?;
        let undefined = c_int::MIN;
        // SAFETY: all zero is a valid configuration: numbers and null pointers. What NCCL's initialiser sets follows.
        let mut config: sys::ncclConfig_t = unsafe { std::mem::zeroed() };
        config.size = size_of::<sys::ncclConfig_t>();
        config.magic = 0xcafe_beef;
        config.version = 22809 as c_uint;
        config.blocking = 0;
        for field in [
            &mut config.cgaClusterSize,
            &mut config.minCTAs,
            &mut config.maxCTAs,
            &mut config.splitShare,
            &mut config.trafficClass,
            &mut config.collnetEnable,
            &mut config.CTAPolicy,
            &mut config.shrinkShare,
            &mut config.nvlsCTAs,
            &mut config.nChannelsPerNetPeer,
            &mut config.nvlinkCentricSched,
        ] {
            *field = undefined;
        }
        let id = sys::ncclUniqueId { internal: id.0.map(|b| b as std::ffi::c_char) };
        let mut comm = std::ptr::null_mut();
        // SAFETY: the config is complete; the handle is owned below.
        let begun =
            unsafe { sys::ncclCommInitRankConfig(&mut comm, size as i32, id, rank as i32, &mut config) };
        let this = Self { device: device.clone(), handle: Handle(comm), deadline };
        done("ncclCommInitRankConfig", begun, comm)?;
        this.settle("ncclCommInitRankConfig")?;
        Ok(this)
    }

    /// Enqueues several sends and receives as one: `calls` makes them, on this and other communicators.
    ///
    /// # Errors
    /// [`NcclError`].
    pub fn group(&self, calls: impl FnOnce() -> Result<(), NcclError>) -> Result<(), NcclError> {
        // SAFETY: opens a group of this thread, closed below whatever happens.
        done("ncclGroupStart", unsafe { sys::ncclGroupStart() }, std::ptr::null_mut())?;
        let called = calls();
        // SAFETY: the group opened above.
        let ended = done("ncclGroupEnd", unsafe { sys::ncclGroupEnd() }, self.handle.0);
        called?;
        ended?;
        self.settle("ncclGroupEnd")
    }

    /// Inside [`group`](Self::group): all bytes of `from` to `peer`.
    ///
    /// # Errors
    /// [`NcclError`].
    pub fn send(&self, stream: &Stream, from: &Region, peer: usize) -> Result<(), NcclError> {
        stream.keep(from);
        let kind = sys::ncclDataType_t::ncclUint8;
        let to = stream.raw().cast();
        let pointer = from.address() as *const c_void;
        // SAFETY: the region is alive until the stream is done with it: freeing waits, graphs keep it.
        let sent = unsafe { sys::ncclSend(pointer, from.len(), kind, peer as i32, self.handle.0, to) };
        done("ncclSend", sent, self.handle.0)
    }

    /// Inside [`group`](Self::group): fills `into` from `peer`.
    ///
    /// # Errors
    /// [`NcclError`].
    pub fn receive(&self, stream: &Stream, into: &Region, peer: usize) -> Result<(), NcclError> {
        stream.keep(into);
        let kind = sys::ncclDataType_t::ncclUint8;
        let to = stream.raw().cast();
        let pointer = into.address() as *mut c_void;
        // SAFETY: as for `send`.
        let received = unsafe { sys::ncclRecv(pointer, into.len(), kind, peer as i32, self.handle.0, to) };
        done("ncclRecv", received, self.handle.0)
    }

    /// Whether the communicator is well: a lost peer shows here.
    ///
    /// # Errors
    /// [`NcclError::Nccl`].
    pub fn check(&self) -> Result<(), NcclError> {
        state(self.handle.0).and_then(|s| done("asynchronous error", s, self.handle.0))
    }

    /// Waits for the last call.
    fn settle(&self, call: &'static str) -> Result<(), NcclError> {
        let begin = Instant::now();
        loop {
            let now = state(self.handle.0)?;
            if now != ncclResult_t::ncclInProgress {
                return done(call, now, self.handle.0);
            }
            let waited = begin.elapsed();
            if waited > self.deadline {
                return Err(NcclError::Late { call, waited_ms: waited.as_millis() });
            }
            std::thread::yield_now();
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let handle = Handle(std::mem::replace(&mut self.handle.0, std::ptr::null_mut()));
        if handle.0.is_null() {
            return;
        }
        let context = self.device.context().clone();
        let (tell, told) = mpsc::channel();
        // Neither is sure to come back, so neither may run here.
        let spawned = std::thread::Builder::new().name("nccl-give-up".to_owned()).spawn(move || {
            let handle = handle;
            let _ = context.bind_to_thread();
            let well = matches!(state(handle.0), Ok(ncclResult_t::ncclSuccess));
            // SAFETY: the handle was taken from its owner and is used nowhere else.
            let ended = unsafe {
                if well && sys::ncclCommFinalize(handle.0) as u32 <= ncclResult_t::ncclInProgress as u32 {
                    let begin = Instant::now();
                    while matches!(state(handle.0), Ok(ncclResult_t::ncclInProgress))
                        && begin.elapsed() < GIVE_UP / 2
                    {
                        std::thread::yield_now();
                    }
                }
                match state(handle.0) {
                    Ok(ncclResult_t::ncclSuccess) => sys::ncclCommDestroy(handle.0),
                    _ => sys::ncclCommAbort(handle.0),
                }
            };
            let _ = tell.send(ended);
        });
        if spawned.is_ok() {
            let _ = told.recv_timeout(GIVE_UP);
        }
    }
}

fn present() -> Result<(), GpuError> {
    // SAFETY: loads libnccl if it is there.
    let present = unsafe { sys::is_culib_present() };
    if present { Ok(()) } else { Err(GpuError::NoLibrary { library: "libnccl.so" }) }
}

fn state(comm: sys::ncclComm_t) -> Result<ncclResult_t, NcclError> {
    let mut state = ncclResult_t::ncclSuccess;
    // SAFETY: a live communicator, or null, which NCCL refuses.
    let asked = unsafe { sys::ncclCommGetAsyncError(comm, &mut state) };
    done("ncclCommGetAsyncError", asked, std::ptr::null_mut())?;
    Ok(state)
}

/// In progress counts as done here: `settle` follows.
fn done(call: &'static str, result: ncclResult_t, comm: sys::ncclComm_t) -> Result<(), NcclError> {
    if matches!(result, ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress) {
        return Ok(());
    }
    // SAFETY: both give static strings that end with zero; a null communicator means this thread's last error.
    let words = unsafe {
        let text = |p: *const std::ffi::c_char| {
            if p.is_null() { String::new() } else { CStr::from_ptr(p).to_string_lossy().into_owned() }
        };
        format!("{} {}", text(sys::ncclGetErrorString(result)), text(sys::ncclGetLastError(comm)))
    };
    Err(NcclError::Nccl { call, what: words.trim().to_owned() })
}
