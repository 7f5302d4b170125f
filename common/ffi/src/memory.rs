//! The memory of a dense CPU tensor as a slice: how rows get onto a link and logits into the sampler without a copy.
//!
//! A tensor's memory may be shared by others (`shallow_clone`, views), which Rust's borrow rules cannot see. The caller
//! keeps the rule that libtorch itself has: while a slice lives, no operation writes to a tensor that shares its memory.
//! Here every tensor is used by the one thread that owns the device, so that means: take the slice, copy or send it, let
//! it go, before the next in-place operation.
use tch::{Device, Kind, Tensor};

use crate::FfiError;

/// The bytes of a tensor, row-major, in the machine's order.
///
/// # Errors
/// [`FfiError::NotASlice`] when the tensor is not contiguous or not on the CPU.
pub fn bytes(tensor: &Tensor) -> Result<&[u8], FfiError> {
    slice(tensor, tensor.f_kind()?)
}

/// The same for writing.
///
/// # Errors
/// As [`bytes`].
pub fn bytes_mut(tensor: &mut Tensor) -> Result<&mut [u8], FfiError> {
    let (pointer, len) = checked(tensor, tensor.f_kind()?, 1)?;
    if len == 0 {
        return Ok(&mut []);
    }
    // SAFETY: `checked` found `len` bytes of dense CPU memory at `pointer`, which the tensor keeps alive while it is
    // borrowed; the module's rule, kept by the caller, is that nobody else touches the memory meanwhile.
    Ok(unsafe { std::slice::from_raw_parts_mut(pointer, len) })
}

/// The elements of a [`Kind::Float`] tensor.
///
/// # Errors
/// As [`bytes`], or when the tensor is of another kind.
pub fn f32s(tensor: &Tensor) -> Result<&[f32], FfiError> {
    slice(tensor, Kind::Float)
}

/// The elements of a [`Kind::Int64`] tensor.
///
/// # Errors
/// As [`bytes`], or when the tensor is of another kind.
pub fn i64s(tensor: &Tensor) -> Result<&[i64], FfiError> {
    slice(tensor, Kind::Int64)
}

/// Plain numbers: every bit pattern is a value.
trait Plain {}
impl Plain for u8 {}
impl Plain for f32 {}
impl Plain for i64 {}

fn slice<T: Plain>(tensor: &Tensor, kind: Kind) -> Result<&[T], FfiError> {
    let (pointer, len) = checked(tensor, kind, size_of::<T>())?;
    if len == 0 {
        return Ok(&[]);
    }
    // SAFETY: `checked` found `len` elements of dense CPU memory at `pointer`, aligned for `T`, of which every bit
    // pattern is a value (`Plain`). The tensor keeps it alive while it is borrowed; that nobody writes meanwhile is the
    // module's rule, kept by the caller.
    Ok(unsafe { std::slice::from_raw_parts(pointer.cast::<T>(), len) })
}

/// Where the tensor's memory is and how many elements of `element_bytes` it holds.
fn checked(tensor: &Tensor, kind: Kind, element_bytes: usize) -> Result<(*mut u8, usize), FfiError> {
    let refuse = || FfiError::NotASlice(format!("{tensor:?}"));
    let found = tensor.f_kind()?;
    if found != kind || tensor.device() != Device::Cpu || tensor.is_sparse() || tensor.is_mkldnn() {
        return Err(refuse());
    }
    if !tensor.is_contiguous() {
        return Err(refuse());
    }
    let bytes = tensor.numel() * found.elt_size_in_bytes();
    if bytes == 0 {
        return Ok((std::ptr::null_mut(), 0));
    }
    let pointer = tensor.data_ptr().cast::<u8>();
    if pointer.is_null() || !pointer.addr().is_multiple_of(element_bytes) {
        return Err(refuse());
    }
    Ok((pointer, bytes / element_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_show_and_change_the_tensor() {
        let mut tensor = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0]).view([2, 2]);
        assert_eq!(f32s(&tensor).unwrap(), [1.0, 2.0, 3.0, 4.0]);
        bytes_mut(&mut tensor).unwrap()[..4].copy_from_slice(&9.0f32.to_le_bytes());
        assert_eq!(tensor.double_value(&[0, 0]), 9.0);
        assert_eq!(bytes(&tensor.to_kind(Kind::BFloat16)).unwrap().len(), 8);
    }

    #[test]
    fn other_layouts_and_kinds_are_refused_and_nothing_is_an_empty_slice() {
        let tensor = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0]).view([2, 2]);
        assert!(matches!(f32s(&tensor.tr()), Err(FfiError::NotASlice(_))));
        assert!(matches!(i64s(&tensor), Err(FfiError::NotASlice(_))));
        assert!(bytes(&tensor.narrow(0, 0, 0)).unwrap().is_empty());
    }
}
