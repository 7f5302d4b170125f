//! libtorch on a CUDA device: its CUDA part loaded at run time, its operations on a stream of ours, and memory shown to
//! it or taken from it.
//!
//! The binaries are linked with libtorch's CPU part alone, so that one binary serves machines with and without a GPU. [`load`]
//! brings in the rest; it must come before any tensor operation of the process, because libtorch looks for CUDA once.
use std::any::Any;
use std::ffi::{CStr, CString, c_char, c_void};
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};

use afd_gpu::{Device, Region, Stream};
use tch::{Kind, Tensor};

use crate::FfiError;

/// Why libtorch cannot use a GPU. A retry does not help.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// libtorch's CUDA part, or something it needs, is not on the library path.
    #[error("libtorch's CUDA part cannot be loaded: {0} (is the CUDA build of libtorch on LD_LIBRARY_PATH?)")]
    Library(String),
    /// It is there, but it finds no usable GPU.
    #[error("libtorch finds no usable GPU")]
    Unavailable,
    /// There are fewer devices than that.
    #[error("libtorch finds {count} GPUs, no cuda:{ordinal}")]
    NoDevice {
        /// What was asked for.
        ordinal: usize,
        /// How many there are.
        count: i64,
    },
    /// A function of its C interface failed; it says why on standard error.
    #[error("libtorch: {0} failed")]
    Call(&'static str),
}

/// Loads libtorch's CUDA part and checks that it can use device `ordinal`. To be called before any tensor exists.
///
/// # Errors
/// [`CudaError`].
pub fn load(ordinal: usize) -> Result<(), CudaError> {
    // SAFETY: a constant name. Constructors of the library register its operators and have no preconditions. It is never
    // closed.
    let handle = unsafe { libc::dlopen(c"libtorch_cuda.so".as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if handle.is_null() {
        return Err(CudaError::Library(last_load_error()));
    }
    if !tch::Cuda::is_available() {
        return Err(CudaError::Unavailable);
    }
    let count = tch::Cuda::device_count();
    if i64::try_from(ordinal).is_ok_and(|ordinal| ordinal < count) {
        Ok(())
    } else {
        Err(CudaError::NoDevice { ordinal, count })
    }
}

fn last_load_error() -> String {
    // SAFETY: dlerror returns null or a string that is good until this thread's next dl call; it is copied before.
    unsafe {
        let text: *const c_char = libc::dlerror();
        if text.is_null() { "unknown".into() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
    }
}

type CreateGuard = unsafe extern "C" fn(*mut c_void, i32, *mut *mut c_void) -> i32;
type DeleteGuard = unsafe extern "C" fn(*mut c_void) -> i32;

fn symbol(name: &'static str) -> Result<*mut c_void, CudaError> {
    let text = CString::new(name).map_err(|_| CudaError::Call(name))?;
    // SAFETY: a string that ends with zero; every loaded library may be looked at.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, text.as_ptr()) };
    if found.is_null() { Err(CudaError::Call(name)) } else { Ok(found) }
}

/// While it lives, libtorch operations of this thread run on a stream of ours, in order with everything else on it.
pub struct StreamGuard {
    guard: *mut c_void,
    delete: DeleteGuard,
    _stream: Arc<dyn Any + Send + Sync>,
    // The guard is the thread's: it must not leave it.
    _not_send: PhantomData<*mut ()>,
}

impl StreamGuard {
    /// # Errors
    /// [`CudaError::Call`], also before [`load`].
    pub fn new(stream: &Stream) -> Result<Self, CudaError> {
        let (create, delete) = ("aoti_torch_create_cuda_stream_guard", "aoti_torch_delete_cuda_stream_guard");
        let ordinal = i32::try_from(stream.device().ordinal()).map_err(|_| CudaError::Call(create))?;
        // SAFETY: both symbols are libtorch's, with these signatures (torch/csrc/inductor/aoti_torch/c/shim.h).
        let (new, delete) = unsafe {
            (
                std::mem::transmute::<*mut c_void, CreateGuard>(symbol(create)?),
                std::mem::transmute::<*mut c_void, DeleteGuard>(symbol(delete)?),
            )
        };
        let mut guard = std::ptr::null_mut();
        // SAFETY: the stream is alive and of this device, and is kept until the guard is gone.
        if unsafe { new(stream.raw(), ordinal, &mut guard) } != 0 {
            return Err(CudaError::Call(create));
        }
        Ok(Self { guard, delete, _stream: stream.handle(), _not_send: PhantomData })
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        // SAFETY: made by `new` on this thread, deleted once.
        unsafe { (self.delete)(self.guard) };
    }
}

/// Sequences of some rows each, packed one after the other, of which every one attends to its own context: the rows are
/// the context's last.
#[derive(Debug)]
pub struct PackedSequences {
    /// Where each one's rows begin, and where the last one's end: `[sequences + 1]` i32, on the device.
    pub row_starts: Tensor,
    /// The same of their contexts.
    pub context_starts: Tensor,
    /// Most rows of one.
    pub max_rows: i64,
    /// Longest context.
    pub max_context: i64,
}

type FlashAttention = unsafe extern "C" fn(
    *const c_void,
    *const c_void,
    *const c_void,
    *const *const c_void,
    *const *const c_void,
    i64,
    i64,
    f64,
    i32,
    i32,
    *const f64,
    *const i64,
    *const i64,
    *const *const c_void,
    *const *const c_void,
    *mut *mut c_void,
    *mut *mut c_void,
    *mut *mut c_void,
    *mut *mut c_void,
    *mut *mut c_void,
) -> i32;

/// Causal attention of packed sequences by libtorch's flash attention, which `tch` does not know: `queries`
/// `[rows, heads, dim]`, `keys` and `values` `[context, kv heads, dim]`, bf16 or f16, in rows that lie together; scores are
/// scaled by `scale`. Returns `[rows, heads, dim]`.
///
/// # Errors
/// [`CudaError::Call`] when libtorch refuses (another type, an odd `dim`, tensors that are not on the device).
pub fn flash_attention(
    (queries, keys, values): (&Tensor, &Tensor, &Tensor),
    sequences: &PackedSequences,
    scale: f64,
) -> Result<Tensor, CudaError> {
    let name = "aoti_torch_cuda__flash_attention_forward";
    // SAFETY: the symbol is libtorch's, with this signature (torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h).
    let call = unsafe { std::mem::transmute::<*mut c_void, FlashAttention>(symbol(name)?) };
    let handle = |tensor: &Tensor| tensor.as_ptr().cast::<c_void>();
    let PackedSequences { row_starts, context_starts, max_rows, max_context } = sequences;
    let (rows, context) = (handle(row_starts), handle(context_starts));
    let (mut out, mut more) = (null_mut(), [null_mut(); 4]);
    let [lse, seed, unused, mask] = &mut more;
    let none: *const c_void = std::ptr::null();
    // SAFETY: every handle is a live tensor, as tch and libtorch both know them; optional ones are pointers to handles or
    // null; results are written to places of ours.
    let failed = unsafe {
        call(
            handle(queries),
            handle(keys),
            handle(values),
            &rows,
            &context,
            *max_rows,
            *max_context,
            0.0,
            1,
            0,
            &scale,
            none.cast(),
            none.cast(),
            none.cast(),
            none.cast(),
            &mut out,
            lse,
            seed,
            unused,
            mask,
        )
    };
    if failed != 0 {
        return Err(CudaError::Call(name));
    }
    for tensor in more {
        // SAFETY: results are the caller's to free, as tensors of tch are.
        drop(unsafe { Tensor::from_ptr(tensor.cast()) });
    }
    // SAFETY: as above.
    Ok(unsafe { Tensor::from_ptr(out.cast()) })
}

/// The memory of a dense CUDA tensor, which it keeps. Nobody may resize the tensor; who writes to it, and when, is the
/// business of whoever orders the work on both.
///
/// # Errors
/// [`FfiError::NotASlice`] when the tensor is not contiguous or not on `device`.
pub fn region(device: &Device, tensor: &Tensor) -> Result<Region, FfiError> {
    let kind = tensor.f_kind()?;
    let here = tensor.device() == tch::Device::Cuda(device.ordinal());
    if !here || tensor.is_sparse() || !tensor.is_contiguous() {
        return Err(FfiError::NotASlice(format!("{:?} {kind:?} on {:?}", tensor.size(), tensor.device())));
    }
    let bytes = tensor.numel() * kind.elt_size_in_bytes();
    let address = tensor.data_ptr().addr() as u64;
    // A tensor may be sent but not shared; nobody ever takes it out of its lock.
    let keep = Box::new(Mutex::new(tensor.shallow_clone()));
    // SAFETY: a dense tensor's memory is `bytes` long and lives as long as a clone of the tensor, which is kept; the
    // allocator gives it to nobody else meanwhile.
    Ok(unsafe { Region::foreign(device, address, bytes, keep) })
}

/// `region` as a tensor, row-major. libtorch carries no lifetime along: the region's memory is never freed from now on,
/// so this is for what lives as long as the process.
///
/// # Errors
/// [`FfiError::OutOfRange`] when the region is too small, [`FfiError::Misaligned`], or libtorch's.
pub fn view(device: &Device, region: &Region, shape: &[i64], kind: Kind) -> Result<Tensor, FfiError> {
    let elements = shape.iter().try_fold(1usize, |all, &size| all.checked_mul(usize::try_from(size).ok()?));
    let bytes = elements.and_then(|elements| elements.checked_mul(kind.elt_size_in_bytes()));
    let end = bytes.unwrap_or(usize::MAX);
    if end > region.len() {
        return Err(FfiError::OutOfRange { begin: 0, end, len: region.len() });
    }
    let align = kind.elt_size_in_bytes();
    if !region.address().is_multiple_of(align as u64) {
        return Err(FfiError::Misaligned { align });
    }
    let mut strides = vec![1i64; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim].max(1);
    }
    let kept: &'static Region = Box::leak(Box::new(region.clone()));
    let pointer = std::ptr::with_exposed_provenance::<u8>(kept.address() as usize);
    // SAFETY: the range lies inside device memory that is never freed (a clone of its owner was leaked), is aligned, and
    // every bit pattern is a value of a numeric kind. The pointer is only handed to the device.
    Ok(unsafe { Tensor::f_from_blob(pointer, shape, &strides, kind, tch::Device::Cuda(device.ordinal())) }?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_gpu_it_says_so() {
        if let Some(why) = Device::missing(1) {
            let error = load(0).unwrap_err();
            assert!(matches!(error, CudaError::Library(_) | CudaError::Unavailable), "{error}");
            return eprintln!("{why}");
        }
        load(0).unwrap();
        let device = Device::open(0).unwrap();
        let stream = device.stream().unwrap();
        let _guard = StreamGuard::new(&stream).unwrap();
        let ones = Tensor::ones([3, 5], (Kind::Float, tch::Device::Cuda(0)));
        let memory = region(&device, &ones).unwrap();
        assert_eq!(memory.read_on::<f32>(&stream).unwrap(), [1.0; 15]);
        let mut again = view(&device, &memory, &[5, 3], Kind::Float).unwrap();
        let _ = again.fill_(2.0);
        assert_eq!(ones.sum(Kind::Float).double_value(&[]), 30.0);
        assert!(view(&device, &memory, &[16], Kind::Float).is_err());
        assert!(region(&device, &ones.tr()).is_err());
    }
}
