//! Making, opening and mapping a segment.
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use super::lane::{Receiver, Sender};
use crate::FfiError;

const PAGE: usize = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"AFDSHM1\0");
const NONCE_AT: usize = 8;
const SLOTS_AT: usize = 24;
const SLOT_BYTES_AT: usize = 32;
/// Within a lane's control page: the words that change are on lines of their own.
const HEAD_AT: usize = 0;
const SLEEPING_AT: usize = 64;
const STATES_AT: usize = 128;

/// Random bytes that prove that both sides see the same segment.
pub type Nonce = [u8; 16];

/// Which lane is whose: the first end sends on lane 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The one that dialed.
    First,
    /// The one that answered.
    Second,
}

/// Size of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    slots: u32,
    slot_bytes: usize,
}

impl Shape {
    /// Lanes of `slots` slots of `slot_bytes`; `None` when there is nothing to share or an address could not express it.
    pub fn new(slots: u32, slot_bytes: usize) -> Option<Self> {
        let shape = Self { slots, slot_bytes };
        let per_lane = slot_bytes.checked_add(PAGE)?.checked_mul(slots as usize)?;
        let total = per_lane.checked_add(8 * slots as usize + 2 * PAGE)?.checked_mul(2)?;
        (slots > 0 && slot_bytes > 0 && isize::try_from(total).is_ok()).then_some(shape)
    }

    pub(super) fn slots(self) -> u32 {
        self.slots
    }

    pub(super) fn slot_bytes(self) -> usize {
        self.slot_bytes
    }

    /// Bytes of the whole file.
    pub fn total_bytes(self) -> usize {
        self.slot_at(1, self.slots)
    }

    fn lane_control_bytes(self) -> usize {
        (STATES_AT + 8 * self.slots as usize).next_multiple_of(PAGE)
    }

    fn lane_at(self, lane: usize) -> usize {
        PAGE + lane * self.lane_control_bytes()
    }

    pub(super) fn head_at(self, lane: usize) -> usize {
        self.lane_at(lane) + HEAD_AT
    }

    pub(super) fn sleeping_at(self, lane: usize) -> usize {
        self.lane_at(lane) + SLEEPING_AT
    }

    pub(super) fn state_at(self, lane: usize, slot: u32) -> usize {
        self.lane_at(lane) + STATES_AT + 4 * slot as usize
    }

    pub(super) fn queue_at(self, lane: usize, place: u32) -> usize {
        self.state_at(lane, self.slots) + 4 * place as usize
    }

    pub(super) fn slot_at(self, lane: usize, slot: u32) -> usize {
        let stride = self.slot_bytes.next_multiple_of(PAGE);
        self.lane_at(2) + (lane * self.slots as usize + slot as usize) * stride
    }
}

/// A mapped segment.
pub struct Segment {
    mapping: Arc<Mapping>,
    shape: Shape,
}

impl Segment {
    /// Creates the file at `path` (in `/dev/shm`, or on any other memory file system) with mode 0600, with all of its
    /// memory really allocated: later writes cannot fail for lack of it.
    ///
    /// # Errors
    /// [`FfiError::Os`]: the file exists, or there is not that much memory. Nothing is left behind.
    pub fn create(path: &Path, shape: Shape, nonce: &Nonce) -> Result<Self, FfiError> {
        let options = |file: &mut OpenOptions| file.create_new(true).mode(0o600).open(path);
        let file = options(&mut open_options()).map_err(|source| failed("creating", path, source))?;
        let made =
            allocate(&file, shape.total_bytes()).and_then(|()| Mapping::new(&file, shape.total_bytes()));
        let mapping = made.map_err(|source| {
            let _ = std::fs::remove_file(path);
            failed(&format!("allocating {} bytes in", shape.total_bytes()), path, source)
        })?;
        let segment = Self { mapping: Arc::new(mapping), shape };
        segment.mapping.write(NONCE_AT, nonce);
        segment.mapping.write(SLOTS_AT, &shape.slots.to_ne_bytes());
        segment.mapping.write(SLOT_BYTES_AT, &(shape.slot_bytes as u64).to_ne_bytes());
        segment.mapping.write(0, &MAGIC.to_ne_bytes());
        Ok(segment)
    }

    /// Maps what [`create`](Self::create) made.
    ///
    /// # Errors
    /// [`FfiError::Os`]: there is no such file here (the other side may be on another host or in another container), or
    /// it is not a segment of this shape.
    pub fn open(path: &Path, shape: Shape) -> Result<Self, FfiError> {
        let opened = open_options().open(path).and_then(|file| {
            let found = file.metadata()?.len();
            if found != shape.total_bytes() as u64 {
                let what = format!("has {found} bytes, {} were agreed", shape.total_bytes());
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
            Mapping::new(&file, shape.total_bytes())
        });
        let mapping = opened.map_err(|source| failed("opening", path, source))?;
        let expected = [&MAGIC.to_ne_bytes()[..], &(shape.slot_bytes as u64).to_ne_bytes()].concat();
        let found = [mapping.read::<8>(0), mapping.read::<8>(SLOT_BYTES_AT)].concat();
        if found != expected || mapping.read(SLOTS_AT) != shape.slots.to_ne_bytes() {
            let what = io::Error::new(io::ErrorKind::InvalidData, "not a segment of the agreed shape");
            return Err(failed("opening", path, what));
        }
        Ok(Self { mapping: Arc::new(mapping), shape })
    }

    /// What the creator wrote.
    pub fn nonce(&self) -> Nonce {
        self.mapping.read(NONCE_AT)
    }

    /// The two lanes as `side` sees them. An end calls this once.
    pub fn lanes(self, side: Side) -> (Sender, Receiver) {
        let (out, into) = match side {
            Side::First => (0, 1),
            Side::Second => (1, 0),
        };
        (
            Sender::new(Arc::clone(&self.mapping), self.shape, out),
            Receiver::new(self.mapping, self.shape, into),
        )
    }
}

fn open_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NOFOLLOW);
    options
}

fn failed(what: &str, path: &Path, source: io::Error) -> FfiError {
    FfiError::Os { what: format!("{what} {}", path.display()), source }
}

fn allocate(file: &File, bytes: usize) -> io::Result<()> {
    let len = libc::off_t::try_from(bytes).map_err(|_| io::ErrorKind::FileTooLarge)?;
    // SAFETY: a call on an open descriptor, with no memory of ours involved.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, len) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

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
    fn new(file: &File, len: usize) -> io::Result<Self> {
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

    fn read<const N: usize>(&self, at: usize) -> [u8; N] {
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
