//! Under which names a family stores the FFN of a layer.
use crate::config::model::Architecture;

/// Names of one layer's FFN tensors.
#[derive(Clone, Debug)]
pub struct FfnNames {
    prefix: String,
    expert: [&'static str; 3],
}

impl FfnNames {
    /// Of the layer with this index.
    pub fn new(architecture: Architecture, layer: usize) -> Self {
        match architecture {
            Architecture::Mixtral => {
                Self { prefix: format!("model.layers.{layer}.block_sparse_moe"), expert: ["w1", "w3", "w2"] }
            }
            Architecture::Llama
            | Architecture::Qwen3Moe
            | Architecture::Olmoe
            | Architecture::DeepseekV2
            | Architecture::DeepseekV3
            | Architecture::Glm4Moe => Self {
                prefix: format!("model.layers.{layer}.mlp"),
                expert: ["gate_proj", "up_proj", "down_proj"],
            },
        }
    }

    /// `[experts, hidden]`
    pub fn router(&self) -> String {
        format!("{}.gate.weight", self.prefix)
    }

    /// `[experts]` f32
    pub fn correction_bias(&self) -> String {
        format!("{}.gate.e_score_correction_bias", self.prefix)
    }

    /// `[vocab, k]` of an integer type: the experts of every token id.
    pub fn token_table(&self) -> String {
        format!("{}.gate.tid2eid", self.prefix)
    }

    /// Gate, up and down of the dense MLP, without `.weight` or `.bias`.
    pub fn dense(&self) -> [String; 3] {
        self.expert.map(|part| format!("{}.{part}", self.prefix))
    }

    /// Gate, up and down of a routed expert.
    pub fn expert(&self, expert: usize) -> [String; 3] {
        self.expert.map(|part| format!("{}.experts.{expert}.{part}", self.prefix))
    }

    /// Gate, up and down of the shared experts, which are stored as one.
    pub fn shared(&self) -> [String; 3] {
        self.expert.map(|part| format!("{}.shared_experts.{part}", self.prefix))
    }
}
