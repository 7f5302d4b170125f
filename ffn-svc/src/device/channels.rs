//! This end of links that a stream drives: opened here, held until they are closed.
use std::time::Duration;

use afd_common::ids::Epoch;
use afd_gpu::channel::{
    DeviceChannel, Form, Frame, Identity, Landing, NcclChannel, Offer, StepChannel, StepError, StepLimits,
};
use afd_gpu::nccl::UniqueId;
use afd_gpu::{Device, Stream};

use crate::engine::{IpcBuffer, OpenStream, OpenStreamError, OwnEnd, PeerEnd};

/// Opens this end. With NCCL `grant` hears the ids before this end waits for the other.
pub(super) fn open(
    device: &Device,
    stream: &Stream,
    request: &OpenStream,
    shape: RowShape,
    grant: &mut dyn FnMut(OwnEnd),
) -> Result<Box<dyn StepChannel>, OpenStreamError> {
    let limits = shape.limits(request.num_stages, request.max_rows, request.patience);
    match &request.peer {
        PeerEnd::CudaIpc(buffer) => {
            let landing = Landing::new(device, limits, rand::random()).map_err(failed)?;
            let own = landing.offer().map_err(failed)?;
            let channel = DeviceChannel::connect(landing, &offer_of(buffer)).map_err(failed)?;
            grant(OwnEnd::CudaIpc(buffer_of(&own)));
            Ok(Box::new(channel))
        }
        PeerEnd::Nccl => {
            let id = || UniqueId::new().map_err(|error| OpenStreamError::Failed(error.to_string()));
            let (to_ffn, to_attention) = (id()?, id()?);
            grant(OwnEnd::Nccl([to_ffn.0, to_attention.0]));
            let ids = [to_attention, to_ffn];
            let channel = NcclChannel::join(device, stream, limits, true, ids, request.deadline);
            Ok(Box::new(channel.map_err(failed)?))
        }
    }
}

fn failed(error: StepError) -> OpenStreamError {
    match error {
        StepError::NotShared(_) => OpenStreamError::NotShared(error.to_string()),
        StepError::BadFrame(what) => OpenStreamError::Invalid(what),
        _ => OpenStreamError::Failed(error.to_string()),
    }
}

fn offer_of(buffer: &IpcBuffer) -> Offer {
    let IpcBuffer { handle, nonce, num_slots, max_rows, row_bytes } = *buffer;
    Offer { handle, nonce, num_slots, max_rows, row_bytes }
}

fn buffer_of(offer: &Offer) -> IpcBuffer {
    let Offer { handle, nonce, num_slots, max_rows, row_bytes } = *offer;
    IpcBuffer { handle, nonce, num_slots, max_rows, row_bytes }
}

/// How rows travel on a channel, which knows one size of a row: that of rows on their way to the FFN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowShape {
    /// Bytes of a row on its way in.
    pub(super) row_bytes: usize,
    /// Rows of that size that one row on its way back takes: 2 for f32 partial sums of bf16 rows.
    pub(super) units_back: usize,
}

impl RowShape {
    fn limits(self, num_stages: u32, max_rows: u32, patience: Duration) -> StepLimits {
        StepLimits {
            num_slots: num_stages as usize,
            max_rows: max_rows as usize * self.units_back,
            row_bytes: self.row_bytes,
            patience,
        }
    }

    /// The frames of a hop, on its way in and back.
    pub(super) fn frames(self, epoch: Epoch, layer: u16, stage: usize, rows: usize) -> (Frame, Frame) {
        let frame = |combine: bool, rows: usize| Frame {
            slot: stage,
            identity: Identity { epoch: epoch.0, layer, stage: stage as u8, combine },
            rows,
            form: Form::for_bytes(rows * self.row_bytes),
        };
        (frame(false, rows), frame(true, rows * self.units_back))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_sums_take_the_room_of_two_rows() {
        let shape = RowShape { row_bytes: 512, units_back: 2 };
        let limits = shape.limits(2, 100, Duration::from_secs(1));
        assert_eq!((limits.num_slots, limits.max_rows, limits.row_bytes), (2, 200, 512));
        let (to, back) = shape.frames(Epoch(9), 3, 1, 70);
        assert_eq!((to.rows, back.rows, to.slot, back.slot), (70, 140, 1, 1));
        assert!(!to.identity.combine && back.identity.combine && to.identity.word() != back.identity.word());
        assert_eq!((to.form, back.form), (Form::Packets, Form::Rows));
    }
}
