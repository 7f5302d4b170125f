//! Memory of a device, and the few words of pinned host memory that kernels write to.
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::{result, sys};

use crate::{Device, GpuError, Stream};

/// Plain numbers that can be copied to and from a device as they are.
pub trait Element: Copy + Default + sealed::Plain + 'static {}

mod sealed {
    /// Sealed: no padding, every bit pattern valid.
    pub trait Plain {}
}

macro_rules! elements {
    ($($t:ty),*) => { $(impl sealed::Plain for $t {} impl Element for $t {})* };
}
elements!(u8, u16, u32, u64, i32, i64, f32, half::bf16);

/// Some bytes of a device's memory. Clones and parts share the allocation, which is freed with the last of them.
#[derive(Clone)]
pub struct Region {
    owner: Arc<Owner>,
    offset: usize,
    len: usize,
}

struct Owner {
    device: Device,
    address: sys::CUdeviceptr,
    kind: Kind,
}

enum Kind {
    /// From `cuMemAlloc`.
    Allocated,
    /// A peer's allocation, opened from a handle.
    Mapped,
    /// Somebody else's, who is kept here.
    Foreign(#[allow(dead_code)] Box<dyn Any + Send + Sync>),
}

impl Drop for Owner {
    fn drop(&mut self) {
        // A context that faulted refuses; its memory goes with the process, and there is nobody to tell.
        let _ = self.device.context().bind_to_thread();
        match self.kind {
            // SAFETY: this is the only owner, and cuMemFree waits for work that may still use it.
            Kind::Allocated => drop(unsafe { result::free_sync(self.address) }),
            // SAFETY: this is the only owner; closing waits likewise.
            Kind::Mapped => drop(unsafe { sys::cuIpcCloseMemHandle(self.address) }),
            Kind::Foreign(_) => {}
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:#x}, {} bytes)", self.address(), self.len)
    }
}

impl Region {
    /// Fresh memory; what is in it is unknown. Never from an allocator that reuses, so that it can be exported.
    ///
    /// # Errors
    /// [`GpuError::Driver`] when memory is out.
    pub fn alloc(device: &Device, bytes: usize) -> Result<Self, GpuError> {
        let bind = device.context().bind_to_thread();
        // SAFETY: the context is current; the result is owned by the region made below.
        let address = bind.and_then(|()| unsafe { result::malloc_sync(bytes.max(16)) });
        let address = address.map_err(GpuError::driver("allocating device memory"))?;
        let owner = Owner { device: device.clone(), address, kind: Kind::Allocated };
        Ok(Self { owner: Arc::new(owner), offset: 0, len: bytes })
    }

    /// Fresh memory, all zero.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn zeroed(device: &Device, bytes: usize) -> Result<Self, GpuError> {
        let region = Self::alloc(device, bytes)?;
        region.fill(0)?;
        Ok(region)
    }

    /// Fresh memory with these values.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn from_slice<T: Element>(device: &Device, values: &[T]) -> Result<Self, GpuError> {
        let region = Self::alloc(device, size_of_val(values))?;
        region.write(values)?;
        Ok(region)
    }

    /// Memory that somebody else owns, such as a libtorch tensor's.
    ///
    /// # Safety
    /// `address..address + bytes` is memory of `device` for as long as `keep` lives, and nobody gives it to other work
    /// in the meantime.
    pub unsafe fn foreign(
        device: &Device,
        address: u64,
        bytes: usize,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Self {
        let owner = Owner { device: device.clone(), address, kind: Kind::Foreign(keep) };
        Self { owner: Arc::new(owner), offset: 0, len: bytes }
    }

    /// A peer process's allocation behind `handle`, mapped into this process.
    pub(crate) fn open_handle(device: &Device, handle: &[u8; 64], bytes: usize) -> Result<Self, GpuError> {
        let mut raw = sys::CUipcMemHandle { reserved: [0; 64] };
        for (to, from) in raw.reserved.iter_mut().zip(handle) {
            *to = *from as std::ffi::c_char;
        }
        let mut address = 0;
        let bind = device.context().bind_to_thread();
        // SAFETY: the context is current; the driver checks the handle.
        let opened = bind.and_then(|()| unsafe {
            let lazily = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
            sys::cuIpcOpenMemHandle_v2(&mut address, raw, lazily).result()
        });
        opened.map_err(GpuError::driver("opening a peer's memory"))?;
        let owner = Owner { device: device.clone(), address, kind: Kind::Mapped };
        Ok(Self { owner: Arc::new(owner), offset: 0, len: bytes })
    }

    /// The handle by which another process opens the whole allocation.
    pub(crate) fn export(&self) -> Result<[u8; 64], GpuError> {
        let mut raw = sys::CUipcMemHandle { reserved: [0; 64] };
        let bind = self.owner.device.context().bind_to_thread();
        // SAFETY: the address is the base of a live cuMemAlloc allocation, held by self.
        let exported =
            bind.and_then(|()| unsafe { sys::cuIpcGetMemHandle(&mut raw, self.owner.address).result() });
        exported.map_err(GpuError::driver("exporting memory"))?;
        Ok(raw.reserved.map(|b| b as u8))
    }

    /// Bytes `range` of this region.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`] when they are not all inside.
    pub fn part(&self, range: Range<usize>) -> Result<Self, GpuError> {
        if range.start > range.end || range.end > self.len {
            return Err(GpuError::TooSmall { what: "region", found: self.len, needed: range.end });
        }
        Ok(Self { owner: self.owner.clone(), offset: self.offset + range.start, len: range.len() })
    }

    /// Where it begins on the device.
    pub fn address(&self) -> u64 {
        self.owner.address + self.offset as u64
    }

    /// Its size, bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// # Errors
    /// [`GpuError::TooSmall`] unless it has `needed` bytes and begins at a multiple of 16.
    pub fn expect(&self, what: &'static str, needed: usize) -> Result<&Self, GpuError> {
        if self.len < needed || !self.address().is_multiple_of(16) {
            return Err(GpuError::TooSmall { what, found: self.len, needed });
        }
        Ok(self)
    }

    /// Sets every byte, and waits. Not on a stream: work that uses the region must have ended.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn fill(&self, byte: u8) -> Result<(), GpuError> {
        self.settle()?;
        // SAFETY: the range is inside an allocation that self keeps.
        let done = unsafe { result::memset_d8_sync(self.address(), byte, self.len) };
        done.map_err(GpuError::driver("filling device memory"))?;
        self.settle()
    }

    /// Copies `values` to the region's beginning, and waits.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`], [`GpuError::Driver`].
    pub fn write<T: Element>(&self, values: &[T]) -> Result<(), GpuError> {
        let needed = size_of_val(values);
        if needed > self.len {
            return Err(GpuError::TooSmall { what: "region to write", found: self.len, needed });
        }
        self.settle()?;
        // SAFETY: the range is inside an allocation that self keeps; T is plain.
        let done = unsafe { result::memcpy_htod_sync(self.address(), values) };
        done.map_err(GpuError::driver("copying to the device"))?;
        self.settle()
    }

    /// Copies what the region holds, after everything that was enqueued before on any stream.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn read<T: Element>(&self) -> Result<Vec<T>, GpuError> {
        let mut values = vec![T::default(); self.len / size_of::<T>()];
        self.settle()?;
        // SAFETY: the range is inside an allocation that self keeps; every bit pattern is a T.
        let done = unsafe { result::memcpy_dtoh_sync(&mut values, self.address()) };
        done.map_err(GpuError::driver("copying from the device"))?;
        Ok(values)
    }

    /// As [`read`](Self::read), behind what `stream` has to do and waiting for nothing else.
    ///
    /// # Errors
    /// As there.
    pub fn read_on<T: Element>(&self, stream: &Stream) -> Result<Vec<T>, GpuError> {
        let mut values = vec![T::default(); self.len / size_of::<T>()];
        let bind = self.owner.device.context().bind_to_thread();
        // SAFETY: the range is inside an allocation that self keeps; every bit pattern is a T; values live until the
        // wait below.
        let done = bind.and_then(|()| unsafe {
            result::memcpy_dtoh_async(&mut values, self.address(), stream.inner().cu_stream())
        });
        done.map_err(GpuError::driver("copying from the device"))?;
        stream.synchronize()?;
        Ok(values)
    }

    /// Enqueues a copy of `from` over the beginning of this region.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`], [`GpuError::Driver`].
    pub fn copy_from(&self, stream: &Stream, from: &Self) -> Result<(), GpuError> {
        if from.len > self.len {
            return Err(GpuError::TooSmall { what: "region to copy to", found: self.len, needed: from.len });
        }
        stream.keep(self);
        stream.keep(from);
        let bind = self.owner.device.context().bind_to_thread();
        // SAFETY: both ranges are inside allocations that outlive the copy: freeing waits, graphs keep them.
        let done = bind.and_then(|()| unsafe {
            result::memcpy_dtod_async(self.address(), from.address(), from.len, stream.inner().cu_stream())
        });
        done.map_err(GpuError::driver("copying on the device"))
    }

    fn settle(&self) -> Result<(), GpuError> {
        self.owner.device.synchronize()
    }
}

/// A few words of host memory that kernels can write: how a device tells the host something without being asked.
pub struct HostWords {
    device: Device,
    words: *mut u32,
    address: u64,
    len: usize,
}

// SAFETY: the memory is only accessed through atomics, and freed by the one owner.
unsafe impl Send for HostWords {}
// SAFETY: as above.
unsafe impl Sync for HostWords {}

impl HostWords {
    /// `len` words, all zero.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn new(device: &Device, len: usize) -> Result<Self, GpuError> {
        let mut pointer = std::ptr::null_mut();
        let mut address = 0;
        let bind = device.context().bind_to_thread();
        // SAFETY: the context is current; the memory is page-aligned and `len * 4` bytes long, owned below.
        let made = bind.and_then(|()| unsafe {
            sys::cuMemHostAlloc(&mut pointer, len * 4, sys::CU_MEMHOSTALLOC_DEVICEMAP).result()?;
            std::ptr::write_bytes(pointer.cast::<u8>(), 0, len * 4);
            sys::cuMemHostGetDevicePointer_v2(&mut address, pointer, 0).result()
        });
        made.map_err(GpuError::driver("allocating host memory"))?;
        Ok(Self { device: device.clone(), words: pointer.cast(), address, len })
    }

    /// The word at `index`; `None` beyond the end.
    pub fn get(&self, index: usize) -> Option<u32> {
        // SAFETY: inside the allocation, aligned, and only ever accessed through atomics on this side.
        (index < self.len)
            .then(|| unsafe { AtomicU32::from_ptr(self.words.add(index)) }.load(Ordering::Acquire))
    }

    /// Writes the word at `index` from here, if it is still 0.
    pub(crate) fn set_first(&self, index: usize, value: u32) {
        if index < self.len {
            // SAFETY: as for `get`.
            let word = unsafe { AtomicU32::from_ptr(self.words.add(index)) };
            let _ = word.compare_exchange(0, value, Ordering::AcqRel, Ordering::Acquire);
        }
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn address_of(&self, index: usize) -> Result<u64, GpuError> {
        let (found, needed) = (self.len * 4, index.saturating_add(1).saturating_mul(4));
        if needed > found {
            return Err(GpuError::TooSmall { what: "words for the host", found, needed });
        }
        Ok(self.address + index as u64 * 4)
    }
}

impl Drop for HostWords {
    fn drop(&mut self) {
        let _ = self.device.context().synchronize();
        // SAFETY: allocated by cuMemHostAlloc, freed once, and no kernel runs any more.
        let _ = unsafe { sys::cuMemFreeHost(self.words.cast()) };
    }
}
