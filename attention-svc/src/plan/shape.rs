//! The numbers of a model that the arithmetic needs, and no others: a model can be planned for that is not served yet.
//!
//! [`ModelShape`] comes from a checkpoint's [`ModelConfig`] or, for architectures outside the registry, from the lenient
//! reader in [`config_reader`](super::config_reader).
use afd_common::config::model::{
    AttentionConfig, CheckpointDtype, DenseConfig, FfnConfig, ModelConfig, MoeConfig,
};
use serde::{Deserialize, Serialize};

/// Sizes of a decoder-only model. Symbols are those of the module's table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelShape {
    /// For people.
    pub name: String,
    /// `h`, width of the residual stream.
    pub hidden: u32,
    /// Rows of the embedding and of the head.
    pub vocab: u32,
    /// The head is the embedding, stored once.
    pub tied_head: bool,
    /// The same in every layer.
    pub attention: AttentionShape,
    /// `L_moe`, layers whose FFN is a mixture; 0 in a dense model.
    pub num_moe_layers: u32,
    /// Their sizes; `None` in a dense model.
    pub moe: Option<MoeShape>,
    /// Layers whose FFN is one gated MLP.
    pub num_dense_layers: u32,
    /// Rows of gate and up of those.
    pub dense_intermediate: u32,
    /// What the checkpoint stores.
    pub stored: StoredAs,
}

/// The attention block.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
pub enum AttentionShape {
    /// Grouped-query attention.
    Gqa {
        /// `n_q`, query heads.
        heads: u32,
        /// `n_kv`, key and value heads.
        kv_heads: u32,
        /// `d_h`, width of a head.
        head_dim: u32,
        /// Layers that attend to the latest tokens only.
        window: Option<Window>,
    },
    /// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).
    Mla {
        /// Heads.
        heads: u32,
        /// Rank of the query's projection; none in V2-Lite.
        q_lora_rank: Option<u32>,
        /// Rank of the cached latent.
        kv_lora_rank: u32,
        /// Width of a head's part without rope.
        qk_nope_head_dim: u32,
        /// Width of a head's part with rope; cached beside the latent.
        qk_rope_head_dim: u32,
        /// Width of a value head.
        v_head_dim: u32,
        /// DeepSeek-V3.2's sparse attention.
        indexer: Option<Indexer>,
    },
}

/// Sliding-window attention in some of the layers (gpt-oss alternates).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Tokens such a layer looks back at.
    pub tokens: u32,
    /// Layers that do.
    pub num_layers: u32,
}

/// DeepSeek sparse attention: a small scorer reads a key of every token, attention then reads the best `top_k` of them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Indexer {
    /// Its heads.
    pub heads: u32,
    /// Width of its one cached key per token.
    pub head_dim: u32,
    /// Tokens that attention reads.
    pub top_k: u32,
}

/// A mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoeShape {
    /// `E`, routed experts.
    pub num_experts: u32,
    /// `k`, experts per token.
    pub experts_per_token: u32,
    /// `d`, rows of gate and up of one expert.
    pub intermediate: u32,
    /// `n_s · d`, the same of all shared experts together; 0 when there are none.
    pub shared_intermediate: u32,
}

/// Element types of the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredAs {
    /// Attention projections.
    pub attention: ElementType,
    /// Experts and MLPs.
    pub ffn: ElementType,
    /// Embedding and head.
    pub head: ElementType,
}

/// Element types the planner can count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ElementType {
    /// binary32
    F32,
    /// bfloat16 or binary16
    Bf16,
    /// 8-bit float; block scales are left out (0.02 % to 3 %)
    Fp8,
    /// 8-bit integer
    Int8,
    /// 4-bit float with one 8-bit scale per 32
    Mxfp4,
}

impl ElementType {
    /// `b`, bytes per element.
    pub fn bytes(self) -> f64 {
        match self {
            Self::F32 => 4.0,
            Self::Bf16 => 2.0,
            Self::Fp8 | Self::Int8 => 1.0,
            Self::Mxfp4 => 4.25 / 8.0,
        }
    }
}

impl From<CheckpointDtype> for ElementType {
    fn from(dtype: CheckpointDtype) -> Self {
        match dtype {
            CheckpointDtype::F32 => Self::F32,
            CheckpointDtype::Bf16 | CheckpointDtype::F16 => Self::Bf16,
        }
    }
}

impl ModelShape {
    /// Whether every row goes through some experts, whatever the router chooses.
    pub fn has_shared_experts(&self) -> bool {
        self.moe.is_some_and(|moe| moe.shared_intermediate > 0)
    }

    /// `L`, decoder layers.
    pub fn num_layers(&self) -> u32 {
        self.num_moe_layers + self.num_dense_layers
    }
}

impl From<&ModelConfig> for ModelShape {
    fn from(config: &ModelConfig) -> Self {
        let moe = config.layers.iter().find_map(|layer| match layer {
            FfnConfig::Moe(moe) => Some(MoeShape::from(moe)),
            FfnConfig::Dense(_) => None,
        });
        let dense_intermediate = config.layers.iter().find_map(|layer| match layer {
            FfnConfig::Dense(DenseConfig { intermediate_size, .. }) => Some(*intermediate_size as u32),
            FfnConfig::Moe(_) => None,
        });
        let num_moe_layers =
            config.layers.iter().filter(|layer| matches!(layer, FfnConfig::Moe(_))).count() as u32;
        let plain = ElementType::from(config.dtype);
        let quantized = if config.fp8_block.is_some() { ElementType::Fp8 } else { plain };
        Self {
            name: config.architecture.to_string(),
            hidden: config.hidden_size as u32,
            vocab: config.vocab_size as u32,
            tied_head: config.tie_word_embeddings,
            attention: AttentionShape::new(&config.attention, config.layers.len() as u32),
            num_moe_layers,
            moe,
            num_dense_layers: config.layers.len() as u32 - num_moe_layers,
            dense_intermediate: dense_intermediate.unwrap_or(0),
            stored: StoredAs { attention: quantized, ffn: quantized, head: plain },
        }
    }
}

impl AttentionShape {
    fn new(attention: &AttentionConfig, num_layers: u32) -> Self {
        match attention {
            AttentionConfig::Gqa(gqa) => Self::Gqa {
                heads: gqa.num_heads as u32,
                kv_heads: gqa.num_kv_heads as u32,
                head_dim: gqa.head_dim as u32,
                window: gqa.sliding_window.map(|tokens| Window { tokens: tokens as u32, num_layers }),
            },
            AttentionConfig::Mla(mla) => Self::Mla {
                heads: mla.num_heads as u32,
                q_lora_rank: mla.q_lora_rank.map(|rank| rank as u32),
                kv_lora_rank: mla.kv_lora_rank as u32,
                qk_nope_head_dim: mla.qk_nope_head_dim as u32,
                qk_rope_head_dim: mla.qk_rope_head_dim as u32,
                v_head_dim: mla.v_head_dim as u32,
                indexer: None,
            },
        }
    }
}

impl From<&MoeConfig> for MoeShape {
    fn from(moe: &MoeConfig) -> Self {
        Self {
            num_experts: moe.num_experts as u32,
            experts_per_token: moe.experts_per_token as u32,
            intermediate: moe.intermediate_size as u32,
            shared_intermediate: moe.shared_intermediate_size as u32,
        }
    }
}
