//! One launch of a kernel: its grid, its arguments, and whether it may start before the kernel ahead has ended.
use std::ffi::c_void;

use cudarc::driver::sys;

use crate::{GpuError, Kernel, Region, Stream};

/// Arguments are given in the kernel's order; regions are kept by a graph that is being captured.
#[derive(Debug)]
pub struct Launch<'a> {
    kernel: &'a Kernel,
    grid: (u32, u32),
    threads: u32,
    overlap: bool,
    opens_late: bool,
    /// Little-endian, so that the low half of each word is the argument when it is narrower.
    arguments: Vec<u64>,
    regions: Vec<&'a Region>,
}

impl<'a> Launch<'a> {
    /// `grid` blocks of `threads` threads.
    pub fn new(kernel: &'a Kernel, grid: (u32, u32), threads: u32) -> Self {
        let (arguments, regions) = (Vec::with_capacity(20), Vec::with_capacity(8));
        Self { kernel, grid, threads, overlap: false, opens_late: false, arguments, regions }
    }

    /// May start while the kernel ahead still runs. The kernel waits by itself before it touches what others write.
    pub fn overlap(mut self, overlap: bool) -> Self {
        self.overlap = overlap;
        self
    }

    /// The kernel lets the next one start only when all before it have ended.
    pub(crate) fn opens_late(mut self) -> Self {
        self.opens_late = true;
        self
    }

    /// A pointer.
    pub fn region(mut self, region: &'a Region) -> Self {
        self.arguments.push(region.address());
        self.regions.push(region);
        self
    }

    /// A pointer that may be null.
    pub fn maybe(mut self, region: Option<&'a Region>) -> Self {
        self.arguments.push(region.map_or(0, Region::address));
        self.regions.extend(region);
        self
    }

    /// A 64-bit number, or a pointer to what somebody else keeps.
    pub fn u64(mut self, value: u64) -> Self {
        self.arguments.push(value);
        self
    }

    /// A 32-bit number.
    pub fn u32(self, value: u32) -> Self {
        self.u64(u64::from(value))
    }

    /// A size as the kernels' `int`.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`] beyond 31 bits.
    pub fn size(self, value: usize) -> Result<Self, GpuError> {
        let value = i32::try_from(value).map_err(|_| GpuError::unsupported(format!("size {value}")))?;
        Ok(self.u32(value as u32))
    }

    /// A float.
    pub fn f32(self, value: f32) -> Self {
        self.u32(value.to_bits())
    }

    /// Enqueues it.
    ///
    /// # Safety
    /// The arguments are the kernel's, in number, order and type, and what they point to is as large as the kernel
    /// reaches and lives until the launch is over (regions that were given do).
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub unsafe fn enqueue(self, stream: &Stream) -> Result<(), GpuError> {
        for region in &self.regions {
            stream.keep(region);
        }
        let mut pointers: Vec<*mut c_void> =
            self.arguments.iter().map(|a| std::ptr::from_ref(a).cast_mut().cast()).collect();
        // SAFETY: all zero is a valid attribute: the union is of plain numbers.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        let config = sys::CUlaunchConfig {
            gridDimX: self.grid.0,
            gridDimY: self.grid.1,
            gridDimZ: 1,
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.kernel.shared_bytes(),
            hStream: stream.inner().cu_stream(),
            attrs: &mut attribute,
            numAttrs: u32::from(self.overlap),
        };
        let bind = stream.device().context().bind_to_thread();
        // SAFETY: the config and the pointers live through the call; the rest is the caller's promise.
        let launched = bind.and_then(|()| unsafe {
            let nothing_more = std::ptr::null_mut();
            sys::cuLaunchKernelEx(&config, self.kernel.function(), pointers.as_mut_ptr(), nothing_more)
                .result()
        });
        stream.set_opens_late(self.opens_late);
        launched.map_err(GpuError::driver(self.kernel.name()))
    }
}
