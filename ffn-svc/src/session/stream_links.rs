//! Links of a session that a CUDA stream drives: what the peer sends is checked here, what is opened is the engine's, on its
//! own thread. They are up when they are granted: nothing is attached.
use std::sync::Arc;
use std::time::Duration;

use afd_common::proto::v1;
use tonic::{Code, Status};

use super::ipc_wire::{self, WrongLength};
use super::links::{check_sizes, invalid, not_agreed};
use super::sessions::{Session, Sessions};
use super::status::detailed;
use crate::engine::{OpenStream, OpenStreamError, OwnEnd, PeerEnd, StreamOwner};

/// Longest that a wait may be asked to wait.
const MAX_PATIENCE_MS: u32 = 600_000;

/// Whether a stream drives links of this kind.
pub(super) fn is_stream_driven(kind: v1::LinkKind) -> bool {
    matches!(kind, v1::LinkKind::Nccl | v1::LinkKind::CudaIpc)
}

impl Sessions {
    /// Opens a link for a session.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` names the field; `FAILED_PRECONDITION` when another kind of link may do; `UNAVAILABLE`.
    pub async fn open_stream_link(
        &self,
        session: &Arc<Session>,
        link: &v1::LinkRequest,
    ) -> Result<v1::LinkGrant, Status> {
        let kind = link.kind();
        if !session.agreement.link_kinds.contains(&kind) {
            return Err(not_agreed(session, link.kind));
        }
        check_sizes(session, link)?;
        if link.patience_ms == 0 || link.patience_ms > MAX_PATIENCE_MS {
            let what = format!("{}; expected 1 to {MAX_PATIENCE_MS}", link.patience_ms);
            return Err(invalid("links.patience_ms", what));
        }
        let peer = match (kind, &link.cuda_ipc) {
            (v1::LinkKind::CudaIpc, Some(buffer)) => {
                PeerEnd::CudaIpc(ipc_wire::from_wire(buffer).map_err(|wrong| wrong_length(&wrong))?)
            }
            (v1::LinkKind::CudaIpc, None) => return Err(invalid("links.cuda_ipc", "missing".into())),
            _ => PeerEnd::Nccl,
        };
        let (epoch, attach_timeout) = {
            let mut grants = self.lock_grants();
            (grants.mint_epoch(), grants.attach_timeout())
        };
        let request = OpenStream {
            peer,
            epoch,
            num_stages: link.credits,
            max_rows: link.max_rows,
            patience: Duration::from_millis(link.patience_ms.into()),
            deadline: attach_timeout,
        };
        let owner = StreamOwner {
            peer: session.place.to_string(),
            accounts: Arc::clone(&session.accounts),
            session: session.tag,
        };
        session.expect_stream_links();
        let own = self.engine().open_stream(request, owner).await.map_err(|error| refused(&error))?;
        // As for links that are attached: the session may have ended before the engine had the link.
        if let Some(why) = session.end() {
            self.engine().close_session(session.tag, why);
        }
        let grant = v1::LinkGrant {
            kind: kind.into(),
            epoch: epoch.0,
            credits: link.credits,
            max_rows: link.max_rows,
            attach_timeout_ms: attach_timeout.as_millis() as u32,
            ..v1::LinkGrant::default()
        };
        Ok(match own {
            OwnEnd::CudaIpc(offer) => v1::LinkGrant { cuda_ipc: Some(ipc_wire::to_wire(&offer)), ..grant },
            OwnEnd::Nccl([to_ffn, to_attention]) => {
                let ids = v1::NcclIds { to_ffn: to_ffn.to_vec(), to_attention: to_attention.to_vec() };
                v1::LinkGrant { nccl: Some(ids), ..grant }
            }
        })
    }
}

fn wrong_length(&WrongLength { field, found, expected }: &WrongLength) -> Status {
    invalid(&format!("links.cuda_ipc.{field}"), format!("{found} bytes; expected {expected}"))
}

fn refused(error: &OpenStreamError) -> Status {
    let (code, reason) = match error {
        OpenStreamError::NoDevice | OpenStreamError::NotShared(_) => {
            (Code::FailedPrecondition, "LINK_NOT_SHARED")
        }
        OpenStreamError::Invalid(_) => (Code::InvalidArgument, "LINKS_INVALID"),
        OpenStreamError::Failed(_) => (Code::Internal, "LINK_FAILED"),
        OpenStreamError::Stopped => (Code::Unavailable, "STOPPED"),
    };
    detailed(code, error.to_string(), reason, Vec::new())
}
