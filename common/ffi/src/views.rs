//! Views of CPU tensors whose rows our own loops walk, and the error of a call whose tensors do not fit.
use std::ops::Range;

use tch::{Device, Kind, Tensor};

/// A call that does not fit its tensors.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ShapeError(pub(crate) String);

/// Refuses with the formatted words unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($words:tt)*) => {
        if !$condition {
            return Err($crate::views::ShapeError(format!($($words)*)));
        }
    };
}
pub(crate) use ensure;

/// A strided view of a CPU tensor with three dimensions, the last of them contiguous.
pub(crate) struct Rows3<E> {
    first: *mut E,
    row_stride: usize,
    head_stride: usize,
    pub(crate) rows: usize,
    pub(crate) heads: usize,
    pub(crate) len: usize,
}

impl<E> Rows3<E> {
    pub(crate) fn new(what: &str, tensor: &Tensor, kind: Kind) -> Result<Self, ShapeError> {
        check_cpu(what, tensor, kind)?;
        let (size, stride) = (tensor.size(), tensor.stride());
        ensure!(size.len() == 3, "{what}: shape {size:?}, expected [rows, heads, len]");
        ensure!(size[2] <= 1 || stride[2] == 1, "{what}: the last dimension is not contiguous");
        Ok(Self {
            first: tensor.data_ptr().cast(),
            row_stride: stride[0] as usize,
            head_stride: stride[1] as usize,
            rows: size[0] as usize,
            heads: size[1] as usize,
            len: size[2] as usize,
        })
    }

    /// The addresses between its first and its last element.
    pub(crate) fn span(&self) -> Range<usize> {
        let last = |count: usize, stride: usize| count.saturating_sub(1) * stride;
        let elements = last(self.rows, self.row_stride) + last(self.heads, self.head_stride) + self.len;
        let from = self.first as usize;
        from..from + elements * size_of::<E>()
    }

    /// Whether no element has two places in it.
    pub(crate) fn is_injective(&self) -> bool {
        let (rows, heads) = ((self.rows, self.row_stride), (self.heads, self.head_stride));
        let nested = |outer: (usize, usize), inner: (usize, usize)| {
            (inner.0 <= 1 || inner.1 >= self.len)
                && (outer.0 <= 1 || outer.1 >= inner.0.saturating_sub(1) * inner.1 + self.len)
        };
        nested(rows, heads) || nested(heads, rows)
    }

    /// Address of a row's head.
    ///
    /// # Safety
    /// `row` and `head` are within bounds.
    pub(crate) unsafe fn at(&self, row: usize, head: usize) -> *mut E {
        debug_assert!(row < self.rows && head < self.heads);
        // SAFETY: libtorch keeps every element of a tensor's shape inside its storage.
        unsafe { self.first.add(row * self.row_stride + head * self.head_stride) }
    }
}

/// That a tensor's memory may be touched as `kind`.
pub(crate) fn check_cpu(what: &str, tensor: &Tensor, kind: Kind) -> Result<(), ShapeError> {
    ensure!(tensor.device() == Device::Cpu, "{what}: on {:?}, expected the CPU", tensor.device());
    ensure!(tensor.kind() == kind, "{what}: {:?}, expected {kind:?}", tensor.kind());
    Ok(())
}
