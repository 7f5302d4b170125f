//! Offers of memory between GPUs as the protocol carries them, for both roles. Sizes are compared with one's own when the
//! memory is opened; here they only have to be numbers of this machine.
use afd_common::proto::v1;
use afd_gpu::channel::Offer;

/// A field that is not as long as it must be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`cuda_ipc.{field}` has {found} bytes; expected {expected}")]
pub struct WrongLength {
    /// Which field.
    pub field: &'static str,
    /// Bytes as sent.
    pub found: usize,
    /// Bytes of a good one.
    pub expected: usize,
}

/// For the peer.
pub fn to_wire(offer: &Offer) -> v1::CudaIpcBuffer {
    let number = |size: usize| u32::try_from(size).unwrap_or(u32::MAX);
    v1::CudaIpcBuffer {
        handle: offer.handle.to_vec(),
        nonce: offer.nonce.to_vec(),
        num_slots: number(offer.num_slots),
        max_rows: number(offer.max_rows),
        row_bytes: number(offer.row_bytes),
    }
}

/// The peer's.
///
/// # Errors
/// [`WrongLength`] names the field.
pub fn from_wire(buffer: &v1::CudaIpcBuffer) -> Result<Offer, WrongLength> {
    let wrong = |field, bytes: &[u8], expected| WrongLength { field, found: bytes.len(), expected };
    let handle = buffer.handle.as_slice().try_into();
    let nonce = buffer.nonce.as_slice().try_into();
    Ok(Offer {
        handle: handle.map_err(|_| wrong("handle", &buffer.handle, 64))?,
        nonce: nonce.map_err(|_| wrong("nonce", &buffer.nonce, 16))?,
        num_slots: buffer.num_slots as usize,
        max_rows: buffer.max_rows as usize,
        row_bytes: buffer.row_bytes as usize,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_comes_back_and_a_wrong_length_names_its_field() {
        let offer = Offer { handle: [7; 64], nonce: [9; 16], num_slots: 2, max_rows: 64, row_bytes: 4096 };
        let wire = to_wire(&offer);
        assert_eq!(from_wire(&wire), Ok(offer));
        let short = v1::CudaIpcBuffer { nonce: vec![0; 15], ..wire };
        assert_eq!(from_wire(&short), Err(WrongLength { field: "nonce", found: 15, expected: 16 }));
    }
}
