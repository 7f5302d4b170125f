//! The engine thread's end of edges that a stream drives. A hop costs a put and a wait per shard, enqueued on attention's own
//! stream; whether it went well is asked at the end of a step, before anything of it counts. So a lost rank loses the
//! step: nothing is sent again within it, the engine runs it once more.
use std::sync::Arc;
use std::time::{Duration, Instant};

use afd_common::ids::{HopKey, StepId};
use afd_common::link::LinkKind;
use afd_common::proto::v1;
use afd_common::proto::v1::steps_request::Message;
use afd_ffi::cuda;
use afd_gpu::channel::{Frame, StepError};
use afd_gpu::{Completion, Device, GpuError, Stream};
use ffn_svc::device::DeviceFfn;
use tch::{Kind, Tensor};

use super::edges::Edges;
use super::hop_table::EdgeId;
use super::stats::FfnStats;
use super::stream_edge::StreamEdge;
use super::stream_times::StreamTimes;
use crate::device::StepRun;
use crate::engine::{DeviceTimes, Ending, FfnLoss};

mod hops;

/// Added to what waits may take in all, for what runs between them.
const SLACK: Duration = Duration::from_secs(5);

/// Where attention's tensors are and what runs there in order.
#[derive(Clone, Debug)]
pub struct StreamPlace {
    /// The device.
    pub device: Device,
    /// The engine's stream.
    pub stream: Arc<Stream>,
    /// Decoder layers.
    pub num_layers: u16,
    /// How long a wait waits.
    pub patience: Duration,
}

/// See the module's head.
pub(super) struct Streams {
    place: StreamPlace,
    edges: Edges<StreamEdge>,
    /// The edges of every shard that steps use, in shard order; empty while some shard has none.
    chosen: Vec<EdgeId>,
    generation: u64,
    /// The step under way, eager.
    step: Option<Step>,
    /// Of the step under way, when its times are wanted.
    timing: Option<StreamTimes>,
    /// Of the last step, if they were.
    times: Option<DeviceTimes>,
    /// Of the step under way.
    step_id: StepId,
    ending: Option<Ending>,
    /// What is said of a stage at once, out and back; memory that is used again.
    frames: (Vec<Frame>, Vec<Frame>),
}

struct Step {
    num_stages: usize,
    /// Hops that came back.
    combined: usize,
    outstanding: Vec<(HopKey, usize)>,
}

impl Streams {
    pub(super) fn new(place: StreamPlace, rank: u32) -> Self {
        Self {
            place,
            edges: Edges::new(rank),
            chosen: Vec::new(),
            generation: 0,
            step: None,
            timing: None,
            times: None,
            step_id: StepId(0),
            ending: None,
            frames: Default::default(),
        }
    }

    pub(super) fn end_with(&mut self, ending: Ending) {
        self.ending = Some(ending);
    }

    // ---- edges come and go

    pub(super) fn handle_up(&mut self, mut edge: StreamEdge, stats: &FfnStats, now: Instant) {
        let (peer, shard, kind) = (Arc::clone(&edge.peer), edge.shard, edge.link.kind);
        edge.stats = Some(stats.links.handle_stream_up(kind, &peer, edge.link.epoch));
        match self.edges.adopt(edge) {
            Ok(()) => tracing::info!(%peer, %shard, link = %kind, "FFN rank joined"),
            Err((edge, why)) => {
                tracing::error!(%peer, %shard, why, "FFN rank does not fit");
                give_up(edge, &why, stats, now);
            }
        }
        self.choose();
    }

    /// Whether it was one of these edges.
    pub(super) fn handle_down(&mut self, id: EdgeId, why: &str, stats: &FfnStats, now: Instant) -> bool {
        let Some(edge) = self.edges.remove(id) else { return false };
        if edge.draining && self.step.is_none() {
            tracing::info!(peer = %edge.peer, shard = %edge.shard, why, "FFN rank has left, as it said it would");
        } else {
            stats.handle_loss(0);
            tracing::warn!(peer = %edge.peer, shard = %edge.shard, why, "FFN rank lost");
        }
        give_up(edge, why, stats, now);
        self.choose();
        true
    }

    pub(super) fn handle_draining(&mut self, id: EdgeId) {
        if let Some(edge) = self.edges.iter_mut().find(|edge| edge.id == id) {
            edge.draining = true;
        }
        // Between steps: the step under way has its edges.
        self.choose();
    }

    fn choose(&mut self) {
        let all = (0..self.edges.num_shards()).map(|shard| self.edges.choose(shard).map(|edge| edge.id));
        let chosen = all.collect::<Option<Vec<_>>>().unwrap_or_default();
        if chosen != self.chosen {
            self.chosen = chosen;
            self.generation += 1;
        }
    }

    /// Whether every shard has an edge.
    pub(super) fn is_complete(&self) -> bool {
        !self.chosen.is_empty()
    }

    /// Whether the ranks that serve some shard are about to stop.
    pub(super) fn is_leaving(&self) -> bool {
        self.edges.is_leaving()
    }

    /// Shards that these edges know of.
    pub(super) fn num_shards(&self) -> usize {
        self.edges.num_shards()
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    pub(super) fn max_rows(&self) -> usize {
        let rows = self.used().map(|edge| edge.link.max_rows).min().unwrap_or(0);
        rows.min(DeviceFfn::MAX_ROWS)
    }

    /// With NCCL a large send ends when the peer receives: one stage's rows would wait for a peer that sends another's.
    pub(super) fn max_stages(&self) -> usize {
        if self.used().any(|edge| edge.link.kind == LinkKind::Nccl) { 1 } else { usize::MAX }
    }

    /// NCCL wants its calls of one step to be over before those of another are enqueued, unless it guards them itself, which
    /// costs more than it gives.
    pub(super) fn runs_ahead(&self) -> bool {
        self.used().all(|edge| edge.link.kind != LinkKind::Nccl)
    }

    /// Whether no wait has found anything amiss.
    pub(super) fn is_sound(&self) -> bool {
        self.used().all(|edge| edge.link.channel.check().is_ok())
    }

    /// The edges that steps use, in shard order.
    fn used(&self) -> impl Iterator<Item = &StreamEdge> {
        self.chosen.iter().filter_map(|id| self.edges.iter().find(|edge| edge.id == *id))
    }

    fn used_mut(&mut self) -> impl Iterator<Item = &mut StreamEdge> {
        let chosen = &self.chosen;
        let mut edges: Vec<_> = self.edges.iter_mut().filter(|edge| chosen.contains(&edge.id)).collect();
        edges.sort_by_key(|edge| edge.shard.index());
        edges.into_iter()
    }

    // ---- a step

    /// Tells every rank. On these links a plan is what starts the step there: one that cannot be told is a loss.
    pub(super) fn announce(
        &mut self,
        plan: &v1::StepPlan,
        stats: &FfnStats,
        now: Instant,
    ) -> Result<(), FfnLoss> {
        (self.timing, self.times, self.step_id) = (None, None, StepId(plan.step_id));
        if plan.profile {
            let begun = StreamTimes::begin(&self.place.stream);
            self.timing = Some(begun.map_err(|error| FfnLoss::Fatal { what: error.to_string() })?);
        }
        let deaf = self.used().find(|edge| edge.control.plans.try_send(Message::Plan(plan.clone())).is_err());
        let Some((id, peer)) = deaf.map(|edge| (edge.id, edge.peer.to_string())) else { return Ok(()) };
        let what = "its control stream takes no plan";
        stats.handle_plan_dropped();
        self.handle_down(id, what, stats, now);
        Err(FfnLoss::Unavailable { peer, what: what.into() })
    }

    /// An eager step begins, of stages of so many rows.
    pub(super) fn begin_step(&mut self, stage_rows: &[usize]) -> Result<(), FfnLoss> {
        let (num_stages, stream) = (stage_rows.len(), Arc::clone(&self.place.stream));
        self.step = Some(Step { num_stages, combined: 0, outstanding: Vec::new() });
        self.begin(&stream, stage_rows.iter().map(|&rows| (rows, None)))
    }

    /// Whether an eager step is under way over these edges.
    pub(super) fn in_step(&self) -> bool {
        self.step.is_some()
    }

    /// The step is over. An eager one that was given up midway has left the other side waiting: the links are of no more use.
    pub(super) fn end_step(&mut self, stats: &FfnStats, now: Instant) {
        if let Some(timing) = self.timing.take() {
            let read = timing.read(&self.place.device);
            self.times =
                read.inspect_err(|error| tracing::warn!(%error, "a step's times cannot be had")).ok();
        }
        let Some(step) = self.step.take() else { return };
        if step.combined < step.num_stages * usize::from(self.place.num_layers) {
            for id in self.chosen.clone() {
                self.handle_down(id, "a step was given up midway", stats, now);
            }
        }
    }

    /// Sends the rows of a hop of an eager step.
    pub(super) fn dispatch(&mut self, hop: HopKey, rows: &Tensor) -> Result<(), FfnLoss> {
        let fatal = |what: String| FfnLoss::Fatal { what: format!("{hop}: {what}") };
        let rows = rows.f_contiguous().map_err(|error| fatal(error.to_string()))?;
        let num_rows = rows.size().first().map_or(0, |&rows| rows as usize);
        let region = cuda::region(&self.place.device, &rows).map_err(|error| fatal(error.to_string()))?;
        let stream = Arc::clone(&self.place.stream);
        self.put(&stream, hop.layer, hop.stage.0.into(), num_rows, &region, None)?;
        if let Some(step) = &mut self.step {
            step.outstanding.push((hop, num_rows));
        }
        Ok(())
    }

    /// What came back for a hop of an eager step: the sum of the shards, of `kind`. After the last layer it is known to be
    /// right.
    pub(super) fn combine(
        &mut self,
        hop: HopKey,
        hidden_size: u32,
        kind: Kind,
        stats: &FfnStats,
        now: Instant,
    ) -> Result<Tensor, FfnLoss> {
        let fatal = |what: String| FfnLoss::Fatal { what: format!("{hop}: {what}") };
        let torch = |error: tch::TchError| FfnLoss::Fatal { what: format!("{hop}: {error}") };
        let found = self.step.as_mut().and_then(|step| {
            let at = step.outstanding.iter().position(|(key, _)| *key == hop)?;
            step.combined += 1;
            Some(step.outstanding.swap_remove(at).1)
        });
        let num_rows = found.ok_or_else(|| fatal("was never dispatched".into()))?;
        let (device, stream) = (self.place.device.clone(), Arc::clone(&self.place.stream));
        let landed = self.wait(&stream, hop.layer, hop.stage.0.into(), num_rows)?;
        // Copied: the slot is the next hop's.
        let part_kind = if landed.len() > 1 { Kind::Float } else { kind };
        let options = (part_kind, tch::Device::Cuda(device.ordinal()));
        let mut sum: Option<Tensor> = None;
        for rows in landed {
            let part = Tensor::f_empty([num_rows as i64, hidden_size.into()], options).map_err(torch)?;
            let to = cuda::region(&device, &part).map_err(|error| fatal(error.to_string()))?;
            to.copy_from(&stream, &rows).map_err(|error| fatal(error.to_string()))?;
            sum = Some(match sum {
                None => part,
                Some(mut sum) => sum.f_add_(&part).map_err(torch)?,
            });
        }
        let sum = sum.ok_or_else(|| fatal("no shard has an edge".into()))?;
        let sum = sum.f_to_kind(kind).map_err(torch)?;
        if hop.layer.0 + 1 == self.place.num_layers {
            self.settle(&stream)?;
            self.arrive(stats, now)?;
        }
        Ok(sum)
    }

    /// Enqueues what is to be known of the last waits.
    pub(super) fn settle(&mut self, stream: &Stream) -> Result<(), FfnLoss> {
        for edge in self.used_mut() {
            edge.link.channel.settle(stream).map_err(|error| not_enqueued(edge, &error))?;
        }
        Ok(())
    }

    /// Waits until the stream is here, and checks.
    fn arrive(&mut self, stats: &FfnStats, now: Instant) -> Result<(), FfnLoss> {
        // Only one wait of a step is ever waited out: the others end with it.
        let mark = self.place.stream.mark(false);
        let settled = mark.and_then(|mark| self.watch(&mark, 2 * self.place.patience + SLACK));
        if let Err(error) = settled {
            return Err(FfnLoss::Fatal { what: format!("the step does not end: {error}") });
        }
        self.check(stats, now)
    }

    /// Waits for a mark on the stream. What waits there for a rank whose control task has ended is given up, once, instead of
    /// being patient: a process that was killed closes its connections long before anybody's patience ends. So is what
    /// waits for any when this process has to have ended.
    ///
    /// # Errors
    /// [`GpuError::Late`] after `deadline`, [`GpuError::Driver`].
    pub(super) fn watch(&self, mark: &Completion, deadline: Duration) -> Result<(), GpuError> {
        let begin = Instant::now();
        let mut given_up = false;
        while !mark.is_done()? {
            if !given_up {
                let deadline = self.ending.as_ref().and_then(Ending::deadline);
                let ends = deadline.is_some_and(|deadline| Instant::now() >= deadline);
                let gone = self.used().filter(|edge| ends || edge.control.plans.is_closed());
                given_up = gone.inspect(|edge| edge.link.channel.abort()).count() > 0;
            }
            let waited = begin.elapsed();
            if waited > deadline {
                return Err(GpuError::Late { what: "work on the stream", waited_ms: waited.as_millis() });
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// When the device was where in the last step, if that was wanted.
    pub(super) fn times(&self) -> Option<&DeviceTimes> {
        self.times.as_ref()
    }

    /// Whether everything that has run so far got what it waited for.
    pub(super) fn check(&mut self, stats: &FfnStats, now: Instant) -> Result<(), FfnLoss> {
        let broken = self.used().find_map(|edge| edge.link.channel.check().err().map(|why| (edge, why)));
        let Some((edge, why)) = broken else { return Ok(()) };
        let (id, peer, what) = (edge.id, edge.peer.to_string(), why.to_string());
        self.handle_down(id, &what, stats, now);
        Err(FfnLoss::Unavailable { peer, what })
    }
}

/// Plans of whole decode steps.
pub(super) fn decode_plan(step: StepId, padded_rows: &[usize], run: StepRun) -> v1::StepPlan {
    v1::StepPlan {
        step_id: step.0,
        padded_tokens: padded_rows.iter().map(|&rows| rows as u32).collect(),
        phase: v1::Phase::Decode.into(),
        warmup: run == StepRun::Warmup,
        graph_capture: run == StepRun::Capture,
        graph_replay: run == StepRun::Replay,
        profile: run == StepRun::Profiled,
        ..v1::StepPlan::default()
    }
}

fn give_up(edge: StreamEdge, why: &str, stats: &FfnStats, now: Instant) {
    edge.stats.iter().for_each(|link| stats.links.handle_stream_down(link));
    edge.abandon(why, now);
}

fn not_enqueued(edge: &StreamEdge, error: &StepError) -> FfnLoss {
    let kind: LinkKind = edge.link.kind;
    match error {
        StepError::Lost(_) => FfnLoss::Unavailable { peer: edge.peer.to_string(), what: error.to_string() },
        _ => FfnLoss::Fatal { what: format!("{} over {kind}: {error}", edge.peer) },
    }
}
