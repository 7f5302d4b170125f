//! The attention half against Hugging Face's own hidden states, against plain references for shapes no fixture has, and
//! against itself: whatever the chunking, the mix of rows and the way to the cache, the numbers are the same.
mod chunks;
mod forward;
mod hidden;
mod odd_shapes;
mod plain;
mod stage;

use afd_common::config::model::ModelConfig;
use afd_common::weights::Weights;
use afd_tests::fixtures;
use attention_svc::model::AttentionModel;
use tch::{Kind, Tensor};

fn load(name: &str) -> (ModelConfig, Weights, AttentionModel) {
    let folder = fixtures::checkpoint(name);
    let config = ModelConfig::load(&folder).unwrap();
    let weights = Weights::open(&folder, &config, Kind::Float).unwrap();
    let model = AttentionModel::load(&config, &weights, config.max_position_embeddings).unwrap();
    (config, weights, model)
}

/// Largest absolute difference.
fn distance(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    (a - b).abs().max().double_value(&[])
}
