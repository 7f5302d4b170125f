//! Opens a link that a CUDA stream drives: memory of both ends is exchanged over `OpenLinks` and mapped, or both join what
//! the FFN has named. Blocking calls to the device run beside tokio's own threads.
use std::time::Duration;

use afd_common::ids::Epoch;
use afd_common::link::LinkKind;
use afd_common::proto::v1;
use afd_common::proto::v1::ffn_control_service_client::FfnControlServiceClient;
use afd_gpu::channel::{DeviceChannel, HopShape, Landing, NcclChannel, StepChannel, StepError};
use afd_gpu::nccl::UniqueId;
use ffn_svc::session::ipc_wire;
use tonic::Code;
use tonic::transport::Channel;

use super::session::{SessionError, Shared, combine_dtype, late, wire_kind, within};
use super::stream_edge::StreamLink;

/// Why a link was not opened.
pub(super) enum NotOpened {
    /// Another kind may work.
    NextKind(String),
    /// The session is of no use.
    Ends(SessionError),
}

impl From<SessionError> for NotOpened {
    fn from(error: SessionError) -> Self {
        Self::Ends(error)
    }
}

impl From<StepError> for NotOpened {
    fn from(error: StepError) -> Self {
        match error {
            StepError::NotShared(_) | StepError::Lost(_) => Self::NextKind(error.to_string()),
            _ => Self::Ends(SessionError::broken("opening the link", error)),
        }
    }
}

/// A link of `kind`, which a stream drives.
pub(super) async fn open(
    client: &mut FfnControlServiceClient<Channel>,
    kind: LinkKind,
    peer: &str,
    joined: &v1::JoinResponse,
    shared: &Shared,
) -> Result<StreamLink, NotOpened> {
    let settings = &shared.settings;
    let Some(stream) = settings.stream.clone() else {
        return Err(NotOpened::NextKind(format!("{kind} needs a GPU (--device)")));
    };
    let shape = HopShape::new(stream.hidden_size, stream.rows.bytes(), combine_dtype(joined)?.bytes());
    let max_rows = settings.max_tokens_per_stage as usize;
    let limits = shape.limits(settings.max_stages as usize, max_rows, stream.patience);
    let device = stream.device.clone();
    let landing = match kind {
        LinkKind::CudaIpc => {
            let make = move || {
                let landing = Landing::new(&device, limits, rand::random())?;
                let offer = landing.offer()?;
                Ok((landing, offer))
            };
            Some(beside(make).await?)
        }
        _ => None,
    };
    let link = v1::LinkRequest {
        kind: wire_kind(kind).into(),
        credits: settings.max_stages,
        max_rows: settings.max_tokens_per_stage,
        cuda_ipc: landing.as_ref().map(|(_, offer)| ipc_wire::to_wire(offer)),
        patience_ms: u32::try_from(stream.patience.as_millis()).unwrap_or(u32::MAX),
    };
    let request = v1::OpenLinksRequest { session_id: joined.session_id.clone(), links: vec![link] };
    let (limit, phase) = (settings.link_timeout, "open links");
    let opened = match tokio::time::timeout(limit, client.open_links(request)).await {
        Ok(Err(status)) if status.code() == Code::FailedPrecondition => {
            return Err(NotOpened::NextKind(status.message().to_owned()));
        }
        Ok(answer) => within(limit, peer, phase, std::future::ready(answer)).await?,
        Err(_) => return Err(SessionError::Broken(late(peer, phase, limit)).into()),
    };
    let grant = opened.into_inner().links.into_iter().next().unwrap_or_default();
    let (epoch, deadline) = (Epoch(grant.epoch), Duration::from_millis(grant.attach_timeout_ms.into()));
    let device = stream.device;
    let channel: Box<dyn StepChannel> = match (landing, grant.cuda_ipc, grant.nccl) {
        (Some((landing, _)), Some(buffer), _) => {
            let offer = ipc_wire::from_wire(&buffer).map_err(|wrong| refused(wrong.to_string()))?;
            let mut channel = beside(move || DeviceChannel::connect(landing, &offer)).await?;
            channel.set_open_early(true);
            Box::new(channel)
        }
        (None, _, Some(ids)) => {
            let ids = [unique_id(&ids.to_attention)?, unique_id(&ids.to_ffn)?];
            let join = move || NcclChannel::join(&device, &device.stream()?, limits, false, ids, deadline);
            Box::new(beside(join).await?)
        }
        _ => return Err(refused(format!("the answer does not say how to open {kind}")).into()),
    };
    Ok(StreamLink { kind, epoch, max_rows, shape, channel })
}

/// Runs a call that blocks.
async fn beside<T: Send + 'static>(
    call: impl FnOnce() -> Result<T, StepError> + Send + 'static,
) -> Result<T, NotOpened> {
    match tokio::task::spawn_blocking(call).await {
        Ok(made) => Ok(made?),
        Err(error) => Err(SessionError::broken("opening the link", error).into()),
    }
}

fn refused(what: String) -> SessionError {
    SessionError::Refused(format!("open links: {what}"))
}

fn unique_id(bytes: &[u8]) -> Result<UniqueId, SessionError> {
    bytes.try_into().map(UniqueId).map_err(|_| refused(format!("an NCCL id of {} bytes", bytes.len())))
}
