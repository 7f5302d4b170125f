//! The FFN of a layer, enqueued on attention's own stream, so that a captured graph can hold whole steps.
use std::time::Duration;

use afd_common::ids::{LayerIdx, StageIdx, StepId};
use afd_gpu::{Completion, Region, Stream};

use crate::engine::FfnLoss;

/// An FFN that a stream drives, here or on other devices.
///
/// # Contract
/// - **Order.** Per step: [`announce`](Self::announce), then for every layer and, within it, every stage one `dispatch` and one
///   `combine`, the combine of a stage before its next dispatch; then [`settle`](Self::settle) and, once the stream got
///   there, [`check`](Self::check). What
///   was enqueued while a graph was being captured is the same step again whenever the graph is launched.
/// - **Memory.** `dispatch` reads the rows when the stream gets there; they may be written again behind the stage's
///   `combine`. What `combine` returns is there for work on the stream behind it, until the stage's next `dispatch`.
/// - **Padding.** Rows beyond the number that a stage's `num_rows` holds are padding: not routed; what comes back for them is
///   finite and otherwise nobody's business.
/// - **Results count after `check`.** A step that was lost computed with whatever was there.
pub trait StreamFfn {
    /// Most padded rows of a stage.
    fn max_rows(&self) -> usize;

    /// Most stages of a step.
    fn max_stages(&self) -> usize {
        usize::MAX
    }

    /// Makes everything that stages of these padded rows need, so that nothing is compiled or allocated later.
    ///
    /// # Errors
    /// [`FfnLoss`]; graphs cannot be had then.
    fn prepare(&mut self, padded_rows: &[usize]) -> Result<(), FfnLoss>;

    /// A step of stages of these padded rows is about to be launched.
    ///
    /// # Errors
    /// [`FfnLoss`]; the step cannot run.
    fn announce(&mut self, step: StepId, padded_rows: &[usize], run: StepRun) -> Result<(), FfnLoss>;

    /// Enqueues what is to be said once of a step's hops, before the first of them: of every stage its padded rows, and how
    /// many are real.
    ///
    /// # Errors
    /// [`FfnLoss`]; the step cannot run.
    fn begin(&mut self, _stream: &Stream, _stages: &[(usize, &Region)]) -> Result<(), FfnLoss> {
        Ok(())
    }

    /// Where a hop's rows can be written at once, for [`dispatch`](Self::dispatch) to find them there; `None` where they are to
    /// be kept here.
    fn direct(&self, _hop: StreamHop) -> Option<Region> {
        None
    }

    /// Enqueues: the rows of a hop go to the FFN.
    ///
    /// # Errors
    /// [`FfnLoss`]; the step cannot run.
    fn dispatch(&mut self, stream: &Stream, hop: StreamHop, rows: &HopRows<'_>) -> Result<(), FfnLoss>;

    /// Enqueues: work behind this finds the FFN's output.
    ///
    /// # Errors
    /// [`FfnLoss`]; the step cannot run.
    fn combine(&mut self, stream: &Stream, hop: StreamHop) -> Result<Summand, FfnLoss>;

    /// Enqueues what [`check`](Self::check) needs, behind the last combine of a step.
    ///
    /// # Errors
    /// [`FfnLoss`]; the step cannot run.
    fn settle(&mut self, _stream: &Stream) -> Result<(), FfnLoss> {
        Ok(())
    }

    /// Waits for a mark behind a step. Where a rank is known to be gone, what waits for it on the stream ends at once.
    ///
    /// # Errors
    /// [`FfnLoss::Fatal`] after `deadline`, or when the device refuses.
    fn watch(&mut self, mark: &Completion, deadline: Duration) -> Result<(), FfnLoss> {
        let late = |error| FfnLoss::Fatal { what: format!("a decode step does not end: {error}") };
        mark.wait(deadline).map_err(late)
    }

    /// Whether a step may be enqueued while another is under way.
    fn runs_ahead(&self) -> bool {
        true
    }

    /// Whether everything that has run so far got what it waited for, without saying what is to be done about it.
    fn is_sound(&self) -> bool {
        true
    }

    /// Whether everything that has run so far got what it waited for.
    ///
    /// # Errors
    /// [`FfnLoss`]: the step's results are not to be used, and nothing that was captured.
    fn check(&mut self) -> Result<(), FfnLoss>;

    /// What the layer's FFN reads on attention's own device whatever its rows are, fetched while attention runs; `None` where
    /// the FFN is on others, and attention's is idle meanwhile.
    fn weights_here(&self, _layer: LayerIdx) -> Option<&Region> {
        None
    }

    /// Whether attention's device has nothing else to do between a hop's dispatch and its combine, because the FFN is on others.
    fn is_elsewhere(&self) -> bool {
        false
    }

    /// Changes when what was captured can no longer be used, because a rank was lost or came.
    fn generation(&self) -> u64;
}

/// How a step is run, so that both sides capture and replay alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepRun {
    /// Operation by operation.
    Eager,
    /// The same, for the sake of warmth: all rows are padding.
    Warmup,
    /// Captured, then launched.
    Capture,
    /// Launched again.
    Replay,
    /// Operation by operation, because the times of its parts are wanted: a graph has only a beginning and an end.
    Profiled,
}

/// One exchange of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamHop {
    /// Decoder layer.
    pub layer: LayerIdx,
    /// Stage of the step.
    pub stage: StageIdx,
    /// Rows of the stage, padded.
    pub padded_rows: usize,
}

/// Rows on their way to the FFN.
#[derive(Clone, Copy, Debug)]
pub struct HopRows<'a> {
    /// `[padded_rows, hidden]` bf16
    pub rows: &'a Region,
    /// How many are real: one i32.
    pub num_rows: &'a Region,
}

/// What is added to the residual stream.
#[derive(Clone, Debug)]
pub enum Summand {
    /// `[padded_rows, hidden]` bf16
    Whole(Region),
    /// Partial sums of the shards, in shard order, `[padded_rows, hidden]` f32 each.
    Parts(Vec<Region>),
}

/// An FFN that gives back what it got: for making attention's own operations warm.
pub(super) struct Echo {
    is_elsewhere: bool,
    rows: Vec<(StageIdx, Region)>,
}

impl Echo {
    /// In the place of one that is [elsewhere](StreamFfn::is_elsewhere) or not.
    pub(super) fn new(is_elsewhere: bool) -> Self {
        Self { is_elsewhere, rows: Vec::new() }
    }
}

impl StreamFfn for Echo {
    fn max_rows(&self) -> usize {
        usize::MAX
    }

    fn prepare(&mut self, _padded_rows: &[usize]) -> Result<(), FfnLoss> {
        Ok(())
    }

    fn announce(&mut self, _step: StepId, _padded_rows: &[usize], _run: StepRun) -> Result<(), FfnLoss> {
        Ok(())
    }

    fn dispatch(&mut self, _stream: &Stream, hop: StreamHop, rows: &HopRows<'_>) -> Result<(), FfnLoss> {
        self.rows.retain(|(stage, _)| *stage != hop.stage);
        self.rows.push((hop.stage, rows.rows.clone()));
        Ok(())
    }

    fn combine(&mut self, _stream: &Stream, hop: StreamHop) -> Result<Summand, FfnLoss> {
        let found = self.rows.iter().find(|(stage, _)| *stage == hop.stage);
        let found = found.map(|(_, rows)| Summand::Whole(rows.clone()));
        found.ok_or_else(|| FfnLoss::Fatal { what: format!("{} was never dispatched", hop.layer) })
    }

    fn check(&mut self) -> Result<(), FfnLoss> {
        Ok(())
    }

    fn is_elsewhere(&self) -> bool {
        self.is_elsewhere
    }

    fn generation(&self) -> u64 {
        0
    }
}
