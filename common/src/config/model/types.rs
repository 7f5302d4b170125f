//! What a checkpoint's configuration says, as types. Every value of these types was checked when it was read; code that
//! receives one checks nothing again.
use std::fmt;
use std::str::FromStr;

use super::ConfigError;

/// A decoder-only language model, every number checked.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct ModelConfig {
    /// Which family's names and layout the checkpoint uses.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Tokens known to the embedding and the head.
    pub vocab_size: usize,
    /// Longest sequence, tokens.
    pub max_position_embeddings: usize,
    /// Epsilon of the residual stream's norms.
    pub rms_norm_eps: f64,
    /// The head is the embedding.
    pub tie_word_embeddings: bool,
    /// The same in every layer.
    pub attention: AttentionConfig,
    /// The same in every layer.
    pub rope: RopeConfig,
    /// One entry per decoder layer.
    pub layers: Vec<FfnConfig>,
    /// As the checkpoint declares it (`torch_dtype` or `dtype`).
    pub dtype: CheckpointDtype,
    /// `quantization_config`, when the weights are stored as block FP8 (128 × 128 by default).
    pub fp8_block: Option<(usize, usize)>,
    /// Beginning-of-text token, if any.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a text (config.json, overridden by generation_config.json).
    pub eos_token_ids: Vec<u32>,
}

/// Hugging Face architectures that are served. The registry: `FromStr` accepts exactly these names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
pub enum Architecture {
    /// `LlamaForCausalLM`
    Llama,
    /// `MixtralForCausalLM`
    Mixtral,
    /// `Qwen3MoeForCausalLM`
    Qwen3Moe,
    /// `OlmoeForCausalLM`
    Olmoe,
    /// `DeepseekV2ForCausalLM`
    DeepseekV2,
    /// `DeepseekV3ForCausalLM` (Kimi-K2 and others that only differ in numbers)
    DeepseekV3,
    /// `Glm4MoeForCausalLM` (GLM-4.5): DeepSeek-V3's mixture behind grouped-query attention
    Glm4Moe,
}

impl Architecture {
    /// Every architecture that is served.
    pub const ALL: [Self; 7] = [
        Self::Llama,
        Self::Mixtral,
        Self::Qwen3Moe,
        Self::Olmoe,
        Self::DeepseekV2,
        Self::DeepseekV3,
        Self::Glm4Moe,
    ];

    /// As in the `architectures` field of `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mixtral => "MixtralForCausalLM",
            Self::Qwen3Moe => "Qwen3MoeForCausalLM",
            Self::Olmoe => "OlmoeForCausalLM",
            Self::DeepseekV2 => "DeepseekV2ForCausalLM",
            Self::DeepseekV3 => "DeepseekV3ForCausalLM",
            Self::Glm4Moe => "Glm4MoeForCausalLM",
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Architecture {
    type Err = ConfigError;

    fn from_str(name: &str) -> Result<Self, ConfigError> {
        Self::ALL.into_iter().find(|known| known.name() == name).ok_or_else(|| ConfigError::Architecture {
            found: name.into(),
            known: Self::ALL.map(Self::name).join(", "),
        })
    }
}

/// Element type of the stored weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
pub enum CheckpointDtype {
    /// binary32
    F32,
    /// bfloat16
    Bf16,
    /// binary16
    F16,
}

/// The attention block.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub enum AttentionConfig {
    /// Grouped-query attention.
    Gqa(GqaConfig),
    /// Multi-head latent attention (DeepSeek-V2, section 2.1).
    Mla(MlaConfig),
}

/// Grouped-query attention.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct GqaConfig {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head; not always hidden / heads.
    pub head_dim: usize,
    /// How many elements of a head turn, the first ones; an even number, `head_dim` for all but GLM.
    pub rotary_dim: usize,
    /// q, k, v (and, for Llama's `attention_bias`, o) projections have a bias.
    pub qkv_bias: bool,
    /// The output projection has a bias.
    pub o_bias: bool,
    /// Norm of queries and keys before rope.
    pub qk_norm: QkNorm,
    /// q, k and v are clipped to ± this (OLMoE's `clip_qkv`).
    pub clip_qkv: Option<f64>,
    /// Only the latest so many tokens are attended to.
    pub sliding_window: Option<usize>,
}

/// Norm of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub enum QkNorm {
    /// None.
    None,
    /// RMSNorm over each head (Qwen3).
    PerHead,
    /// RMSNorm over the whole projection (OLMoE).
    Whole,
}

/// Multi-head latent attention; names as in the DeepSeek-V2 paper and its checkpoints.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct MlaConfig {
    /// Heads.
    pub num_heads: usize,
    /// Rank of the query's low-rank projection; none in V2-Lite.
    pub q_lora_rank: Option<usize>,
    /// Rank of the compressed key and value: what is cached, with the rope key.
    pub kv_lora_rank: usize,
    /// Width of a head's part without rope.
    pub qk_nope_head_dim: usize,
    /// Width of a head's part with rope; the key's is shared by all heads.
    pub qk_rope_head_dim: usize,
    /// Width of a value head.
    pub v_head_dim: usize,
    /// The low-rank projections have a bias (`attention_bias`).
    pub bias: bool,
    /// Rope pairs neighbours (2i, 2i+1) instead of halves.
    pub rope_interleave: bool,
}

/// Rotary position embedding.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// How it is stretched.
    pub scaling: RopeScaling,
}

/// Stretching of the rotary embedding to longer sequences.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Positions divided by the factor.
    Linear {
        /// How much longer.
        factor: f64,
    },
    /// Llama 3.
    Llama3 {
        /// How much longer.
        factor: f64,
        /// Wavelengths above original / this are stretched in full.
        low_freq_factor: f64,
        /// Wavelengths below original / this are kept.
        high_freq_factor: f64,
        /// Length it was trained with.
        original_max_position_embeddings: usize,
    },
    /// YaRN (arXiv 2309.00071) with DeepSeek's two mscales.
    Yarn {
        /// How much longer.
        factor: f64,
        /// Rotations above which a dimension is kept.
        beta_fast: f64,
        /// Rotations below which a dimension is interpolated in full.
        beta_slow: f64,
        /// cos and sin are multiplied by mscale(factor, mscale) / mscale(factor, mscale_all_dim).
        mscale: Option<f64>,
        /// The softmax scale is multiplied by mscale(factor, mscale_all_dim)².
        mscale_all_dim: Option<f64>,
        /// Explicit factor of cos and sin, instead of the two mscales.
        attention_factor: Option<f64>,
        /// Round the correction range to whole dimensions.
        truncate: bool,
        /// Length it was trained with.
        original_max_position_embeddings: usize,
    },
}

/// One decoder layer's FFN.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub enum FfnConfig {
    /// A gated MLP, `down(silu(gate(x)) * up(x))`.
    Dense(DenseConfig),
    /// A mixture of such MLPs.
    Moe(MoeConfig),
}

/// A gated MLP.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct DenseConfig {
    /// Rows of gate and up.
    pub intermediate_size: usize,
    /// The projections have a bias (`mlp_bias`).
    pub bias: bool,
}

/// A mixture of experts.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct MoeConfig {
    /// Routed experts.
    pub num_experts: usize,
    /// Experts chosen per token.
    pub experts_per_token: usize,
    /// Rows of gate and up of one routed expert.
    pub intermediate_size: usize,
    /// Rows of gate and up of the shared expert (all shared experts together); 0 when there is none.
    pub shared_intermediate_size: usize,
    /// How experts are scored and chosen.
    pub router: RouterConfig,
}

/// How experts are scored and chosen.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct RouterConfig {
    /// From logits to scores.
    pub scoring: Scoring,
    /// From scores to experts.
    pub selection: Selection,
    /// Chosen weights are divided by their sum.
    pub normalize: bool,
    /// Added to that sum (DeepSeek-V3: 1e-20; others 0).
    pub normalize_eps: f64,
    /// Chosen weights are multiplied by this, after normalising.
    pub scaling_factor: f64,
    /// The logits are computed in f32 whatever the compute dtype (DeepSeek).
    pub logits_in_f32: bool,
}

/// From router logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub enum Scoring {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each.
    Sigmoid,
    /// Square root of the softplus of each (the newest DeepSeek family).
    SqrtSoftplus,
}

/// From scores to experts.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub enum Selection {
    /// The best k.
    Greedy,
    /// The best k within the best groups; a group's score is its best expert's (DeepSeek-V2).
    GroupLimited {
        /// Groups of equal size.
        num_groups: usize,
        /// Groups that may be chosen from.
        topk_groups: usize,
    },
    /// Scores plus a bias (`e_score_correction_bias`, f32) choose, the scores weigh; a group's score is the sum of its
    /// best two (DeepSeek-V3).
    NoAuxTc {
        /// Groups of equal size.
        num_groups: usize,
        /// Groups that may be chosen from.
        topk_groups: usize,
    },
    /// A table names the experts of every token id (`mlp.gate.tid2eid`, hash routing); the scores only weigh them.
    TokenTable {
        /// Rows of the table.
        vocab_size: usize,
    },
}
