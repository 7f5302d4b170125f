//! The seam between attention and the FFN role: what the engine asks of whatever stands behind it (remote shards over
//! links, or the FFN model in the same process). Rows go out in [`FfnPort::dispatch`] and come back, through the
//! layer's FFN, in [`FfnPort::combine`]. Nothing here schedules, samples or knows a request.
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use afd_common::ids::{Epoch, HopKey, StepId};
use afd_common::link::LinkKind;
use afd_common::telemetry::TraceContext;
use tch::Tensor;

use super::trace::AttendRecord;
use crate::device::StreamFfn;
use crate::scheduler::Phase;

/// One attention rank's way to every shard of the FFN.
///
/// # Contract
/// - **Order of calls.** Per step: `begin_step`, then for every layer and stage one `dispatch` and one `combine` of the
///   same hop, then `end_step`. Between the dispatch of a hop and its combine other stages are dispatched and combined;
///   at most one hop of a stage is outstanding, so at most as many as the step has stages. Between steps: `idle`.
/// - **Completion.** `dispatch` returns once the rows are handed over or copied; the tensor may be changed afterwards.
///   `combine` waits for all shards and returns their sum, `[num_rows, hidden]` in the compute dtype, rows in the order
///   they were dispatched. Zero rows are legal. The wait is bounded by the implementation.
/// - **Loss.** An implementation keeps the rows of every outstanding hop and may send them again to another rank before
///   it gives up; the engine sees an error only when that has failed.
/// - **Cancellation.** `end_step` ends the step whatever happened in it, errors included: hops still outstanding are
///   forgotten and an answer that arrives later is dropped and counted. Step ids grow; gaps are legal.
pub trait FfnPort: Send {
    /// Says what is about to come.
    ///
    /// # Errors
    /// [`FfnLoss::Bereft`] when a shard has no usable rank.
    fn begin_step(&mut self, plan: &StepOutline) -> Result<(), FfnLoss>;

    /// Most stages of a step: 1 where rows cannot go out while others come back.
    fn max_stages(&self) -> usize {
        usize::MAX
    }

    /// Sends the rows of a hop, `[num_rows, hidden]` in the compute dtype, and the side tensors the layer asks for.
    ///
    /// # Errors
    /// [`FfnLoss`]; the engine then gives up the step.
    fn dispatch(&mut self, hop: HopKey, rows: &Tensor, side: &SideTensors) -> Result<(), FfnLoss>;

    /// The FFN's output for a dispatched hop, `[num_rows, hidden]` in the compute dtype.
    ///
    /// # Errors
    /// [`FfnLoss`]; the engine then gives up the step (or, after [`FfnLoss::Rejected`], that stage).
    fn combine(&mut self, hop: HopKey) -> Result<Tensor, FfnLoss>;

    /// Tells where to look for when the engine has to have ended. A wait for ranks that are lost is over then at the latest;
    /// an implementation that never waits for anybody needs none.
    fn end_with(&mut self, _ending: Ending) {}

    /// Says what the step after the present one is going to be, as far as can be told: nothing to rely on. Called after
    /// `begin_step`; a `begin_step` that says otherwise, or [`withdraw`](Self::withdraw), supersedes it.
    fn announce_ahead(&mut self, _next: &StepOutline) {}

    /// What was announced ahead does not come. Whether anything was: its id must not be used again then.
    fn withdraw(&mut self) -> bool {
        false
    }

    /// The step is over, well or not.
    fn end_step(&mut self, step: StepId);

    /// The same way, driven by attention's stream, where it can be: whole decode steps then need no host.
    fn stream(&mut self) -> Option<&mut dyn StreamFfn> {
        None
    }

    /// The same while a step that was launched there is under way: what has come meanwhile is not looked at, so that the step
    /// keeps its ranks.
    fn stream_under_way(&mut self) -> Option<&mut dyn StreamFfn> {
        self.stream()
    }

    /// What was noted of the last step's hops, if it was [recorded](StepOutline::trace) or
    /// [profiled](StepOutline::profile). Good until the next step.
    fn hop_records(&self) -> &[HopRecord] {
        &[]
    }

    /// When a device was where in the last step, if the step was [profiled](StepOutline::profile) and a stream drove its
    /// hops: then [`hop_records`](Self::hop_records) has nothing. Good until the next step.
    fn device_times(&self) -> Option<&DeviceTimes> {
        None
    }

    /// Whether its ranks are to be warmed up before the first step that serves somebody.
    fn warms_up(&self) -> bool {
        false
    }

    /// Steps with [`StepOutline::warmup`] are about to come: every rank that is there now counts as cold. Whether such steps
    /// are of any use.
    fn begin_warm_up(&mut self) -> bool {
        false
    }

    /// The steps since the last call have warmed the ranks that they went to. Whether others are still cold. Ranks that join
    /// later are the implementation's own business.
    fn handle_warm(&mut self) -> bool {
        false
    }

    /// Whether every shard has a rank. The engine schedules nothing while this is false.
    fn ready(&self) -> bool;

    /// Whether [`idle`](Self::idle) would find something: it is not called while one step is launched behind another.
    fn has_news(&self) -> bool {
        false
    }

    /// Whether the ranks of some shard are about to stop, all of them: what runs may be finished, and nothing new begins.
    fn is_leaving(&self) -> bool {
        false
    }

    /// Which ranks are missing now, for people.
    fn standing(&self) -> String {
        "not every FFN shard has a rank that is ready".into()
    }

    /// When to be called again at the latest while no step runs.
    fn wake_at(&self) -> Option<Instant> {
        None
    }

    /// Called between steps and whenever the engine was woken with nothing to run: adopt new links, drop broken ones.
    /// Must not wait.
    fn idle(&mut self);
}

/// When the engine has to have ended, once that is known. Looked at in every wait for a hop: one load, no lock.
#[derive(Clone, Debug)]
pub struct Ending {
    started: Instant,
    /// Since `started`; [`NEVER`] while the engine is to go on.
    deadline_us: Arc<AtomicU64>,
    /// How long before that it was known.
    patience_us: Arc<AtomicU64>,
}

const NEVER: u64 = u64::MAX;

impl Default for Ending {
    fn default() -> Self {
        let deadline_us = Arc::new(AtomicU64::new(NEVER));
        Self { started: Instant::now(), deadline_us, patience_us: Arc::default() }
    }
}

impl Ending {
    /// The engine has to have ended by then.
    pub fn set(&self, deadline: Instant) {
        let patience_us = deadline.saturating_duration_since(Instant::now()).as_micros() as u64;
        self.patience_us.store(patience_us, Relaxed);
        let deadline_us = deadline.saturating_duration_since(self.started).as_micros() as u64;
        self.deadline_us.store(deadline_us, Relaxed);
    }

    /// `None` while it is to go on.
    pub fn deadline(&self) -> Option<Instant> {
        let deadline_us = self.deadline_us.load(Relaxed);
        (deadline_us != NEVER).then(|| self.started + Duration::from_micros(deadline_us))
    }

    /// Why a wait is given up that nothing but the deadline was against: a process that ends by itself had no time for it, one
    /// that was told to end had as much as its option says.
    pub fn why(&self) -> &'static str {
        match self.patience_us.load(Relaxed) {
            0 => "no longer waited for: this process ends",
            _ => "no longer waited for: this process ends (--drain-timeout)",
        }
    }
}

/// What a step is going to send: bounds for the other side, not facts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepOutline {
    /// Grows from step to step.
    pub step: StepId,
    /// What the step does.
    pub phase: Phase,
    /// Rows of each stage, at least 1 each.
    pub stage_rows: Vec<usize>,
    /// Whether the times of its hops are wanted from both sides.
    pub profile: bool,
    /// Nobody waits for its tokens: it goes to ranks that are [cold](FfnPort::begin_warm_up), all rows to every shard.
    pub warmup: bool,
    /// The step's own span, when its hops are to be recorded as children of it.
    pub trace: Option<TraceContext>,
}

/// Times of one hop's way to one shard and back.
#[derive(Clone, Copy, Debug)]
pub struct HopRecord {
    /// Which hop.
    pub key: HopKey,
    /// To which shard.
    pub shard: u32,
    /// Rows of it.
    pub rows: u32,
    /// How it travelled.
    pub link: LinkKind,
    /// On which life of the link.
    pub epoch: Epoch,
    /// Times it was sent, at least 1.
    pub sends: u8,
    /// The hop began to be dispatched.
    pub begun: Instant,
    /// A link had first taken it.
    pub sent: Instant,
    /// The engine began to wait for the hop.
    pub combine_begun: Option<Instant>,
    /// The answer was here.
    pub arrived: Option<Instant>,
    /// The answers of all shards were here.
    pub combined: Option<Instant>,
}

/// What a stream did in one step, by the device's own marks.
#[derive(Clone, Debug, Default)]
pub struct DeviceTimes {
    /// What it computed between its hops.
    pub attends: Vec<AttendRecord>,
    /// Its hops.
    pub hops: Vec<HopRecord>,
}

/// What travels with the rows of a hop, as the layer's description asks.
#[derive(Debug, Default)]
pub enum SideTensors {
    /// Nothing: the gate is on the FFN, or the layer is dense.
    #[default]
    None,
    /// `[num_rows, num_experts]` f32
    RouterLogits(Tensor),
    /// The chosen experts.
    TopK {
        /// `[num_rows, k]` i64
        ids: Tensor,
        /// `[num_rows, k]` f32
        weights: Tensor,
    },
    /// `[num_rows]` i64
    InputIds(Tensor),
}

/// Why the FFN's output cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FfnLoss {
    /// A shard's rank is gone and nothing took its place in time. The sequences of the step keep their tokens; trying
    /// the step again helps once [`FfnPort::ready`].
    #[error("{peer}: {what}")]
    Unavailable {
        /// Which rank or shard, with its address.
        peer: String,
        /// What happened.
        what: String,
    },
    /// A shard has no rank, and has had none for as long as that is borne (`--ffn-loss-timeout`) if a step was under way.
    /// As above.
    #[error("no rank serves FFN shard {shard}")]
    Bereft {
        /// As `--shard` takes it.
        shard: String,
    },
    /// The FFN refused this hop or failed on it; it lives on. Retrying the same rows does not help.
    #[error("{hop}: {peer} reported: {what}")]
    Rejected {
        /// Which hop.
        hop: HopKey,
        /// Which rank.
        peer: String,
        /// The FFN's own words.
        what: String,
    },
    /// This process cannot go on (its own device or state is broken).
    #[error("{what}")]
    Fatal {
        /// Why.
        what: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_without_patience_is_nothing_that_an_option_would_change() {
        let ending = Ending::default();
        assert_eq!(ending.deadline(), None);
        ending.set(Instant::now() + Duration::from_secs(1));
        assert!(ending.why().ends_with("this process ends (--drain-timeout)"));
        ending.set(Instant::now());
        assert!(ending.deadline().is_some_and(|deadline| deadline <= Instant::now()));
        assert!(ending.why().ends_with("this process ends"));
    }
}
