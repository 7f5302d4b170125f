//! One GPU of this machine and the streams of work on it.
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, sys};

use crate::{GpuError, Region};

/// A GPU: its primary context, which libtorch uses too. Clones are the same device.
#[derive(Clone, Debug)]
pub struct Device {
    context: Arc<CudaContext>,
    arch: (u32, u32),
    num_multiprocessors: u32,
    cache_bytes: usize,
}

impl Device {
    /// # Errors
    /// [`GpuError::NoDriver`] and [`GpuError::NoDevice`]; a retry does not help.
    pub fn open(ordinal: usize) -> Result<Self, GpuError> {
        let count = Self::count()?;
        if ordinal >= count {
            return Err(GpuError::NoDevice { ordinal, count });
        }
        let context = CudaContext::new(ordinal).map_err(GpuError::driver("opening the device"))?;
        let attribute = |which| context.attribute(which).map_err(GpuError::driver("asking the device"));
        use sys::CUdevice_attribute_enum as Ask;
        let major = attribute(Ask::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Ask::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let num = attribute(Ask::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let cache = attribute(Ask::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?;
        let arch = (major as u32, minor as u32);
        Ok(Self { arch, num_multiprocessors: num as u32, cache_bytes: cache.max(0) as usize, context })
    }

    /// How many GPUs this process sees.
    ///
    /// # Errors
    /// [`GpuError::NoDriver`] without a driver.
    pub fn count() -> Result<usize, GpuError> {
        // SAFETY: loads libcuda if it is there; its constructors ask nothing of us.
        if !unsafe { sys::is_culib_present() } {
            return Err(GpuError::NoDriver);
        }
        let count = cudarc::driver::result::init().and_then(|()| CudaContext::device_count());
        match count {
            Ok(count) => Ok(count as usize),
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => Ok(0),
            Err(e) => Err(GpuError::driver("counting devices")(e)),
        }
    }

    /// Why a test that needs `devices` GPUs is skipped here, or `None` if it can run.
    pub fn missing(devices: usize) -> Option<String> {
        match Self::count() {
            Ok(count) if count >= devices => None,
            Ok(count) => Some(format!("skipped: {count} GPUs, {devices} needed")),
            Err(e) => Some(format!("skipped: {e}")),
        }
    }

    /// A new stream; it does not order with any other.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn stream(&self) -> Result<Stream, GpuError> {
        let inner = self.context.new_stream().map_err(GpuError::driver("making a stream"))?;
        Ok(Stream {
            device: self.clone(),
            inner,
            capturing: Mutex::default(),
            opens_late: AtomicBool::new(false),
        })
    }

    /// As the marketing has it.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn name(&self) -> Result<String, GpuError> {
        self.context.name().map_err(GpuError::driver("asking the device"))
    }

    /// Free memory, bytes.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn free_bytes(&self) -> Result<u64, GpuError> {
        let (free, _) = self.context.mem_get_info().map_err(GpuError::driver("asking for free memory"))?;
        Ok(free as u64)
    }

    /// Index among the GPUs that this process sees.
    pub fn ordinal(&self) -> usize {
        self.context.ordinal()
    }

    /// Compute capability, such as (9, 0).
    pub fn arch(&self) -> (u32, u32) {
        self.arch
    }

    /// Multiprocessors: the grid of kernels that stay for the whole work.
    pub fn num_multiprocessors(&self) -> u32 {
        self.num_multiprocessors
    }

    /// Size of the second-level cache.
    pub fn cache_bytes(&self) -> usize {
        self.cache_bytes
    }

    /// Waits for everything on every stream.
    ///
    /// # Errors
    /// [`GpuError::Driver`], also for faults of kernels that ran before.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        self.context.synchronize().map_err(GpuError::driver("waiting for the device"))
    }

    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }
}

/// Work in order. One thread enqueues at a time.
#[derive(Debug)]
pub struct Stream {
    device: Device,
    inner: Arc<CudaStream>,
    /// What kernels were given while a graph is being captured.
    capturing: Mutex<Option<Vec<Region>>>,
    /// Whether the kernel launched last lets the next one start only when all before it have ended.
    opens_late: AtomicBool,
}

impl Stream {
    /// Where it runs.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Waits for everything enqueued so far.
    ///
    /// # Errors
    /// [`GpuError::Driver`], also for faults of kernels that ran before.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        self.inner.synchronize().map_err(GpuError::driver("waiting for the stream"))
    }

    /// A mark behind everything enqueued so far. `timed` marks can be subtracted.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn mark(&self, timed: bool) -> Result<Completion, GpuError> {
        use sys::CUevent_flags as Flags;
        let flags = if timed { Flags::CU_EVENT_DEFAULT } else { Flags::CU_EVENT_DISABLE_TIMING };
        let event = self.inner.record_event(Some(flags)).map_err(GpuError::driver("recording an event"))?;
        Ok(Completion { event })
    }

    /// Makes later work here wait for `mark`, whatever stream it was made on.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn wait_for(&self, mark: &Completion) -> Result<(), GpuError> {
        self.inner.wait(&mark.event).map_err(GpuError::driver("ordering streams"))
    }

    /// The driver's handle, for libraries that enqueue by themselves (NCCL, libtorch's stream guard).
    pub fn raw(&self) -> *mut std::ffi::c_void {
        self.inner.cu_stream().cast()
    }

    /// Keeps the stream alive for those that were given [`raw`](Self::raw).
    pub fn handle(&self) -> Arc<dyn std::any::Any + Send + Sync> {
        Arc::clone(&self.inner) as _
    }

    pub(crate) fn inner(&self) -> &Arc<CudaStream> {
        &self.inner
    }

    /// What kernels were given while a graph is being captured; `None` at other times.
    pub(crate) fn capturing(&self) -> MutexGuard<'_, Option<Vec<Region>>> {
        self.capturing.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn opens_late(&self) -> bool {
        self.opens_late.load(Ordering::Relaxed)
    }

    pub(crate) fn set_opens_late(&self, late: bool) {
        self.opens_late.store(late, Ordering::Relaxed);
    }

    /// What the work enqueued from now on uses, so that a graph being captured keeps it.
    pub(crate) fn keep(&self, region: &Region) {
        if let Some(kept) = self.capturing().as_mut() {
            kept.push(region.clone());
        }
    }
}

/// A point on a stream that can be waited for.
#[derive(Debug)]
pub struct Completion {
    event: CudaEvent,
}

impl Completion {
    /// Whether everything before the mark has ended.
    ///
    /// # Errors
    /// [`GpuError::Driver`], also for faults of kernels before the mark.
    pub fn is_done(&self) -> Result<bool, GpuError> {
        self.event.try_is_complete().map_err(GpuError::driver("asking for an event"))
    }

    /// Waits until [`is_done`](Self::is_done), yielding between looks.
    ///
    /// # Errors
    /// [`GpuError::Late`] when `deadline` has passed; the work goes on. [`GpuError::Driver`].
    pub fn wait(&self, deadline: Duration) -> Result<(), GpuError> {
        let begin = Instant::now();
        while !self.is_done()? {
            let waited = begin.elapsed();
            if waited > deadline {
                return Err(GpuError::Late { what: "work on the stream", waited_ms: waited.as_millis() });
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Microseconds from `earlier` to here; both marks timed and done.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn us_since(&self, earlier: &Self) -> Result<f64, GpuError> {
        let ms = earlier.event.elapsed_ms(&self.event).map_err(GpuError::driver("timing events"))?;
        Ok(f64::from(ms) * 1e3)
    }
}
