//! The control plane towards one FFN rank, in tokio: join, open a link, keep the session alive, pass plans on; and
//! again from the start whenever it breaks.
//!
//! Nothing of the per-layer path is here: rows travel on the link, which the engine thread owns once it is up.
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use afd_common::frame::RowType;
use afd_common::ids::Shard;
use afd_common::link::LinkKind;
use afd_common::proto::v1;
use afd_common::proto::v1::ffn_control_service_client::FfnControlServiceClient;
use afd_common::spelling;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use super::edge::{Edge, EdgeEvent};
use super::hop_table::EdgeId;
use super::joining::{self, Opened, Target};
use super::life::{EdgeControl, Life};
use super::peer::{Peer, PeerState};
use super::roster::{NotSeated, Process};
use super::session::{self, SessionError, Shared};
use super::stream_edge::StreamEdge;
use super::talk::{Talk, heartbeat};

/// Plans waiting for the control stream: a few steps' worth.
const PLAN_QUEUE: usize = 16;
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_MOST: Duration = Duration::from_secs(1);
/// Before a process is asked again that another one keeps out, unless that one goes first; and at most, before one is that
/// knows another process as this rank.
const TWIN_RETRY: Duration = Duration::from_secs(5);

/// Serves one address, which `--ffn` calls `host`, until `stop`: session after session, with a short pause between them.
pub async fn run(
    address: SocketAddr,
    host: String,
    shared: Arc<Shared>,
    peer: watch::Sender<Peer>,
    stop: CancellationToken,
) {
    let mut control = Control { address, host, shared: &shared, peer, process: None, is_taken: false };
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
        let most = if matches!(ended, SessionError::Taken(_)) { TWIN_RETRY } else { RETRY_MOST };
        pause = if begun.elapsed() > RETRY_MOST { RETRY_FIRST } else { (pause * 2).min(most) };
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
    /// Another process was this attention rank when this one last tried to join.
    is_taken: bool,
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

    fn handle_end(&mut self, ended: SessionError) {
        let why = ended.to_string();
        let address = self.address;
        let is_taken = matches!(ended, SessionError::Taken(_));
        if std::mem::replace(&mut self.is_taken, is_taken) != is_taken && is_taken {
            let retry_s = TWIN_RETRY.as_secs();
            tracing::warn!(
                peer = %address, why, retry_s, option = "--rank",
                "another process is this attention rank; trying on until it is gone"
            );
        }
        let state = match ended {
            SessionError::Refused(_) => PeerState::Refused { why: why.clone(), for_good: true },
            SessionError::NotSeated(_) => PeerState::Refused { why: why.clone(), for_good: false },
            SessionError::Taken(_) | SessionError::Broken(_) | SessionError::Away(_) => {
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
                "join: identity.role is {}, expected ffn (--ffn)",
                spelling::role(identity.role)
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
        let limit = shared.settings.link_timeout;
        let target = Target::new(address, &self.host, shared)?;
        // Who it is, is known for sure once it has joined.
        let expected = match &self.process {
            Some(process) => format!("F{} at {address}", process.rank()),
            None => address.to_string(),
        };
        let channel = target.connect(&expected, limit).await?;
        let mut client = FfnControlServiceClient::new(channel.clone());
        let joined = joining::join(&mut client, &expected, shared).await?;
        let _seated = self.seat(joined.identity.as_ref())?;
        let shard = joining::agreed_shard(&joined, shared)?;
        let combine_dtype = session::combine_dtype(&joined)?;
        let rank = joined.identity.as_ref().map_or(0, |identity| identity.rank);
        let peer: Arc<str> = format!("F{rank} at {address}").into();

        // The lease runs from the join on, so the stream that keeps it comes before the link.
        let (to_rank, requests) = mpsc::channel(PLAN_QUEUE);
        let hello = v1::StepsRequest { session_id: joined.session_id.clone(), message: Some(heartbeat()) };
        to_rank.try_send(hello).map_err(|error| SessionError::broken("steps", error))?;
        let steps = client.steps(ReceiverStream::new(requests));
        let steps = session::within(limit, &peer, "control stream", steps).await?;
        let link = joining::open_link(&mut client, channel, &target, &peer, &joined, shared).await?;

        let id = EdgeId(shared.next_edge.fetch_add(1, Ordering::Relaxed));
        let (plan_sender, plans) = mpsc::channel(PLAN_QUEUE);
        let (abandon, abandoned) = mpsc::channel(1);
        let life = Arc::new(Life::new(shared.started));
        let control = EdgeControl { plans: plan_sender, abandon, life: Arc::clone(&life) };
        let (kind, up) = edge(id, Arc::clone(&peer), shard, combine_dtype, link, control);
        let served = self.peer.borrow().served.filter(|served| *served != shard);
        if let Some(was) = served {
            tracing::warn!(peer = %address, %was, is = %shard, "FFN rank has come back as another shard");
        }
        self.set_state(PeerState::Up { shard, link: kind, life: Arc::clone(&life) });
        shared.tell(up);
        let lease = Duration::from_millis(joined.lease_ms.max(100).into());
        let steps_may_fail = kind.is_stream_driven();
        let last_hop = (0, 0, 0);
        let talk = Talk { id, peer, shard, shared, life, lease, to_rank, steps_may_fail, last_hop };
        let why = talk.run(plans, abandoned, steps.into_inner(), stop).await;
        shared.tell(EdgeEvent::Down { id, why: why.clone() });
        Err(SessionError::Broken(why))
    }
}

/// The engine's end of an opened link, and the link's kind.
fn edge(
    id: EdgeId,
    peer: Arc<str>,
    shard: Shard,
    combine_dtype: RowType,
    link: Opened,
    control: EdgeControl,
) -> (LinkKind, EdgeEvent) {
    match link {
        Opened::Host(link) => {
            let (kind, control) = (link.limits().kind, Some(control));
            let (hop_seconds, draining, warm_up) = (None, false, None);
            let edge = Edge { id, peer, shard, combine_dtype, link, control, hop_seconds, draining, warm_up };
            (kind, EdgeEvent::Up(edge))
        }
        Opened::Stream(link) => {
            let kind = link.kind;
            let edge = StreamEdge { id, peer, shard, link, control, stats: None, draining: false };
            (kind, EdgeEvent::StreamUp(Box::new(edge)))
        }
    }
}
