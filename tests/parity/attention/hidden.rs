//! Hidden states on both sides of every attention / FFN split, given the reference's residual stream.
use afd_common::config::model::{FfnConfig, ModelConfig};
use afd_common::identity::{GatePlacement, SharedExpertPlacement, Sides};
use afd_common::ids::LayerIdx;
use afd_common::weights::Weights;
use afd_tests::fixtures::{self, ALL};
use attention_svc::model::{AttentionModel, KvCache, Reach};
use tch::{Kind, Tensor};

use crate::stage::{Blocks, Sequence, stage};
use crate::{distance, load};

/// As `fixtures/README.md` says.
const TOLERANCE: f64 = 2e-4;

#[test]
fn every_layer_s_hidden_states_are_the_reference_s() {
    for name in ALL {
        let (config, _, model) = load(name);
        let golden = golden(name);
        for reach in [Reach::Auto, Reach::Direct, Reach::Gathered] {
            let mut kv = KvCache::new(&config, 16, 4, Kind::Float).unwrap();
            let mut blocks = Blocks::new(16, 4);
            let mut sequence = Sequence::new(&short_prompt(name));
            let rows = sequence.ids.len();
            let batch = stage(&mut blocks, &mut [(&mut sequence, rows)]);
            let stage = model.prepare_with(&batch, reach).unwrap();
            let embedded = model.embed(&batch.input_ids).unwrap();
            let at = |what: &str, found: &Tensor| {
                let off = distance(found, &golden(what));
                assert!(off <= TOLERANCE, "{name}, {reach:?}, {what}: off by {off:e}");
            };
            at("embed", &embedded);
            let mut before = embedded;
            for i in 0..config.layers.len() {
                let attended =
                    model.attend(LayerIdx(i as u16), before.shallow_clone(), &stage, &mut kv).unwrap();
                at(&format!("layers.{i}.attn_out"), &(&attended.residual - &before));
                at(&format!("layers.{i}.post_attn"), &attended.residual);
                at(&format!("layers.{i}.ffn_in"), &attended.ffn_in);
                before = golden(&format!("layers.{i}.out"));
            }
            let all: Vec<usize> = (0..rows).collect();
            let off = distance(&model.logits(&before, &all).unwrap(), &golden("logits"));
            assert!(off <= 3e-4, "{name}: logits off by {off:e}");
            let picked = model.logits(&before, &[rows - 1, 2]).unwrap();
            assert_eq!(picked.size()[0], 2);
            assert!(distance(&picked.get(1), &golden("logits").get(2)) <= 3e-4);
        }
    }
}

#[test]
fn in_bf16_every_layer_stays_within_its_rounding() {
    for name in ALL {
        let golden = golden(name);
        let folder = fixtures::checkpoint(name);
        let config = ModelConfig::load(&folder).unwrap();
        let weights = Weights::open(&folder, &config, Kind::BFloat16).unwrap();
        let model = AttentionModel::load(&config, &weights, config.max_position_embeddings).unwrap();
        for reach in [Reach::Direct, Reach::Gathered] {
            let mut kv = KvCache::new(&config, 16, 4, Kind::BFloat16).unwrap();
            let mut sequence = Sequence::new(&short_prompt(name));
            let rows = sequence.ids.len();
            let batch = stage(&mut Blocks::new(16, 4), &mut [(&mut sequence, rows)]);
            let stage = model.prepare_with(&batch, reach).unwrap();
            for i in 0..config.layers.len() {
                let before = if i == 0 { golden("embed") } else { golden(&format!("layers.{}.out", i - 1)) };
                let attended = model
                    .attend(LayerIdx(i as u16), before.to_kind(Kind::BFloat16), &stage, &mut kv)
                    .unwrap();
                for (what, found) in [("post_attn", &attended.residual), ("ffn_in", &attended.ffn_in)] {
                    assert_eq!(found.kind(), Kind::BFloat16);
                    let expected = golden(&format!("layers.{i}.{what}"));
                    // A dozen roundings to 8 bits, of numbers as large as the largest.
                    let bound = 0.02 * expected.abs().max().double_value(&[]);
                    let off = distance(&found.to_kind(Kind::Float), &expected);
                    assert!(off <= bound, "{name}, {reach:?}, layer {i} {what}: off by {off}, bound {bound}");
                }
            }
        }
    }
}

#[test]
fn the_gate_on_attention_routes_as_the_reference_does() {
    for name in ALL {
        let (config, weights, mut model) = load(name);
        let golden = golden(name);
        let layer = |i: usize| LayerIdx(i as u16);
        let ffn_in = |i: usize| golden(&format!("layers.{i}.ffn_in"));
        assert!(model.route(layer(3), &ffn_in(3), &[]).unwrap().is_none(), "{name}: no gate was loaded yet");
        model.take_on(GatePlacement::Attention, &weights).unwrap();
        for (i, ffn) in config.layers.iter().enumerate() {
            let logits = model.router_logits(layer(i), &ffn_in(i)).unwrap();
            let routed = model.route(layer(i), &ffn_in(i), &[]).unwrap();
            if let FfnConfig::Dense(_) = ffn {
                assert!(logits.is_none() && routed.is_none(), "{name}: layer {i} is dense");
                continue;
            }
            let routed = routed.unwrap();
            assert!(distance(&logits.unwrap(), &golden(&format!("layers.{i}.router_logits"))) <= TOLERANCE);
            assert_eq!(routed.ids, golden(&format!("layers.{i}.topk_ids")), "{name}, layer {i}");
            assert!(distance(&routed.weights, &golden(&format!("layers.{i}.topk_weights"))) <= TOLERANCE);
        }
    }
}

#[test]
fn shared_experts_on_attention_give_the_reference_s_numbers_and_only_they_are_read() {
    for name in ALL {
        let (config, weights, mut model) = load(name);
        let golden = golden(name);
        let before = weights.asked_for();
        let sides = Sides { gate: GatePlacement::Ffn, shared_experts: SharedExpertPlacement::Attention };
        model.take_on(sides, &weights).unwrap();
        let read: Vec<_> = weights.asked_for().into_iter().filter(|name| !before.contains(name)).collect();
        let has_some = |i: usize| config.moe(i).is_some_and(|moe| moe.shared_intermediate_size > 0);
        let num_layers = (0..config.num_layers()).filter(|i| has_some(*i)).count();
        assert!(read.iter().all(|name| name.contains(".shared_experts.")), "{name}: {read:?}");
        assert_eq!((read.len(), num_layers > 0), (3 * num_layers, config.has_shared_experts()), "{name}");
        for i in 0..config.num_layers() {
            let ffn_in = golden(&format!("layers.{i}.ffn_in"));
            // Few rows and many are computed in different ways.
            for repeats in [1, 40] {
                let rows = ffn_in.repeat([repeats, 1]);
                let found = model.shared_experts(LayerIdx(i as u16), &rows).unwrap();
                let Some(found) = found.filter(|_| has_some(i)) else {
                    assert!(!has_some(i), "{name}, layer {i}");
                    continue;
                };
                let expected = golden(&format!("layers.{i}.shared_out")).repeat([repeats, 1]);
                let off = distance(&found, &expected);
                assert!(off <= TOLERANCE, "{name}, layer {i}, {repeats} times: off by {off}");
            }
        }
    }
}

/// The fixture's recorded tensors, by name.
fn golden(name: &str) -> impl Fn(&str) -> Tensor {
    let path = fixtures::root().join("expected").join(format!("{name}.hidden.safetensors"));
    let tensors = Tensor::read_safetensors(path).unwrap();
    move |what| {
        let found = tensors.iter().find(|(name, _)| name == what);
        found.unwrap_or_else(|| panic!("no {what} in the fixture")).1.shallow_clone()
    }
}

fn short_prompt(name: &str) -> Vec<u32> {
    let prompts = fixtures::expected(name).unwrap().prompts;
    prompts.into_iter().find(|prompt| prompt.id == "short").unwrap().input_ids
}
