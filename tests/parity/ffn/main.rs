//! The FFN half against Hugging Face's own numbers: for every layer of every tiny checkpoint, what goes in and comes out
//! of the FFN, the routing in between, with any number of shards and the gate on either side.
mod reference;

use afd_common::config::model::{FfnConfig, ModelConfig};
use afd_common::identity::GatePlacement;
use afd_common::ids::{LayerIdx, Shard};
use afd_common::layers::{Router, Selected, Selector};
use afd_common::weights::Weights;
use afd_tests::fixtures;
use ffn_svc::model::{FfnModel, Side};
use tch::{Kind, Tensor};

use reference::Reference;

/// Of hidden states (see `tests/fixtures/README.md`).
const HIDDEN_TOLERANCE: f64 = 2e-4;
const LOGITS_TOLERANCE: f64 = 2e-4;
const WEIGHT_TOLERANCE: f64 = 1e-5;
/// Of sums in another order; the values reach 28.
const ROUNDING_TOLERANCE: f64 = 5e-5;

fn open(name: &str, kind: Kind) -> (ModelConfig, Weights) {
    let folder = fixtures::checkpoint(name);
    let config = ModelConfig::load(&folder).unwrap();
    let weights = Weights::open(&folder, &config, kind).unwrap();
    (config, weights)
}

/// Largest absolute difference.
fn distance(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    (a - b).abs().max().double_value(&[])
}

#[test]
fn routers_give_the_reference_logits_and_experts() {
    for name in fixtures::ALL {
        let (config, weights) = open(name, Kind::Float);
        let reference = Reference::open(name);
        for (layer, moe) in (0..config.num_layers()).filter_map(|layer| Some((layer, config.moe(layer)?))) {
            let architecture = config.architecture;
            let router = Router::load(&weights, architecture, layer, moe, config.hidden_size).unwrap();
            let selector = Selector::load(&weights, architecture, layer, moe).unwrap();
            let logits = router.logits(&reference.layer(layer, "ffn_in")).unwrap();
            let off = distance(&logits, &reference.layer(layer, "router_logits"));
            assert!(off < LOGITS_TOLERANCE, "{name} layer {layer}: logits off by {off}");
            let Selected { ids, weights } = selector.select(&logits).unwrap();
            assert!(ids.equal(&reference.layer(layer, "topk_ids")), "{name} layer {layer}: experts");
            let off = distance(&weights, &reference.layer(layer, "topk_weights"));
            assert!(off < WEIGHT_TOLERANCE, "{name} layer {layer}: weights off by {off}");
        }
    }
}

/// The shards' parts, added up in shard order.
fn sum_of_shards(models: &[FfnModel], layer: usize, x: &Tensor, side: &Side) -> Tensor {
    let parts = models.iter().map(|model| model.forward(LayerIdx(layer as u16), x, side).unwrap());
    parts.reduce(|sum, part| sum + part).unwrap()
}

fn shards(config: &ModelConfig, weights: &Weights, count: u32, gate: GatePlacement) -> Vec<FfnModel> {
    (0..count)
        .map(|index| FfnModel::load(config, weights, Shard::new(index, count).unwrap(), gate).unwrap())
        .collect()
}

#[test]
fn every_layer_gives_the_reference_output_with_any_number_of_shards() {
    for name in fixtures::ALL {
        let (config, weights) = open(name, Kind::Float);
        let reference = Reference::open(name);
        for count in [1, 2, 3, 5] {
            let models = shards(&config, &weights, count, GatePlacement::Ffn);
            for layer in 0..config.num_layers() {
                let sum = sum_of_shards(&models, layer, &reference.layer(layer, "ffn_in"), &Side::None);
                let off = distance(&sum, &reference.layer(layer, "ffn_out"));
                assert!(off < HIDDEN_TOLERANCE, "{name} layer {layer}, {count} shards: off by {off}");
            }
        }
    }
}

#[test]
fn the_gate_on_attention_changes_nothing() {
    for name in fixtures::ALL {
        let (config, weights) = open(name, Kind::Float);
        let reference = Reference::open(name);
        for count in [1, 3] {
            let models = shards(&config, &weights, count, GatePlacement::Attention);
            for layer in 0..config.num_layers() {
                for side in sides(&config, &reference, layer) {
                    let sum = sum_of_shards(&models, layer, &reference.layer(layer, "ffn_in"), &side);
                    let off = distance(&sum, &reference.layer(layer, "ffn_out"));
                    assert!(off < HIDDEN_TOLERANCE, "{name} layer {layer}, {side:?}: off by {off}");
                }
            }
        }
    }
}

/// What attention may send along with a layer's rows.
fn sides(config: &ModelConfig, reference: &Reference, layer: usize) -> Vec<Side> {
    if config.moe(layer).is_none() {
        return vec![Side::None];
    }
    let [ids, weights] = ["topk_ids", "topk_weights"].map(|what| reference.layer(layer, what));
    vec![Side::TopK { ids, weights }, Side::RouterLogits(reference.layer(layer, "router_logits"))]
}

#[test]
fn routed_and_shared_experts_are_each_right_alone() {
    for name in fixtures::ALL {
        let (config, weights) = open(name, Kind::Float);
        let mut routed_only = config.clone();
        for layer in &mut routed_only.layers {
            if let FfnConfig::Moe(moe) = layer {
                moe.shared_intermediate_size = 0;
            }
        }
        let reference = Reference::open(name);
        let whole = shards(&config, &weights, 1, GatePlacement::Ffn);
        let routed = shards(&routed_only, &weights, 1, GatePlacement::Ffn);
        for layer in (0..config.num_layers()).filter(|&layer| config.moe(layer).is_some()) {
            let x = reference.layer(layer, "ffn_in");
            let routed = sum_of_shards(&routed, layer, &x, &Side::None);
            let off = distance(&routed, &reference.layer(layer, "routed_out"));
            assert!(off < HIDDEN_TOLERANCE, "{name} layer {layer}: routed off by {off}");
            if config.moe(layer).is_some_and(|moe| moe.shared_intermediate_size > 0) {
                let shared = sum_of_shards(&whole, layer, &x, &Side::None) - routed;
                let off = distance(&shared, &reference.layer(layer, "shared_out"));
                assert!(off < HIDDEN_TOLERANCE, "{name} layer {layer}: shared off by {off}");
            }
        }
    }
}

/// One row at a time takes another way through the experts than many rows do.
#[test]
fn rows_alone_equal_rows_together() {
    for name in fixtures::ALL {
        let (config, weights) = open(name, Kind::Float);
        let reference = Reference::open(name);
        let models = shards(&config, &weights, 1, GatePlacement::Ffn);
        for layer in 0..config.num_layers() {
            let x = reference.layer(layer, "ffn_in");
            let many = x.repeat([4, 1]);
            let together = sum_of_shards(&models, layer, &many, &Side::None);
            for row in 0..x.size()[0] {
                let alone = sum_of_shards(&models, layer, &x.narrow(0, row, 1), &Side::None);
                let off = distance(&alone, &together.narrow(0, row, 1));
                assert!(off < ROUNDING_TOLERANCE, "{name} layer {layer} row {row}: off by {off}");
            }
        }
    }
}

/// In bf16 the routing may flip, so the reference's is sent along; what is left is rounding. Few rows and many rows are
/// computed in different ways.
#[test]
fn bf16_stays_near_the_reference_when_the_routing_is_given() {
    for name in fixtures::ALL {
        let (config, weights) = open(name, Kind::BFloat16);
        let reference = Reference::open(name);
        for (count, repeats) in [(1, 1), (3, 1), (1, 40), (3, 40)] {
            let models = shards(&config, &weights, count, GatePlacement::Attention);
            for layer in 0..config.num_layers() {
                let many = |tensor: Tensor| tensor.repeat([repeats, 1]);
                let x = many(reference.layer(layer, "ffn_in")).to_kind(Kind::BFloat16);
                let side = match sides(&config, &reference, layer).swap_remove(0) {
                    Side::TopK { ids, weights } => Side::TopK { ids: many(ids), weights: many(weights) },
                    other => other,
                };
                let sum = sum_of_shards(&models, layer, &x, &side).to_kind(Kind::Float);
                let expected = many(reference.layer(layer, "ffn_out"));
                let relative =
                    (&sum - &expected).norm().double_value(&[]) / expected.norm().double_value(&[]);
                assert!(
                    relative < 0.02,
                    "{name} layer {layer}, {count} shards, {repeats} times: off by {relative}"
                );
            }
        }
    }
}
