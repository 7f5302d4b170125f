//! Large tensors of zeros whose pages exist only once they are written.
use memmap2::MmapMut;
use tch::{Device, Kind, Tensor};

use crate::FfiError;

/// A tensor `shape` of zeros of `kind` in anonymous memory. libtorch's own zeros are written one by one: a KV cache of
/// gigabytes then costs seconds at the start and all its memory at once.
///
/// The memory is never given back, because libtorch carries no lifetime along: for what lives as long as the process.
///
/// # Errors
/// [`FfiError::Os`] when there is not that much address space, or libtorch's.
pub fn zeroed_for_life(shape: &[i64], kind: Kind) -> Result<Tensor, FfiError> {
    let elements = shape.iter().try_fold(1usize, |all, &size| all.checked_mul(usize::try_from(size).ok()?));
    let bytes = elements.and_then(|elements| elements.checked_mul(kind.elt_size_in_bytes()));
    let bytes = bytes.ok_or_else(|| FfiError::Os {
        what: format!("a tensor of shape {shape:?}"),
        source: std::io::ErrorKind::OutOfMemory.into(),
    })?;
    if bytes == 0 {
        return Ok(Tensor::f_zeros(shape, (kind, Device::Cpu))?);
    }
    let map = MmapMut::map_anon(bytes)
        .map_err(|source| FfiError::Os { what: format!("{bytes} bytes of memory"), source })?;
    let memory: &'static mut MmapMut = Box::leak(Box::new(map));
    let mut strides = vec![1i64; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim].max(1);
    }
    // SAFETY: the mapping is page-aligned, exactly as long as the tensor, writable, private and never unmapped; the only
    // reference to it ends here, so the tensor is its one owner from now on. Zero bytes are zeros of every numeric kind.
    Ok(unsafe { Tensor::f_from_blob(memory.as_mut_ptr(), shape, &strides, kind, Device::Cpu) }?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_zero_has_the_shape_and_can_be_written() {
        let mut tensor = zeroed_for_life(&[3, 5, 7], Kind::BFloat16).unwrap();
        assert_eq!((tensor.size(), tensor.kind()), (vec![3, 5, 7], Kind::BFloat16));
        assert_eq!(tensor.abs().sum(Kind::Float).double_value(&[]), 0.0);
        let _ = tensor.narrow(0, 1, 1).fill_(2.0);
        assert_eq!(tensor.sum(Kind::Float).double_value(&[]), 70.0);
        let _ = tensor.zero_();
        assert!(zeroed_for_life(&[0, 4], Kind::Float).is_ok());
        assert!(zeroed_for_life(&[i64::MAX, 8], Kind::Float).is_err());
    }
}
