//! The FFN half of a decoder: for every layer a dense MLP or a mixture of experts, of which this rank owns one shard.
//! What [`FfnModel::forward`] returns is this shard's partial sum.
use afd_common::ids::LayerIdx;
use tch::Tensor;

/// Side tensors of a hop, as they came with it.
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
    /// `[rows]` i64
    InputIds(Tensor),
}

/// Weights of one shard of every layer's FFN.
pub struct FfnModel {
    _layers: LayerIdx,
}
