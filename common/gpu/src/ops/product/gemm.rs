//! Matrix products by cuBLASLt: planned once for a shape, then enqueued as often as one likes. With a workspace of our
//! own nothing is allocated when one is enqueued, so products can be captured.
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::cublaslt::{result, sys};

use super::{GemmShape, ProductType, WeightOrder};
use crate::{Device, GpuError, Region, Stream};

/// Enough for every algorithm on Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// Algorithms that are timed against each other.
const MAX_CANDIDATES: usize = 12;

/// The library on a device, and memory for its intermediate results: the products that share it run on one stream, one
/// after the other. Clones are the same.
#[derive(Clone, Debug)]
pub(super) struct Blas {
    inner: Arc<Handle>,
}

#[derive(Debug)]
struct Handle {
    raw: sys::cublasLtHandle_t,
    device: Device,
    workspace: Region,
}

// SAFETY: cuBLASLt handles may be used by any thread, also by several at once.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        let _ = self.device.synchronize();
        // SAFETY: made by `Blas::new`, destroyed once; its products have ended.
        let _ = unsafe { result::destroy_handle(self.raw) };
    }
}

impl Blas {
    /// # Errors
    /// [`GpuError::NoLibrary`] without cuBLASLt, [`GpuError::Blas`], [`GpuError::Driver`].
    pub(super) fn new(device: &Device) -> Result<Self, GpuError> {
        // SAFETY: loads libcublasLt if it is there; its constructors ask nothing of us.
        if !unsafe { sys::is_culib_present() } {
            return Err(GpuError::NoLibrary { library: "libcublasLt.so" });
        }
        let workspace = Region::alloc(device, WORKSPACE_BYTES)?;
        let bind = device.context().bind_to_thread();
        bind.map_err(GpuError::driver("choosing the device"))?;
        let raw = result::create_handle().map_err(GpuError::blas("opening cuBLASLt"))?;
        Ok(Self { inner: Arc::new(Handle { raw, device: device.clone(), workspace }) })
    }
}

/// A planned product.
#[derive(Debug)]
pub(super) struct Gemm {
    blas: Blas,
    accumulate: bool,
    operation: Operation,
    /// Row-major matrices seen as column-major ones: the weight is the left factor.
    left: Layout,
    right: Layout,
    out: Layout,
    algorithms: Vec<sys::cublasLtMatmulHeuristicResult_t>,
    chosen: usize,
}

// SAFETY: descriptors are plain memory of the library that is only read after construction; used through &self, and the
// library allows concurrent reads.
unsafe impl Send for Gemm {}

impl Gemm {
    /// Asks the library how it would compute `shape`.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`] for sizes that contradict themselves, [`GpuError::Blas`] when no algorithm fits.
    pub(super) fn new(blas: &Blas, shape: &GemmShape) -> Result<Self, GpuError> {
        let GemmShape { rows, inner, columns, batch, accumulate, .. } = *shape;
        let bf16 = sys::cudaDataType::CUDA_R_16BF;
        let out_type = match shape.out {
            ProductType::Bf16 => bf16,
            ProductType::F32 => sys::cudaDataType::CUDA_R_32F,
        };
        let operation = Operation::new(shape.order)?;
        let left = match shape.order {
            WeightOrder::OutIn => Layout::new(bf16, inner, columns, shape.weight_stride),
            WeightOrder::InOut => Layout::new(bf16, columns, inner, shape.weight_stride),
        }?;
        let right = Layout::new(bf16, inner, rows, shape.x_stride)?;
        let out = Layout::new(out_type, columns, rows, shape.out_stride)?;
        if batch > 1 {
            left.set_batch(batch, shape.weight_batch)?;
            right.set_batch(batch, shape.x_batch)?;
            out.set_batch(batch, shape.out_batch)?;
        }
        let algorithms = candidates(blas, &operation, &left, &right, &out)?;
        Ok(Self { blas: blas.clone(), accumulate, operation, left, right, out, algorithms, chosen: 0 })
    }

    /// Times every algorithm that the library proposes on operands that are as cold as in use, and keeps the fastest:
    /// `weights` are the matrices of several layers. Overwrites `out`.
    ///
    /// # Errors
    /// As for [`enqueue`](Self::enqueue).
    pub(super) fn tune(
        &mut self,
        stream: &Stream,
        x: &Region,
        weights: &[&Region],
        out: &Region,
    ) -> Result<(), GpuError> {
        let mut best = (f64::INFINITY, 0);
        for candidate in 0..self.algorithms.len() {
            self.chosen = candidate;
            let mut time = f64::INFINITY;
            for round in 0..3 {
                let begin = stream.mark(true)?;
                // An algorithm that is proposed and then refused is passed over.
                if weights.iter().any(|weight| self.enqueue(stream, x, weight, out).is_err()) {
                    break;
                }
                let end = stream.mark(true)?;
                stream.synchronize()?;
                if round > 0 {
                    time = time.min(end.us_since(&begin)?);
                }
            }
            if time < best.0 {
                best = (time, candidate);
            }
        }
        self.chosen = best.1;
        Ok(())
    }

    /// Enqueues the product, of operands that are as large as its shape reaches.
    ///
    /// # Errors
    /// [`GpuError::Blas`].
    pub(super) fn enqueue(
        &self,
        stream: &Stream,
        x: &Region,
        weight: &Region,
        out: &Region,
    ) -> Result<(), GpuError> {
        let workspace = &self.blas.inner.workspace;
        [x, weight, out, workspace].into_iter().for_each(|region| stream.keep(region));
        let (alpha, beta) = (1.0f32, if self.accumulate { 1.0f32 } else { 0.0 });
        let device = stream.device();
        device.context().bind_to_thread().map_err(GpuError::driver("choosing the device"))?;
        stream.set_opens_late(false);
        let Some(algorithm) = self.algorithms.get(self.chosen) else {
            return Err(GpuError::unsupported("a matrix product without an algorithm"));
        };
        // SAFETY: descriptors and handle are alive, held by self; operands are as large as the layouts reach, which the caller checked, and are kept
        // until the work is over (freeing waits, graphs keep them); the scalars are read before the call returns.
        let done = unsafe {
            result::matmul(
                self.blas.inner.raw,
                self.operation.0,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                weight.address() as *const c_void,
                self.left.0,
                x.address() as *const c_void,
                self.right.0,
                out.address() as *const c_void,
                self.out.0,
                out.address() as *mut c_void,
                self.out.0,
                &raw const algorithm.algo,
                workspace.address() as *mut c_void,
                workspace.len(),
                stream.raw().cast(),
            )
        };
        done.map_err(GpuError::blas("a matrix product"))
    }
}

fn candidates(
    blas: &Blas,
    operation: &Operation,
    left: &Layout,
    right: &Layout,
    out: &Layout,
) -> Result<Vec<sys::cublasLtMatmulHeuristicResult_t>, GpuError> {
    let wishes = Wishes::new()?;
    // SAFETY: all zero is a valid result to be overwritten: plain numbers.
    let mut found: Vec<sys::cublasLtMatmulHeuristicResult_t> =
        vec![unsafe { std::mem::zeroed() }; MAX_CANDIDATES];
    let mut count = 0;
    // SAFETY: every descriptor is alive; the list has as many places as are asked for.
    let asked = unsafe {
        sys::cublasLtMatmulAlgoGetHeuristic(
            blas.inner.raw,
            operation.0,
            left.0,
            right.0,
            out.0,
            out.0,
            wishes.0,
            MAX_CANDIDATES as i32,
            found.as_mut_ptr(),
            &mut count,
        )
    };
    asked.result().map_err(GpuError::blas("choosing an algorithm"))?;
    found.truncate(usize::try_from(count).unwrap_or(0));
    found.retain(|one| one.state.result().is_ok() && one.workspaceSize <= WORKSPACE_BYTES);
    if found.is_empty() {
        return Err(GpuError::unsupported("a matrix product that cuBLASLt has no algorithm for"));
    }
    Ok(found)
}

/// What is computed: `op(left) · right` in f32.
#[derive(Debug)]
struct Operation(sys::cublasLtMatmulDesc_t);

impl Operation {
    fn new(order: WeightOrder) -> Result<Self, GpuError> {
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let made = result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F);
        let made = Self(made.map_err(GpuError::blas("describing a product"))?);
        if order == WeightOrder::OutIn {
            // CUBLAS_OP_T, which the bindings of this library lack.
            let transposed = 1i32;
            let which = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
            // SAFETY: the descriptor is alive, the attribute an i32.
            let set = unsafe {
                result::set_matmul_desc_attribute(made.0, which, (&raw const transposed).cast(), 4)
            };
            set.map_err(GpuError::blas("describing a product"))?;
        }
        Ok(made)
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

/// Sizes of one operand, column-major.
#[derive(Debug)]
struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(kind: sys::cudaDataType, rows: usize, columns: usize, stride: usize) -> Result<Self, GpuError> {
        let made = result::create_matrix_layout(kind, rows as u64, columns as u64, stride as i64);
        made.map(Self).map_err(GpuError::blas("describing a matrix"))
    }

    fn set_batch(&self, count: usize, stride: usize) -> Result<(), GpuError> {
        use sys::cublasLtMatrixLayoutAttribute_t as Which;
        let (count, stride) = (count as i32, stride as i64);
        // SAFETY: the layout is alive; the attributes are an i32 and an i64.
        let set = unsafe {
            let which = Which::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
            result::set_matrix_layout_attribute(self.0, which, (&raw const count).cast(), 4).and_then(|()| {
                let which = Which::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
                result::set_matrix_layout_attribute(self.0, which, (&raw const stride).cast(), 8)
            })
        };
        set.map_err(GpuError::blas("describing a matrix"))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

/// What an algorithm may use.
struct Wishes(sys::cublasLtMatmulPreference_t);

impl Wishes {
    fn new() -> Result<Self, GpuError> {
        let made = Self(result::create_matmul_pref().map_err(GpuError::blas("describing a product"))?);
        let bytes = WORKSPACE_BYTES;
        let which = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: the preference is alive, the attribute a size.
        let set = unsafe {
            result::set_matmul_pref_attribute(made.0, which, (&raw const bytes).cast(), size_of::<usize>())
        };
        set.map_err(GpuError::blas("describing a product"))?;
        Ok(made)
    }
}

impl Drop for Wishes {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}
