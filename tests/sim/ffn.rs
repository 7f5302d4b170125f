//! An FFN process in virtual time: the real engine, hop queue, registry of sessions and plan book, and between them what
//! `ffn-svc`'s session module does with tokio.
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use afd_common::ids::{HopKey, StepId};
use afd_common::link::{Doorbell, HopLink};
use afd_common::proto::v1;
use afd_common::routing::Routing;
use afd_common::telemetry::Metrics;
use ffn_svc::engine::stepped::SteppedEngine;
use ffn_svc::engine::{EngineMetrics, EngineOptions, Planned, SessionTag, StepAccounts};
use ffn_svc::session::plans::{PlanBook, PlanLimits};
use ffn_svc::session::registry::{NotAdmitted, Place, Registry, SessionId};

use crate::model::SimModel;

pub(crate) const MAX_ROWS: u32 = 4;
/// Links that belong to no session.
const NO_SESSION: SessionTag = SessionTag(0);

pub(crate) struct Process {
    pub(crate) incarnation: u64,
    pub(crate) is_stopped: bool,
    pub(crate) is_draining: bool,
    engine: SteppedEngine<SimModel>,
    registry: Registry,
    sessions: BTreeMap<u64, Session>,
    next_tag: u64,
    next_epoch: u64,
    limits: PlanLimits,
    num_layers: u16,
}

struct Session {
    place: Place,
    id: SessionId,
    book: PlanBook,
    accounts: Arc<StepAccounts>,
}

/// One set for all: registering them takes longer than a run.
fn metrics() -> EngineMetrics {
    static METRICS: OnceLock<EngineMetrics> = OnceLock::new();
    METRICS.get_or_init(|| EngineMetrics::new(&Metrics::new()).expect("no name is taken")).clone()
}

impl Process {
    pub(crate) fn start(model: SimModel, max_stages: u32, incarnation: u64) -> Self {
        let num_layers = model.num_layers;
        let options = EngineOptions {
            max_rows: MAX_ROWS,
            max_batch_rows: 2 * MAX_ROWS,
            metrics: metrics(),
            inject_delay: Duration::ZERO,
            board: Duration::ZERO,
            routing: Routing::Model,
        };
        Self {
            incarnation,
            is_stopped: false,
            is_draining: false,
            engine: SteppedEngine::new(model, options),
            registry: Registry::default(),
            sessions: BTreeMap::new(),
            next_tag: 1,
            // As in a real process: later lives have later epochs.
            next_epoch: incarnation * 1000,
            limits: PlanLimits { max_stages, max_tokens_per_stage: MAX_ROWS },
            num_layers,
        }
    }

    pub(crate) fn join(
        &mut self,
        identity: &v1::Identity,
        now: Instant,
        lease: Duration,
    ) -> Result<u64, NotAdmitted> {
        let tag = self.next_tag;
        let id = SessionId::from_bits(tag.into());
        let replaced = self.registry.admit(identity, id.clone(), now, lease)?;
        self.next_tag += 1;
        if let Some(replaced) = replaced {
            let gone = self.sessions.iter().find(|(_, session)| session.id == replaced).map(|(tag, _)| *tag);
            gone.into_iter().for_each(|tag| self.finish(tag, "a newer session took its place"));
        }
        let session = Session {
            place: Place::of(identity),
            id,
            book: PlanBook::new(self.limits),
            accounts: Arc::new(StepAccounts::new(self.num_layers, false)),
        };
        self.sessions.insert(tag, session);
        Ok(tag)
    }

    pub(crate) fn mint_epoch(&mut self) -> u64 {
        self.next_epoch += 1;
        self.next_epoch
    }

    pub(crate) fn bell(&self) -> Doorbell {
        self.engine.bell()
    }

    /// Gives the engine a link of a session, or of nobody's.
    pub(crate) fn adopt(&mut self, link: Box<dyn HopLink>, tag: Option<u64>) {
        match tag.and_then(|tag| Some((tag, self.sessions.get(&tag)?))) {
            Some((tag, session)) => {
                self.engine.adopt_for(link, Arc::clone(&session.accounts), SessionTag(tag));
            }
            None => {
                let accounts = Arc::new(StepAccounts::new(self.num_layers, false));
                self.engine.adopt_for(link, accounts, NO_SESSION);
            }
        }
    }

    /// A plan or its withdrawal arrives. A session that has ended hears nothing any more.
    ///
    /// # Errors
    /// The plan book's: an attention rank must never send what is refused.
    pub(crate) fn plan(&mut self, tag: u64, message: &v1::steps_request::Message) -> Result<(), String> {
        let Some(session) = self.sessions.get_mut(&tag) else { return Ok(()) };
        let plan = match message {
            v1::steps_request::Message::Plan(plan) => plan,
            v1::steps_request::Message::Cancel(cancel) => {
                session.book.cancel(StepId(cancel.step_id));
                session.accounts.handle_cancel(StepId(cancel.step_id));
                return Ok(());
            }
            v1::steps_request::Message::Heartbeat(_) => return Ok(()),
        };
        session.book.accept(plan).map_err(|error| error.to_string())?;
        let stages = plan.padded_tokens.len() as u32;
        session.accounts.handle_plan(StepId(plan.step_id), Planned { stages, ..Planned::default() });
        Ok(())
    }

    /// Hears from a session. `false`: it has ended.
    pub(crate) fn renew(&mut self, tag: u64, until: Instant) -> bool {
        let Some(session) = self.sessions.get(&tag) else { return false };
        self.registry.renew(&session.place, &session.id, until)
    }

    /// Of a session.
    pub(crate) fn last_begun(&self, tag: u64) -> Option<HopKey> {
        self.sessions.get(&tag)?.accounts.last_begun()
    }

    /// Whether a session takes a step for one that has begun and not ended.
    pub(crate) fn is_under_way(&self, tag: u64) -> bool {
        self.sessions.get(&tag).is_some_and(|session| session.accounts.under_way())
    }

    /// Ends the sessions whose lease is over.
    pub(crate) fn expire(&mut self, now: Instant) {
        let over = self.sessions.iter().filter(|(_, session)| {
            self.registry.lease_ends(&session.place, &session.id).is_none_or(|ends| ends <= now)
        });
        for tag in over.map(|(tag, _)| *tag).collect::<Vec<_>>() {
            self.end(tag, "its lease has ended");
        }
    }

    /// Ends a session, if it is there.
    pub(crate) fn end(&mut self, tag: u64, why: &str) {
        if let Some(session) = self.sessions.get(&tag) {
            self.registry.end(&session.place, &session.id);
            self.finish(tag, why);
        }
    }

    fn finish(&mut self, tag: u64, why: &str) {
        self.sessions.remove(&tag);
        self.engine.close_session(SessionTag(tag), why);
    }

    pub(crate) fn num_sessions(&self) -> usize {
        self.sessions.len()
    }

    /// The engine takes a turn; whether it has run a batch.
    pub(crate) fn turn(&mut self) -> bool {
        let ran = self.engine.turn();
        for session in self.sessions.values_mut() {
            while let Some(account) = session.accounts.take_finished() {
                session.book.finish(account.step);
            }
        }
        ran
    }
}
