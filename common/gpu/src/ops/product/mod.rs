//! Matrix products: by a kernel of ours for few rows ([`FewProducts`]), otherwise by cuBLASLt ([`Gemm`]).
mod few;
mod gemm;
mod shape;

pub use few::{FewProduct, FewProducts};
pub use gemm::{Blas, Gemm};
pub use shape::{GemmShape, ProductType, WeightOrder};

use crate::{GpuError, Region, Stream};

/// A planned product, whichever way.
#[derive(Debug)]
pub enum Product {
    /// By our kernel.
    Few(FewProduct),
    /// By the library.
    Library(Box<Gemm>),
}

impl Product {
    /// By our kernel where there is one for `shape`.
    ///
    /// # Errors
    /// As [`Gemm::new`].
    pub fn new(blas: &Blas, few: &FewProducts, shape: GemmShape) -> Result<Self, GpuError> {
        match few.plan(shape)? {
            Some(product) => Ok(Self::Few(product)),
            None => Ok(Self::Library(Box::new(Gemm::new(blas, shape)?))),
        }
    }

    /// As [`Gemm::tune`]; there is nothing to choose for our kernel.
    ///
    /// # Errors
    /// As there.
    pub fn tune(
        &mut self,
        stream: &Stream,
        x: &Region,
        weights: &[&Region],
        out: &Region,
    ) -> Result<(), GpuError> {
        match self {
            Self::Few(product) => {
                weights.iter().try_for_each(|weight| product.enqueue(stream, x, weight, out))
            }
            Self::Library(product) => product.tune(stream, x, weights, out),
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
        match self {
            Self::Few(product) => product.enqueue(stream, x, weight, out),
            Self::Library(product) => product.enqueue(stream, x, weight, out),
        }
    }
}
