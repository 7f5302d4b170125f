//! A layer's FFN whose results say where they came from: shard `s` makes `x · (s + 2) + layer` of every element. All
//! numbers are small and whole, so sums are exact in f32 in whatever order they are added up.
use afd_common::frame::{RowType, SideKind};
use afd_common::ids::{LayerIdx, Shard};
use ffn_svc::engine::{LayerInputs, StageModel, StageSpec};
use ffn_svc::model::Side;
use tch::Tensor;

pub(crate) const HIDDEN: usize = 2;

pub(crate) struct SimModel {
    pub(crate) shard: Shard,
    pub(crate) num_layers: u16,
}

impl StageModel for SimModel {
    fn spec(&self) -> StageSpec {
        let layer = LayerInputs {
            side: SideKind::None,
            side_columns: 0,
            num_experts: 0,
            experts_per_token: 0,
            local_experts: Vec::new(),
        };
        StageSpec {
            hidden_size: HIDDEN,
            activations: RowType::F32,
            shard: self.shard,
            layers: vec![layer; usize::from(self.num_layers)],
        }
    }

    fn forward(&self, layer: LayerIdx, rows: &Tensor, _: &Side) -> Result<Tensor, String> {
        Ok(rows * f64::from(self.shard.index() + 2) + f64::from(layer.0))
    }
}

/// What one shard makes of an element.
pub(crate) fn partial(x: f32, layer: u16, shard: u32) -> f32 {
    x * (shard + 2) as f32 + f32::from(layer)
}

/// What all shards together make of it.
pub(crate) fn whole(x: f32, layer: u16, num_shards: u32) -> f32 {
    (0..num_shards).map(|shard| partial(x, layer, shard)).sum()
}
