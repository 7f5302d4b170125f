//! Checksums of headers, which are CRC-32C, and of bodies, which are what the two ends of a link agreed on.
use afd_ffi::sum64::Sum64;
use crc_fast::{CrcAlgorithm, Digest};

use super::FrameError;

/// How the bodies of a link are summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Checksum {
    /// CRC-32C (Castagnoli), which everybody speaks.
    #[default]
    Crc32c,
    /// [`Sum64`](afd_ffi::sum64), where both ends said that they can.
    Sum64,
}

impl std::fmt::Display for Checksum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Crc32c => "crc32c",
            Self::Sum64 => "sum64",
        })
    }
}

/// What a body was summed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodySum {
    /// As [`Checksum::Crc32c`].
    Crc32c(u32),
    /// As [`Checksum::Sum64`].
    Sum64(u64),
}

impl BodySum {
    /// Of what kind it is.
    pub fn checksum(self) -> Checksum {
        match self {
            Self::Crc32c(_) => Checksum::Crc32c,
            Self::Sum64(_) => Checksum::Sum64,
        }
    }

    fn value(self) -> u64 {
        match self {
            Self::Crc32c(sum) => sum.into(),
            Self::Sum64(sum) => sum,
        }
    }
}

/// Whether `body` is what its sender computed `found` of.
///
/// # Errors
/// [`FrameError::BodyChecksum`]; the body must not be used then.
pub fn verify_body(body: &[u8], found: BodySum) -> Result<(), FrameError> {
    let mut check = BodyCheck::new(found.checksum());
    check.update(body);
    check.verify(found)
}

/// Checksum of a body that comes piece by piece, computed while each piece is still in the processor's cache.
#[allow(clippy::large_enum_variant, reason = "lives on the stack of a hop, which asks for no memory")]
pub enum BodyCheck {
    /// As [`Checksum::Crc32c`], so far.
    Crc32c(u32),
    /// As [`Checksum::Sum64`], so far.
    Sum64(Sum64),
}

impl BodyCheck {
    /// Of nothing yet.
    pub fn new(checksum: Checksum) -> Self {
        match checksum {
            Checksum::Crc32c => Self::Crc32c(0),
            Checksum::Sum64 => Self::Sum64(Sum64::default()),
        }
    }

    /// The next piece.
    pub fn update(&mut self, piece: &[u8]) {
        match self {
            Self::Crc32c(crc) => *crc = extend(*crc, piece),
            Self::Sum64(sum) => sum.update(piece),
        }
    }

    /// Of all pieces together.
    pub fn sum(&self) -> BodySum {
        match self {
            Self::Crc32c(crc) => BodySum::Crc32c(*crc),
            Self::Sum64(sum) => BodySum::Sum64(sum.finish()),
        }
    }

    /// As [`verify_body`] of all pieces together.
    ///
    /// # Errors
    /// [`FrameError::BodyChecksum`]; the body must not be used then.
    pub fn verify(&self, found: BodySum) -> Result<(), FrameError> {
        match self.sum() {
            computed if computed == found => Ok(()),
            computed => Err(FrameError::BodyChecksum { found: found.value(), computed: computed.value() }),
        }
    }
}

/// Checksum of a body that is the concatenation of `parts`.
pub fn body_sum(checksum: Checksum, parts: &[&[u8]]) -> BodySum {
    let mut check = BodyCheck::new(checksum);
    parts.iter().for_each(|part| check.update(part));
    check.sum()
}

/// CRC-32C of all there is: of a header, of a body where nothing else was agreed.
pub fn crc32c(bytes: &[u8]) -> u32 {
    extend(0, bytes)
}

/// That of what `crc` is the checksum of, and `bytes` behind it.
fn extend(crc: u32, bytes: &[u8]) -> u32 {
    afd_ffi::crc::extend(crc, bytes).unwrap_or_else(|| extend_anywhere(crc, bytes))
}

/// The same with whatever the CPU has.
pub(super) fn extend_anywhere(crc: u32, bytes: &[u8]) -> u32 {
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, (!crc).into());
    digest.update(bytes);
    digest.finalize() as u32
}
