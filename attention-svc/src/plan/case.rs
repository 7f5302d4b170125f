//! What is planned: a model, a device, and what is asked of them.
use afd_common::identity::SharedExpertPlacement;
use serde::{Deserialize, Serialize};

use super::formulas::attention;
use super::formulas::ffn;
use super::layout::Layout;
use super::profile::{FixedTimes, Profile};
use super::shape::{ElementType, ModelShape, MoeShape};

/// Everything a layout's outcome depends on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// The model.
    pub shape: ModelShape,
    /// The devices.
    pub profile: Profile,
    /// Element types at run time.
    pub precision: Precision,
    /// The load.
    pub workload: Workload,
}

/// Element types at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Precision {
    /// `b_w` of the attention projections.
    pub attention: ElementType,
    /// `b_w` of experts and MLPs.
    pub ffn: ElementType,
    /// Of embedding and head.
    pub head: ElementType,
    /// Of the KV cache.
    pub kv: ElementType,
    /// `b_in`, rows on their way to the FFN.
    pub dispatch: ElementType,
    /// `b_out`, rows on their way back.
    pub combine: ElementType,
}

impl Precision {
    /// Weights as the checkpoint stores them, activations and cache in bfloat16.
    pub fn of(shape: &ModelShape) -> Self {
        let stored = shape.stored;
        Self {
            attention: stored.attention,
            ffn: stored.ffn,
            head: stored.head,
            kv: ElementType::Bf16,
            dispatch: ElementType::Bf16,
            combine: ElementType::Bf16,
        }
    }
}

/// The load.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// `S`, tokens of a sequence while it is decoded; its mean length, not its longest.
    pub context: u64,
    /// How rows find experts.
    pub exchange: Exchange,
    /// `λ ≥ 1`, rows of the busiest FFN rank over the mean.
    pub imbalance: f64,
    /// Tokens a step gives a sequence: 1, or more with multi-token prediction (1.7 to 1.9 are reported).
    pub tokens_per_step: f64,
    /// Which side has shared experts where attention and FFN are apart.
    #[serde(default)]
    pub shared_experts: SharedExpertPlacement,
}

impl Case {
    /// Whether attention has the model's shared experts, and no FFN rank does.
    pub fn shared_on_attention(&self, layout: Layout) -> bool {
        matches!(layout, Layout::Afd { .. })
            && self.workload.shared_experts == SharedExpertPlacement::Attention
    }

    /// The model's mixtures as FFN ranks have them.
    pub fn moe_on_ffn(&self, layout: Layout) -> Option<MoeShape> {
        let mut moe = self.shape.moe?;
        if self.shared_on_attention(layout) {
            moe.shared_intermediate = 0;
        }
        Some(moe)
    }
}

impl Workload {
    /// Balanced experts, one token a step, routed dispatch.
    pub fn decoding(context: u64) -> Self {
        let shared_experts = SharedExpertPlacement::Ffn;
        Self { context, exchange: Exchange::Routed, imbalance: 1.0, tokens_per_step: 1.0, shared_experts }
    }
}

/// How rows find experts under AFD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Exchange {
    /// The gate is on attention: a row goes to the ranks that own one of its experts.
    Routed,
    /// The gate is on the FFN: every row goes to every shard, and every shard answers with a partial sum in f32.
    Broadcast,
    /// Every row goes to one FFN rank, which shares it with the others (the AFD plugin for vLLM).
    PointToPoint,
}

/// Per-layer numbers of a case, in bytes and operations: what every layout of it shares.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// `h`.
    pub hidden: f64,
    /// `L_moe`.
    pub moe_layers: f64,
    /// `L − L_moe`.
    pub dense_layers: f64,
    /// Attention weights of a layer, B.
    pub attention_weights: f64,
    /// Router of a mixture layer, B; lives where the gate is.
    pub gate_weights: f64,
    /// `kv · S` read per row and layer, B.
    pub kv_read: f64,
    /// `kv · S` held per sequence and layer, B.
    pub kv_held: f64,
    /// `F_att(S)`, operations per row and layer.
    pub attention_flop: f64,
    /// Head, B.
    pub head: f64,
    /// Embedding and head as stored, B.
    pub embedding_and_head: f64,
    /// Head, operations per row.
    pub head_flop: f64,
    /// Dense MLP of a layer, B.
    pub dense_weights: f64,
    /// Dense MLP, operations per row.
    pub dense_flop: f64,
    /// Shared experts of a mixture layer, B.
    pub shared_weights: f64,
    /// Shared experts, operations per row.
    pub shared_flop: f64,
    /// `P_A`, operations/s.
    pub attention_rate: f64,
    /// `P_F`, operations/s.
    pub ffn_rate: f64,
    /// `P` of the head, operations/s.
    pub head_rate: f64,
    /// `BW`, B/s.
    pub memory_bandwidth: f64,
    /// `b_in · h`, B.
    pub row_in: f64,
    /// `b_out · h`, B.
    pub row_out: f64,
    /// `t0_A`, s.
    pub attention_fixed: f64,
    /// `t0_F`, s.
    pub ffn_fixed: f64,
    /// Per step, s.
    pub step_fixed: f64,
}

impl Terms {
    /// Works them out once.
    pub fn of(case: &Case) -> Self {
        let Case { shape, profile, precision, workload } = case;
        let (hidden, context) = (f64::from(shape.hidden), workload.context as f64);
        let layers = shape.num_layers();
        let head_elements = f64::from(shape.vocab) * hidden;
        let dense_elements = ffn::gated_weights(shape.hidden, f64::from(shape.dense_intermediate));
        let shared_width = shape.moe.map_or(0.0, |moe| f64::from(moe.shared_intermediate));
        let shared_elements = ffn::gated_weights(shape.hidden, shared_width);
        let kv_bytes = precision.kv.bytes();
        let tables = if shape.tied_head { 1.0 } else { 2.0 };
        Self {
            hidden,
            moe_layers: f64::from(shape.num_moe_layers),
            dense_layers: f64::from(shape.num_dense_layers),
            attention_weights: attention::num_weights(&shape.attention, shape.hidden)
                * precision.attention.bytes(),
            gate_weights: shape.moe.map_or(0.0, |moe| f64::from(moe.num_experts) * hidden * 2.0),
            kv_read: attention::kv_elements_read(&shape.attention, context, layers) * kv_bytes,
            kv_held: attention::kv_elements_held(&shape.attention, context, layers) * kv_bytes,
            attention_flop: attention::flop_per_row(&shape.attention, shape.hidden, context, layers),
            head: head_elements * precision.head.bytes(),
            embedding_and_head: tables * head_elements * precision.head.bytes(),
            head_flop: 2.0 * head_elements,
            dense_weights: dense_elements * precision.ffn.bytes(),
            dense_flop: 2.0 * dense_elements,
            shared_weights: shared_elements * precision.ffn.bytes(),
            shared_flop: 2.0 * shared_elements,
            attention_rate: profile.compute.rate(precision.attention),
            ffn_rate: profile.compute.rate(precision.ffn),
            head_rate: profile.compute.rate(precision.head),
            memory_bandwidth: profile.memory.bandwidth.value,
            row_in: hidden * precision.dispatch.bytes(),
            row_out: hidden * precision.combine.bytes(),
            attention_fixed: FixedTimes::seconds(&profile.fixed.attention_stage),
            ffn_fixed: FixedTimes::seconds(&profile.fixed.ffn_stage),
            step_fixed: FixedTimes::seconds(&profile.fixed.step),
        }
    }
}
