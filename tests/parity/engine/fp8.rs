//! Block-FP8 checkpoints, through both roles: the same as their dequantised twin, whatever part of a tensor is taken.
use std::collections::HashMap;
use std::path::Path;

use afd_common::config::model::ModelConfig;
use afd_common::identity::GatePlacement;
use afd_common::weights::Weights;
use afd_tests::fixtures;
use afd_tests::monolith::Monolith;
use attention_svc::engine::EngineConfig;
use attention_svc::request::SamplingParams;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};
use tch::{Kind, Tensor};

use crate::serving::{Running, tokens};

const MODEL: &str = "tiny-deepseek-v3";
/// No dimension of the fixture is a multiple of either, and no shard begins at the edge of a block.
const BLOCK: [i64; 2] = [24, 40];
/// Largest value of E4M3.
const LARGEST: f64 = 448.0;

/// As the official checkpoints have it: projections and experts, not embedding, head, norms or router.
fn is_quantised(name: &str) -> bool {
    name.ends_with("_proj.weight") || name.ends_with("_proj_with_mqa.weight")
}

/// Stored values and the scale of each block.
fn quantise(weight: &Tensor) -> (Tensor, Tensor) {
    let (rows, columns) = weight.size2().unwrap();
    let blocks =
        [rows, columns].iter().zip(BLOCK).map(|(size, block)| (size + block - 1) / block).collect::<Vec<_>>();
    let scales = Tensor::zeros([blocks[0], blocks[1]], (Kind::Float, tch::Device::Cpu));
    let stored = weight.zeros_like();
    for i in 0..blocks[0] {
        for j in 0..blocks[1] {
            let cut = |tensor: &Tensor| {
                let (row, column) = (i * BLOCK[0], j * BLOCK[1]);
                tensor.narrow(0, row, BLOCK[0].min(rows - row)).narrow(
                    1,
                    column,
                    BLOCK[1].min(columns - column),
                )
            };
            let part = cut(weight);
            let scale = part.abs().max() / LARGEST;
            cut(&stored).copy_(&(part / &scale));
            scales.narrow(0, i, 1).narrow(1, j, 1).copy_(&scale);
        }
    }
    (stored.to_kind(Kind::Float8e4m3fn), scales)
}

fn dequantise(stored: &Tensor, scales: &Tensor) -> Tensor {
    let (rows, columns) = stored.size2().unwrap();
    let spread =
        scales.repeat_interleave_self_int(BLOCK[0], 0, None).repeat_interleave_self_int(BLOCK[1], 1, None);
    stored.to_kind(Kind::Float) * spread.narrow(0, 0, rows).narrow(1, 0, columns)
}

fn write(folder: &Path, config: &Value, tensors: &HashMap<String, Tensor>) {
    let bytes: HashMap<&String, Vec<u8>> = tensors
        .iter()
        .map(|(name, tensor)| (name, afd_ffi::memory::bytes(tensor).unwrap().to_vec()))
        .collect();
    let views = tensors.iter().map(|(name, tensor)| {
        let shape = tensor.size().iter().map(|size| *size as usize).collect();
        let dtype = match tensor.kind() {
            Kind::Float => Dtype::F32,
            Kind::BFloat16 => Dtype::BF16,
            Kind::Float8e4m3fn => Dtype::F8_E4M3,
            other => panic!("{other:?}"),
        };
        (name.clone(), TensorView::new(dtype, shape, &bytes[name]).unwrap())
    });
    serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

fn greedy(folder: &Path, num_shards: u32, gate: GatePlacement, prompt: &[u32]) -> Vec<u32> {
    let model = ModelConfig::load(folder).unwrap();
    let weights = Weights::open(folder, &model, Kind::Float).unwrap();
    let config = EngineConfig { max_model_len: 256, ..EngineConfig::default() };
    let running = Running::start(&model, &weights, config, num_shards, gate);
    let found = tokens(running.submit("fp8", prompt, 32, SamplingParams::greedy()));
    running.end();
    found
}

#[test]
fn a_block_fp8_checkpoint_is_its_dequantised_twin() {
    let _no_grad = tch::no_grad_guard();
    let source = fixtures::checkpoint(MODEL);
    let (official, twin) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (mut stored, mut plain) = (HashMap::new(), HashMap::new());
    for (name, tensor) in Tensor::read_safetensors(source.join("model.safetensors")).unwrap() {
        if !is_quantised(&name) {
            plain.insert(name.clone(), tensor.shallow_clone());
            stored.insert(name, tensor);
            continue;
        }
        let (values, scales) = quantise(&tensor.to_kind(Kind::Float));
        plain.insert(name.clone(), dequantise(&values, &scales).contiguous());
        stored.insert(format!("{name}_scale_inv"), scales);
        stored.insert(name, values);
    }
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    write(twin.path(), &config, &plain);
    config["quantization_config"] = json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": BLOCK});
    write(official.path(), &config, &stored);

    let prompt = fixtures::expected(MODEL).unwrap().prompts[0].input_ids.clone();
    for kind in [Kind::Float, Kind::BFloat16] {
        let logits = |folder: &Path| Monolith::load(folder, kind).unwrap().logits(&prompt, 0).unwrap();
        assert_eq!(logits(official.path()), logits(twin.path()), "{kind:?}");
    }
    let expected = greedy(twin.path(), 1, GatePlacement::Ffn, &prompt);
    for (num_shards, gate) in
        [(1, GatePlacement::Ffn), (2, GatePlacement::Attention), (3, GatePlacement::Ffn)]
    {
        assert_eq!(
            greedy(official.path(), num_shards, gate, &prompt),
            expected,
            "{num_shards} shards, {gate:?}"
        );
    }
}
