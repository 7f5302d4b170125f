//! The engine thread's loop: hear commands, poll links, queue hops, run a batch, send what came of it. In reading order:
//! `links` (who may send), `batch` (what is computed), `answers` (what goes back).
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use afd_common::frame::FrameHeader;
use afd_common::ids::{HopKey, StageIdx, StepId};
use afd_common::link::{Doorbell, HopLink, InFrame, LinkError};
use bytes::Bytes;
use crossbeam_channel::{Receiver, TryRecvError};
use tokio::sync::oneshot;

use super::accounts::StepAccounts;
use super::clock::Clock;
use super::hop_error::{self, HopError};
use super::staging::Staging;
use super::stream_links::{GiveUps, StreamSource};
use super::{Call, Command, EngineMetrics, EngineOptions, SessionTag, StageModel, StageSpec};
use crate::hop_queue::{Convoys, HopQueue, QueuedHop, SourceId};

mod answers;
mod batch;
mod links;

/// Where hops of [`Call`]s come from.
const CALLS: SourceId = SourceId(0);
/// How soon the end of a step on a device is noticed.
const LOOK_AGAIN: Duration = Duration::from_micros(100);

pub(super) struct Worker<M> {
    pub(super) model: M,
    pub(super) spec: StageSpec,
    options: EngineOptions,
    inbox: Receiver<Command>,
    bell: Doorbell,
    pub(super) clock: Clock,
    queue: HopQueue<Waiting>,
    convoys: Convoys,
    /// Look again then, at the latest.
    held_until_us: Option<u64>,
    sources: Vec<Source>,
    /// Links that a stream drives; `steps.rs`.
    pub(super) streams: Vec<StreamSource>,
    pub(super) next_stream: u64,
    pub(super) give_ups: GiveUps,
    next_source: u64,
    next_call: u64,
    staging: Staging,
    /// Reused from batch to batch.
    batch: Vec<QueuedHop<Waiting>>,
    dropped: Vec<QueuedHop<Waiting>>,
    text: Vec<u8>,
}

/// A link in use.
struct Source {
    id: SourceId,
    link: Box<dyn HopLink>,
    accounts: Arc<StepAccounts>,
    session: SessionTag,
    /// The attention rank at its other end.
    rank: u32,
    /// Hops answered with an error.
    failed_hops: u64,
}

/// What waits in the queue.
struct Waiting {
    origin: Origin,
    arrived_us: u64,
}

enum Origin {
    Link(InFrame),
    Call { header: FrameHeader, body: Bytes, reply: oneshot::Sender<Result<Vec<u8>, HopError>> },
}

impl Origin {
    fn header(&self) -> &FrameHeader {
        match self {
            Self::Link(frame) => &frame.header,
            Self::Call { header, .. } => header,
        }
    }

    fn body(&self) -> &[u8] {
        match self {
            Self::Link(frame) => frame.body(),
            Self::Call { body, .. } => body,
        }
    }
}

/// What a turn of the loop came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// A batch ran.
    Ran,
    /// There is nothing to do until the bell rings.
    Idle,
    /// The engine was told to end.
    Stopped,
}

/// Whether the loop goes on.
enum Heard {
    Nothing,
    Stop { reason: String },
}

impl<M: StageModel> Worker<M> {
    pub(super) fn new(
        model: M,
        options: EngineOptions,
        (inbox, bell): (Receiver<Command>, Doorbell),
        give_ups: GiveUps,
    ) -> Self {
        let spec = model.spec();
        let num_layers = u16::try_from(spec.layers.len()).unwrap_or(u16::MAX);
        let mut queue = HopQueue::new(num_layers, options.max_batch_rows);
        queue.open(CALLS);
        Self {
            model,
            spec,
            convoys: Convoys::new(options.board.as_micros() as u64),
            held_until_us: None,
            options,
            inbox,
            bell,
            clock: Clock::new(),
            queue,
            sources: Vec::new(),
            streams: Vec::new(),
            next_stream: 1,
            give_ups,
            next_source: CALLS.0 + 1,
            next_call: 0,
            staging: Staging::new(),
            batch: Vec::new(),
            dropped: Vec::new(),
            text: Vec::new(),
        }
    }

    pub(super) fn run(&mut self) {
        loop {
            // Read before looking, so that what rings meanwhile is not slept through.
            let seen = self.bell.count();
            match self.turn() {
                Turn::Ran => {}
                Turn::Idle => self.rest(seen),
                Turn::Stopped => return,
            }
        }
    }

    /// Hears, looks, and runs what is next, if there is anything.
    pub(super) fn turn(&mut self) -> Turn {
        if let Heard::Stop { reason } = self.hear() {
            self.stop(&reason);
            return Turn::Stopped;
        }
        self.poll_links();
        self.poll_steps();
        self.held_until_us = self.convoys.update(self.clock.now_us());
        let Self { queue, convoys, batch, .. } = self;
        let next = queue.pick_ready(batch, |hop| convoys.holds(hop.source, hop.key));
        self.metrics().unanswered.set((self.queue.len() + self.batch.len()) as i64);
        let Some(layer) = next else { return Turn::Idle };
        self.run_batch(layer);
        Turn::Ran
    }

    /// Sleeps until something is heard, or nobody is held any longer.
    fn rest(&mut self, seen: u64) {
        let since_us = self.clock.now_us();
        let under_way = self.sources.iter().any(|source| source.accounts.under_way());
        // The end of a step on the device rings no bell.
        let look_again = (!self.no_step_begun()).then(|| Instant::now() + LOOK_AGAIN);
        let held_until = self
            .held_until_us
            .map(|until_us| Instant::now() + Duration::from_micros(until_us.saturating_sub(since_us)));
        self.bell.wait(seen, [look_again, held_until].into_iter().flatten().min());
        if under_way {
            self.metrics().idle_us.fetch_add(self.clock.now_us().saturating_sub(since_us), Relaxed);
        }
    }

    pub(super) fn metrics(&self) -> &EngineMetrics {
        &self.options.metrics
    }

    fn hear(&mut self) -> Heard {
        loop {
            match self.inbox.try_recv() {
                Ok(Command::Adopt { link, accounts, session, rank }) => {
                    self.adopt(link, accounts, session, rank);
                }
                Ok(Command::CloseSession { session, reason }) => self.close_session(session, &reason),
                Ok(Command::Call(call)) => self.queue_call(call),
                Ok(Command::Stream(command)) => self.handle_stream(command),
                Ok(Command::Stop { reason }) => return Heard::Stop { reason },
                Err(TryRecvError::Empty) => return Heard::Nothing,
                Err(TryRecvError::Disconnected) => return Heard::Stop { reason: "nobody is left".into() },
            }
        }
    }

    fn queue_call(&mut self, call: Call) {
        let Call { mut header, body, reply } = call;
        if reply.is_closed() {
            return;
        }
        // Every call is a step of its own, so that none is taken for another's duplicate.
        self.next_call += 1;
        header.hop = HopKey { step: StepId(self.next_call), layer: header.hop.layer, stage: StageIdx(0) };
        let origin = Origin::Call { header, body, reply };
        self.queue_hop(CALLS, origin);
    }

    /// Takes what the links have; a link that has ended is dropped with its hops.
    fn poll_links(&mut self) {
        let mut at = 0;
        while at < self.sources.len() {
            match self.sources[at].link.poll_recv() {
                Ok(Some(frame)) => self.queue_hop(self.sources[at].id, Origin::Link(frame)),
                Ok(None) => at += 1,
                Err(end) => {
                    if let LinkError::Corrupt { peer, what } = &end {
                        tracing::warn!(peer, what, "a frame came damaged: the link is given up");
                    }
                    self.drop_source(at, &end.to_string());
                }
            }
        }
    }

    fn queue_hop(&mut self, source: SourceId, origin: Origin) {
        let header = *origin.header();
        let checked = hop_error::check(&self.spec, self.options.max_rows, &header, origin.body().len());
        let arrived_us = self.clock.now_us();
        let waiting = Waiting { origin, arrived_us };
        let (error, waiting) = match checked {
            Err(error) => (error, waiting),
            Ok(()) => match self.queue.push(source, header.hop, header.rows, waiting) {
                Ok(()) => {
                    if source != CALLS {
                        self.convoys.handle_arrival(source, header.hop, header.rows, arrived_us);
                    }
                    return;
                }
                Err((refused, waiting)) => (refused.into(), waiting),
            },
        };
        self.answer_error(source, waiting.origin, &error);
    }

    fn source(&self, id: SourceId) -> Option<&Source> {
        self.sources.iter().find(|source| source.id == id)
    }
}

pub(super) fn seconds(from_us: u64, to_us: u64) -> f64 {
    Duration::from_micros(to_us.saturating_sub(from_us)).as_secs_f64()
}
