//! Stacked layers against the model of the CPU, on made-up bf16 weights: libtorch computes them here as on a GPU. The
//! kernels are checked where there is a GPU.
use std::path::PathBuf;

use afd_common::config::model::{FfnConfig, Scoring, Selection};
use afd_common::identity::GatePlacement;
use afd_common::identity::SharedExpertPlacement;
use afd_gpu::{Region, ops::Moe};
use tch::Kind;

use super::*;

/// Two layers, one dense and one with experts, in sizes that the kernels take.
fn config() -> ModelConfig {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny/tiny-deepseek-v2");
    let mut config = ModelConfig::load(&folder).unwrap();
    config.hidden_size = 256;
    config.layers.truncate(2);
    for layer in &mut config.layers {
        match layer {
            FfnConfig::Dense(mlp) => mlp.intermediate_size = 200,
            FfnConfig::Moe(moe) => {
                (moe.num_experts, moe.experts_per_token, moe.intermediate_size) = (16, 3, 128);
                moe.shared_intermediate_size = 256;
                moe.router.selection = Selection::Greedy;
            }
        }
    }
    config
}

fn weights(config: &ModelConfig) -> Weights {
    Weights::dummy(config, Kind::BFloat16, 5)
}

fn rows(count: i64) -> Tensor {
    tch::manual_seed(11);
    Tensor::randn([count, 256], (Kind::Float, tch::Device::Cpu)).to_kind(Kind::BFloat16)
}

/// ‖a − b‖ / ‖b‖
fn distance(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    let (a, b) = (a.to_kind(Kind::Double), b.to_kind(Kind::Double));
    ((&a - &b).norm() / b.norm()).double_value(&[])
}

/// On a GPU: every row by itself, but for a few: made-up routers are f32 for libtorch and bf16 for the kernels, so a row that
/// hesitates between two experts may go to the other one.
fn close(found: &Tensor, wanted: &Tensor, what: &str) {
    let (found, wanted) = (found.to_device(tch::Device::Cpu), wanted.to_device(tch::Device::Cpu));
    assert_eq!(found.size(), wanted.size());
    let rows = wanted.size()[0];
    let off = (0..rows).filter(|&row| {
        let (found, wanted) = (found.get(row), wanted.get(row));
        let distance = distance(&found, &wanted);
        distance.is_nan() || distance >= 1e-2
    });
    let off: Vec<_> = off.collect();
    assert!(off.len() as i64 <= rows / 20, "{what}: rows {off:?} of {rows}");
}

fn device_model(config: &ModelConfig, shard: Shard, device: Option<&Device>) -> DeviceModel {
    let mut weights = weights(config);
    if let Some(device) = device {
        weights = weights.on(tch::Device::Cuda(device.ordinal())).unwrap();
    }
    DeviceModel::load(config, &weights, shard, GatePlacement::Ffn, device).unwrap()
}

/// What the FFN and attention make of a layer each is, added up, what the FFN makes of it alone.
#[test]
fn shared_experts_apart_are_what_the_ffn_leaves_out() {
    let config = config();
    let (x, weights) = (rows(9), weights(&config));
    let apart = Sides { shared_experts: SharedExpertPlacement::Attention, ..Sides::default() };
    let load = |sides: Sides| DeviceModel::load(&config, &weights, Shard::WHOLE, sides, None).unwrap();
    let (whole, routed) = (load(Sides::default()), load(apart));
    assert!(matches!(routed.body, Body::Stacked { .. }));
    assert_eq!(routed.about().specs()[1].shared_experts, Some(SharedExpertPlacement::Attention));
    SharedExperts::check(&config, Kind::BFloat16).unwrap();
    assert!(SharedExperts::check(&config, Kind::Float).is_err());
    let shared = SharedExperts::load(&config, &weights).unwrap();
    assert!(shared.forward(LayerIdx(0), &x).unwrap().is_none());
    let part = shared.forward(LayerIdx(1), &x).unwrap().unwrap();
    assert_eq!(part.kind(), Kind::Float);
    let of = |model: &DeviceModel| model.forward(LayerIdx(1), &x, &Side::None).unwrap().to_kind(Kind::Float);
    assert!(distance(&(part + of(&routed)), &of(&whole)) < 1e-2);
    assert!(distance(&of(&routed), &of(&whole)) > 0.1);
}

fn as_on_the_cpu(config: &ModelConfig, count: u32) {
    let model = FfnModel::load(config, &weights(config), Shard::WHOLE, GatePlacement::Ffn).unwrap();
    for num_rows in [1, 3, 40] {
        let x = rows(num_rows);
        for layer in [LayerIdx(0), LayerIdx(1)] {
            let wanted = model.forward(layer, &x, &Side::None).unwrap();
            let mut sum = Tensor::zeros_like(&x).to_kind(Kind::Float);
            for index in 0..count {
                let part = device_model(config, Shard::new(index, count).unwrap(), None);
                assert!(matches!(part.body, Body::Stacked { .. }));
                let out = part.forward(layer, &x, &Side::None).unwrap();
                assert_eq!(out.kind(), part.about().out_kind());
                sum += out.to_kind(Kind::Float);
            }
            let distance = distance(&sum, &wanted);
            assert!(distance < 1e-2, "{layer}, {num_rows} rows, {count} shards: {distance}");
        }
    }
}

#[test]
fn shards_add_up_to_the_model_of_the_cpu() {
    for count in [1, 2, 3] {
        as_on_the_cpu(&config(), count);
    }
}

#[test]
fn sigmoid_scores_with_a_bias_choose_as_on_the_cpu() {
    let mut config = config();
    if let Some(FfnConfig::Moe(moe)) = config.layers.last_mut() {
        moe.router.scoring = Scoring::Sigmoid;
        moe.router.selection = Selection::NoAuxTc { num_groups: 1, topk_groups: 1 };
        (moe.router.normalize, moe.router.scaling_factor) = (true, 2.5);
    }
    as_on_the_cpu(&config, 2);
}

#[test]
fn what_is_wrong_with_rows_is_said() {
    let (config, x) = (config(), rows(2));
    let model = device_model(&config, Shard::WHOLE, None);
    let ids = Side::InputIds(Tensor::zeros([2], (Kind::Int64, tch::Device::Cpu)));
    assert!(matches!(model.forward(LayerIdx(1), &x, &ids), Err(FfnModelError::Side { .. })));
    assert!(matches!(model.forward(LayerIdx(9), &x, &Side::None), Err(FfnModelError::UnknownLayer { .. })));
    let wide = x.to_kind(Kind::Float);
    assert!(matches!(model.forward(LayerIdx(1), &wide, &Side::None), Err(FfnModelError::Rows { .. })));
    let none = model.forward(LayerIdx(1), &x.narrow(0, 0, 0), &Side::None).unwrap();
    assert_eq!(none.size(), [0, 256]);
}

#[test]
fn what_the_kernels_cannot_do_is_computed_without_them() {
    let mut config = config();
    config.hidden_size = 264;
    let mut model = device_model(&config, Shard::WHOLE, None);
    assert!(model.kernels().unwrap_err().to_string().contains("264"));
    let x = Tensor::ones([2, 264], (Kind::BFloat16, tch::Device::Cpu));
    assert_eq!(model.forward(LayerIdx(1), &x, &Side::None).unwrap().size(), [2, 264]);
    let weights = Weights::dummy(&config, Kind::Float, 5);
    let mut model = DeviceModel::load(&config, &weights, Shard::WHOLE, GatePlacement::Ffn, None).unwrap();
    assert!(model.kernels().unwrap_err().to_string().contains("bf16"));
}

/// Rows of all experts of either layer: every row has three choices in the second.
fn counted(model: &DeviceModel) -> [u64; 2] {
    let counts = model.about().expert_counts();
    [LayerIdx(0), LayerIdx(1)].map(|layer| counts.of_layer(layer).into_iter().map(|(_, rows)| rows).sum())
}

#[test]
fn kernels_and_libtorch_agree_on_a_gpu() {
    if let Some(why) = Device::missing(1) {
        return eprintln!("{why}");
    }
    afd_ffi::cuda::load(0).unwrap();
    let (device, config) = (Device::open(0).unwrap(), config());
    let stream = device.stream().unwrap();
    for shard in [Shard::WHOLE, Shard::new(1, 3).unwrap()] {
        let mut model = device_model(&config, shard, Some(&device));
        let row_bytes = model.kernels().unwrap().out_row_bytes();
        for num_rows in [1usize, 8, 9, 40, Moe::MAX_ROWS] {
            let x = rows(num_rows as i64).to_device(tch::Device::Cuda(0));
            let input = afd_ffi::cuda::region(&device, &x).unwrap();
            let output = Region::alloc(&device, num_rows * row_bytes).unwrap();
            for layer in [LayerIdx(0), LayerIdx(1)] {
                let wanted = model.forward(layer, &x, &Side::None).unwrap();
                device.synchronize().unwrap();
                output.fill(0xff).unwrap();
                let kernels = model.kernels().unwrap();
                kernels.enqueue(&stream, layer, num_rows, &input, None, &output).unwrap();
                stream.synchronize().unwrap();
                let size = [num_rows as i64, 256];
                let found = afd_ffi::cuda::view(&device, &output, &size, wanted.kind()).unwrap();
                close(&found, &wanted, &format!("shard {shard}, {layer}, {num_rows} rows"));
            }
        }
        if shard == Shard::WHOLE {
            assert_eq!(counted(&model), [0, 3 * (1 + 8 + 9 + 40 + Moe::MAX_ROWS as u64)]);
        }
    }
}

#[test]
fn prompts_are_computed_as_libtorch_alone_does_on_a_gpu() {
    if let Some(why) = Device::missing(1) {
        return eprintln!("{why}");
    }
    afd_ffi::cuda::load(0).unwrap();
    let device = Device::open(0).unwrap();
    let stream = Arc::new(device.stream().unwrap());
    let mut sigmoid = config();
    if let Some(FfnConfig::Moe(moe)) = sigmoid.layers.last_mut() {
        moe.router.scoring = Scoring::Sigmoid;
        moe.router.selection = Selection::NoAuxTc { num_groups: 1, topk_groups: 1 };
        (moe.router.normalize, moe.router.scaling_factor) = (true, 2.5);
    }
    for config in [config(), sigmoid] {
        for shard in [Shard::WHOLE, Shard::new(1, 3).unwrap()] {
            let mut model = device_model(&config, shard, Some(&device));
            let _guard = afd_ffi::cuda::StreamGuard::new(&stream).unwrap();
            let all = [1, 7, 40, 1000].map(|count| rows(count).to_device(tch::Device::Cuda(0)));
            let layers = [LayerIdx(0), LayerIdx(1)];
            let run = |model: &DeviceModel| {
                let forward = |x: &Tensor, layer| {
                    model.forward(layer, x, &Side::None).unwrap().to_device(tch::Device::Cpu)
                };
                all.iter().flat_map(|x| layers.map(|layer| forward(x, layer))).collect::<Vec<_>>()
            };
            let wanted = run(&model);
            model.run_on(&stream).unwrap();
            for (found, wanted) in run(&model).iter().zip(&wanted) {
                close(found, wanted, &format!("shard {shard}"));
            }
            if shard == Shard::WHOLE {
                assert_eq!(counted(&model), [0, 3 * (1 + 7 + 40 + 1000)]);
            }
        }
    }
}
