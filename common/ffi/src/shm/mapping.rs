//! Memory that is mapped from a file, and every access to it.
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

/// Memory shared with another process.
pub(super) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory that any thread may use; what is done with it concurrently goes through atomics or
// is ordered by the slot protocol of `lane`.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(super) fn new(file: &File, len: usize) -> io::Result<Self> {
        // SAFETY: a new mapping of an open file at an address of the kernel's choice; it aliases nothing of ours.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    /// The word at `at`, which must be a multiple of 4.
    pub(super) fn word(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at + 4 <= self.len, "a word outside of its segment");
        // SAFETY: in bounds and aligned (the mapping starts on a page), alive as long as `self`, and every access to
        // these four bytes in any process is atomic.
        unsafe { AtomicU32::from_ptr(self.start.as_ptr().add(at).cast()) }
    }

    /// Copies into the segment. The caller has the right to write there: before the other side knows the segment, or
    /// because the slot is free.
    pub(super) fn write(&self, at: usize, bytes: &[u8]) {
        assert!(
            at.checked_add(bytes.len()).is_some_and(|end| end <= self.len),
            "a write outside of its segment"
        );
        // SAFETY: in bounds; the source is ours and cannot overlap a mapping that is only written through this
        // function. No reference to the destination exists in this process: see the callers' right to write.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.as_ptr().add(at), bytes.len()) }
    }

    /// The bytes of a slot that this end holds.
    ///
    /// # Safety
    /// Nobody in this process writes to them while the slice lives; that the other process does not is the protocol of
    /// `lane` (a slot is not free while it is held).
    pub(super) unsafe fn slice(&self, at: usize, len: usize) -> &[u8] {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "a slice outside of its segment");
        // SAFETY: in bounds, initialised by the kernel, alive as long as `self`; not written to, says the caller.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(at), len) }
    }

    pub(super) fn read<const N: usize>(&self, at: usize) -> [u8; N] {
        assert!(at + N <= self.len, "a read outside of its segment");
        // SAFETY: in bounds; any byte value is a value. Page 0 is not written to once the segment is known to others.
        unsafe { self.start.as_ptr().add(at).cast::<[u8; N]>().read() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping that `new` made; every borrow of it has ended, since they all borrow from `self`.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}
