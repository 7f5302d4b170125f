//! Shards, side tensors and shapes on made-up weights, against the FFN written out row by row. (Against the reference
//! implementation: `tests/parity`.)
use std::path::PathBuf;

use afd_common::config::model::{ModelConfig, MoeConfig};
use afd_common::identity::GatePlacement;
use afd_common::layers::{Router, Selector};
use proptest::prelude::*;
use tch::{Device, Kind};

use super::*;

fn config(name: &str) -> ModelConfig {
    ModelConfig::load(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny").join(name))
        .unwrap()
}

fn rows(count: i64, hidden: usize) -> Tensor {
    Tensor::randn([count, hidden as i64], (Kind::Float, Device::Cpu))
}

fn distance(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    if a.numel() == 0 { 0.0 } else { (a - b).abs().max().to_kind(Kind::Double).double_value(&[]) }
}

fn mlp(weights: &Weights, names: [String; 3], hidden: usize, intermediate: usize, x: &Tensor) -> Tensor {
    let (h, i) = (hidden as i64, intermediate as i64);
    let [gate, up, down] = names.map(|name| format!("{name}.weight"));
    let gate = x.matmul(&weights.tensor(&gate, &[i, h]).unwrap().tr());
    let up = x.matmul(&weights.tensor(&up, &[i, h]).unwrap().tr());
    (gate.silu() * up).matmul(&weights.tensor(&down, &[h, i]).unwrap().tr())
}

/// A layer's FFN, one row and one expert after the other.
fn naive(config: &ModelConfig, weights: &Weights, layer: usize, x: &Tensor) -> Tensor {
    let (hidden, names) = (config.hidden_size, FfnNames::new(config.architecture, layer));
    let moe = match &config.layers[layer] {
        FfnConfig::Dense(dense) => return mlp(weights, names.dense(), hidden, dense.intermediate_size, x),
        FfnConfig::Moe(moe) => moe,
    };
    let selected = choose(config, weights, layer, moe, x);
    let out: Vec<Tensor> = (0..x.size()[0])
        .map(|row| {
            let x = x.narrow(0, row, 1);
            let mut sum = if moe.shared_intermediate_size > 0 {
                mlp(weights, names.shared(), hidden, moe.shared_intermediate_size, &x)
            } else {
                x.zeros_like()
            };
            for i in 0..moe.experts_per_token as i64 {
                let expert = selected.ids.int64_value(&[row, i]) as usize;
                sum += mlp(weights, names.expert(expert), hidden, moe.intermediate_size, &x)
                    * selected.weights.double_value(&[row, i]);
            }
            sum
        })
        .collect();
    if out.is_empty() { x.shallow_clone() } else { Tensor::cat(&out, 0) }
}

fn choose(
    config: &ModelConfig,
    weights: &Weights,
    layer: usize,
    moe: &MoeConfig,
    x: &Tensor,
) -> afd_common::layers::Selected {
    let router = Router::load(weights, config.architecture, layer, moe, config.hidden_size).unwrap();
    let selector = Selector::load(weights, config.architecture, layer, moe).unwrap();
    selector.select(&router.logits(x).unwrap()).unwrap()
}

fn sum_of_shards(
    config: &ModelConfig,
    weights: &Weights,
    count: u32,
    sides: impl Into<Sides>,
    layer: usize,
    x: &Tensor,
) -> Tensor {
    sum_of_placed(config, weights, &Placement::contiguous(config, count), sides, layer, x)
}

fn sum_of_placed(
    config: &ModelConfig,
    weights: &Weights,
    placement: &Placement,
    sides: impl Into<Sides>,
    layer: usize,
    x: &Tensor,
) -> Tensor {
    let sides = sides.into();
    let mut sum: Option<Tensor> = None;
    let count = placement.num_shards();
    for index in 0..count {
        let shard = Shard::new(index, count).unwrap();
        let model = FfnModel::load_placed(config, weights, shard, sides, placement).unwrap();
        let side = match (sides.gate, config.moe(layer)) {
            (GatePlacement::Attention, Some(moe)) => {
                let selected = choose(config, weights, layer, moe, x);
                Side::TopK { ids: selected.ids, weights: selected.weights }
            }
            _ => Side::None,
        };
        let part = model.forward(LayerIdx(layer as u16), x, &side).unwrap();
        assert_eq!(part.kind(), model.about().out_kind());
        sum = Some(sum.map_or(part.shallow_clone(), |sum| sum + part));
    }
    sum.unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Any numbers, any shard count, any rows: the shards' parts add up to the FFN written out.
    #[test]
    fn shards_add_up_to_the_plain_ffn(
        hidden in 1usize..40,
        experts in 1usize..11,
        top_k in 1usize..5,
        intermediate in 1usize..20,
        shared in 0usize..13,
        dense in 1usize..30,
        count in 1u32..7,
        rows_count in 0i64..120,
        on_attention: bool,
        shared_on_attention: bool,
    ) {
        let mut config = config("tiny-deepseek-v2");
        config.hidden_size = hidden;
        config.layers.truncate(2);
        for layer in &mut config.layers {
            match layer {
                FfnConfig::Dense(mlp) => mlp.intermediate_size = dense,
                FfnConfig::Moe(moe) => {
                    moe.num_experts = experts;
                    moe.experts_per_token = top_k.min(experts);
                    moe.intermediate_size = intermediate;
                    moe.shared_intermediate_size = shared;
                }
            }
        }
        let weights = Weights::dummy(&config, Kind::Float, 11);
        let gate = if on_attention { GatePlacement::Attention } else { GatePlacement::Ffn };
        let shared_experts = match shared_on_attention {
            true => SharedExpertPlacement::Attention,
            false => SharedExpertPlacement::Ffn,
        };
        let x = rows(rows_count, hidden);
        for layer in 0..2 {
            let sum = sum_of_shards(&config, &weights, count, Sides { gate, shared_experts }, layer, &x);
            let mut expected = naive(&config, &weights, layer, &x);
            if shared_on_attention && shared > 0 && config.moe(layer).is_some() {
                let names = FfnNames::new(config.architecture, layer).shared();
                expected -= mlp(&weights, names, hidden, shared, &x);
            }
            prop_assert!(distance(&sum, &expected) < 1e-4, "layer {layer}: {}", distance(&sum, &expected));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    /// Wherever experts are, copies included: the same sum.
    #[test]
    fn a_placement_changes_no_sum(
        owners in prop::collection::vec(1u8..8, 16),
        rows_count in 1i64..80,
        on_attention: bool,
    ) {
        // A bit a shard: who has the expert.
        let lists: Vec<Vec<usize>> = (0..3)
            .map(|shard| (0..16).filter(|expert| owners[*expert] >> shard & 1 == 1).collect())
            .collect();
        let config = config("tiny-deepseek-v2");
        let file = afd_common::placement::PlacementFile { experts: Some(lists), ..Default::default() };
        let placement = file.placement(&config, Some(3)).unwrap();
        let weights = Weights::dummy(&config, Kind::Float, 5);
        let gate = if on_attention { GatePlacement::Attention } else { GatePlacement::Ffn };
        let x = rows(rows_count, config.hidden_size);
        let sum = sum_of_placed(&config, &weights, &placement, gate, 1, &x);
        prop_assert!(distance(&sum, &naive(&config, &weights, 1, &x)) < 1e-4);
    }
}

#[test]
fn a_placement_of_another_deployment_is_refused() {
    let config = config("tiny-mixtral");
    let weights = Weights::dummy(&config, Kind::Float, 5);
    let load = |config: &ModelConfig, placement: &Placement| {
        let shard = Shard::new(0, 2).unwrap();
        FfnModel::load_placed(config, &weights, shard, GatePlacement::Ffn, placement).unwrap_err().to_string()
    };
    assert!(load(&config, &Placement::contiguous(&config, 3)).contains("has 3 shards, expected 2"));
    let other = self::config("tiny-olmoe");
    assert!(load(&config, &Placement::contiguous(&other, 2)).contains("8 experts of layer 0"));
}

#[test]
fn biases_of_a_dense_mlp_are_added_once() {
    // Made-up biases are zero, so these are written into a file.
    let folder = tempfile::tempdir().unwrap();
    let mut config = config("tiny-llama");
    config.hidden_size = 6;
    config.layers =
        vec![FfnConfig::Dense(afd_common::config::model::DenseConfig { intermediate_size: 5, bias: true })];
    let shapes = [("gate_proj", 5, 6), ("up_proj", 5, 6), ("down_proj", 6, 5)];
    let (mut header, mut bytes, mut tensors) = (serde_json::Map::new(), Vec::<u8>::new(), Vec::new());
    for (name, out, input) in shapes {
        for (what, shape) in [("weight", vec![out, input]), ("bias", vec![out])] {
            // Small, as trained weights are: an output of some hundreds is rounded by more than is allowed below.
            let tensor = Tensor::randn(&shape, (Kind::Float, Device::Cpu)) * 0.25;
            let begin = bytes.len();
            bytes.extend(afd_ffi::memory::bytes(&tensor).unwrap());
            let entry =
                serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, bytes.len()]});
            header.insert(format!("model.layers.0.mlp.{name}.{what}"), entry);
            tensors.push(tensor);
        }
    }
    let header = serde_json::to_vec(&header).unwrap();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &bytes].concat();
    std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
    let weights = Weights::open(folder.path(), &config, Kind::Float).unwrap();
    let x = rows(3, 6);
    let linear = |x: &Tensor, i: usize| x.matmul(&tensors[i].tr()) + &tensors[i + 1];
    let expected = linear(&(linear(&x, 0).silu() * linear(&x, 2)), 4);
    for count in [1, 2, 7] {
        let sum = sum_of_shards(&config, &weights, count, GatePlacement::Ffn, 0, &x);
        assert!(distance(&sum, &expected) < 1e-5, "{count} shards");
    }
}

#[test]
fn a_shard_reads_its_own_tensors_and_no_others() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny/tiny-mixtral");
    let config = ModelConfig::load(&folder).unwrap();
    let read = |index, gate| {
        let weights = Weights::open(&folder, &config, Kind::Float).unwrap();
        FfnModel::load(&config, &weights, Shard::new(index, 4).unwrap(), gate).unwrap();
        weights.asked_for()
    };
    let names = read(1, GatePlacement::Ffn);
    let own = |name: &String| {
        name.ends_with(".gate.weight") || name.contains(".experts.2.") || name.contains(".experts.3.")
    };
    assert!(names.iter().all(own), "{names:?}");
    assert_eq!(names.len(), 4 * (1 + 2 * 3));
    assert_eq!(read(1, GatePlacement::Attention).len(), 4 * 2 * 3);
}

#[test]
fn shared_experts_on_attention_are_neither_read_nor_described_as_ours() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny/tiny-deepseek-v3");
    let config = ModelConfig::load(&folder).unwrap();
    for gate in [GatePlacement::Ffn, GatePlacement::Attention] {
        let load = |shared_experts| {
            let weights = Weights::open(&folder, &config, Kind::Float).unwrap();
            let (shard, sides) = (Shard::new(1, 2).unwrap(), Sides { gate, shared_experts });
            let model = FfnModel::load(&config, &weights, shard, sides).unwrap();
            let said: Vec<_> = model.about().specs().iter().map(|spec| spec.shared_experts).collect();
            (weights.asked_for(), said)
        };
        let (here, described) = load(SharedExpertPlacement::Ffn);
        assert_eq!(described, [None, Some(SharedExpertPlacement::Ffn), described[1], described[1]]);
        let (without, described) = load(SharedExpertPlacement::Attention);
        assert_eq!(described, [None, Some(SharedExpertPlacement::Attention), described[1], described[1]]);
        let is_shared = |name: &&String| name.contains(".shared_experts.");
        assert_eq!(here.iter().filter(is_shared).count(), 3 * 3);
        assert_eq!(without, here.into_iter().filter(|name| !is_shared(&name)).collect::<Vec<_>>());
    }
}

#[test]
fn experts_are_counted_by_the_rows_they_get() {
    let config = config("tiny-olmoe");
    let weights = Weights::dummy(&config, Kind::Float, 1);
    let (model, x) =
        (FfnModel::load(&config, &weights, Shard::WHOLE, GatePlacement::Ffn).unwrap(), rows(10, 64));
    assert_eq!(model.forward(LayerIdx(2), &x, &Side::None).unwrap().size(), [10, 64]);
    let counts = model.about().expert_counts();
    let total: u64 = counts.of_layer(LayerIdx(2)).iter().map(|&(_, rows)| rows).sum();
    assert_eq!((total, counts.of_layer(LayerIdx(1))[0]), (40, (0, 0)));
}

#[test]
fn whatever_does_not_fit_is_refused_and_harms_nobody() {
    let config = config("tiny-olmoe");
    let weights = Weights::dummy(&config, Kind::Float, 1);
    let here = FfnModel::load(&config, &weights, Shard::WHOLE, GatePlacement::Ffn).unwrap();
    let there = FfnModel::load(&config, &weights, Shard::WHOLE, GatePlacement::Attention).unwrap();
    let (layer, x) = (LayerIdx(0), rows(2, 64));
    let ids = |id: i64| Tensor::from_slice(&[0, 1, 2, 3, 4, 5, 6, id]).view([2, 4]);
    let weights = || Tensor::ones([2, 4], (Kind::Float, Device::Cpu));
    let refused = |model: &FfnModel, layer, x: &Tensor, side: &Side| {
        model.forward(layer, x, side).unwrap_err().to_string()
    };
    assert!(refused(&here, LayerIdx(4), &x, &Side::None).contains("layer 4 of 4"));
    assert!(refused(&here, layer, &rows(2, 63), &Side::None).contains("[2, 63]"));
    assert!(refused(&here, layer, &x.to_kind(Kind::BFloat16), &Side::None).contains("BFloat16"));
    assert!(refused(&here, layer, &x.view([128]), &Side::None).contains("[128]"));
    let topk = Side::TopK { ids: ids(7), weights: weights() };
    assert_eq!(here.forward(layer, &x, &topk).unwrap().size(), [2, 64], "a choice that was made is taken");
    assert!(refused(&there, layer, &x, &Side::None).contains("None"));
    assert!(refused(&there, layer, &x, &Side::RouterLogits(weights())).contains("router_logits"));
    let beyond = Side::TopK { ids: ids(16), weights: weights() };
    assert!(refused(&there, layer, &x, &beyond).contains("row 1 is routed to expert 16 of 16"));
    let short = Side::TopK { ids: ids(7), weights: weights().narrow(1, 0, 3) };
    assert!(refused(&there, layer, &x, &short).contains("topk_weights"));
    assert_eq!(there.forward(layer, &x, &topk).unwrap().size(), [2, 64]);
}

#[test]
fn a_layer_that_routes_by_token_id_needs_the_ids_and_routes_no_padding() {
    let config = config("tiny-hash-routed");
    let weights = Weights::dummy(&config, Kind::Float, 1);
    let here = FfnModel::load(&config, &weights, Shard::WHOLE, GatePlacement::Ffn).unwrap();
    let there = FfnModel::load(&config, &weights, Shard::WHOLE, GatePlacement::Attention).unwrap();
    let specs: Vec<_> = here.about().specs().iter().map(|spec| (spec.side, spec.side_columns)).collect();
    assert_eq!(specs, [(SideKind::None, 0), (SideKind::InputIds, 1), (SideKind::None, 0)]);
    assert_eq!((there.about().specs()[1].side, there.about().specs()[1].side_columns), (SideKind::TopK, 3));

    let (layer, x) = (LayerIdx(1), rows(3, 32));
    let tokens = |ids: &[i64]| Side::InputIds(Tensor::from_slice(ids));
    let padded = here.forward(layer, &x, &tokens(&[5, -1, 96])).unwrap();
    let count: u64 = here.about().expert_counts().of_layer(layer).iter().map(|&(_, rows)| rows).sum();
    assert_eq!(count, 2 * 3, "every real row, k times");
    let shared = mlp(&weights, FfnNames::new(config.architecture, 1).shared(), 32, 12, &x.narrow(0, 1, 1));
    assert!(distance(&padded.narrow(0, 1, 1), &shared) < 1e-5, "padding meets the shared experts only");
    let full = here.forward(layer, &x, &tokens(&[5, 7, 96])).unwrap();
    for row in [0, 2] {
        assert!(distance(&padded.narrow(0, row, 1), &full.narrow(0, row, 1)) < 1e-5);
    }

    let refused = |model: &FfnModel, side: &Side| model.forward(layer, &x, side).unwrap_err().to_string();
    assert!(refused(&here, &Side::None).contains("side tensors are None, expected `input_ids`"));
    assert!(refused(&here, &tokens(&[1, 2])).contains("`input_ids` is [2] Int64, expected [3] Int64"));
    assert!(refused(&here, &tokens(&[1, 97, 2])).contains("`input_ids`: row 1 is token 97 of 97"));
    let logits = Side::RouterLogits(Tensor::zeros([3, 7], (Kind::Float, Device::Cpu)));
    assert!(refused(&there, &logits).contains("expected the experts' choice"));
    let by_score = here.forward(LayerIdx(2), &x, &tokens(&[1, 2, 3])).unwrap_err().to_string();
    assert!(by_score.contains("expected none"), "{by_score}");
}
