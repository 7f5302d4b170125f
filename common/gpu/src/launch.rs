//! One launch of a kernel: its grid, its arguments, and whether it may start before the kernel ahead has ended.
use std::ffi::c_void;

use cudarc::driver::sys;

use crate::tensor_map::MapArgument;
use crate::{GpuError, Kernel, Region, Stream};

/// Arguments are given in the kernel's order; regions are kept by a graph that is being captured.
#[derive(Debug)]
pub struct Launch<'a> {
    kernel: &'a Kernel,
    grid: (u32, u32, u32),
    threads: u32,
    /// Blocks along the grid's first dimension that are a cluster.
    cluster: Option<u32>,
    overlap: bool,
    opens_late: bool,
    /// Little-endian, so that the low half of each word is the argument when it is narrower; a map takes sixteen.
    words: Vec<u64>,
    /// Where each argument begins.
    arguments: Vec<usize>,
    regions: Vec<&'a Region>,
}

impl<'a> Launch<'a> {
    /// `grid` blocks of `threads` threads.
    pub fn new(kernel: &'a Kernel, grid: (u32, u32), threads: u32) -> Self {
        Self {
            kernel,
            grid: (grid.0, grid.1, 1),
            threads,
            cluster: None,
            overlap: false,
            opens_late: false,
            words: Vec::with_capacity(48),
            arguments: Vec::with_capacity(20),
            regions: Vec::with_capacity(8),
        }
    }

    /// The grid has so many layers.
    pub(crate) fn deep(mut self, layers: u32) -> Self {
        self.grid.2 = layers;
        self
    }

    /// So many neighbouring blocks run at once and reach each other's shared memory.
    pub(crate) fn cluster(mut self, blocks: u32) -> Self {
        self.cluster = Some(blocks);
        self
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
        self.regions.push(region);
        self.u64(region.address())
    }

    /// A description of some elements of `of`.
    pub(crate) fn map(mut self, map: MapArgument, of: &'a Region) -> Self {
        self.regions.push(of);
        self.arguments.push(self.words.len());
        self.words.extend(map.0);
        self
    }

    /// A pointer that may be null.
    pub fn maybe(mut self, region: Option<&'a Region>) -> Self {
        self.regions.extend(region);
        self.u64(region.map_or(0, Region::address))
    }

    /// A 64-bit number, or a pointer to what somebody else keeps.
    pub fn u64(mut self, value: u64) -> Self {
        self.arguments.push(self.words.len());
        self.words.push(value);
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
            self.arguments.iter().map(|&at| self.words[at..].as_ptr().cast_mut().cast()).collect();
        // SAFETY: all zero is a valid attribute: the union is of plain numbers.
        let mut attributes: [sys::CUlaunchAttribute; 2] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        if self.overlap {
            let id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[count].id = id;
            attributes[count].value.programmaticStreamSerializationAllowed = 1;
            count += 1;
        }
        if let Some(x) = self.cluster {
            attributes[count].id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attributes[count].value.clusterDim =
                sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y: 1, z: 1 };
            count += 1;
        }
        let config = sys::CUlaunchConfig {
            gridDimX: self.grid.0,
            gridDimY: self.grid.1,
            gridDimZ: self.grid.2,
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.kernel.shared_bytes(),
            hStream: stream.inner().cu_stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: count as u32,
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
