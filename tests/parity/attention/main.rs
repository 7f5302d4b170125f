//! The attention half against Hugging Face's own hidden states, against plain references for shapes no fixture has, and
//! against itself: whatever the chunking, the mix of rows and the way to the cache, the numbers are the same.
mod chunks;
mod hidden;
mod odd_shapes;
mod plain;
mod stage;

use std::path::PathBuf;

use afd_common::config::model::ModelConfig;
use afd_common::weights::Weights;
use attention_svc::model::AttentionModel;
use tch::{Kind, Tensor};

/// Every tiny checkpoint.
const FIXTURES: [&str; 7] = [
    "tiny-llama",
    "tiny-mixtral",
    "tiny-qwen3-moe",
    "tiny-olmoe",
    "tiny-deepseek-v2",
    "tiny-deepseek-v2-group",
    "tiny-deepseek-v3",
];

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

fn load(name: &str) -> (ModelConfig, AttentionModel) {
    let folder = fixtures().join("tiny").join(name);
    let config = ModelConfig::load(&folder).unwrap();
    let weights = Weights::open(&folder, &config, Kind::Float).unwrap();
    let model = AttentionModel::load(&config, &weights, config.max_position_embeddings).unwrap();
    (config, model)
}

/// Largest absolute difference.
fn distance(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    (a - b).abs().max().double_value(&[])
}
