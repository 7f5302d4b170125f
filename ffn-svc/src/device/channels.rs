//! This end of links that a stream drives: opened here, held until they are closed.
use afd_gpu::channel::{DeviceChannel, HopShape, Landing, NcclChannel, StepChannel, StepError};
use afd_gpu::nccl::UniqueId;
use afd_gpu::{Device, Stream};

use crate::engine::{OpenStream, OpenStreamError, OwnEnd, PeerEnd};

/// Opens this end. With NCCL `grant` hears the ids before this end waits for the other.
pub(super) fn open(
    device: &Device,
    stream: &Stream,
    request: &OpenStream,
    shape: HopShape,
    grant: &mut dyn FnMut(OwnEnd),
) -> Result<Box<dyn StepChannel>, OpenStreamError> {
    let limits = shape.limits(request.num_stages as usize, request.max_rows as usize, request.patience);
    match &request.peer {
        PeerEnd::CudaIpc(offer) => {
            let landing = Landing::new(device, limits, rand::random()).map_err(failed)?;
            let own = landing.offer().map_err(failed)?;
            let mut channel = DeviceChannel::connect(landing, offer).map_err(failed)?;
            channel.set_open_early(true);
            grant(OwnEnd::CudaIpc(own));
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
