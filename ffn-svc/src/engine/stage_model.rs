//! What the engine asks of a model: a description of every layer, and one layer's FFN on some rows. [`FfnModel`] is the
//! real one on the CPU; tests have smaller ones.
use std::any::Any;
use std::sync::Arc;

use afd_common::frame::RowType;
use afd_common::ids::{LayerIdx, Shard};
use tch::{Kind, Tensor};

use super::StepRunner;
use crate::model::{AboutShard, ExpertCounts, FfnModel, LayerSpec, Side};

/// The model as the engine sees it. It is used by one thread, the one that owns the device.
pub trait StageModel: Send + 'static {
    /// What every layer takes and returns.
    fn spec(&self) -> StageSpec;

    /// Called once on the engine's thread, before anything else there. What it returns is dropped when the thread ends.
    ///
    /// # Errors
    /// Why the device cannot be used; the engine dies of it.
    fn enter_thread(&mut self) -> Result<Box<dyn Any>, String> {
        Ok(Box::new(()))
    }

    /// One layer's FFN on `rows`, `[rows, hidden]` in the activation dtype with at least one row, on the CPU: this
    /// shard's partial sum, `[rows, hidden]`, on the CPU too. The inputs are only lent: their memory is overwritten after
    /// the call.
    ///
    /// # Errors
    /// What is wrong with these rows or their side tensors. The model stays usable.
    fn forward(&mut self, layer: LayerIdx, rows: &Tensor, side: &Side) -> Result<Tensor, String>;

    /// [`forward`](Self::forward) on rows of a warm-up, whose choices of experts are not to be counted where that can be left out.
    ///
    /// # Errors
    /// Those of [`forward`](Self::forward).
    fn rehearse(&mut self, layer: LayerIdx, rows: &Tensor, side: &Side) -> Result<Tensor, String> {
        self.forward(layer, rows, side)
    }

    /// What runs the steps of links that a stream drives; `None` without a GPU.
    fn steps(&mut self) -> Option<&mut dyn StepRunner> {
        None
    }

    /// How often each expert was chosen, where that is counted.
    fn expert_counts(&self) -> Option<Arc<ExpertCounts>> {
        None
    }
}

/// What a model takes and returns.
#[derive(Clone, Debug)]
pub struct StageSpec {
    /// Width of a row.
    pub hidden_size: usize,
    /// Element type of the rows that come in.
    pub activations: RowType,
    /// Which part of every layer this is.
    pub shard: Shard,
    /// One entry per decoder layer.
    pub layers: Vec<LayerSpec>,
}

impl StageSpec {
    /// What a shard takes and returns.
    pub fn of(about: &AboutShard) -> Self {
        Self {
            hidden_size: about.hidden_size(),
            // The options know no third dtype; if there were one, the model would refuse every row by name.
            activations: if about.kind() == Kind::BFloat16 { RowType::Bf16 } else { RowType::F32 },
            shard: about.shard(),
            layers: about.specs().to_vec(),
        }
    }

    /// All of a model of so many dense layers, in f32.
    pub fn dense(hidden_size: usize, num_layers: usize) -> Self {
        let layers = vec![LayerSpec::dense(); num_layers];
        Self { hidden_size, activations: RowType::F32, shard: Shard::WHOLE, layers }
    }

    /// Element type of the rows that go back: partial sums travel in f32.
    pub fn combine(&self) -> RowType {
        if self.shard.count() > 1 { RowType::F32 } else { self.activations }
    }

    /// Most bytes of a row on its way in or out, side tensors included: what links are sized by. Both ends must come to the
    /// same number, and attention does not know the number of shards when it does: partial sums count as f32.
    pub fn max_row_bytes(&self) -> usize {
        let side =
            self.layers.iter().map(|layer| layer.side.bytes_per_row(layer.side_columns as usize)).max();
        let row_in = self.hidden_size * self.activations.bytes() + side.unwrap_or(0);
        row_in.max(self.hidden_size * RowType::F32.bytes())
    }
}

impl StageModel for FfnModel {
    fn spec(&self) -> StageSpec {
        StageSpec::of(self.about())
    }

    fn forward(&mut self, layer: LayerIdx, rows: &Tensor, side: &Side) -> Result<Tensor, String> {
        FfnModel::forward(self, layer, rows, side).map_err(|error| error.to_string())
    }

    fn rehearse(&mut self, layer: LayerIdx, rows: &Tensor, side: &Side) -> Result<Tensor, String> {
        FfnModel::rehearse(self, layer, rows, side).map_err(|error| error.to_string())
    }

    fn expert_counts(&self) -> Option<Arc<ExpertCounts>> {
        Some(Arc::clone(self.about().expert_counts()))
    }
}
