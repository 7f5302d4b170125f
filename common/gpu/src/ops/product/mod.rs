//! Matrix products: by a kernel of ours for few rows (`few`) or a few dozen (`mid`), otherwise by cuBLASLt (`gemm`).
mod few;
mod gemm;
mod mid;
mod shape;

use few::{FewProduct, FewProducts};
use gemm::{Blas, Gemm};
use mid::{MidProduct, MidProducts};
pub use shape::{GemmShape, MlaSizes, ProductType, WeightOrder};

use crate::{Device, GpuError, Region, Stream};

/// What products on a device are made with: our kernels, the library and memory for its intermediate results. The products
/// that share it run on one stream, one after the other. Clones are the same.
#[derive(Clone, Debug)]
pub struct ProductKernels {
    few: FewProducts,
    /// Absent on devices without the instructions.
    mid: Option<MidProducts>,
    blas: Blas,
}

impl ProductKernels {
    /// # Errors
    /// [`GpuError::NoLibrary`] without cuBLASLt or NVRTC, [`GpuError::Blas`], [`GpuError::Compile`], [`GpuError::Driver`].
    pub fn new(device: &Device) -> Result<Self, GpuError> {
        Ok(Self { few: FewProducts::new(device)?, mid: MidProducts::new(device)?, blas: Blas::new(device)? })
    }
}

/// A planned product, whichever way.
#[derive(Debug)]
pub struct Product {
    shape: GemmShape,
    reach: [usize; 3],
    way: Way,
}

#[derive(Debug)]
enum Way {
    Few(FewProduct),
    Mid(MidProduct),
    Library(Box<Gemm>),
}

impl Product {
    /// By a kernel of ours where there is one for `shape`.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`] for sizes that contradict themselves, [`GpuError::Blas`] when no algorithm fits.
    pub fn new(kernels: &ProductKernels, shape: GemmShape) -> Result<Self, GpuError> {
        let reach = shape.reach()?;
        let mid = || kernels.mid.as_ref().and_then(|mid| mid.plan(&shape));
        let way = if let Some(few) = kernels.few.plan(&shape) {
            Way::Few(few)
        } else if let Some(mid) = mid() {
            Way::Mid(mid)
        } else {
            Way::Library(Box::new(Gemm::new(&kernels.blas, &shape)?))
        };
        Ok(Self { shape, reach, way })
    }

    /// By the library, whatever the shape: what ours are measured against.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    #[doc(hidden)]
    pub fn by_library(kernels: &ProductKernels, shape: GemmShape) -> Result<Self, GpuError> {
        let way = Way::Library(Box::new(Gemm::new(&kernels.blas, &shape)?));
        Ok(Self { shape, reach: shape.reach()?, way })
    }

    /// Which of the ways it goes.
    #[doc(hidden)]
    pub fn way(&self) -> String {
        match &self.way {
            Way::Few(_) => "few".to_owned(),
            Way::Mid(mid) => mid.cut(),
            Way::Library(_) => "library".to_owned(),
        }
    }

    /// Times every algorithm that the library proposes on operands that are as cold as in use, and keeps the fastest:
    /// `weights` are the matrices of several layers. There is nothing to choose for our kernels. Overwrites `out`.
    ///
    /// # Errors
    /// As for [`enqueue`](Self::enqueue).
    pub fn tune(
        &mut self,
        stream: &Stream,
        x: &Region,
        weights: &[&Region],
        out: &Region,
    ) -> Result<(), GpuError> {
        weights.iter().try_for_each(|weight| self.enqueue(stream, x, weight, out))?;
        match &mut self.way {
            Way::Few(_) | Way::Mid(_) => Ok(()),
            Way::Library(product) => product.tune(stream, x, weights, out),
        }
    }

    /// Enqueues the product.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`], [`GpuError::Blas`], [`GpuError::Driver`].
    pub fn enqueue(
        &self,
        stream: &Stream,
        x: &Region,
        weight: &Region,
        out: &Region,
    ) -> Result<(), GpuError> {
        let [x_bytes, weight_bytes, out_bytes] = self.reach;
        x.expect("rows of a product", x_bytes)?;
        weight.expect("weight of a product", weight_bytes)?;
        out.expect("result of a product", out_bytes)?;
        match &self.way {
            Way::Few(product) => product.enqueue(stream, &self.shape, x, weight, out),
            Way::Mid(product) => product.enqueue(stream, &self.shape, x, weight, out),
            Way::Library(product) => product.enqueue(stream, x, weight, out),
        }
    }
}
