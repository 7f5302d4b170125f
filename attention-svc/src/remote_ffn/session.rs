//! What every phase of a session with an FFN rank has: this process's settings, what all control tasks share, why a session
//! ends, and the deadline of a call.
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use afd_common::frame::RowType;
use afd_common::link::{Doorbell, LinkKind};
use afd_common::net::client;
use afd_common::net::tls::ClientTls;
use afd_common::proto::v1;
use afd_common::spelling::{self, span};
use afd_gpu::Device;
use tokio::sync::Notify;
use tonic::Code;

use super::edge::EdgeEvent;
use super::roster::{NotSeated, Roster};
use super::stats::FfnReports;

/// What stays the same for every rank and every session.
#[derive(Clone, Debug)]
pub struct ControlSettings {
    /// This process.
    pub identity: v1::Identity,
    /// Must be equal on both sides.
    pub model: v1::ModelIdentity,
    /// In order of preference.
    pub link_kinds: Vec<LinkKind>,
    /// For links that a stream drives; none without a GPU.
    pub stream: Option<StreamSettings>,
    /// Stages in flight to ask for: also the link's credits.
    pub max_stages: u32,
    /// Tokens of one stage to ask for.
    pub max_tokens_per_stage: u32,
    /// Most bytes of one row on the wire, either way, side tensors included.
    pub max_row_bytes: usize,
    /// Guards joining; empty when there is none.
    pub join_token: String,
    /// FFN ranks are dialled in the clear without.
    pub tls: Option<ClientTls>,
    /// For each phase of joining: connect, join, open links and attach.
    pub link_timeout: Duration,
}

/// What links that a stream drives need to know of this process.
#[derive(Clone, Debug)]
pub struct StreamSettings {
    /// Attention's device.
    pub device: Device,
    /// Width of a row, elements.
    pub hidden_size: usize,
    /// Element type of a row on its way out.
    pub rows: RowType,
    /// How long a wait on the stream waits for the FFN, and the FFN for this process.
    pub patience: Duration,
}

/// What the control tasks of all ranks share.
pub struct Shared {
    /// See [`ControlSettings`].
    pub settings: ControlSettings,
    /// To the engine.
    pub events: crossbeam_channel::Sender<EdgeEvent>,
    /// Rung with every event, and by every link.
    pub bell: Doorbell,
    /// The engine's clock.
    pub started: Instant,
    /// Shards of this deployment, once a rank has joined; 0 before.
    pub shard_count: AtomicU32,
    /// Makes edge ids.
    pub next_edge: AtomicU64,
    /// Notified whenever some rank stands differently.
    pub changed: Notify,
    /// Notified whenever a rank that was in use is gone.
    pub vacated: Notify,
    /// Which process holds which rank.
    pub roster: Mutex<Roster>,
    /// What ranks say of steps that were profiled.
    pub reports: Arc<FfnReports>,
}

impl Shared {
    pub(super) fn tell(&self, event: EdgeEvent) {
        // The engine outlives its edges; if it is gone, so is everything that could use the event.
        let _ = self.events.send(event);
        self.bell.ring();
    }

    pub(super) fn lock_roster(&self) -> MutexGuard<'_, Roster> {
        self.roster.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[derive(Debug, thiserror::Error)]
pub(super) enum SessionError {
    #[error("{0}")]
    Refused(String),
    #[error("join: {0}")]
    NotSeated(#[from] NotSeated),
    /// Another live process says that it is this attention rank.
    #[error("{0}")]
    Taken(String),
    #[error("{0}")]
    Broken(String),
    #[error("{0}")]
    Away(String),
}

impl SessionError {
    pub(super) fn broken(what: &str, error: impl std::fmt::Display) -> Self {
        Self::Broken(format!("{what}: {error}"))
    }
}

/// Element type of what the rank sends back.
pub(super) fn combine_dtype(joined: &v1::JoinResponse) -> Result<RowType, SessionError> {
    match joined.combine_dtype() {
        v1::Dtype::F32 => Ok(RowType::F32),
        v1::Dtype::Bf16 => Ok(RowType::Bf16),
        _ => Err(SessionError::Refused(format!(
            "join: combine_dtype is {}, expected float32 or bfloat16",
            spelling::dtype(joined.combine_dtype)
        ))),
    }
}

/// The protocol's name of a link kind.
pub(super) fn wire_kind(kind: LinkKind) -> v1::LinkKind {
    match kind {
        LinkKind::Loopback => v1::LinkKind::Loopback,
        LinkKind::Tcp => v1::LinkKind::Tcp,
        LinkKind::Inline => v1::LinkKind::Inline,
        LinkKind::Shm => v1::LinkKind::Shm,
        LinkKind::Nccl => v1::LinkKind::Nccl,
        LinkKind::CudaIpc => v1::LinkKind::CudaIpc,
    }
}

/// What is said of a phase that `peer` let run out.
pub(super) fn late(peer: &str, phase: &str, limit: Duration) -> String {
    format!("{phase}: no answer from {peer} within {} (--link-timeout)", span(limit))
}

/// One call of a phase, answered by `peer` within its limit.
pub(super) async fn within<T>(
    limit: Duration,
    peer: &str,
    phase: &str,
    call: impl Future<Output = Result<T, tonic::Status>>,
) -> Result<T, SessionError> {
    match tokio::time::timeout(limit, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(status)) => Err(from_status(phase, &status)),
        Err(_) => Err(SessionError::Broken(late(peer, phase, limit))),
    }
}

/// A `FAILED_PRECONDITION` will not go away by trying again soon; everything else may.
fn from_status(what: &str, status: &tonic::Status) -> SessionError {
    match status.code() {
        Code::FailedPrecondition | Code::PermissionDenied | Code::Unauthenticated => {
            SessionError::Refused(format!("{what}: {}", client::words(status)))
        }
        Code::Unimplemented => SessionError::Refused(format!(
            "{what}: no ffn-svc listens there (--ffn): {}",
            if status.message().is_empty() { "it does not know the call" } else { status.message() }
        )),
        Code::AlreadyExists => SessionError::Taken(format!("{what}: {}", client::words(status))),
        _ => SessionError::Broken(format!("{what}: {}", client::words(status))),
    }
}
