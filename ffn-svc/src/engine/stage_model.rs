//! What the engine asks of a model: a description of every layer, and one layer's FFN on some rows. [`FfnModel`] is the
//! real one; tests have smaller ones.
use afd_common::frame::{RowType, SideKind};
use afd_common::ids::{LayerIdx, Shard};
use tch::Tensor;

use crate::model::Side;

/// The model as the engine sees it. It is used by one thread, the one that owns the device.
pub trait StageModel: Send + 'static {
    /// What every layer takes and returns.
    fn spec(&self) -> &StageSpec;

    /// One layer's FFN on `rows`, `[rows, hidden]` in the activation dtype with at least one row: this shard's partial
    /// sum, `[rows, hidden]`. The inputs are only lent: their memory is overwritten after the call.
    ///
    /// # Errors
    /// What is wrong with these rows or their side tensors. The model stays usable.
    fn forward(&self, layer: LayerIdx, rows: &Tensor, side: &Side) -> Result<Tensor, String>;
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
    pub layers: Vec<LayerInputs>,
}

impl StageSpec {
    /// Element type of the rows that go back: partial sums travel in f32.
    pub fn combine(&self) -> RowType {
        if self.shard.count() > 1 { RowType::F32 } else { self.activations }
    }

    /// Most bytes of a row on its way in or out, side tensors included.
    pub fn max_row_bytes(&self) -> usize {
        let side =
            self.layers.iter().map(|layer| layer.side.bytes_per_row(layer.side_columns as usize)).max();
        let row_in = self.hidden_size * self.activations.bytes() + side.unwrap_or(0);
        row_in.max(self.hidden_size * self.combine().bytes())
    }
}

/// One layer's FFN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerInputs {
    /// Side tensors that must come with a hop.
    pub side: SideKind,
    /// Elements per row of each; 0 with [`SideKind::None`], 1 with [`SideKind::InputIds`].
    pub side_columns: u32,
    /// Experts of the whole layer; 0 when it is dense.
    pub num_experts: u32,
    /// Experts chosen per row; 0 when it is dense.
    pub experts_per_token: u32,
    /// Ids of the experts in this shard.
    pub local_experts: Vec<u32>,
}
