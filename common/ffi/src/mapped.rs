//! Files mapped read-only, and tensors that are views of them.
use std::fs::File;
use std::ops::Range;
use std::path::Path;

use memmap2::{Advice, Mmap, UncheckedAdvice};
use tch::{Device, Kind, Tensor};

use crate::FfiError;

/// A file mapped read-only for the rest of the process's life.
///
/// It is never unmapped: a tensor made of it can be cloned, narrowed and sent to other threads, and libtorch does not
/// carry a lifetime along. A process serves one checkpoint, so nothing is lost but address space; the pages themselves
/// belong to the page cache and are given back under pressure, or by [`release`](Self::release).
///
/// Whoever deploys the checkpoint must replace its files (rename), never shorten or rewrite them in place: a page that
/// vanishes under a mapping ends the process with SIGBUS. In-place operations on a view fault as well.
#[derive(Debug)]
pub struct MappedFile {
    map: Mmap,
}

/// How a file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// Long pieces: what follows is read ahead.
    InOrder,
    /// A page here and there: no others are read along.
    Scattered,
}

impl MappedFile {
    /// Maps a whole file. Reads nothing of it yet.
    ///
    /// # Errors
    /// [`FfiError::Os`]; a retry helps only if the file was not there yet.
    pub fn open(path: &Path) -> Result<&'static Self, FfiError> {
        let fail = |source| FfiError::Os { what: path.display().to_string(), source };
        let file = File::open(path).map_err(fail)?;
        // SAFETY: the mapping is private and read-only, so this process never writes to it. That no other process
        // changes the file meanwhile is the deployer's part of the contract above.
        let map = unsafe { Mmap::map(&file) }.map_err(fail)?;
        Ok(Box::leak(Box::new(Self { map })))
    }

    /// Says how it is going to be read next, which costs less then. Takes part in nothing else.
    pub fn expect(&self, reads: Reads) {
        let advice = match reads {
            Reads::InOrder => Advice::Normal,
            Reads::Scattered => Advice::Random,
        };
        // Advice: a kernel that cannot take it reads as it always does.
        let _ = self.map.advise(advice);
    }

    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// A tensor that is `shape` elements of `kind` from byte `offset` on, row-major, in place.
    ///
    /// # Errors
    /// [`FfiError::OutOfRange`], [`FfiError::Misaligned`] (copy the bytes then), or libtorch's.
    pub fn tensor(&'static self, offset: usize, shape: &[i64], kind: Kind) -> Result<Tensor, FfiError> {
        let elements =
            shape.iter().try_fold(1usize, |product, &size| product.checked_mul(usize::try_from(size).ok()?));
        let end = elements
            .and_then(|elements| elements.checked_mul(kind.elt_size_in_bytes()))
            .and_then(|bytes| bytes.checked_add(offset))
            .unwrap_or(usize::MAX);
        let bytes = self.range(offset..end)?;
        let align = kind.elt_size_in_bytes();
        if !bytes.as_ptr().addr().is_multiple_of(align) {
            return Err(FfiError::Misaligned { align });
        }
        let mut strides = vec![1i64; shape.len()];
        for dim in (1..shape.len()).rev() {
            strides[dim - 1] = strides[dim] * shape[dim].max(1);
        }
        // SAFETY: the range was checked to lie inside the mapping, is aligned, and lives for ever (`&'static self`);
        // every bit pattern is a value of a numeric kind. Nobody writes: in-place operations on a view fault.
        Ok(unsafe { Tensor::f_from_blob(bytes.as_ptr(), shape, &strides, kind, Device::Cpu) }?)
    }

    /// Asks the kernel to read these bytes ahead.
    pub fn prefetch(&self, range: Range<usize>) {
        if self.range(range.clone()).is_ok() && !range.is_empty() {
            // Advice only: a kernel that refuses it reads the pages when they are used.
            let _ = self.map.advise_range(Advice::WillNeed, range.start, range.len());
        }
    }

    /// Drops the pages that lie wholly within these bytes from this process's memory, after they were copied. Using
    /// them again is legal and reads them anew.
    pub fn release(&self, range: Range<usize>) {
        let page = process_page_bytes();
        let begin = range.start.next_multiple_of(page);
        let end = range.end / page * page;
        if begin < end && self.range(begin..end).is_ok() {
            // SAFETY: the mapping is file-backed, read-only and private without changes of its own, so dropped pages
            // come back from the file with the same content. A refusal only means that memory is kept.
            let _ = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, begin, end - begin) };
        }
    }

    fn range(&self, range: Range<usize>) -> Result<&[u8], FfiError> {
        let len = self.map.len();
        self.map.get(range.clone()).ok_or(FfiError::OutOfRange { begin: range.start, end: range.end, len })
    }
}

fn process_page_bytes() -> usize {
    // SAFETY: `sysconf` has no preconditions.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).ok().filter(|bytes| bytes.is_power_of_two()).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapped(bytes: &[u8]) -> &'static MappedFile {
        let path = std::env::temp_dir().join(format!("afd-mapped-{}-{}", std::process::id(), bytes.len()));
        std::fs::write(&path, bytes).unwrap();
        let file = MappedFile::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file
    }

    #[test]
    fn a_view_shows_the_bytes_and_outlives_the_name() {
        let bytes: Vec<u8> = (0..6u32).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let view = mapped(&bytes).tensor(4, &[2, 2], Kind::Float).unwrap();
        assert_eq!(Vec::<Vec<f32>>::try_from(&view).unwrap(), [[1.0, 2.0], [3.0, 4.0]]);
    }

    #[test]
    fn a_view_outside_or_askew_is_refused() {
        let file = mapped(&[0; 20]);
        assert!(matches!(file.tensor(4, &[2, 3], Kind::Float), Err(FfiError::OutOfRange { len: 20, .. })));
        assert!(matches!(file.tensor(0, &[i64::MAX, 8], Kind::Float), Err(FfiError::OutOfRange { .. })));
        assert!(matches!(file.tensor(0, &[-1], Kind::Float), Err(FfiError::OutOfRange { .. })));
        assert!(matches!(file.tensor(2, &[2], Kind::Float), Err(FfiError::Misaligned { align: 4 })));
    }

    #[test]
    fn released_pages_come_back_from_the_file() {
        let file = mapped(&vec![7; 3 * 65536]);
        assert!(file.bytes().iter().all(|&byte| byte == 7));
        file.release(100..3 * 65536);
        file.prefetch(0..3 * 65536);
        assert!(file.bytes().iter().all(|&byte| byte == 7));
        file.release(0..usize::MAX);
    }
}
