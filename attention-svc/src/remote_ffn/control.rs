//! The control plane towards one FFN rank, in tokio: join, open a link, keep the session alive, pass plans on; and
//! again from the start whenever it breaks.
//!
//! Nothing of the per-layer path is here: rows travel on the link, which the engine thread owns once it is up.
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use afd_common::frame::RowType;
use afd_common::ids::{Epoch, Shard};
use afd_common::link::attach::{self, AttachError};
use afd_common::link::grants::{LinkId, Secret, Ticket};
use afd_common::link::{Doorbell, HopLink, Limits, LinkKind, inline};
use afd_common::proto::v1;
use afd_common::proto::v1::ffn_control_service_client::FfnControlServiceClient;
use afd_common::proto::{PROTOCOL_MAJOR, PROTOCOL_MINOR};
use tokio::sync::{Notify, mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use super::edge::{Edge, EdgeControl, EdgeEvent, Progress};
use super::hop_table::EdgeId;

/// Plans waiting for the control stream: a few steps' worth.
const PLAN_QUEUE: usize = 16;
/// HTTP/2 windows: large enough that a plan or a report never waits for a window update.
const WINDOW_BYTES: u32 = 4 << 20;
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_MOST: Duration = Duration::from_secs(1);

/// What stays the same for every rank and every session.
#[derive(Clone, Debug)]
pub struct ControlSettings {
    /// This process.
    pub identity: v1::Identity,
    /// Must be equal on both sides.
    pub model: v1::ModelIdentity,
    /// In order of preference.
    pub link_kinds: Vec<LinkKind>,
    /// Stages in flight to ask for: also the link's credits.
    pub max_stages: u32,
    /// Tokens of one stage to ask for.
    pub max_tokens_per_stage: u32,
    /// Most bytes of one row on the wire, either way, side tensors included.
    pub max_row_bytes: usize,
    /// Guards joining; empty when there is none.
    pub join_token: String,
    /// For each of connect, join, open links and attach.
    pub phase_timeout: Duration,
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
}

/// How one rank stands, for people and for readiness.
#[derive(Clone, Debug, PartialEq)]
pub enum PeerState {
    /// Trying; what went wrong last.
    Connecting {
        /// "connection refused", or empty before the first attempt has ended.
        last_error: String,
    },
    /// It answered and said no: another model, another shard count, a rank twice.
    Refused {
        /// The rank's own words.
        why: String,
    },
    /// In use.
    Up {
        /// Which part of every layer it owns.
        shard: Shard,
        /// How rows travel.
        link: LinkKind,
    },
}

#[derive(Debug, thiserror::Error)]
enum SessionError {
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Broken(String),
}

impl SessionError {
    fn broken(what: &str, error: impl std::fmt::Display) -> Self {
        Self::Broken(format!("{what}: {error}"))
    }

    /// A `FAILED_PRECONDITION` will not go away by trying again soon; everything else may.
    fn from_status(what: &str, status: &tonic::Status) -> Self {
        match status.code() {
            Code::FailedPrecondition
            | Code::PermissionDenied
            | Code::Unauthenticated
            | Code::Unimplemented => Self::Refused(format!("{what}: {}", status.message())),
            _ => Self::Broken(format!("{what}: {} ({:?})", status.message(), status.code())),
        }
    }
}

/// Serves one address until `stop`: session after session, with a short pause between them.
pub async fn run(
    address: SocketAddr,
    shared: Arc<Shared>,
    state: watch::Sender<PeerState>,
    stop: CancellationToken,
) {
    let mut pause = RETRY_FIRST;
    loop {
        let begun = Instant::now();
        let ended = tokio::select! {
            Err(ended) = session(address, &shared, &state, &stop) => ended,
            () = stop.cancelled() => return,
        };
        if stop.is_cancelled() {
            return;
        }
        // A session that has lasted is no reason to hesitate.
        pause = if begun.elapsed() > RETRY_MOST { RETRY_FIRST } else { (pause * 2).min(RETRY_MOST) };
        let now = match ended {
            SessionError::Refused(why) => {
                tracing::error!(peer = %address, why, "FFN rank refused to work with this attention rank");
                PeerState::Refused { why }
            }
            SessionError::Broken(last_error) => {
                tracing::debug!(peer = %address, last_error, "no session with FFN rank");
                PeerState::Connecting { last_error }
            }
        };
        shared.set_state(&state, now);
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = stop.cancelled() => return,
        }
    }
}

/// One session from join to its end, which is always an error: it says why.
async fn session(
    address: SocketAddr,
    shared: &Shared,
    state: &watch::Sender<PeerState>,
    stop: &CancellationToken,
) -> Result<Infallible, SessionError> {
    let settings = &shared.settings;
    let channel = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| SessionError::broken("address", error))?
        .connect_timeout(settings.phase_timeout)
        .tcp_nodelay(true)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .connect()
        .await
        .map_err(|error| SessionError::broken("connecting", innermost(&error)))?;
    let mut client = FfnControlServiceClient::new(channel.clone());

    let joined = join(&mut client, shared).await?;
    let shard = agreed_shard(&joined, shared)?;
    let peer: Arc<str> = match &joined.identity {
        Some(identity) => format!("F{} at {address}", identity.rank).into(),
        None => format!("FFN at {address}").into(),
    };
    let combine_dtype = match joined.combine_dtype() {
        v1::Dtype::F32 => RowType::F32,
        v1::Dtype::Bf16 => RowType::Bf16,
        other => {
            return Err(SessionError::Refused(format!("join: combine dtype {other:?} is not known here")));
        }
    };

    // The lease runs from the join on, so the stream that keeps it comes before the link.
    let (to_rank, requests) = mpsc::channel(PLAN_QUEUE);
    let hello = v1::StepsRequest { session_id: joined.session_id.clone(), message: Some(heartbeat()) };
    to_rank.try_send(hello).map_err(|error| SessionError::broken("steps", error))?;
    let steps = within(settings.phase_timeout, "steps", client.steps(ReceiverStream::new(requests))).await?;
    let mut responses = steps.into_inner();

    let link = open_link(&mut client, channel, address, &peer, &joined, shared).await?;
    let kind = link.limits().kind;
    let id = EdgeId(shared.next_edge.fetch_add(1, Ordering::Relaxed));
    let (plan_sender, mut plans) = mpsc::channel(PLAN_QUEUE);
    let (abandon, mut abandoned) = mpsc::channel(1);
    let progress = Arc::new(Progress::default());
    let control = EdgeControl { plans: plan_sender, abandon, progress: Arc::clone(&progress) };
    let edge = Edge {
        id,
        peer: Arc::clone(&peer),
        shard,
        combine_dtype,
        max_rows: link.limits().max_rows,
        link,
        control: Some(control),
        hop_seconds: None,
        draining: false,
    };
    shared.tell(EdgeEvent::Up(edge));
    shared.set_state(state, PeerState::Up { shard, link: kind });

    let lease = Duration::from_millis(joined.lease_ms.max(100).into());
    let mut beat = tokio::time::interval(lease / 3);
    let mut last_hop = (0, 0);
    let why = loop {
        let request = tokio::select! {
            plan = plans.recv() => match plan {
                Some(plan) => v1::steps_request::Message::Plan(plan),
                None => break "the engine has dropped the edge".to_owned(),
            },
            _ = beat.tick() => heartbeat(),
            why = abandoned.recv() => break why.unwrap_or_else(|| "the engine has dropped the edge".to_owned()),
            () = stop.cancelled() => break "this attention rank is stopping".to_owned(),
            response = tokio::time::timeout(lease, responses.message()) => match response {
                Err(_) => break format!("said nothing for {} ms (its lease)", lease.as_millis()),
                Ok(Err(status)) => break format!("control stream failed: {}", status.message()),
                Ok(Ok(None)) => break "ended the control stream".to_owned(),
                Ok(Ok(Some(response))) => {
                    handle_response(response, id, shared, &progress, &mut last_hop);
                    continue;
                }
            },
        };
        if to_rank.send(v1::StepsRequest { session_id: String::new(), message: Some(request) }).await.is_err()
        {
            break "closed the control stream".to_owned();
        }
    };
    shared.tell(EdgeEvent::Down { id, why: why.clone() });
    Err(SessionError::Broken(why))
}

fn handle_response(
    response: v1::StepsResponse,
    id: EdgeId,
    shared: &Shared,
    progress: &Progress,
    last_hop: &mut (u64, u32),
) {
    match response.message {
        Some(v1::steps_response::Message::Heartbeat(beat)) => {
            let begun = (beat.last_step_id, beat.last_layer);
            if std::mem::replace(last_hop, begun) != begun {
                progress.handle_moved(shared.started.elapsed().as_micros() as u64);
            }
        }
        Some(v1::steps_response::Message::Report(report)) => {
            progress.handle_moved(shared.started.elapsed().as_micros() as u64);
            tracing::trace!(
                step = report.step_id,
                hops = report.num_hops,
                compute_us = report.compute_us,
                "step report"
            );
        }
        Some(v1::steps_response::Message::Draining(draining)) => {
            tracing::info!(remaining_ms = draining.remaining_ms, "FFN rank is draining");
            shared.tell(EdgeEvent::Draining { id });
        }
        None => {}
    }
}

async fn join(
    client: &mut FfnControlServiceClient<Channel>,
    shared: &Shared,
) -> Result<v1::JoinResponse, SessionError> {
    let settings = &shared.settings;
    let request = v1::JoinRequest {
        protocol_major: PROTOCOL_MAJOR,
        protocol_minor: PROTOCOL_MINOR,
        identity: Some(settings.identity.clone()),
        model: Some(settings.model.clone()),
        shard_count: shared.shard_count.load(Ordering::Acquire),
        link_kinds: settings.link_kinds.iter().map(|kind| wire_kind(*kind).into()).collect(),
        max_stages: settings.max_stages,
        max_tokens_per_stage: settings.max_tokens_per_stage,
        features: Vec::new(),
        join_token: settings.join_token.clone(),
    };
    let joined = within(settings.phase_timeout, "join", client.join(request)).await?.into_inner();
    if joined.max_tokens_per_stage < settings.max_tokens_per_stage || joined.max_stages < settings.max_stages
    {
        return Err(SessionError::Refused(format!(
            "join: the rank serves {} stages of {} tokens, this attention rank needs {} of {} \
             (--max-num-batched-tokens here, --max-tokens-per-stage there)",
            joined.max_stages,
            joined.max_tokens_per_stage,
            settings.max_stages,
            settings.max_tokens_per_stage
        )));
    }
    Ok(joined)
}

/// Which shard the rank owns. The first rank decides how many there are, if nobody did.
fn agreed_shard(joined: &v1::JoinResponse, shared: &Shared) -> Result<Shard, SessionError> {
    let spec = joined.shard.ok_or_else(|| SessionError::Refused("join: the answer names no shard".into()))?;
    let shard = Shard::new(spec.index, spec.count).ok_or_else(|| {
        SessionError::Refused(format!("join: shard {} of {} does not exist", spec.index, spec.count))
    })?;
    match shared.shard_count.compare_exchange(0, spec.count, Ordering::AcqRel, Ordering::Acquire) {
        Err(known) if known != spec.count => Err(SessionError::Refused(format!(
            "join: shard_count: the rank has {}, other ranks of this deployment have {known}",
            spec.count
        ))),
        _ => Ok(shard),
    }
}

/// The best link that both sides offer and that works between them: shared memory needs more than an offer.
async fn open_link(
    client: &mut FfnControlServiceClient<Channel>,
    channel: Channel,
    address: SocketAddr,
    peer: &str,
    joined: &v1::JoinResponse,
    shared: &Shared,
) -> Result<Box<dyn HopLink>, SessionError> {
    let wanted = shared.settings.link_kinds.iter().copied();
    let mut common = wanted.filter(|kind| joined.link_kinds.contains(&wire_kind(*kind).into())).peekable();
    while let Some(kind) = common.next() {
        let (ticket, limits) = grant(client, kind, peer, joined, shared).await?;
        match attach(kind, channel.clone(), address, ticket, limits, shared).await {
            Err(AttachError::NotShared { peer, what }) if common.peek().is_some() => {
                tracing::info!(
                    peer,
                    what,
                    "no memory is shared with this FFN rank: trying the next kind of link"
                );
            }
            attached => return attached.map_err(|error| SessionError::broken("attach", error)),
        }
    }
    Err(SessionError::Refused("join: no link kind in common (--link)".into()))
}

/// Registers a link of one kind: the right to attach to it, and what both ends hold to.
async fn grant(
    client: &mut FfnControlServiceClient<Channel>,
    kind: LinkKind,
    peer: &str,
    joined: &v1::JoinResponse,
    shared: &Shared,
) -> Result<(Ticket, Limits), SessionError> {
    let settings = &shared.settings;
    let link = v1::LinkRequest {
        kind: wire_kind(kind).into(),
        credits: settings.max_stages,
        max_rows: settings.max_tokens_per_stage,
    };
    let request = v1::OpenLinksRequest { session_id: joined.session_id.clone(), links: vec![link] };
    let opened = within(settings.phase_timeout, "open links", client.open_links(request)).await?.into_inner();
    let refused = |what: String| SessionError::Refused(format!("open links: {what}"));
    let grant = opened.links.first().ok_or_else(|| refused("the answer has no link".into()))?;
    let secret = Secret::from_slice(&grant.secret)
        .ok_or_else(|| refused(format!("a secret of {} bytes", grant.secret.len())))?;
    let max_body_bytes = Limits::body_bytes(grant.max_rows, settings.max_row_bytes)
        .ok_or_else(|| refused(format!("{} rows do not fit a frame", grant.max_rows)))?;
    let limits = Limits {
        kind,
        peer: peer.to_owned(),
        epoch: Epoch(grant.epoch),
        credits: grant.credits,
        max_rows: grant.max_rows,
        max_body_bytes,
    };
    Ok((Ticket { link_id: LinkId(grant.link_id), secret }, limits))
}

async fn attach(
    kind: LinkKind,
    channel: Channel,
    address: SocketAddr,
    ticket: Ticket,
    limits: Limits,
    shared: &Shared,
) -> Result<Box<dyn HopLink>, AttachError> {
    let (bell, timeout, peer) = (shared.bell.clone(), shared.settings.phase_timeout, limits.peer.clone());
    if kind == LinkKind::Inline {
        return Ok(Box::new(inline::dial(channel, &ticket, limits, bell, timeout).await?));
    }
    let dial = move || attach::dial(address, &ticket, limits, bell, timeout);
    let attached = tokio::task::spawn_blocking(dial).await;
    attached.unwrap_or_else(|error| Err(AttachError::Transport { peer, what: error.to_string() }))
}

/// The protocol's name of a link kind.
pub fn wire_kind(kind: LinkKind) -> v1::LinkKind {
    match kind {
        LinkKind::Loopback => v1::LinkKind::Loopback,
        LinkKind::Tcp => v1::LinkKind::Tcp,
        LinkKind::Inline => v1::LinkKind::Inline,
        LinkKind::Shm => v1::LinkKind::Shm,
    }
}

async fn within<T>(
    limit: Duration,
    what: &str,
    call: impl Future<Output = Result<T, tonic::Status>>,
) -> Result<T, SessionError> {
    match tokio::time::timeout(limit, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(status)) => Err(SessionError::from_status(what, &status)),
        Err(_) => Err(SessionError::Broken(format!("{what}: no answer within {} ms", limit.as_millis()))),
    }
}

fn heartbeat() -> v1::steps_request::Message {
    let sent_at_us = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_micros() as u64);
    v1::steps_request::Message::Heartbeat(v1::Heartbeat { sent_at_us, ..v1::Heartbeat::default() })
}

/// "transport error" says nothing; what it was made of does.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

impl Shared {
    fn set_state(&self, cell: &watch::Sender<PeerState>, state: PeerState) {
        cell.send_replace(state);
        self.changed.notify_waiters();
    }

    fn tell(&self, event: EdgeEvent) {
        // The engine outlives its edges; if it is gone, so is everything that could use the event.
        let _ = self.events.send(event);
        self.bell.ring();
    }
}
