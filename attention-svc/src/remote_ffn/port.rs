//! The engine thread's end of every edge: sends rows to the shards that serve them, waits for their partial sums, adds them
//! up in shard order, and sends the rows of a lost edge again to whoever serves its shard next.
//!
//! The FFN holds no request state, so nothing is lost with it: the rows of every outstanding hop are kept here until
//! the hop is combined.
use std::sync::Arc;
use std::time::{Duration, Instant};

use afd_common::config::model::ModelConfig;
use afd_common::frame::RowType;
use afd_common::identity::ExpertRules;
use afd_common::ids::{HopKey, StepId};
use afd_common::link::{Doorbell, LinkError};
use afd_common::placement::Placement;
use afd_common::routing::{Routing, balanced_ids};
use afd_gpu::{Completion, Stream};
use crossbeam_channel::Receiver;
use tch::{Device, TchError, Tensor};

use super::announce::{Announcements, step_plan};
use super::clock::Clock;
use super::edge::{Edge, EdgeEvent};
use super::edges::Edges;
use super::hop_table::{Arrival, EdgeId, MAX_SENDS};
use super::kept::Kept;
use super::outstanding::{Outstanding, row_kind};
use super::recorder::HopRecorder;
use super::routes::Share;
use super::stats::FfnStats;
use super::stream_edge::StreamEdge;
use super::streams::{StreamPlace, Streams, decode_plan};
use crate::device::{HopRows, StepRun, StreamFfn, StreamHop, Summand};
use crate::engine::{DeviceTimes, FfnLoss, FfnPort, HopRecord, SideTensors, StepOutline};

/// What stays the same for the life of the process.
#[derive(Clone, Debug)]
pub struct PortSettings {
    /// Width of a row, elements.
    pub hidden_size: u32,
    /// Element type of dispatched rows and of the combined result.
    pub rows: RowType,
    /// This attention rank.
    pub rank: u32,
    /// Time without an answer or any progress after which an edge is lost, for a hop of few rows.
    pub hop_timeout: Duration,
    /// Added to it per outstanding row, so that a long prefill is not taken for a death.
    pub hop_timeout_per_row: Duration,
    /// Time a shard may have no rank before its requests fail.
    pub loss_timeout: Duration,
    /// What the model's layers are, for where their experts are.
    pub model: Arc<ModelConfig>,
    /// How experts are chosen and where they are.
    pub experts: ExpertRules,
    /// Where links that a stream drives begin; none without a GPU.
    pub place: Option<StreamPlace>,
}

impl PortSettings {
    /// Where experts are in a deployment of so many shards.
    fn placement(&self, num_shards: u32) -> Result<Arc<Placement>, String> {
        match &self.experts.placement {
            None => Ok(Arc::new(Placement::contiguous(&self.model, num_shards))),
            Some(placement) if placement.num_shards() == num_shards => Ok(Arc::clone(placement)),
            Some(placement) => {
                let placed = placement.num_shards();
                Err(format!("the placement has {placed} shards, the rank says {num_shards} (--placement)"))
            }
        }
    }
}

/// The way to every FFN shard over registered links.
pub struct RemoteFfn {
    settings: PortSettings,
    bell: Doorbell,
    events: Receiver<EdgeEvent>,
    edges: Edges,
    /// Ranks whose links a stream drives; where every shard has one, steps go that way.
    streams: Option<Streams>,
    hops: Outstanding,
    /// Of the hop that is being added up; empty otherwise.
    parts: Vec<(usize, Tensor)>,
    /// Where experts are, once it is known how many shards there are.
    placement: Option<Arc<Placement>>,
    /// Memory to put the rows of one shard together in.
    gathered: Vec<u8>,
    announced: Announcements,
    recorder: HopRecorder,
    clock: Box<dyn Clock>,
    started: Instant,
    /// Since when some shard has had no rank.
    bereft_since: Option<Instant>,
    stats: Arc<FfnStats>,
    standing: Sentence,
}

/// Says how the FFN ranks stand, whenever it is asked.
pub type Sentence = Arc<dyn Fn() -> String + Send + Sync>;

/// What a port is joined to.
pub struct PortParts {
    /// Whoever sends an event rings it, as every link of an edge does.
    pub bell: Doorbell,
    /// Edges come through it.
    pub events: Receiver<EdgeEvent>,
    /// The wall's, but in a simulation.
    pub clock: Box<dyn Clock>,
    /// Read by metrics and readiness.
    pub stats: Arc<FfnStats>,
    /// For errors.
    pub standing: Sentence,
}

impl RemoteFfn {
    /// Without an edge yet.
    pub fn new(settings: PortSettings, parts: PortParts) -> Self {
        let PortParts { bell, events, clock, stats, standing } = parts;
        let started = clock.now();
        Self {
            edges: Edges::new(settings.rank),
            streams: settings.place.clone().map(|place| Streams::new(place, settings.rank)),
            settings,
            bell,
            events,
            hops: Outstanding::default(),
            parts: Vec::new(),
            placement: None,
            gathered: Vec::new(),
            announced: Announcements::default(),
            recorder: HopRecorder::default(),
            clock,
            started,
            bereft_since: Some(started),
            stats,
            standing,
        }
    }

    /// Hops whose rows are kept: 0 between steps.
    pub fn num_outstanding(&self) -> usize {
        self.hops.num_outstanding()
    }

    /// Microseconds since the port began.
    fn now_us(&self) -> u64 {
        (self.clock.now() - self.started).as_micros() as u64
    }

    // ---- edges come and go

    fn handle_events(&mut self) {
        while let Ok(event) = self.events.try_recv() {
            match event {
                EdgeEvent::Up(edge) => self.handle_up(edge),
                EdgeEvent::StreamUp(edge) => self.handle_stream_up(*edge),
                EdgeEvent::Down { id, why } => self.handle_down(id, &why),
                EdgeEvent::Draining { id } => {
                    self.streams.iter_mut().for_each(|streams| streams.handle_draining(id));
                    if let Some(edge) = self.edges.iter_mut().find(|edge| edge.id == id) {
                        edge.draining = true;
                    }
                }
            }
        }
    }

    fn handle_up(&mut self, mut edge: Edge) {
        edge.hop_seconds = self.stats.hop_seconds_of(edge.link.limits().kind);
        self.stats.links.handle_up(edge.link.as_ref());
        let (peer, shard, link) = (Arc::clone(&edge.peer), edge.shard, edge.link.limits().kind);
        let placement = self.settings.placement(shard.count());
        let adopted = match &placement {
            Ok(_) => self.edges.adopt(edge),
            Err(why) => Err((edge, why.clone())),
        };
        match adopted {
            Ok(()) => tracing::info!(%peer, %shard, %link, "FFN rank joined"),
            Err((edge, why)) => {
                tracing::error!(%peer, %shard, why, "FFN rank does not fit");
                self.stats.links.handle_down(edge.link.as_ref());
                edge.abandon(&why, self.clock.now());
            }
        }
        if self.placement.is_none() && self.edges.num_shards() > 0 {
            self.placement = placement.ok();
            self.stats.handle_shards(self.edges.num_shards());
        }
        self.note_readiness();
    }

    fn handle_stream_up(&mut self, edge: StreamEdge) {
        let now = self.clock.now();
        match &mut self.streams {
            Some(streams) => streams.handle_up(edge, &self.stats, now),
            None => edge.abandon("this attention rank has no GPU (--device)", now),
        }
        let num_shards = self.streams.as_ref().map_or(0, Streams::num_shards);
        self.stats.handle_shards(num_shards);
        self.note_readiness();
    }

    fn handle_down(&mut self, id: EdgeId, why: &str) {
        let now = self.clock.now();
        if let Some(streams) = &mut self.streams
            && streams.handle_down(id, why, &self.stats, now)
        {
            self.note_readiness();
            return;
        }
        if let Some(edge) = self.edges.remove(id) {
            let replays = self.hops.table.handle_loss(id);
            self.stats.handle_loss(replays);
            self.stats.links.handle_down(edge.link.as_ref());
            tracing::warn!(peer = %edge.peer, shard = %edge.shard, replays, why, "FFN rank lost");
            edge.abandon(why, self.clock.now());
            self.note_readiness();
        }
    }

    fn note_readiness(&mut self) {
        let ready = self.is_complete();
        self.stats.set_ready(ready);
        self.bereft_since = if ready { None } else { self.bereft_since.or_else(|| Some(self.clock.now())) };
    }

    /// Whether every shard has a rank, all by links of one sort.
    fn is_complete(&self) -> bool {
        self.edges.is_complete() || self.by_stream()
    }

    fn streams(&mut self) -> Result<&mut Streams, FfnLoss> {
        let none = || FfnLoss::Fatal { what: "no link is driven by a stream".into() };
        self.streams.as_mut().ok_or_else(none)
    }

    /// Whether steps go by links that a stream drives.
    fn by_stream(&self) -> bool {
        self.streams.as_ref().is_some_and(Streams::is_complete)
    }

    // ---- rows go out

    /// Hands every unsent part to an edge of its shard, as far as there is one.
    fn send_unsent(&mut self) -> Result<(), FfnLoss> {
        loop {
            let now_us = self.now_us();
            let Some(part) = self.hops.table.unsent().find(|part| self.edges.has(part.shard)) else {
                return Ok(());
            };
            let (Some(edge), Some(kept)) = (self.edges.choose(part.shard), self.hops.kept(part.key)) else {
                return Err(FfnLoss::Fatal { what: format!("{} has no rows to send", part.key) });
            };
            if part.sends >= MAX_SENDS {
                return Err(FfnLoss::Unavailable {
                    peer: format!("shard {} ({})", part.shard, edge.peer),
                    what: format!("{} was lost with its FFN rank {MAX_SENDS} times", part.key),
                });
            }
            let PortSettings { rows: dtype, hidden_size, .. } = self.settings;
            match kept.send(edge.link.as_mut(), part.shard, dtype, hidden_size, &mut self.gathered) {
                Ok(()) => {
                    let num_rows = kept.num_rows_of(part.shard);
                    self.stats.handle_sent(part.shard, num_rows);
                    self.announced.tell(edge, &self.stats);
                    let id = edge.id;
                    self.recorder.handle_sent(part.key, part.shard, num_rows, edge, part.sends);
                    self.hops.table.handle_sent(part.key, part.shard, id, now_us);
                }
                Err(error @ LinkError::BadFrame { .. }) => {
                    return Err(FfnLoss::Rejected {
                        hop: part.key,
                        peer: edge.peer.to_string(),
                        what: error.to_string(),
                    });
                }
                // Without credit the rank still owes answers to a step that was given up: a new link is quicker.
                Err(error) => {
                    let id = edge.id;
                    self.handle_down(id, &error.to_string());
                }
            }
        }
    }

    // ---- partial sums come back

    fn poll_links(&mut self) {
        // One lost edge at a time: the loop starts over, the edges before it have nothing new then.
        while let Some((id, why)) = self.poll_until_loss() {
            self.handle_down(id, &why);
        }
    }

    fn poll_until_loss(&mut self) -> Option<(EdgeId, String)> {
        let now_us = self.now_us();
        for edge in self.edges.iter_mut() {
            loop {
                match edge.link.poll_recv() {
                    Ok(None) => break,
                    Ok(Some(frame)) => {
                        let (hop, shard) = (frame.header.hop, edge.shard.index() as usize);
                        let sent_us = self.hops.table.waiting_since(hop, shard);
                        match self.hops.handle_frame(edge, &frame, self.settings.hidden_size) {
                            Ok(arrival) => {
                                if arrival == Arrival::Accepted {
                                    self.recorder.handle_arrival(hop, shard);
                                    observe(edge, sent_us, now_us);
                                }
                                self.stats.handle_arrival(arrival);
                            }
                            Err(why) => return Some((edge.id, why)),
                        }
                    }
                    Err(error) => return Some((edge.id, error.to_string())),
                }
            }
        }
        None
    }

    /// Gives up the edge that has owed an answer for too long without getting on. Returns when to look again.
    fn expire_overdue(&mut self) -> Option<Instant> {
        let (id, since_us) = self.hops.table.oldest_wait()?;
        let edge = self.edges.iter().find(|edge| edge.id == id)?;
        let num_rows = self.hops.num_rows();
        let allowed = self.settings.hop_timeout + self.settings.hop_timeout_per_row * num_rows;
        let moved = edge.control.as_ref().and_then(|control| control.life.moved_at());
        let sent = self.started + Duration::from_micros(since_us);
        let overdue = moved.map_or(sent, |moved| sent.max(moved)) + allowed;
        if self.clock.now() >= overdue {
            let allowed_ms = allowed.as_millis();
            let why = format!(
                "no answer and no progress within {allowed_ms} ms for {num_rows} rows (--hop-timeout)"
            );
            self.handle_down(id, &why);
        }
        Some(overdue)
    }

    /// The shard that has no rank, and until when that is borne.
    fn bereft(&self) -> Option<(usize, Instant)> {
        Some((self.edges.first_bereft()?, self.bereft_since? + self.settings.loss_timeout))
    }

    fn unavailable(&self, shard: usize) -> FfnLoss {
        FfnLoss::Unavailable {
            peer: format!("FFN shard {shard}"),
            what: format!(
                "no rank serves it and none took its place within {:.1} s (--ffn-loss-timeout)",
                self.settings.loss_timeout.as_secs_f64()
            ),
        }
    }

    /// Adds up what the shards returned, in their order, each row where it belongs.
    fn add_up(&mut self, kept: &Kept) -> Result<Tensor, TchError> {
        let (num_rows, kind) = (kept.num_rows, row_kind(self.settings.rows));
        let hidden_size = self.settings.hidden_size;
        let no_rows_yet = |kind| Tensor::f_zeros([num_rows.into(), hidden_size.into()], (kind, Device::Cpu));
        let mut sum: Option<Tensor> = None;
        for (shard, part) in self.parts.drain(..) {
            sum = Some(match (kept.share(shard), sum) {
                (Share::All, None) => part,
                (Share::All, Some(mut sum)) => sum.f_add_(&part)?,
                (Share::Some(rows), sum) => {
                    let rows: Vec<i64> = rows.iter().map(|row| i64::from(*row)).collect();
                    let mut sum = sum.map_or_else(|| no_rows_yet(part.kind()), Ok)?;
                    sum.f_index_add_(0, &Tensor::f_from_slice(&rows)?, &part)?
                }
            });
        }
        let sum = sum.map_or_else(|| no_rows_yet(kind), Ok)?;
        if sum.kind() == kind { Ok(sum) } else { sum.f_to_kind(kind) }
    }

    /// The rows of a hop as they will be sent: with the experts of the cycle instead of the model's where that is asked
    /// for, and shared out over the shards where attention knows the experts.
    fn keep(&self, hop: HopKey, rows: &Tensor, side: &SideTensors) -> Result<Kept, String> {
        let placed = self.placement.as_ref().and_then(|placement| placement.layer(hop.layer.0.into()));
        let cycle = match (side, placed) {
            (SideTensors::TopK { weights, .. }, Some(placed))
                if self.settings.experts.routing == Routing::Balanced =>
            {
                let cycle = balanced(self.settings.rank, hop, weights, placed.num_experts());
                Some(cycle.map_err(|error| error.to_string())?)
            }
            _ => None,
        };
        let side = cycle.as_ref().unwrap_or(side);
        let mut kept = Kept::new(hop, rows, side, self.settings.rows).map_err(|error| error.to_string())?;
        if let Some(placed) = placed.filter(|placed| placed.num_shards() > 1) {
            kept.route(placed).map_err(|error| error.to_string())?;
        }
        Ok(kept)
    }
}

impl FfnPort for RemoteFfn {
    fn begin_step(&mut self, outline: &StepOutline) -> Result<(), FfnLoss> {
        self.idle();
        if self.by_stream()
            && let Some(streams) = &mut self.streams
        {
            let plan = step_plan(outline);
            streams.announce(&plan, &self.stats, self.clock.now())?;
            streams.begin_step(outline.stage_rows.len());
            self.recorder.begin_step(false);
            return Ok(());
        }
        if let Some(shard) = self.edges.first_bereft() {
            return Err(self.unavailable(shard));
        }
        self.announced.begin(outline, self.edges.iter(), &self.stats);
        self.recorder.begin_step(outline.trace.is_some() || outline.profile);
        Ok(())
    }

    fn dispatch(&mut self, hop: HopKey, rows: &Tensor, side: &SideTensors) -> Result<(), FfnLoss> {
        if let Some(streams) = self.streams.as_mut().filter(|streams| streams.in_step()) {
            self.stats.handle_dispatch(rows.size().first().map_or(0, |&rows| rows as u32));
            return streams.dispatch(hop, rows);
        }
        self.recorder.handle_dispatch();
        let kept =
            self.keep(hop, rows, side).map_err(|what| FfnLoss::Fatal { what: format!("{hop}: {what}") })?;
        self.stats.handle_dispatch(kept.num_rows);
        self.hops.keep(kept, self.edges.num_shards());
        self.send_unsent()
    }

    fn combine(&mut self, hop: HopKey) -> Result<Tensor, FfnLoss> {
        let begun = self.clock.now();
        if let Some(streams) = self.streams.as_mut().filter(|streams| streams.in_step()) {
            let (hidden_size, kind) = (self.settings.hidden_size, row_kind(self.settings.rows));
            let sum = streams.combine(hop, hidden_size, kind, &self.stats, begun);
            self.stats.handle_combine(self.clock.now() - begun);
            return sum;
        }
        self.recorder.handle_wait(hop, begun);
        loop {
            let seen = self.bell.count();
            self.handle_events();
            self.poll_links();
            if let Some(loss) = self.hops.take_rejected() {
                return Err(loss);
            }
            if let Some(kept) = self.hops.take(hop, &mut self.parts) {
                self.stats.handle_combine(self.clock.now() - begun);
                self.recorder.handle_complete(hop);
                let fatal = |error| FfnLoss::Fatal { what: format!("sum of the shards: {error}") };
                return self.add_up(&kept).map_err(fatal);
            }
            self.send_unsent()?;
            let overdue = self.expire_overdue();
            let bereft = self.bereft();
            if let Some((shard, until)) = bereft
                && self.clock.now() >= until
            {
                return Err(self.unavailable(shard));
            }
            match [overdue, bereft.map(|(_, until)| until)].into_iter().flatten().min() {
                Some(deadline) => self.clock.wait(&self.bell, seen, deadline),
                None if self.hops.table.is_empty() => {
                    return Err(FfnLoss::Fatal { what: format!("{hop} was never dispatched") });
                }
                None => {}
            }
        }
    }

    fn end_step(&mut self, _step: StepId) {
        self.hops.clear();
        self.announced.end();
        let now = self.clock.now();
        if let Some(streams) = &mut self.streams {
            streams.end_step(&self.stats, now);
        }
        self.note_readiness();
    }

    fn stream(&mut self) -> Option<&mut dyn StreamFfn> {
        // Looked at first: what was captured may be of no more use.
        self.idle();
        if self.by_stream() { Some(self) } else { None }
    }

    // Never over links that a stream drives: there a plan is what starts its step.
    fn announce_ahead(&mut self, next: &StepOutline) {
        self.announced.tell_ahead(next, self.edges.iter(), &self.stats);
    }

    fn withdraw(&mut self) -> bool {
        self.announced.withdraw(self.edges.iter(), &self.stats)
    }

    fn hop_records(&self) -> &[HopRecord] {
        self.recorder.hops()
    }

    fn device_times(&self) -> Option<&DeviceTimes> {
        self.streams.as_ref().and_then(Streams::times)
    }

    fn ready(&self) -> bool {
        self.is_complete()
    }

    fn standing(&self) -> String {
        (self.standing)()
    }

    fn idle(&mut self) {
        self.handle_events();
        self.poll_links();
    }
}

/// Whole decode steps, over links that a stream drives.
impl StreamFfn for RemoteFfn {
    fn max_rows(&self) -> usize {
        self.streams.as_ref().map_or(0, Streams::max_rows)
    }

    /// The ranks have made everything when they joined.
    fn prepare(&mut self, _padded_rows: &[usize]) -> Result<(), FfnLoss> {
        Ok(())
    }

    fn announce(&mut self, step: StepId, padded_rows: &[usize], run: StepRun) -> Result<(), FfnLoss> {
        let (plan, now) = (decode_plan(step, padded_rows, run), self.clock.now());
        let stats = Arc::clone(&self.stats);
        self.streams()?.announce(&plan, &stats, now)
    }

    fn dispatch(&mut self, stream: &Stream, hop: StreamHop, rows: &HopRows<'_>) -> Result<(), FfnLoss> {
        let StreamHop { layer, stage, padded_rows } = hop;
        self.streams()?.put_hop(stream, layer, stage.0.into(), padded_rows, rows)
    }

    fn combine(&mut self, stream: &Stream, hop: StreamHop) -> Result<Summand, FfnLoss> {
        let StreamHop { layer, stage, padded_rows } = hop;
        self.streams()?.wait_hop(stream, layer, stage.0.into(), padded_rows)
    }

    fn settle(&mut self, stream: &Stream) -> Result<(), FfnLoss> {
        self.streams()?.settle(stream)
    }

    fn watch(&mut self, mark: &Completion, deadline: Duration) -> Result<(), FfnLoss> {
        let late = |error| FfnLoss::Fatal { what: format!("a decode step does not end: {error}") };
        self.streams()?.watch(mark, deadline).map_err(late)
    }

    fn check(&mut self) -> Result<(), FfnLoss> {
        let (stats, now) = (Arc::clone(&self.stats), self.clock.now());
        let checked = self.streams()?.check(&stats, now);
        self.note_readiness();
        checked
    }

    fn generation(&self) -> u64 {
        self.streams.as_ref().map_or(0, Streams::generation)
    }
}

/// The choice of `--routing balanced` in place of the model's, with the model's weights.
fn balanced(rank: u32, hop: HopKey, weights: &Tensor, num_experts: usize) -> Result<SideTensors, TchError> {
    let (num_rows, top_k) = weights.size2()?;
    let mut ids = Vec::new();
    balanced_ids(&mut ids, rank, hop, num_rows as usize, top_k as usize, num_experts);
    let ids = Tensor::f_from_slice(&ids)?.f_view([num_rows, top_k])?;
    Ok(SideTensors::TopK { ids, weights: weights.shallow_clone() })
}

/// Counts how long an answer of `edge` took that was sent for at `sent_us` on the engine's clock.
fn observe(edge: &Edge, sent_us: Option<u64>, now_us: u64) {
    if let (Some(seconds), Some(sent_us)) = (&edge.hop_seconds, sent_us) {
        seconds.observe(now_us.saturating_sub(sent_us) as f64 / 1e6);
    }
}
