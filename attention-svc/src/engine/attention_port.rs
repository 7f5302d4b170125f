//! The seam between the engine and the attention half of the model: what a step needs of it, and nothing else, so that the
//! loop around it can be tested with a model that is plain arithmetic.
use std::any::Any;
use std::time::Duration;

use afd_common::ids::{LayerIdx, StepId};
use afd_gpu::ops::DrawRule;
use tch::Tensor;

use super::{FfnLoss, FfnPort, SideTensors, StageOutput, StepOutline};
use crate::model::{Attended, StageBatch};

/// Attention of every layer together with the KV cache's tensors.
///
/// # Contract
/// `prepare` once per stage; then `embed`, `attend` for every layer in order, `logits`. Stages of a step may take turns at
/// each layer. `attend` writes the keys and values of the stage's rows before it reads any; rows that were written by a
/// step that failed are written again, never read.
pub trait AttentionPort: Send {
    /// A stage, ready for every layer.
    type Prepared;

    /// Called once on the engine's thread, before anything else there. What it returns is dropped when the thread ends.
    ///
    /// # Errors
    /// [`AttentionError`]; the engine dies of it.
    fn enter_thread(&mut self) -> Result<Box<dyn Any>, AttentionError> {
        Ok(Box::new(()))
    }

    /// Decoder layers.
    fn num_layers(&self) -> u16;

    /// What is the same for all layers of a stage.
    ///
    /// # Errors
    /// [`AttentionError`] when the stage contradicts itself or the cache.
    fn prepare(&self, batch: &StageBatch) -> Result<Self::Prepared, AttentionError>;

    /// Rows of the residual stream before the first layer, `[num_rows, hidden]`.
    ///
    /// # Errors
    /// [`AttentionError`] for an id beyond the vocabulary.
    fn embed(&self, input_ids: &[u32]) -> Result<Tensor, AttentionError>;

    /// Attention of one layer over `x`, `[num_rows, hidden]`.
    ///
    /// # Errors
    /// [`AttentionError`]; the stage cannot go on.
    fn attend(
        &mut self,
        layer: LayerIdx,
        x: Tensor,
        stage: &Self::Prepared,
    ) -> Result<Attended, AttentionError>;

    /// What the layer's FFN needs besides the rows `ffn_in` of the stage's tokens `input_ids`: nothing unless the gate is
    /// on attention or the layer routes by token id.
    ///
    /// # Errors
    /// [`AttentionError`]; the stage cannot go on.
    fn side_tensors(
        &self,
        layer: LayerIdx,
        ffn_in: &Tensor,
        input_ids: &[u32],
    ) -> Result<SideTensors, AttentionError>;

    /// What attention itself adds to the output of the layer's FFN for the rows `ffn_in`, `[num_rows, hidden]` f32: its shared
    /// experts, where they are placed here. Asked for once per layer and stage, while the FFN works on the rows.
    ///
    /// # Errors
    /// [`AttentionError`]; the stage cannot go on.
    fn shared_experts(&self, _layer: LayerIdx, _ffn_in: &Tensor) -> Result<Option<Tensor>, AttentionError> {
        Ok(None)
    }

    /// Whether it ever has anything to make ready.
    fn warms_up(&self) -> bool {
        false
    }

    /// Whether there is nothing for [`warm_up`](Self::warm_up) to do.
    fn is_warm(&self, _ffn: &mut dyn FfnPort) -> bool {
        true
    }

    /// Makes whole decode steps ready where they can run on the device alone, by running steps from `first` on that are all
    /// padding. Returns how many it ran.
    ///
    /// # Errors
    /// [`FfnLoss`]; to be tried again once the FFN can be used.
    fn warm_up(&mut self, _ffn: &mut dyn FfnPort, _first: StepId) -> Result<u64, FfnLoss> {
        Ok(0)
    }

    /// Token ids to make up prompts of, where the first prompts of every size cost more than those behind them: memory is taken
    /// and operations are loaded when they first run. `None` where that is not so, or too slow to be done ahead.
    fn warms_prompts(&self) -> Option<usize> {
        None
    }

    /// Enqueues a whole decode step on the device, the FFN included, if that can be, for [`finish`](Self::finish) to wait for.
    /// Nothing was done otherwise. At most one step may be enqueued behind another.
    ///
    /// # Errors
    /// [`FfnLoss`]: the step is lost; one that it was enqueued behind is to be finished nonetheless.
    fn launch(
        &mut self,
        _ffn: &mut dyn FfnPort,
        _plan: &StepOutline,
        _stages: &[DecodeStage<'_>],
        _turn: DecodeTurn,
    ) -> Result<DecodeLaunch, FfnLoss> {
        Ok(DecodeLaunch::Unknown)
    }

    /// Whether the oldest step that was launched is over.
    fn is_over(&self) -> bool {
        true
    }

    /// Waits for the oldest step that was launched. `num_rows` are those of its stages.
    ///
    /// # Errors
    /// [`FfnLoss`]: the step is lost, and so is the one behind it: nothing runs any more.
    fn finish(&mut self, _ffn: &mut dyn FfnPort, _num_rows: &[usize]) -> Result<DecodeEnd, FfnLoss> {
        Err(FfnLoss::Fatal { what: "no decode step was launched".into() })
    }

    /// The token with the largest logit of each of some rows of the residual stream after the last layer, where the device
    /// can say without the logits: `u32::MAX` where there is none. `None` where it cannot.
    ///
    /// # Errors
    /// [`AttentionError`]; the stage cannot go on.
    fn best(&self, _x: &Tensor, _rows: &[usize]) -> Result<Option<Vec<u32>>, AttentionError> {
        Ok(None)
    }

    /// Logits of some rows of the residual stream after the last layer, `[rows.len(), vocab_size]` f32, contiguous, on
    /// the CPU.
    ///
    /// # Errors
    /// [`AttentionError`]; the stage cannot go on.
    fn logits(&self, x: &Tensor, rows: &[usize]) -> Result<Tensor, AttentionError>;
}

/// One stage of a decode step.
#[derive(Clone, Copy, Debug)]
pub struct DecodeStage<'a> {
    /// Its rows, one of each sequence.
    pub batch: &'a StageBatch,
    /// How the token of each row is chosen. Where only the host can do that it says the best, which nobody then looks at.
    pub rules: &'a [DrawRule],
}

/// When a decode step comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeTurn {
    /// After something else, or a pause.
    First,
    /// As soon as could be after another decode step had ended.
    Next,
    /// Behind the one under way, whose sequences it has in the same order: its token ids are what that one chooses, and those
    /// of the batch mean nothing.
    Behind,
}

/// What came of launching a decode step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeLaunch {
    /// There is no such way here.
    Unknown,
    /// This step has to run layer by layer; or alone, if it was to come behind another.
    Eager(EagerReason),
    /// It is on its way.
    Launched {
        /// As one graph.
        replayed: bool,
    },
}

/// What came of a decode step on the device.
#[derive(Debug)]
pub struct DecodeEnd {
    /// Of every stage. Good until the next step that was not launched behind it; where one was, only the tokens are.
    pub outputs: Vec<StageOutput>,
    /// From its launch, or from the end of the step that it came behind, to its end there.
    pub on_device: Duration,
    /// What the device had nothing to do before it since the end of the decode step ahead, by its own clock; `None` for
    /// the first.
    pub idle: Option<Duration>,
}

/// Why a decode step was not one graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EagerReason {
    /// Graphs are off (`--graph-mode none`).
    Off,
    /// The kernels are not made for the model: a gate on attention, a query latent, a number of heads (the log says which).
    Model,
    /// The way to the FFN cannot be driven by a stream.
    Link,
    /// Nothing is captured for the FFN ranks as they are.
    NotWarm,
    /// More stages than were captured.
    Stages,
    /// More rows than were captured.
    Rows,
    /// A sequence is longer than the block tables.
    Shape,
    /// Its times were wanted (`attention-svc profile`).
    Profiled,
}

impl EagerReason {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Off,
        Self::Model,
        Self::Link,
        Self::NotWarm,
        Self::Stages,
        Self::Rows,
        Self::Shape,
        Self::Profiled,
    ];

    /// For metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Model => "model",
            Self::Link => "link",
            Self::NotWarm => "not_warm",
            Self::Stages => "stages",
            Self::Rows => "rows",
            Self::Shape => "shape",
            Self::Profiled => "profiled",
        }
    }
}

/// Attention failed on a stage; the same rows would fail again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct AttentionError(pub String);
