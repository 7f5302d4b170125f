//! What the copy engine is told about a matrix in memory, so that kernels can ask for boxes of it by coordinates.
use cudarc::driver::sys;

use crate::{Device, GpuError, Region};

/// A description of bf16 elements in device memory, where kernels read it, and the memory that it is of. Boxes are in shared
/// memory with the swizzle of their innermost size, 128 or 64 bytes; what is beyond the ends is zero there.
#[derive(Clone, Debug)]
pub struct TensorMap {
    map: Region,
    of: Region,
}

/// The same as a kernel's argument: for matrices that are described anew at each launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MapArgument(pub(crate) [u64; 16]);

/// Dimensions of a [`TensorMap`], the innermost first.
#[derive(Clone, Copy, Debug)]
pub struct MapShape<'a> {
    /// Elements of each.
    pub sizes: &'a [usize],
    /// Bytes from one index to the next, of all but the innermost: multiples of 16.
    pub strides: &'a [usize],
    /// Of a box; the innermost is 64 elements, 128 bytes, or half of that.
    pub box_sizes: &'a [usize],
}

impl MapArgument {
    /// # Errors
    /// As [`TensorMap::new`].
    pub(crate) fn new(device: &Device, of: &Region, shape: MapShape<'_>) -> Result<Self, GpuError> {
        let MapShape { sizes, strides, box_sizes } = shape;
        let rank = sizes.len();
        if !(2..=5).contains(&rank) || strides.len() + 1 != rank || box_sizes.len() != rank {
            return Err(GpuError::unsupported(format!("{shape:?}")));
        }
        let swizzle = match box_sizes[0] {
            64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            32 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            other => return Err(GpuError::unsupported(format!("boxes of {other} elements"))),
        };
        let last = sizes[1..].iter().zip(strides).map(|(size, stride)| size.saturating_sub(1) * stride);
        of.expect("a mapped matrix", last.sum::<usize>() + sizes[0] * 2)?;
        let long = |values: &[usize]| values.iter().map(|&value| value as u64).collect::<Vec<_>>();
        let short = |values: &[usize]| values.iter().map(|&value| value as u32).collect::<Vec<_>>();
        let (sizes, strides, boxes, steps) = (long(sizes), long(strides), short(box_sizes), vec![1u32; rank]);
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let bind = device.context().bind_to_thread();
        // SAFETY: the lists have as many elements as the rank asks for and live through the call, which only computes.
        let encoded = bind.and_then(|()| unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                rank as u32,
                of.address() as *mut std::ffi::c_void,
                sizes.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
            .result()
        });
        encoded.map_err(GpuError::driver("describing a matrix to the copy engine"))?;
        Ok(Self(map.opaque))
    }
}

impl TensorMap {
    /// # Errors
    /// [`GpuError::TooSmall`], [`GpuError::Unsupported`] for shapes that contradict themselves, [`GpuError::Driver`].
    pub fn new(device: &Device, of: &Region, shape: MapShape<'_>) -> Result<Self, GpuError> {
        let MapArgument(words) = MapArgument::new(device, of, shape)?;
        Ok(Self { map: Region::from_slice(device, &words)?, of: of.clone() })
    }

    /// Where kernels find it.
    pub fn region(&self) -> &Region {
        &self.map
    }

    /// The memory that it is of.
    pub fn memory(&self) -> &Region {
        &self.of
    }
}
