//! The FFN half of a decoder: for every layer a dense MLP or a mixture of experts, of which this rank owns one shard.
//! What [`FfnModel::forward`] returns is this shard's partial sum.
//!
//! In reading order: [`FfnModel`] → `moe` (route, then experts) → `grouping` (which rows go to which expert) →
//! `experts`; a dense MLP, and the short cut of both for few rows on the CPU, are among the [layers](afd_common::layers) that
//! both roles use; `about` says what is true of the shard on every device. Nothing here knows hops, links or sessions,
//! and nothing keeps state between calls but [`ExpertCounts`].
use std::sync::Arc;

use afd_common::config::model::{FfnConfig, ModelConfig};
use afd_common::frame::SideKind;
use afd_common::identity::{SharedExpertPlacement, Sides};
use afd_common::ids::{LayerIdx, Shard};
use afd_common::layers::{FewRows, FfnNames, GatedMlp, MlpError};
use afd_common::placement::Placement;
use afd_common::weights::Weights;
use afd_ffi::Crew;
use tch::Tensor;

mod about;
mod counts;
mod error;
mod experts;
mod grouping;
mod moe;
#[cfg(test)]
mod tests;

pub use about::AboutShard;
pub use counts::ExpertCounts;
pub(crate) use error::At;
pub use error::FfnModelError;

use grouping::LocalExperts;
use moe::MixtureOfExperts;

/// Side tensors of a hop, as they came with it.
#[derive(Debug)]
pub enum Side {
    /// Nothing: the layer routes by itself, or is dense.
    None,
    /// `[rows, experts]` f32.
    RouterLogits(Tensor),
    /// The chosen experts.
    TopK {
        /// `[rows, k]` i64
        ids: Tensor,
        /// `[rows, k]` f32
        weights: Tensor,
    },
    /// `[rows]` i64; negative where a row is padding.
    InputIds(Tensor),
}

impl Side {
    /// Which of them it is.
    pub fn kind(&self) -> SideKind {
        match self {
            Self::None => SideKind::None,
            Self::RouterLogits(_) => SideKind::RouterLogits,
            Self::TopK { .. } => SideKind::TopK,
            Self::InputIds(_) => SideKind::InputIds,
        }
    }
}

/// What one layer takes and owns, for `LayerStageService.Describe` and for checking hops.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerSpec {
    /// Side tensors that must come with the rows.
    pub side: SideKind,
    /// Elements per row of each side tensor; 0 with [`SideKind::None`], 1 with [`SideKind::InputIds`].
    pub side_columns: u32,
    /// Experts of the whole layer; 0 when it is dense.
    pub num_experts: u32,
    /// Experts chosen per row; 0 when it is dense.
    pub experts_per_token: u32,
    /// Ids of the experts of this shard, ascending.
    pub local_experts: Vec<u32>,
    /// Which side computes its shared experts; `None` when it has none.
    pub shared_experts: Option<SharedExpertPlacement>,
}

/// Weights of one shard of every layer's FFN.
#[derive(Debug)]
pub struct FfnModel {
    layers: Vec<Layer>,
    about: AboutShard,
    few_rows: FewRows,
}

#[derive(Debug)]
enum Layer {
    Dense(GatedMlp),
    Moe(Box<MixtureOfExperts>),
}

impl FfnModel {
    /// [`load_placed`](Self::load_placed) with every shard having a contiguous part of the experts.
    ///
    /// # Errors
    /// [`FfnModelError::Weights`] names the tensor; a retry does not help.
    pub fn load(
        config: &ModelConfig,
        weights: &Weights,
        shard: Shard,
        sides: impl Into<Sides>,
    ) -> Result<Self, FfnModelError> {
        Self::load_placed(config, weights, shard, sides, &Placement::contiguous(config, shard.count()))
    }

    /// Takes this shard's part of every layer from the checkpoint: a slice of the intermediate dimension of dense MLPs,
    /// the routed experts that `placement` gives it, whole, the routers if they are placed here, and of shared experts, if
    /// they are placed here, a slice or, with the gate on attention, all: rows then come only to the shards that serve one
    /// of their experts. Reads nothing else.
    ///
    /// # Errors
    /// [`FfnModelError`] names the tensor, or the shard counts that differ; a retry does not help.
    pub fn load_placed(
        config: &ModelConfig,
        weights: &Weights,
        shard: Shard,
        sides: impl Into<Sides>,
        placement: &Placement,
    ) -> Result<Self, FfnModelError> {
        let sides = sides.into();
        let misplaced = |what: String| FfnModelError::Placement { what };
        if placement.num_shards() != shard.count() {
            return Err(misplaced(format!(
                "has {} shards, expected {}",
                placement.num_shards(),
                shard.count()
            )));
        }
        let hidden = config.hidden_size;
        let mut layers = Vec::with_capacity(config.layers.len());
        let mut specs = Vec::with_capacity(config.layers.len());
        for (index, ffn) in config.layers.iter().enumerate() {
            let names = FfnNames::new(config.architecture, index);
            let (layer, spec) = match ffn {
                FfnConfig::Dense(dense) => {
                    let mlp = GatedMlp::load(
                        weights,
                        &names.dense(),
                        hidden,
                        dense.intermediate_size,
                        shard,
                        dense.bias,
                    )?;
                    (Layer::Dense(mlp), LayerSpec::dense())
                }
                FfnConfig::Moe(moe) => {
                    let placed =
                        placement.layer(index).filter(|placed| placed.num_experts() == moe.num_experts);
                    let placed = placed.ok_or_else(|| {
                        misplaced(format!("says nothing of the {} experts of layer {index}", moe.num_experts))
                    })?;
                    let local = LocalExperts::new(placed, shard);
                    let layer = MixtureOfExperts::load(config, weights, index, moe, shard, sides, local)?;
                    let spec = layer.spec();
                    (Layer::Moe(Box::new(layer)), spec)
                }
            };
            layers.push(layer);
            specs.push(spec);
        }
        let few_rows = FewRows::new(weights.kind()).map_err(FfnModelError::Threads)?;
        Ok(Self { layers, about: AboutShard::new(specs, hidden, weights.kind(), shard), few_rows })
    }

    /// What is true of this shard wherever it is computed.
    pub fn about(&self) -> &AboutShard {
        &self.about
    }

    /// The same model, its loops on threads that another model of this process uses too: they take turns anyway.
    pub fn on_crew(self, crew: Arc<Crew>) -> Self {
        Self { few_rows: self.few_rows.with_crew(crew), ..self }
    }

    /// One layer's FFN on `hidden`, `[rows, hidden]` in the compute dtype: this shard's partial sum, `[rows, hidden]` of
    /// [`out_kind`](AboutShard::out_kind). Zero rows are legal.
    ///
    /// # Errors
    /// [`FfnModelError`] says what is wrong with these rows or their side tensors; the model stays usable.
    pub fn forward(&self, layer: LayerIdx, hidden: &Tensor, side: &Side) -> Result<Tensor, FfnModelError> {
        self.compute(layer, hidden, side, Some(self.about.expert_counts()))
    }

    /// The same on rows that nobody sent: which experts they choose is not counted.
    ///
    /// # Errors
    /// Those of [`forward`](Self::forward).
    pub fn rehearse(&self, layer: LayerIdx, hidden: &Tensor, side: &Side) -> Result<Tensor, FfnModelError> {
        self.compute(layer, hidden, side, None)
    }

    fn compute(
        &self,
        layer: LayerIdx,
        hidden: &Tensor,
        side: &Side,
        counts: Option<&Arc<ExpertCounts>>,
    ) -> Result<Tensor, FfnModelError> {
        let count = self.layers.len();
        let Some(ffn) = self.layers.get(usize::from(layer.0)) else {
            return Err(FfnModelError::UnknownLayer { layer, count });
        };
        self.about.check_rows(layer, hidden)?;
        let out_kind = self.about.out_kind();
        if hidden.size()[0] == 0 {
            let shape = [0, self.about.hidden_size() as i64];
            return Tensor::f_zeros(shape, (out_kind, hidden.device())).at(layer, "no rows");
        }
        let sum = match ffn {
            Layer::Dense(_) if side.kind() != SideKind::None => {
                return Err(FfnModelError::Side { layer, expected: "none".into(), found: side.kind() });
            }
            Layer::Dense(mlp) => self.forward_dense(layer, mlp, hidden)?,
            Layer::Moe(moe) => moe.forward(layer, hidden, side, counts.map(Arc::as_ref), &self.few_rows)?,
        };
        if sum.kind() == out_kind { Ok(sum) } else { sum.f_to_kind(out_kind).at(layer, "output dtype") }
    }

    fn forward_dense(
        &self,
        layer: LayerIdx,
        mlp: &GatedMlp,
        hidden: &Tensor,
    ) -> Result<Tensor, FfnModelError> {
        self.few_rows.forward_one(mlp, hidden).map_err(|error| match error {
            MlpError::Shape(source) => FfnModelError::FewRows { layer, source },
            MlpError::Torch(source) => FfnModelError::Torch { layer, operation: "dense", source },
        })
    }
}

impl LayerSpec {
    /// A dense layer, which takes rows and nothing else.
    pub fn dense() -> Self {
        Self {
            side: SideKind::None,
            side_columns: 0,
            num_experts: 0,
            experts_per_token: 0,
            local_experts: Vec::new(),
            shared_experts: None,
        }
    }
}
