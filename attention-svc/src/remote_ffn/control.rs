//! The control plane towards one FFN rank, in tokio: join, open a link, keep the session alive, pass plans on; and
//! again from the start whenever it breaks.
//!
//! Nothing of the per-layer path is here: rows travel on the link, which the engine thread owns once it is up.
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use afd_common::ids::Shard;
use afd_common::link::{Doorbell, LinkKind};
use afd_common::net::tls::ClientTls;
use afd_common::proto::v1;
use afd_common::proto::v1::ffn_control_service_client::FfnControlServiceClient;
use tokio::sync::{Notify, mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use super::edge::{Edge, EdgeControl, EdgeEvent, Life};
use super::hop_table::EdgeId;
use super::joining::{self, Opened, Target};
use super::roster::{NotSeated, Process, Roster};
use super::stats::FfnReports;
use super::stream_edge::StreamEdge;
use super::stream_joining::StreamSettings;

/// Plans waiting for the control stream: a few steps' worth.
const PLAN_QUEUE: usize = 16;
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_MOST: Duration = Duration::from_secs(1);
/// Before a process is asked again that another one keeps out, unless that one goes first.
const TWIN_RETRY: Duration = Duration::from_secs(5);

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
    /// Notified whenever a rank that was in use is gone.
    pub vacated: Notify,
    /// Which process holds which rank.
    pub roster: Mutex<Roster>,
    /// What ranks say of steps that were profiled.
    pub reports: Arc<FfnReports>,
}

/// One address, for people and for readiness.
#[derive(Clone, Debug)]
pub struct Peer {
    /// How it stands.
    pub state: PeerState,
    /// Since when it has been up, refusing, or neither.
    pub since: Instant,
    /// Which shard it served when it was up last.
    pub served: Option<Shard>,
    /// Every shard that it has served, and when it was lost the last time that it did.
    pub lost: Vec<(Shard, Instant)>,
}

/// How one rank stands.
#[derive(Clone, Debug)]
pub enum PeerState {
    /// Trying; what went wrong last.
    Connecting {
        /// "connection refused", or empty before the first attempt has ended.
        last_error: String,
    },
    /// Somebody is there, and there is no session with it; what went wrong last. Another try may help.
    Apart {
        /// "join: no answer within 5000 ms", or its own words.
        last_error: String,
    },
    /// It answered and said no: another model, another shard count, a rank twice.
    Refused {
        /// The rank's own words, or this one's.
        why: String,
        /// Only a change of somebody's options can help.
        for_good: bool,
    },
    /// In use.
    Up {
        /// Which part of every layer it owns.
        shard: Shard,
        /// How rows travel.
        link: LinkKind,
        /// Tells when the engine has lost it, which may be before its control stream says so.
        life: Arc<Life>,
    },
}

impl Peer {
    /// Nothing is known yet.
    pub fn unknown(now: Instant) -> Self {
        let state = PeerState::Connecting { last_error: String::new() };
        Self { state, since: now, served: None, lost: Vec::new() }
    }

    /// The rank's shard and link, while it is in use.
    pub fn in_use(&self) -> Option<(Shard, LinkKind)> {
        match &self.state {
            PeerState::Up { shard, link, life } if life.lost_at().is_none() => Some((*shard, *link)),
            _ => None,
        }
    }

    /// When it was lost the last time that it served a shard.
    pub fn lost_at(&self, shard: Shard) -> Option<Instant> {
        self.lost.iter().find(|(other, _)| *other == shard).map(|(_, at)| *at)
    }

    /// Takes a new state in. Returns whether it says anything new.
    pub(super) fn handle(&mut self, state: PeerState, now: Instant) -> bool {
        let news = match (&self.state, &state) {
            (PeerState::Connecting { last_error: old }, PeerState::Connecting { last_error: new })
            | (PeerState::Apart { last_error: old }, PeerState::Apart { last_error: new }) => old != new,
            (PeerState::Refused { why: old, .. }, PeerState::Refused { why: new, .. }) => old != new,
            _ => true,
        };
        if std::mem::discriminant(&self.state) != std::mem::discriminant(&state) {
            self.since = now;
        }
        if let PeerState::Up { shard, life, .. } = &self.state {
            self.lost.retain(|(other, _)| other != shard);
            self.lost.push((*shard, life.lost_at().unwrap_or(now)));
        }
        if let PeerState::Up { shard, .. } = state {
            self.served = Some(shard);
        }
        self.state = state;
        news
    }
}

#[derive(Debug, thiserror::Error)]
pub(super) enum SessionError {
    #[error("{0}")]
    Refused(String),
    #[error("join: {0}")]
    NotSeated(#[from] NotSeated),
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

/// Serves one address, which `--ffn` calls `host`, until `stop`: session after session, with a short pause between them.
pub async fn run(
    address: SocketAddr,
    host: String,
    shared: Arc<Shared>,
    peer: watch::Sender<Peer>,
    stop: CancellationToken,
) {
    let mut control = Control { address, host, shared: &shared, peer, process: None };
    let mut pause = RETRY_FIRST;
    loop {
        let begun = Instant::now();
        // Before the attempt, so that no rank that goes during it is missed.
        let vacated = shared.vacated.notified();
        let ended = tokio::select! {
            Err(ended) = control.session(&stop) => ended,
            () = stop.cancelled() => return,
        };
        if stop.is_cancelled() {
            return;
        }
        // A session that has lasted is no reason to hesitate.
        pause = if begun.elapsed() > RETRY_MOST { RETRY_FIRST } else { (pause * 2).min(RETRY_MOST) };
        let is_kept_out =
            matches!(ended, SessionError::NotSeated(NotSeated::Twin { .. } | NotSeated::Alias { .. }));
        control.handle_end(ended);
        tokio::select! {
            () = tokio::time::sleep(if is_kept_out { TWIN_RETRY } else { pause }) => {}
            () = vacated, if is_kept_out => {}
            () = stop.cancelled() => return,
        }
    }
}

/// What a control task knows.
struct Control<'a> {
    address: SocketAddr,
    host: String,
    shared: &'a Shared,
    peer: watch::Sender<Peer>,
    /// Who answered last.
    process: Option<Process>,
}

/// A process in its place; gives the place up when dropped.
struct Seated<'a> {
    shared: &'a Shared,
    process: Process,
    address: SocketAddr,
}

impl Drop for Seated<'_> {
    fn drop(&mut self) {
        self.shared.lock_roster().vacate(&self.process, self.address);
        self.shared.vacated.notify_waiters();
    }
}

impl<'a> Control<'a> {
    fn set_state(&self, state: PeerState) -> bool {
        let mut news = false;
        self.peer.send_modify(|peer| news = peer.handle(state, Instant::now()));
        self.shared.changed.notify_waiters();
        news
    }

    fn handle_end(&self, ended: SessionError) {
        let why = ended.to_string();
        let address = self.address;
        let state = match ended {
            SessionError::Refused(_) => PeerState::Refused { why: why.clone(), for_good: true },
            SessionError::NotSeated(_) => PeerState::Refused { why: why.clone(), for_good: false },
            SessionError::Broken(_) | SessionError::Away(_) => {
                tracing::debug!(peer = %address, why, "no session with FFN rank");
                let is_away = matches!(ended, SessionError::Away(_));
                self.set_state(match is_away {
                    true => PeerState::Connecting { last_error: why },
                    false => PeerState::Apart { last_error: why },
                });
                return;
            }
        };
        if self.set_state(state) {
            tracing::error!(peer = %address, why, "FFN rank cannot be used");
        }
    }

    /// Takes the place that a process claims.
    fn seat(&mut self, identity: Option<&v1::Identity>) -> Result<Seated<'a>, SessionError> {
        let identity =
            identity.ok_or_else(|| SessionError::Refused("join: the answer has no identity".into()))?;
        if identity.role() != v1::Role::Ffn {
            return Err(SessionError::Refused(format!(
                "join: identity.role is {}, expected ROLE_FFN (--ffn)",
                identity.role().as_str_name()
            )));
        }
        let process = self.process.insert(Process::of(identity)).clone();
        self.shared.lock_roster().seat(&process, self.address)?;
        Ok(Seated { shared: self.shared, process, address: self.address })
    }

    /// One session from join to its end, which is always an error: it says why.
    async fn session(&mut self, stop: &CancellationToken) -> Result<Infallible, SessionError> {
        let (shared, address) = (self.shared, self.address);
        if let Some(process) = &self.process {
            shared.lock_roster().check(process, address)?;
        }
        let limit = shared.settings.phase_timeout;
        let target = Target::new(address, &self.host, shared)?;
        let channel = target.connect(limit).await?;
        let mut client = FfnControlServiceClient::new(channel.clone());
        let joined = joining::join(&mut client, shared).await?;
        let _seated = self.seat(joined.identity.as_ref())?;
        let shard = joining::agreed_shard(&joined, shared)?;
        let combine_dtype = joining::combine_dtype(&joined)?;
        let rank = joined.identity.as_ref().map_or(0, |identity| identity.rank);
        let peer: Arc<str> = format!("F{rank} at {address}").into();

        // The lease runs from the join on, so the stream that keeps it comes before the link.
        let (to_rank, requests) = mpsc::channel(PLAN_QUEUE);
        let hello = v1::StepsRequest { session_id: joined.session_id.clone(), message: Some(heartbeat()) };
        to_rank.try_send(hello).map_err(|error| SessionError::broken("steps", error))?;
        let steps = joining::within(limit, "steps", client.steps(ReceiverStream::new(requests))).await?;
        let link = joining::open_link(&mut client, channel, &target, &peer, &joined, shared).await?;

        let id = EdgeId(shared.next_edge.fetch_add(1, Ordering::Relaxed));
        let (plan_sender, plans) = mpsc::channel(PLAN_QUEUE);
        let (abandon, abandoned) = mpsc::channel(1);
        let life = Arc::new(Life::new(shared.started));
        let control = EdgeControl { plans: plan_sender, abandon, life: Arc::clone(&life) };
        let draining = false;
        let named = Arc::clone(&peer);
        let (kind, up) = match link {
            Opened::Host(link) => {
                let (kind, control) = (link.limits().kind, Some(control));
                let edge =
                    Edge { id, peer, shard, combine_dtype, link, control, hop_seconds: None, draining };
                (kind, EdgeEvent::Up(edge))
            }
            Opened::Stream(link) => {
                let kind = link.kind;
                let edge = StreamEdge { id, peer, shard, link, control, stats: None, draining };
                (kind, EdgeEvent::StreamUp(Box::new(edge)))
            }
        };
        let served = self.peer.borrow().served.filter(|served| *served != shard);
        if let Some(was) = served {
            tracing::warn!(peer = %address, %was, is = %shard, "FFN rank has come back as another shard");
        }
        self.set_state(PeerState::Up { shard, link: kind, life: Arc::clone(&life) });
        shared.tell(up);
        let lease = Duration::from_millis(joined.lease_ms.max(100).into());
        let steps_may_fail = kind.is_stream_driven();
        let talk =
            Talk { id, peer: named, shard, shared, life, lease, to_rank, last_hop: (0, 0), steps_may_fail };
        let why = talk.run(plans, abandoned, steps.into_inner(), stop).await;
        shared.tell(EdgeEvent::Down { id, why: why.clone() });
        Err(SessionError::Broken(why))
    }
}

/// The control stream of an edge.
struct Talk<'a> {
    id: EdgeId,
    peer: Arc<str>,
    shard: Shard,
    shared: &'a Shared,
    life: Arc<Life>,
    lease: Duration,
    to_rank: mpsc::Sender<v1::StepsRequest>,
    last_hop: (u64, u32),
    /// A step that failed ends the link: the FFN has given it up already.
    steps_may_fail: bool,
}

impl Talk<'_> {
    /// Until one side ends it: says why.
    async fn run(
        mut self,
        mut plans: mpsc::Receiver<v1::steps_request::Message>,
        mut abandoned: mpsc::Receiver<String>,
        mut responses: tonic::Streaming<v1::StepsResponse>,
        stop: &CancellationToken,
    ) -> String {
        let lease = self.lease;
        let mut beat = tokio::time::interval(lease / 3);
        loop {
            let request = tokio::select! {
                plan = plans.recv() => match plan {
                    Some(plan) => plan,
                    None => return "the engine has dropped the edge".to_owned(),
                },
                _ = beat.tick() => heartbeat(),
                why = abandoned.recv() => return why.unwrap_or_else(|| "the engine has dropped the edge".to_owned()),
                () = stop.cancelled() => return "this attention rank is stopping".to_owned(),
                response = tokio::time::timeout(lease, responses.message()) => match response {
                    Err(_) => return format!("said nothing for {} ms (its lease)", lease.as_millis()),
                    Ok(Err(status)) => return format!("control stream failed: {}", status.message()),
                    Ok(Ok(None)) => return "ended the control stream".to_owned(),
                    Ok(Ok(Some(response))) => {
                        match self.handle(response) {
                            Some(why) => return why,
                            None => continue,
                        }
                    }
                },
            };
            let request = v1::StepsRequest { session_id: String::new(), message: Some(request) };
            if self.to_rank.send(request).await.is_err() {
                return "closed the control stream".to_owned();
            }
        }
    }

    /// Takes a message in. Why the session is over, if it says so.
    fn handle(&mut self, response: v1::StepsResponse) -> Option<String> {
        match response.message {
            Some(v1::steps_response::Message::Heartbeat(beat)) => {
                let begun = (beat.last_step_id, beat.last_layer);
                if std::mem::replace(&mut self.last_hop, begun) != begun {
                    self.life.handle_moved(Instant::now());
                }
            }
            Some(v1::steps_response::Message::Report(report)) => {
                self.life.handle_moved(Instant::now());
                tracing::trace!(
                    step = report.step_id,
                    hops = report.num_hops,
                    compute_us = report.compute_us,
                    "step report"
                );
                let failed = report.error.clone().filter(|_| self.steps_may_fail);
                let failed =
                    failed.map(|error| format!("step {} failed there: {}", report.step_id, error.message));
                self.shared.reports.handle_report(&self.peer, self.shard, report);
                return failed;
            }
            Some(v1::steps_response::Message::Draining(draining)) => {
                tracing::info!(remaining_ms = draining.remaining_ms, "FFN rank is draining");
                self.shared.tell(EdgeEvent::Draining { id: self.id });
            }
            None => {}
        }
        None
    }
}

fn heartbeat() -> v1::steps_request::Message {
    let sent_at_us = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_micros() as u64);
    v1::steps_request::Message::Heartbeat(v1::Heartbeat { sent_at_us, ..v1::Heartbeat::default() })
}

impl Shared {
    fn tell(&self, event: EdgeEvent) {
        // The engine outlives its edges; if it is gone, so is everything that could use the event.
        let _ = self.events.send(event);
        self.bell.ring();
    }

    fn lock_roster(&self) -> MutexGuard<'_, Roster> {
        self.roster.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
