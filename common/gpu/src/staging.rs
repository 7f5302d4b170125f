//! Page-locked host memory on its way to or from a device: a copy of it does not make the host wait.
use std::ops::Range;
use std::time::Duration;

use cudarc::driver::{result, sys};

use crate::{Completion, Device, Element, GpuError, Region, Stream};

/// Longer than any work ahead of a copy may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Some bytes of page-locked memory. Whoever touches them waits until the last copy has ended.
pub struct Staging {
    device: Device,
    memory: *mut u8,
    len: usize,
    copying: Option<Completion>,
}

// SAFETY: the memory belongs to this value alone, and a copy in flight is waited for before it is touched or freed.
unsafe impl Send for Staging {}

impl Staging {
    /// `len` bytes, all zero.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn new(device: &Device, len: usize) -> Result<Self, GpuError> {
        let mut pointer = std::ptr::null_mut();
        let bind = device.context().bind_to_thread();
        let bytes = len.max(16);
        // SAFETY: the context is current; the memory is page-aligned and `bytes` long, owned below.
        let made = bind.and_then(|()| unsafe {
            sys::cuMemHostAlloc(&mut pointer, bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP).result()?;
            std::ptr::write_bytes(pointer.cast::<u8>(), 0, bytes);
            Ok(())
        });
        made.map_err(GpuError::driver("allocating host memory"))?;
        Ok(Self { device: device.clone(), memory: pointer.cast(), len, copying: None })
    }

    /// Elements of these bytes, which the last copy no longer needs.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`] beyond the end or off an element's alignment; [`GpuError::Late`], [`GpuError::Driver`] when
    /// the last copy does not end.
    pub fn elements<T: Element>(&mut self, bytes: Range<usize>) -> Result<&mut [T], GpuError> {
        let size = size_of::<T>();
        let fits = bytes.start <= bytes.end && bytes.end <= self.len;
        if !fits || !bytes.start.is_multiple_of(size) || !bytes.len().is_multiple_of(size) {
            return Err(GpuError::TooSmall { what: "staging memory", found: self.len, needed: bytes.end });
        }
        self.settle()?;
        // SAFETY: inside the allocation, aligned (its beginning is page-aligned), initialised, every bit pattern a T; no
        // copy runs, and self is borrowed for as long as the slice lives.
        Ok(unsafe {
            std::slice::from_raw_parts_mut(self.memory.add(bytes.start).cast::<T>(), bytes.len() / size)
        })
    }

    /// Enqueues a copy of the first `bytes` bytes to the beginning of `to`.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`], [`GpuError::Driver`].
    pub fn upload(&mut self, stream: &Stream, to: &Region, bytes: usize) -> Result<(), GpuError> {
        self.check(to, bytes)?;
        self.settle()?;
        let bind = self.device.context().bind_to_thread();
        // SAFETY: both ranges are inside live allocations; the host's is not touched or freed before the mark is done,
        // the device's is freed only after everything on it has ended.
        let done = bind.and_then(|()| unsafe {
            let from = std::slice::from_raw_parts(self.memory, bytes);
            result::memcpy_htod_async(to.address(), from, stream.raw().cast())
        });
        done.map_err(GpuError::driver("copying to the device"))?;
        self.copying = Some(stream.mark(false)?);
        Ok(())
    }

    /// Where kernels find the first `bytes` bytes, which the last copy no longer needs; [`end_copy`](Self::end_copy) follows.
    pub(crate) fn begin_copy(&mut self, bytes: usize) -> Result<u64, GpuError> {
        if bytes > self.len.max(16) {
            return Err(GpuError::TooSmall { what: "staging memory", found: self.len, needed: bytes });
        }
        self.settle()?;
        let mut address = 0;
        let bind = self.device.context().bind_to_thread();
        // SAFETY: memory of cuMemHostAlloc, which the device can address.
        let found = bind.and_then(|()| unsafe {
            sys::cuMemHostGetDevicePointer_v2(&mut address, self.memory.cast(), 0).result()
        });
        found.map_err(GpuError::driver("addressing host memory"))?;
        Ok(address)
    }

    /// A kernel that reaches for the memory has been enqueued: nobody touches it before that has ended.
    pub(crate) fn end_copy(&mut self, stream: &Stream) -> Result<(), GpuError> {
        self.copying = Some(stream.mark(false)?);
        Ok(())
    }

    /// Waits for the last copy, and so for everything ahead of it on its stream.
    ///
    /// # Errors
    /// [`GpuError::Late`] after `deadline`; the copy goes on. [`GpuError::Driver`].
    pub fn wait(&mut self, deadline: Duration) -> Result<(), GpuError> {
        if let Some(copying) = &self.copying {
            copying.wait(deadline)?;
            self.copying = None;
        }
        Ok(())
    }

    fn settle(&mut self) -> Result<(), GpuError> {
        self.wait(PATIENCE)
    }

    fn check(&self, region: &Region, bytes: usize) -> Result<(), GpuError> {
        let found = self.len.min(region.len());
        if bytes > found {
            return Err(GpuError::TooSmall { what: "staging memory", found, needed: bytes });
        }
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let _ = self.device.synchronize();
        // SAFETY: allocated by cuMemHostAlloc, freed once; no copy runs any more.
        let _ = unsafe { sys::cuMemFreeHost(self.memory.cast()) };
    }
}
