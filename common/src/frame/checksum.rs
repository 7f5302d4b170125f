//! CRC-32C (Castagnoli) of headers and bodies.
use crc_fast::{CrcAlgorithm, Digest};

use super::FrameError;

/// Whether `body` is what its sender computed `found` of.
///
/// # Errors
/// [`FrameError::BodyChecksum`]; the body must not be used then.
pub fn verify_body(body: &[u8], found: u32) -> Result<(), FrameError> {
    verify(crc32c(body), found)
}

fn verify(computed: u32, found: u32) -> Result<(), FrameError> {
    match computed == found {
        true => Ok(()),
        false => Err(FrameError::BodyChecksum { found, computed }),
    }
}

/// Checksum of a body that comes piece by piece, computed while each piece is still in the processor's cache.
#[derive(Default)]
pub struct BodyCheck(u32);

impl BodyCheck {
    /// The next piece.
    pub fn update(&mut self, piece: &[u8]) {
        self.0 = extend(self.0, piece);
    }

    /// As [`verify_body`] of all pieces together.
    ///
    /// # Errors
    /// [`FrameError::BodyChecksum`]; the body must not be used then.
    pub fn verify(self, found: u32) -> Result<(), FrameError> {
        verify(self.0, found)
    }
}

/// Checksum of a body that is the concatenation of `parts`.
pub fn body_crc(parts: &[&[u8]]) -> u32 {
    parts.iter().fold(0, |crc, part| extend(crc, part))
}

/// Checksum of all there is.
pub(super) fn crc32c(bytes: &[u8]) -> u32 {
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
