//! The seam between the engine and the attention half of the model: what a step needs of it, and nothing else, so that the
//! loop around it can be tested with a model that is plain arithmetic.
use std::any::Any;

use afd_common::ids::LayerIdx;
use tch::Tensor;

use super::SideTensors;
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

    /// Logits of some rows of the residual stream after the last layer, `[rows.len(), vocab_size]` f32, contiguous, on
    /// the CPU.
    ///
    /// # Errors
    /// [`AttentionError`]; the stage cannot go on.
    fn logits(&self, x: &Tensor, rows: &[usize]) -> Result<Tensor, AttentionError>;
}

/// Attention failed on a stage; the same rows would fail again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct AttentionError(pub String);
