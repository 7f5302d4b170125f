//! Whole decode steps on a GPU: from token ids to chosen tokens without the host, captured once per batch size and then
//! launched as one graph.
//!
//! # Why graphs are sound here
//! A step uses memory that this module allocated once, weights, and the cache; its operations are kernels of ours and
//! products with a workspace of their own. Nothing comes from libtorch's allocator, so a plain capture of the stream is all
//! there is to it. Whatever the kernels do not support runs by libtorch, operation by operation, over the same weights
//! and the same cache.
//!
//! # What a graph is for
//! The padded rows of every stage, in order: two stages of 32 are another graph than one of 64. All are captured before the
//! first request, each after a run that makes its operations warm: the first launch of anything may wait for what runs, and
//! what runs may be waiting for us. A step that no graph is for runs eagerly and is counted with the reason.
//!
//! # Shared experts
//! Where attention has them, they are computed right before a stage's answer is waited for: while the FFN works, and when no other
//! stage's rows are left to send.
//!
//! # While the FFN works
//! In a step of one stage attention's device is idle then. It brings part of what it reads next into its second-level cache: see
//! `meanwhile`.
//!
//! # A step behind another
//! A step may be enqueued while another runs, so that the device goes from one to the next by itself: the tokens of the one are
//! there the ids of the other, everything else the host knows ahead. See `steps`.
//!
//! # Loss
//! A wait for the FFN ends by itself when its rank is gone. The step computed garbage then, and says so before anything is
//! committed; its slots of the cache are written again when it is repeated. Graphs hold a lost link's memory: they are
//! dropped and captured anew for the links that come.
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use afd_common::ids::{LayerIdx, StageIdx, StepId};
use afd_gpu::{Completion, Device, GpuError, Graph, Stream};
use tch::{Kind, Tensor};

use super::attention::{Kernels, StageRows};
use super::capture_sizes::CaptureSizes;
use super::stream_ffn::{Echo, HopRows, StepRun, StreamFfn, StreamHop};
use crate::engine::{DecodeStage, EagerReason, FfnLoss};
use crate::model::KernelModel;

mod steps;

use steps::Launched;

/// Longer than any step may take: waits inside it end much earlier by themselves.
const STEP_DEADLINE: Duration = Duration::from_secs(60);

/// What is captured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphSettings {
    /// Padded batch sizes.
    pub sizes: CaptureSizes,
    /// Whether steps are captured, or launched operation by operation.
    pub capture: bool,
    /// Most stages of a step.
    pub max_stages: usize,
}

/// See the module's head.
pub struct Decoder {
    device: Device,
    model: KernelModel,
    kernels: Kernels,
    settings: GraphSettings,
    stages: Vec<Stage>,
    graphs: HashMap<Vec<usize>, Graph>,
    /// Of the FFN's links, when the graphs were captured.
    generation: Option<u64>,
    /// What is under way, oldest first.
    launched: VecDeque<Launched>,
    /// Steps launched so far.
    turns: usize,
    /// Behind the last step that ended.
    ended: Option<Completion>,
}

struct Stage {
    rows: StageRows,
    /// The residual stream, as libtorch sees it: `[max_rows, hidden]`.
    residual: Tensor,
}

/// Why a step did not run on the device alone.
#[derive(Debug)]
enum Failure {
    Loss(FfnLoss),
    Gpu(GpuError),
}

impl From<FfnLoss> for Failure {
    fn from(loss: FfnLoss) -> Self {
        Self::Loss(loss)
    }
}

impl From<GpuError> for Failure {
    fn from(error: GpuError) -> Self {
        Self::Gpu(error)
    }
}

impl From<Failure> for FfnLoss {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Loss(loss) => loss,
            // The device's state is unknown: this process cannot go on.
            Failure::Gpu(error) => Self::Fatal { what: format!("a decode step: {error}") },
        }
    }
}

impl Decoder {
    /// Buffers and kernels for the settings' largest size.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`] when the kernels are not made for the model.
    pub fn new(device: &Device, mut model: KernelModel, settings: GraphSettings) -> Result<Self, GpuError> {
        let (max_rows, hidden) = (settings.sizes.largest(), model.shape.hidden);
        if let Some(shared) = &mut model.shared {
            settings.sizes.as_slice().iter().try_for_each(|&size| shared.prepare(size))?;
        }
        let stage = |_| {
            let rows = StageRows::new(device, &model, max_rows)?;
            let shape = [max_rows as i64, hidden as i64];
            let residual = afd_ffi::cuda::view(device, &rows.residual, &shape, Kind::BFloat16)
                .map_err(|error| GpuError::Unsupported { what: error.to_string() })?;
            Ok(Stage { rows, residual })
        };
        let stages = (0..settings.max_stages.max(1)).map(stage).collect::<Result<_, GpuError>>()?;
        Ok(Self {
            device: device.clone(),
            kernels: Kernels::new(device)?,
            model,
            settings,
            stages,
            graphs: HashMap::new(),
            generation: None,
            launched: VecDeque::new(),
            turns: 0,
            ended: None,
        })
    }

    /// Whether everything is captured for the FFN as it is.
    pub fn is_warm(&self, ffn: &dyn StreamFfn) -> bool {
        self.generation == Some(ffn.generation())
    }

    /// Runs and captures every size, as steps from `first` on that are all padding. Returns how many.
    ///
    /// # Errors
    /// [`FfnLoss`]; to be tried again once the FFN can be used.
    pub fn warm_up(
        &mut self,
        stream: &Stream,
        ffn: &mut dyn StreamFfn,
        first: StepId,
    ) -> Result<u64, FfnLoss> {
        self.graphs.clear();
        self.generation = None;
        let generation = ffn.generation();
        let keys = self.keys(ffn.max_rows(), ffn.max_stages());
        let rows: Vec<usize> = keys.iter().flatten().copied().collect();
        ffn.prepare(&rows)?;
        self.warm_attention(stream, &keys, ffn.is_elsewhere()).map_err(FfnLoss::from)?;
        let mut steps = 0;
        // The largest first: what later ones need is then there.
        for key in keys.iter().rev() {
            let runs: &[StepRun] =
                if self.settings.capture { &[StepRun::Warmup, StepRun::Capture] } else { &[StepRun::Warmup] };
            for run in runs {
                let step = StepId(first.0 + steps);
                steps += 1;
                self.run(stream, ffn, step, (key, *run)).map_err(FfnLoss::from)?;
            }
        }
        self.generation = Some(generation);
        Ok(steps)
    }

    /// Every stage vector that is captured: all sizes with one stage, and equal sizes with more.
    fn keys(&self, max_rows: usize, max_stages: usize) -> Vec<Vec<usize>> {
        let sizes = self.settings.sizes.as_slice().iter().copied().filter(|size| *size <= max_rows);
        let stages = 1..=self.settings.max_stages.min(max_stages).max(1);
        stages.flat_map(|count| sizes.clone().map(move |size| vec![size; count])).collect()
    }

    /// Attention's own operations once, without an FFN that could wait for us meanwhile.
    fn warm_attention(
        &mut self,
        stream: &Stream,
        keys: &[Vec<usize>],
        is_elsewhere: bool,
    ) -> Result<(), Failure> {
        for key in keys {
            for (stage, &padded) in self.stages.iter_mut().zip(key) {
                stage.rows.prepare(&self.kernels, stream, &self.model, padded)?;
                stage.rows.upload_padding(&self.kernels, stream, padded)?;
            }
            self.enqueue(stream, &mut Echo::new(is_elsewhere), key)?;
        }
        Ok(stream.synchronize()?)
    }

    /// The padded rows of stages, if a step of them can run here.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn key(&self, ffn: &dyn StreamFfn, stages: &[DecodeStage<'_>]) -> Result<Vec<usize>, EagerReason> {
        if !self.is_warm(ffn) {
            return Err(EagerReason::NotWarm);
        }
        if stages.len() > self.stages.len() {
            return Err(EagerReason::Stages);
        }
        let largest = stages.iter().map(|stage| stage.batch.input_ids.len()).max().unwrap_or(0);
        let padded = self.settings.sizes.padded(largest).filter(|padded| *padded <= ffn.max_rows());
        let padded = padded.ok_or(EagerReason::Rows)?;
        let fits = self.stages.iter().zip(stages).all(|(own, stage)| own.rows.inputs.fits(stage.batch));
        if fits { Ok(vec![padded; stages.len()]) } else { Err(EagerReason::Shape) }
    }

    /// Enqueues a whole step.
    fn enqueue(&mut self, stream: &Stream, ffn: &mut dyn StreamFfn, key: &[usize]) -> Result<(), Failure> {
        let Self { model, kernels, stages, .. } = self;
        let hop = |layer: usize, stage: usize, padded_rows: usize| StreamHop {
            layer: LayerIdx(layer as u16),
            stage: StageIdx(stage as u8),
            padded_rows,
        };
        let rows_of: Vec<_> =
            stages.iter().zip(key).map(|(stage, &padded)| (padded, &stage.rows.inputs.num_rows)).collect();
        ffn.begin(stream, &rows_of)?;
        for (stage, &padded) in stages.iter().zip(key) {
            stage.rows.begin(kernels, stream, model, padded)?;
        }
        // Between two stages' hops there is something else to do.
        let is_idle = ffn.is_elsewhere() && key.len() == 1;
        for layer in 0..model.layers.len() {
            for (index, (stage, &padded)) in stages.iter_mut().zip(key).enumerate() {
                if layer > 0 {
                    stage.rows.share(stream, model, layer - 1, padded)?;
                    if is_idle {
                        stage.rows.fetch_next(kernels, stream, model, layer - 1, padded)?;
                    }
                    let summand = ffn.combine(stream, hop(layer - 1, index, padded))?;
                    stage.rows.land(kernels, stream, model, layer - 1, padded, &summand)?;
                }
                let hop = hop(layer, index, padded);
                let (reads, direct) = (ffn.weights_here(hop.layer), ffn.direct(hop));
                let to = direct.as_ref();
                let rows = stage.rows.attend(kernels, stream, model, layer, padded, (reads, to))?;
                let rows = HopRows { rows: to.unwrap_or(rows), num_rows: &stage.rows.inputs.num_rows };
                ffn.dispatch(stream, hop, &rows)?;
            }
        }
        let Some(last) = model.layers.len().checked_sub(1) else { return Ok(()) };
        for (index, (stage, &padded)) in stages.iter_mut().zip(key).enumerate() {
            stage.rows.share(stream, model, last, padded)?;
            if is_idle {
                stage.rows.fetch_next(kernels, stream, model, last, padded)?;
            }
            let summand = ffn.combine(stream, hop(last, index, padded))?;
            stage.rows.land(kernels, stream, model, last, padded, &summand)?;
            stage.rows.choose(kernels, stream, model, padded)?;
        }
        ffn.settle(stream)?;
        Ok(())
    }

    /// Whether steps are graphs.
    pub fn captures(&self) -> bool {
        self.settings.capture
    }

    /// How many graphs there are.
    pub fn num_graphs(&self) -> usize {
        self.graphs.len()
    }
}

impl Drop for Decoder {
    fn drop(&mut self) {
        // Graphs go before the links whose memory they hold, and nothing runs any more.
        let _ = self.device.synchronize();
        self.graphs.clear();
    }
}
