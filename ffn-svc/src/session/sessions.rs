//! The live sessions of this process and what each may do: the state behind `FfnControlService`.
//!
//! A session begins with a join, lives as long as its lease is renewed, and takes its links along when it ends. The
//! decisions are those of the pure [`handshake`](super::handshake), [`registry`](super::registry) and
//! [`grants`](afd_common::link::grants); here they meet the clock, randomness and the engine.
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use afd_common::ids::Epoch;
use afd_common::lease::Silence;
use afd_common::link::grants::Grants;
use afd_common::proto::{PROTOCOL_MAJOR, v1};
use afd_common::telemetry::SpanSink;
use rand::Rng;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{Code, Status};

use super::handshake::{self, Agreement, Offer};
use super::registry::{Place, Registry, SessionId};
use super::status::detailed;
use crate::engine::{EngineHandle, SessionTag, StepAccounts};

/// Links that were granted and not attached, over all sessions.
pub(super) const MAX_WAITING_LINKS: usize = 256;
/// Sessions of one host that have joined and said nothing yet: whoever joins for nothing leaves room for others.
const MAX_SILENT_SESSIONS: usize = 64;

/// What a rank is, beside what it offers.
#[derive(Clone, Debug)]
pub struct Settings {
    /// This process.
    pub identity: v1::Identity,
    /// What callers must agree to.
    pub offer: Offer,
    /// A session ends when nothing is heard for this long.
    pub lease: Duration,
    /// A granted link must be attached within this time.
    pub attach_timeout: Duration,
    /// Where spans of recorded steps go.
    pub spans: SpanSink,
}

/// One attention rank's session.
#[derive(Debug)]
pub struct Session {
    /// Its name on the wire.
    pub id: SessionId,
    /// Whose it is.
    pub place: Place,
    /// From which host it joined, where that is known.
    pub from: Option<IpAddr>,
    /// The engine's name for its links.
    pub tag: SessionTag,
    /// What was agreed.
    pub agreement: Agreement,
    /// What its steps cost.
    pub accounts: Arc<StepAccounts>,
    has_steps: AtomicBool,
    has_stream_links: AtomicBool,
    ended: CancellationToken,
    why: OnceLock<String>,
}

impl Session {
    /// Waits until the session has ended.
    pub async fn ended(&self) {
        self.ended.cancelled().await;
    }

    /// Why it ended, if it did.
    pub fn end(&self) -> Option<&str> {
        self.why.get().map(String::as_str)
    }

    /// Whether its plans concern the engine: it has, or is about to have, a link that a stream drives.
    pub fn has_stream_links(&self) -> bool {
        self.has_stream_links.load(Ordering::Acquire)
    }

    pub(super) fn expect_stream_links(&self) {
        self.has_stream_links.store(true, Ordering::Release);
    }

    /// Whether this is the session's first control stream.
    pub fn claim_steps(&self) -> bool {
        !self.has_steps.swap(true, Ordering::AcqRel)
    }
}

/// See the module's head.
pub struct Sessions {
    settings: Settings,
    engine: Arc<EngineHandle>,
    live: Mutex<Live>,
    grants: Mutex<Grants<Arc<Session>>>,
    next_tag: AtomicU64,
    /// Until when, once the process drains.
    draining: watch::Sender<Option<Instant>>,
    tasks: TaskTracker,
}

#[derive(Default)]
struct Live {
    registry: Registry,
    by_id: HashMap<SessionId, Arc<Session>>,
}

impl Sessions {
    /// Nobody has joined.
    pub fn new(settings: Settings, engine: Arc<EngineHandle>) -> Arc<Self> {
        let first_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
        let grants = Grants::new(Epoch(first_epoch), settings.attach_timeout, MAX_WAITING_LINKS);
        Arc::new(Self {
            settings,
            engine,
            live: Mutex::default(),
            grants: Mutex::new(grants),
            next_tag: AtomicU64::new(1),
            draining: watch::Sender::new(None),
            tasks: TaskTracker::new(),
        })
    }

    /// What this rank is.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What runs the hops.
    pub fn engine(&self) -> &Arc<EngineHandle> {
        &self.engine
    }

    /// Tasks that belong to sessions; they end with them.
    pub fn tasks(&self) -> &TaskTracker {
        &self.tasks
    }

    /// Sessions that are live.
    pub fn len(&self) -> usize {
        self.lock_live().by_id.len()
    }

    /// Whether nobody is there.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether some session's step has begun and not ended.
    pub fn any_step_under_way(&self) -> bool {
        self.lock_live().by_id.values().any(|session| session.accounts.under_way())
    }

    /// Handshake.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` names what differs; `UNAVAILABLE` while draining; `RESOURCE_EXHAUSTED` when a host has too many
    /// sessions that say nothing.
    pub fn join(
        self: &Arc<Self>,
        request: &v1::JoinRequest,
        from: Option<IpAddr>,
    ) -> Result<v1::JoinResponse, Status> {
        if self.draining.borrow().is_some() {
            return Err(detailed(Code::Unavailable, "this FFN rank is draining", "DRAINING", Vec::new()));
        }
        let agreement = handshake::agree(&self.settings.offer, request)?;
        let identity = request.identity.clone().unwrap_or_default();
        let id = SessionId::from_bits(rand::rng().random());
        let num_layers = self.engine.spec().layers.len() as u16;
        let accounts = StepAccounts::new(num_layers, self.settings.spans.is_on());
        let session = Arc::new(Session {
            id: id.clone(),
            place: Place::of(&identity),
            from,
            tag: SessionTag(self.next_tag.fetch_add(1, Ordering::Relaxed)),
            agreement,
            accounts: Arc::new(accounts.warm_at_first()),
            has_steps: AtomicBool::new(false),
            has_stream_links: AtomicBool::new(false),
            ended: CancellationToken::new(),
            why: OnceLock::new(),
        });
        let replaced = {
            let mut live = self.lock_live();
            let is_silent =
                |other: &&Arc<Session>| other.from == from && !other.has_steps.load(Ordering::Acquire);
            if from.is_some() && live.by_id.values().filter(is_silent).count() >= MAX_SILENT_SESSIONS {
                let message = format!(
                    "{MAX_SILENT_SESSIONS} sessions of {} have no control stream yet, which is the limit of a host",
                    from.map_or_else(String::new, |from| from.to_string())
                );
                return Err(detailed(Code::ResourceExhausted, message, "SESSIONS_FULL", Vec::new()));
            }
            let replaced = live.registry.admit(&identity, id.clone(), Instant::now(), self.settings.lease)?;
            let replaced = replaced.and_then(|id| live.by_id.remove(&id));
            live.by_id.insert(id, Arc::clone(&session));
            replaced
        };
        if let Some(replaced) = replaced {
            self.finish(&replaced, "a newer session took its place");
        }
        tracing::info!(peer = %session.place, incarnation = identity.incarnation, "joined");
        self.tasks.spawn(Arc::clone(self).watch_lease(Arc::clone(&session)));
        Ok(self.answer_join(&session))
    }

    fn answer_join(&self, session: &Session) -> v1::JoinResponse {
        let (spec, agreement) = (self.engine.spec(), &session.agreement);
        v1::JoinResponse {
            protocol_major: PROTOCOL_MAJOR,
            protocol_minor: agreement.protocol_minor,
            identity: Some(self.settings.identity.clone()),
            shard: Some(v1::ShardSpec { index: spec.shard.index(), count: spec.shard.count() }),
            session_id: session.id.as_str().to_owned(),
            link_kinds: agreement.link_kinds.iter().map(|kind| (*kind).into()).collect(),
            max_stages: agreement.max_stages,
            max_tokens_per_stage: agreement.max_tokens_per_stage,
            features: agreement.features.clone(),
            lease_ms: self.settings.lease.as_millis() as u32,
            combine_dtype: afd_common::identity::dtype(spec.combine()).into(),
        }
    }

    /// A live session.
    ///
    /// # Errors
    /// `NOT_FOUND` when it has ended or never was.
    pub fn find(&self, id: &str) -> Result<Arc<Session>, Status> {
        let found = self.lock_live().by_id.get(&SessionId::from_wire(id)).cloned();
        found.ok_or_else(|| {
            let message = "`session_id` names no live session: join again";
            detailed(Code::NotFound, message, "SESSION_NOT_FOUND", Vec::new())
        })
    }

    /// Something was heard from the session; `false` when it has ended.
    pub fn renew(&self, session: &Session) -> bool {
        let until = Instant::now() + self.settings.lease;
        self.lock_live().registry.renew(&session.place, &session.id, until)
    }

    /// Ends a session, and with it its links. Ending it again changes nothing.
    pub fn end(&self, session: &Arc<Session>, why: &str) {
        {
            let mut live = self.lock_live();
            live.registry.end(&session.place, &session.id);
            live.by_id.remove(&session.id);
        }
        self.finish(session, why);
    }

    /// Ends all sessions.
    pub fn end_all(&self, why: &str) {
        let all: Vec<_> = self.lock_live().by_id.values().cloned().collect();
        all.iter().for_each(|session| self.end(session, why));
    }

    fn finish(&self, session: &Arc<Session>, why: &str) {
        if session.why.set(why.to_owned()).is_ok() {
            tracing::info!(peer = %session.place, why, "session ended");
            session.ended.cancel();
            self.lock_grants().revoke(|owner| owner.id == session.id);
            self.engine.close_session(session.tag, why);
        }
    }

    async fn watch_lease(self: Arc<Self>, session: Arc<Session>) {
        let lease = self.settings.lease;
        let mut heard = Instant::now();
        let mut silence = Silence::new(lease, heard);
        loop {
            let Some(ends) = self.lock_live().registry.lease_ends(&session.place, &session.id) else {
                return;
            };
            // Every word renews the lease.
            let last_word = ends.checked_sub(lease).unwrap_or(heard);
            if last_word > heard {
                heard = last_word;
                silence.handle_heard(heard);
            }
            if silence.handle_due(Instant::now()).is_some() {
                let lease_ms = lease.as_millis();
                return self
                    .end(&session, &format!("nothing was heard for {lease_ms} ms, its lease (--lease-ms)"));
            }
            tokio::select! {
                () = tokio::time::sleep_until(silence.due().into()) => {}
                () = session.ended() => return,
            }
        }
    }

    /// Lets nobody new in and tells every session that the process stops at `deadline`. Calling it again only moves the
    /// deadline.
    pub fn drain(&self, deadline: Instant) {
        self.draining.send_replace(Some(deadline));
    }

    /// The deadline of the drain, now and whenever it changes.
    pub fn draining(&self) -> watch::Receiver<Option<Instant>> {
        self.draining.subscribe()
    }

    fn lock_live(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(super) fn lock_grants(&self) -> MutexGuard<'_, Grants<Arc<Session>>> {
        self.grants.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
