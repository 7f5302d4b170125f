//! The engine thread's loop: hear commands, poll links, queue hops, run a batch, send what came of it.
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use afd_common::frame::{FrameHeader, FrameKind, SideKind};
use afd_common::ids::{Epoch, HopKey, LayerIdx, StageIdx, StepId};
use afd_common::link::{Doorbell, HopLink, InFrame, LinkError};
use afd_common::routing::{Routing, balanced_ids};
use afd_ffi::memory;
use bytes::Bytes;
use crossbeam_channel::{Receiver, TryRecvError};
use tch::{Device, TchError, Tensor};
use tokio::sync::oneshot;

use super::accounts::{HopTimes, StepAccounts};
use super::hop_error::{self, HopError};
use super::staging::{HopBytes, Staging};
use super::stream_links::StreamSource;
use super::{Call, Command, EngineMetrics, EngineOptions, LayerInputs, SessionTag, StageModel, StageSpec};
use crate::hop_queue::{Convoys, HopQueue, QueuedHop, SourceId};
use crate::model::Side;

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

/// Microseconds since the Unix epoch that never go back.
pub(super) struct Clock {
    started: Instant,
    started_us: u64,
}

impl Clock {
    fn new() -> Self {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { started: Instant::now(), started_us: since_epoch.as_micros() as u64 }
    }

    pub(super) fn now_us(&self) -> u64 {
        self.us(Instant::now())
    }

    /// A moment of this process.
    pub(super) fn us(&self, moment: Instant) -> u64 {
        let since = moment.saturating_duration_since(self.started);
        self.started_us + since.as_micros() as u64
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
    pub(super) fn new(model: M, options: EngineOptions, inbox: Receiver<Command>, bell: Doorbell) -> Self {
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

    fn adopt(&mut self, link: Box<dyn HopLink>, accounts: Arc<StepAccounts>, session: SessionTag, rank: u32) {
        let id = SourceId(self.next_source);
        self.next_source += 1;
        tracing::info!(peer = %link.limits().peer, kind = %link.limits().kind, epoch = link.limits().epoch.0, "link up");
        self.metrics().links.with_label_values(&[&link.limits().kind.to_string()]).inc();
        self.metrics().book.handle_up(link.as_ref());
        self.queue.open(id);
        self.sources.push(Source { id, link, accounts, session, rank, failed_hops: 0 });
    }

    fn close_session(&mut self, session: SessionTag, reason: &str) {
        while let Some(at) = self.sources.iter().position(|source| source.session == session) {
            self.sources[at].link.close(reason);
            self.drop_source(at, reason);
        }
        while let Some(at) = self.streams.iter().position(|source| source.owner.session == session) {
            self.drop_stream(at, reason);
        }
    }

    fn stop(&mut self, reason: &str) {
        while !self.streams.is_empty() {
            self.drop_stream(0, reason);
        }
        for at in (0..self.sources.len()).rev() {
            self.sources[at].link.close(reason);
            self.drop_source(at, reason);
        }
    }

    fn drop_source(&mut self, at: usize, why: &str) {
        let source = self.sources.swap_remove(at);
        let limits = source.link.limits();
        self.queue.close(source.id, &mut self.dropped);
        self.convoys.handle_closed(source.id);
        tracing::info!(
            peer = %limits.peer, kind = %limits.kind, epoch = limits.epoch.0, dropped_hops = self.dropped.len(), why,
            "link down"
        );
        self.dropped.clear();
        self.options.metrics.book.handle_down(source.link.as_ref());
        self.options.metrics.links.with_label_values(&[&limits.kind.to_string()]).dec();
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
                Err(end) => self.drop_source(at, &end.to_string()),
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

    /// Runs `self.batch`, all of one layer, and answers every hop of it.
    fn run_batch(&mut self, layer: LayerIdx) {
        let mut batch = std::mem::take(&mut self.batch);
        let started_us = self.clock.now_us();
        for hop in &batch {
            if let Some(source) = self.source(hop.source)
                && !source.accounts.handle_begin(hop.key)
            {
                self.metrics().unplanned.inc();
            }
        }
        let members: Vec<_> = match self.options.board.is_zero() {
            true => Vec::new(),
            false => batch.iter().map(|hop| (hop.source, hop.key)).collect(),
        };
        let rows = batch.iter().map(|hop| hop.rows).sum();
        if !self.options.inject_delay.is_zero() {
            std::thread::sleep(self.options.inject_delay);
        }
        match self.compute(layer, &batch) {
            Ok(output) => self.send_all(&mut batch, output.as_ref(), started_us),
            Err(error) if batch.len() == 1 => {
                batch.drain(..).for_each(|hop| self.answer_error(hop.source, hop.payload.origin, &error));
            }
            // One of them spoiled it for all: each on its own, so that only that one fails.
            Err(_) => {
                for hop in batch.drain(..) {
                    match self.compute(layer, std::slice::from_ref(&hop)) {
                        Ok(output) => self.send_all(&mut vec![hop], output.as_ref(), started_us),
                        Err(error) => self.answer_error(hop.source, hop.payload.origin, &error),
                    }
                }
            }
        }
        batch.clear();
        self.batch = batch;
        self.convoys.handle_executed(members.into_iter(), rows, started_us, self.clock.now_us());
        self.note_convoys();
    }

    fn note_convoys(&self) {
        let metrics = self.metrics();
        metrics.boarding.set(self.convoys.is_on().into());
        metrics.stragglers.inc_by(self.convoys.dropped() - metrics.stragglers.get());
    }

    /// The layer's output for all rows of these hops, `[rows, hidden]` in the combine dtype on the CPU; `None` when they
    /// have no rows.
    fn compute(&mut self, layer: LayerIdx, hops: &[QueuedHop<Waiting>]) -> Result<Option<Tensor>, HopError> {
        let rows: usize = hops.iter().map(|hop| hop.rows as usize).sum();
        if rows == 0 {
            return Ok(None);
        }
        let failed = |what: String| HopError::Model { layer: layer.0, what };
        let inputs =
            self.spec.layers.get(usize::from(layer.0)).map(|inputs| (inputs.side, inputs.side_columns));
        let (side_kind, side_columns) = inputs.unwrap_or((SideKind::None, 0));
        let (hidden, dtype) = (self.spec.hidden_size, self.spec.activations);
        let bytes =
            hops.iter().map(|hop| HopBytes { rows: hop.rows as usize, body: hop.payload.origin.body() });
        let input =
            self.staging.rows(bytes.clone(), hidden, dtype).map_err(|error| failed(error.to_string()))?;
        let side = self
            .staging
            .side(bytes, hidden * dtype.bytes(), side_kind, side_columns as usize)
            .map_err(|error| failed(error.to_string()))?;
        let side = self.balanced(layer, hops).map_err(|error| failed(error.to_string()))?.unwrap_or(side);
        let output = self.model.forward(layer, &input, &side).map_err(failed)?;
        let expected = [rows as i64, hidden as i64];
        if output.size() != expected {
            return Err(failed(format!("the model returned {:?} instead of {expected:?}", output.size())));
        }
        output
            .f_to_device(Device::Cpu)
            .and_then(|output| output.f_to_kind(self.spec.combine().kind()))
            .and_then(|output| output.f_contiguous())
            .map(Some)
            .map_err(|error| failed(error.to_string()))
    }

    /// The choice of `--routing balanced` for a layer that is routed here; `None` with the model's own routing.
    fn balanced(&self, layer: LayerIdx, hops: &[QueuedHop<Waiting>]) -> Result<Option<Side>, TchError> {
        let inputs = self.spec.layers.get(usize::from(layer.0));
        let routed_here = |inputs: &&LayerInputs| inputs.num_experts > 0 && inputs.side != SideKind::TopK;
        let Some(inputs) = inputs.filter(routed_here).filter(|_| self.options.routing == Routing::Balanced)
        else {
            return Ok(None);
        };
        let (top_k, num_experts) = (inputs.experts_per_token as usize, inputs.num_experts as usize);
        let mut ids = Vec::new();
        for hop in hops {
            // A call of its own, outside any link, counts as rank 0.
            let rank = self.source(hop.source).map_or(0, |source| source.rank);
            balanced_ids(&mut ids, rank, hop.key, hop.rows as usize, top_k, num_experts);
        }
        let shape = [-1, top_k as i64];
        let weights = vec![1.0 / top_k as f32; ids.len()];
        let ids = Tensor::f_from_slice(&ids)?.f_view(shape)?;
        Ok(Some(Side::TopK { ids, weights: Tensor::f_from_slice(&weights)?.f_view(shape)? }))
    }

    /// Sends every hop its slice of `output`, in the order in which the rows were put together.
    fn send_all(&mut self, batch: &mut Vec<QueuedHop<Waiting>>, output: Option<&Tensor>, started_us: u64) {
        let finished_us = self.clock.now_us();
        let mut rest: &[u8] = match output.map(memory::bytes) {
            None => &[],
            Some(Ok(bytes)) => bytes,
            Some(Err(error)) => {
                for hop in batch.drain(..) {
                    let error = HopError::Model { layer: hop.key.layer.0, what: error.to_string() };
                    self.answer_error(hop.source, hop.payload.origin, &error);
                }
                return;
            }
        };
        self.note_batch(batch, started_us, finished_us);
        let row_bytes = self.spec.hidden_size * self.spec.combine().bytes();
        let mut before_us = finished_us;
        let batch_hops = batch.len() as u32;
        let batch_rows = batch.iter().map(|hop| hop.rows).sum();
        for hop in batch.drain(..) {
            let (slice, behind) = rest.split_at(hop.rows as usize * row_bytes);
            rest = behind;
            let (source, key, rows, arrived_us) = (hop.source, hop.key, hop.rows, hop.payload.arrived_us);
            self.answer(source, hop.payload.origin, slice);
            let sent_us = self.clock.now_us();
            let metrics = self.metrics();
            metrics.send_seconds.observe(seconds(before_us, sent_us));
            metrics.queue_seconds.observe(seconds(arrived_us, started_us));
            before_us = sent_us;
            if let Some(source) = self.source(source) {
                source.accounts.handle_served(&HopTimes {
                    key,
                    rows,
                    batch_rows,
                    batch_hops,
                    epoch: source.link.limits().epoch,
                    arrived_us,
                    started_us,
                    finished_us,
                    sent_us,
                });
            }
        }
        self.metrics().busy_us.fetch_add(before_us.saturating_sub(started_us), Relaxed);
    }

    fn note_batch(&self, batch: &[QueuedHop<Waiting>], started_us: u64, finished_us: u64) {
        let metrics = self.metrics();
        let rows: u64 = batch.iter().map(|hop| u64::from(hop.rows)).sum();
        metrics.hops.inc_by(batch.len() as u64);
        metrics.rows.inc_by(rows);
        metrics.batch_rows.observe(rows as f64);
        metrics.batch_hops.observe(batch.len() as f64);
        let newcomers =
            (0..batch.len()).filter(|at| batch[..*at].iter().all(|hop| hop.source != batch[*at].source));
        metrics.batch_ranks.observe(newcomers.count() as f64);
        metrics.compute_seconds.observe(seconds(started_us, finished_us));
    }

    fn answer(&mut self, source: SourceId, origin: Origin, slice: &[u8]) {
        let header = match origin {
            // A caller that has gone away is no error.
            Origin::Call { reply, .. } => return drop(reply.send(Ok(slice.to_vec()))),
            Origin::Link(frame) => frame.header,
        };
        let combine = FrameHeader {
            kind: FrameKind::Combine,
            dtype: self.spec.combine(),
            side: SideKind::None,
            side_columns: 0,
            body_bytes: slice.len() as u32,
            ..header
        };
        self.send(source, combine, slice);
    }

    fn answer_error(&mut self, source: SourceId, origin: Origin, error: &HopError) {
        self.metrics().refused.with_label_values(&[error.reason()]).inc();
        let header = match origin {
            Origin::Call { reply, .. } => return drop(reply.send(Err(error.clone()))),
            Origin::Link(frame) => frame.header,
        };
        let mut text = std::mem::take(&mut self.text);
        error.encode(&mut text);
        let answer = FrameHeader {
            kind: FrameKind::Error,
            side: SideKind::None,
            epoch: Epoch(0),
            rows: 0,
            columns: 0,
            side_columns: 0,
            body_bytes: text.len() as u32,
            ..header
        };
        if let Some(source) = self.sources.iter_mut().find(|candidate| candidate.id == source) {
            source.failed_hops += 1;
            // A peer that is wrong all the time does not fill the log.
            if source.failed_hops.is_power_of_two() {
                let (peer, failed_hops) = (&source.link.limits().peer, source.failed_hops);
                tracing::warn!(%peer, hop = %header.hop, failed_hops, %error, "hop failed");
            }
            source.accounts.handle_failed(header.hop.step, error.code() as i32, &error.to_string());
        }
        self.send(source, answer, &text);
        self.text = text;
    }

    /// Sends on a link, which is dropped when it is broken. A link that has gone meanwhile needs no answer.
    fn send(&mut self, source: SourceId, header: FrameHeader, body: &[u8]) {
        let Some(at) = self.sources.iter().position(|candidate| candidate.id == source) else { return };
        match self.sources[at].link.send(header, &[body]) {
            Ok(()) => {}
            // Our own mistake or a result larger than agreed: the peer must not wait for what will not come.
            Err(error @ (LinkError::NoCredit { .. } | LinkError::BadFrame { .. })) => {
                self.sources[at].link.close(&error.to_string());
                self.drop_source(at, &error.to_string());
            }
            Err(end) => self.drop_source(at, &end.to_string()),
        }
    }

    fn source(&self, id: SourceId) -> Option<&Source> {
        self.sources.iter().find(|source| source.id == id)
    }
}

pub(super) fn seconds(from_us: u64, to_us: u64) -> f64 {
    Duration::from_micros(to_us.saturating_sub(from_us)).as_secs_f64()
}
