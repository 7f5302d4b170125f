//! Making and opening a segment.
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use super::lane::{Receiver, Sender};
use super::mapping::Mapping;
use super::shape::{NONCE_AT, SLOT_BYTES_AT, SLOTS_AT, Shape};
use crate::FfiError;

const MAGIC: u64 = u64::from_le_bytes(*b"AFDSHM2\0");

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
        segment.mapping.write(SLOTS_AT, &shape.slots().to_ne_bytes());
        segment.mapping.write(SLOT_BYTES_AT, &(shape.slot_bytes() as u64).to_ne_bytes());
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
        let expected = [&MAGIC.to_ne_bytes()[..], &(shape.slot_bytes() as u64).to_ne_bytes()].concat();
        let found = [mapping.read::<8>(0), mapping.read::<8>(SLOT_BYTES_AT)].concat();
        if found != expected || mapping.read(SLOTS_AT) != shape.slots().to_ne_bytes() {
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
