//! What a layout does with a batch: the answer of [`evaluate`](super::evaluate), for people and programs.
use serde::{Deserialize, Serialize};

use super::layout::Layout;
use super::stage::Resource;

/// What a layout does with a batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    /// Which layout.
    pub layout: Layout,
    /// `b`, sequences per attention rank.
    pub batch_per_rank: f64,
    /// Of all ranks.
    pub sequences: f64,
    /// `T_iter`, ms.
    pub step_ms: f64,
    /// `T_iter` over tokens per step, ms.
    pub tpot_ms: f64,
    /// Of the whole layout over its devices.
    pub tokens_per_s_per_device: f64,
    /// What one stage's way through the step is made of; the parts add up to `step_ms`.
    pub parts: Parts,
    /// Part of the time attention waits, over the layers.
    pub idle_attention: f64,
    /// Part of the time the FFN waits.
    pub idle_ffn: f64,
    /// What a step that starts alone takes longer than one of many in a row, ms; not in `step_ms`.
    pub fill_ms: f64,
    /// What decides the cycle of most layers.
    pub bound: Bound,
    /// What the fullest rank of each role holds.
    pub memory: RoleMemory,
}

/// Parts of a step, ms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parts {
    /// `T_A` of all layers.
    pub attention_ms: f64,
    /// `T_F` of all layers.
    pub ffn_ms: f64,
    /// Both directions of all layers.
    pub communication_ms: f64,
    /// Shared experts on attention, as far as they take longer than the FFN and the way there and back.
    #[serde(default)]
    pub shared_ms: f64,
    /// A stage waits for another to leave a role or a link.
    pub bubble_ms: f64,
    /// Head, sampling, scheduling: once a step.
    pub fixed_ms: f64,
}

/// What decides a cycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// Attention is busy all the time.
    Attention(Resource),
    /// The FFN is.
    Ffn(Resource),
    /// The busiest link is.
    Link,
    /// Nothing is: each stage waits for its own round trip.
    RoundTrip,
}

/// Memory of the fullest rank of each role.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoleMemory {
    /// An attention rank; with colocation the only kind.
    pub attention: RankMemory,
    /// An FFN rank, under AFD.
    pub ffn: Option<RankMemory>,
    /// What a rank may use, B.
    pub usable: f64,
}

/// Memory of a rank, B.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankMemory {
    /// Parameters.
    pub weights: f64,
    /// KV cache of its sequences.
    pub kv_cache: f64,
    /// Rows on their way and logits.
    pub buffers: f64,
}

impl RankMemory {
    /// B.
    pub fn total(&self) -> f64 {
        self.weights + self.kv_cache + self.buffers
    }
}

impl RoleMemory {
    /// Both roles fit.
    pub fn fits(&self) -> bool {
        self.attention.total().max(self.ffn.map_or(0.0, |rank| rank.total())) <= self.usable
    }
}
