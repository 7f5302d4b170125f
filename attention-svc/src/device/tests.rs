//! Decode steps by our kernels against the same steps by libtorch, on one GPU; skipped, saying so, without one.
use afd_common::config::device::DeviceChoice;
use afd_common::config::model::ModelConfig;
use afd_common::identity::{GatePlacement, SharedExpertPlacement, Sides};
use afd_common::ids::{LayerIdx, Shard, StepId};
use afd_common::weights::Weights;
use afd_gpu::Region;
use afd_gpu::ops::DrawRule;
use ffn_svc::device::DeviceModel;
use ffn_svc::model::Side;
use tch::{Kind, Tensor};

use super::stream_ffn::Echo;
use super::{CaptureSizes, Decoder, Gpu, GraphSettings};
use crate::engine::{DecodeStage, DecodeTurn};
use crate::model::{AttentionModel, BlockId, KernelModel, KvCache, SequenceRows, StageBatch};

const BLOCK_SIZE: usize = 16;
const BLOCKS_EACH: usize = 16;

const MLA: &str = r#"{
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "attention_bias": false,
    "first_k_dense_replace": 2, "hidden_act": "silu", "hidden_size": 512, "intermediate_size": 64,
    "kv_lora_rank": 512, "max_position_embeddings": 4096, "moe_intermediate_size": 32, "moe_layer_freq": 1,
    "n_group": 1, "n_routed_experts": 4, "n_shared_experts": 1, "norm_topk_prob": false,
    "num_attention_heads": 16, "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_key_value_heads": 16,
    "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "tie_word_embeddings": false,
    "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 512
}"#;

const GQA: &str = r#"{
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": false,
    "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 512, "intermediate_size": 64,
    "max_position_embeddings": 4096, "mlp_only_layers": [0, 1], "moe_intermediate_size": 32,
    "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 4, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": null,
    "rope_theta": 1000000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 512
}"#;

/// Sequence `i` of a batch: tokens `from..upto` of it, the blocks after one another.
fn rows(i: usize, from: usize, upto: usize, batch: &mut StageBatch) {
    let block = |n: usize| BlockId((i * BLOCKS_EACH + n) as u32);
    let start = batch.input_ids.len();
    for position in from..upto {
        batch.input_ids.push(((position * 31 + i * 77) % 500) as u32);
        batch.positions.push(position as u32);
        batch.slot_mapping.push((i * BLOCKS_EACH * BLOCK_SIZE + position) as i64);
    }
    let block_table = (0..upto.div_ceil(BLOCK_SIZE)).map(block).collect();
    batch.sequences.push(SequenceRows { start, len: upto - from, context_len: upto, block_table });
}

/// All layers with an FFN that gives back what it gets, and the shared experts that the model has.
fn eager(model: &AttentionModel, cache: &mut KvCache, batch: &StageBatch) -> Tensor {
    let prepared = model.prepare(batch).unwrap();
    let mut x = model.embed(&batch.input_ids).unwrap();
    for layer in 0..model.config().layers.len() as u16 {
        let attended = model.attend(LayerIdx(layer), x, &prepared, cache).unwrap();
        let sum = match model.shared_experts(LayerIdx(layer), &attended.ffn_in).unwrap() {
            Some(shared) => (shared + &attended.ffn_in).to_kind(attended.ffn_in.kind()),
            None => attended.ffn_in,
        };
        x = attended.residual.f_add(&sum).unwrap();
    }
    x
}

fn agree(config: &str, sides: Sides, mut ffn: Echo) {
    let Some(gpu) = gpu() else { return };
    let _guard = gpu.enter().unwrap();
    let config = ModelConfig::from_json(&serde_json::from_str(config).unwrap(), None).unwrap();
    let device = tch::Device::Cuda(0);
    let weights = Weights::dummy(&config, Kind::BFloat16, 3).on(device).unwrap();
    let mut model = AttentionModel::load(&config, &weights, 256).unwrap();
    model.take_on(sides, &weights).unwrap();
    let lens = [5, 31, 32, 33, 64, 130, 200];
    let blocks = lens.len() * BLOCKS_EACH;
    let new_cache = || KvCache::new_on(&config, blocks, BLOCK_SIZE, Kind::BFloat16, device).unwrap();
    let (mut by_torch, mut by_kernels) = (new_cache(), new_cache());
    let kernels = KernelModel::new(gpu.device(), &model, &by_kernels).unwrap();
    assert_eq!(kernels.has_shared(1), sides.shared_on_attention());
    gpu.device().synchronize().unwrap();
    let sizes = CaptureSizes::new(&[1, 8]).unwrap();
    let settings = GraphSettings { sizes, capture: true, max_stages: 1 };
    let mut decoder = Decoder::new(gpu.device(), kernels, settings).unwrap();
    decoder.warm_up(gpu.stream(), &mut ffn, StepId(1)).unwrap();
    let mut last = Tensor::zeros([0, config.hidden_size as i64], (Kind::BFloat16, device));
    for cache in [&mut by_torch, &mut by_kernels] {
        let mut prompt = StageBatch::default();
        lens.iter().enumerate().for_each(|(i, &len)| rows(i, 0, len, &mut prompt));
        let x = eager(&model, cache, &prompt);
        let ends: Vec<i64> = prompt.sequences.iter().map(|s| (s.start + s.len - 1) as i64).collect();
        last = x.index_select(0, &Tensor::from_slice(&ends).to_device(device));
    }
    for step in 0..4 {
        for sequences in [1, lens.len()] {
            let mut batch = StageBatch::default();
            let upto = lens.iter().enumerate().take(sequences);
            upto.for_each(|(i, &len)| rows(i, len + step - 1, len + step, &mut batch));
            let wanted = eager(&model, &mut by_torch, &batch);
            let stages = [DecodeStage { batch: &batch, rules: &vec![DrawRule::Best; sequences] }];
            let key = decoder.key(&ffn, &stages).unwrap();
            let of_step = (StepId(100), false);
            let launched =
                decoder.launch(gpu.stream(), &mut ffn, of_step, (&key, &stages), DecodeTurn::First);
            assert!(launched.unwrap());
            let found = decoder.finish(&mut ffn, &[sequences]).unwrap().outputs;
            close(&found[0].x, &wanted, &format!("step {step}, {sequences} sequences, kernels"));
            // The last token of the prompts once more: alone it must come to the same as with all before it.
            if step == 0 {
                let prompt = last.narrow(0, 0, sequences as i64);
                close(
                    &wanted,
                    &prompt,
                    &format!("{sequences} sequences, libtorch's decode against the prompt"),
                );
            }
        }
    }
}

/// Every row by itself: a wrong one must not hide among others.
fn close(found: &Tensor, wanted: &Tensor, what: &str) {
    let wide = |x: &Tensor| x.to_device(tch::Device::Cpu).to_kind(Kind::Double);
    let (found, wanted) = (wide(found), wide(wanted));
    let norm = |x: &Tensor| x.square().sum_dim_intlist(&[1i64][..], false, Kind::Double).sqrt();
    let errors = Vec::<f64>::try_from(norm(&(found - &wanted)) / norm(&wanted)).unwrap();
    eprintln!("{what}: {}", errors.iter().map(|error| format!("{error:.1e} ")).collect::<String>());
    assert!(errors.iter().all(|error| *error < 4e-2), "{what}: {errors:?}");
}

/// Rows whose sixth expert is well ahead of the seventh: made-up routers are f32 for libtorch and bf16 for the kernels, and a row
/// that hesitates may go to the one here and to the other there.
fn rows_that_are_sure(router: &Tensor, count: i64) -> Tensor {
    let x = Tensor::randn([2 * count + 30, 2048], (Kind::BFloat16, router.device()));
    let logits = x.to_kind(Kind::Float).matmul(&router.to_kind(Kind::Float).tr());
    let (best, _) = logits.topk(7, -1, true, true);
    let sure = (best.select(1, 5) - best.select(1, 6)).gt(0.05).nonzero().squeeze_dim(1);
    x.index_select(0, &sure.narrow(0, 0, count))
}

#[test]
fn the_ffn_s_kernels_agree_with_libtorch_at_full_width() {
    let Some(gpu) = gpu() else { return };
    let _guard = gpu.enter().unwrap();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/configs/deepseek-v2-lite/config.json");
    let mut json: serde_json::Map<_, _> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    json.insert("num_hidden_layers".into(), 2.into());
    let config = ModelConfig::from_json(&json, None).unwrap();
    let weights = Weights::dummy(&config, Kind::BFloat16, 3).on(tch::Device::Cuda(0)).unwrap();
    let gate = GatePlacement::Ffn;
    let mut model = DeviceModel::load(&config, &weights, Shard::WHOLE, gate, Some(gpu.device())).unwrap();
    let router = weights.tensor("model.layers.1.mlp.gate.weight", &[64, 2048]).unwrap();
    for num_rows in [1i64, 6, 8, 40] {
        let x = rows_that_are_sure(&router, num_rows);
        let input = afd_ffi::cuda::region(gpu.device(), &x).unwrap();
        let output = Region::zeroed(gpu.device(), num_rows as usize * 4096).unwrap();
        for layer in [LayerIdx(0), LayerIdx(1)] {
            let wanted = model.forward(layer, &x, &Side::None).unwrap();
            let kernels = model.kernels().unwrap();
            kernels.enqueue(gpu.stream(), layer, num_rows as usize, &input, None, &output).unwrap();
            let found =
                afd_ffi::cuda::view(gpu.device(), &output, &[num_rows, 2048], Kind::BFloat16).unwrap();
            close(&found, &wanted, &format!("{layer}, {num_rows} rows"));
        }
    }
}

/// Prompts by kernels against prompts by operations alone: whole ones, then a step of everything there is: sequences that
/// decode, a chunk with earlier context, and a new prompt, in an order that keeps rows of a kind apart.
fn prompts_agree(config: &str) {
    let Some(gpu) = gpu() else { return };
    let _guard = gpu.enter().unwrap();
    let config = ModelConfig::from_json(&serde_json::from_str(config).unwrap(), None).unwrap();
    let device = tch::Device::Cuda(0);
    let weights = Weights::dummy(&config, Kind::BFloat16, 3).on(device).unwrap();
    let load = || AttentionModel::load(&config, &weights, 256).unwrap();
    let (by_torch, mut by_kernels) = (load(), load());
    gpu.device().synchronize().unwrap();
    by_kernels.run_on(gpu.stream(), BLOCK_SIZE).unwrap();
    let new_cache = || KvCache::new_on(&config, 6 * BLOCKS_EACH, BLOCK_SIZE, Kind::BFloat16, device).unwrap();
    let mut caches = (new_cache(), new_cache());
    let (mut prompts, mut mixed) = (StageBatch::default(), StageBatch::default());
    [5, 31, 130, 64].iter().enumerate().for_each(|(i, &len)| rows(i, 0, len, &mut prompts));
    let steps = [(0, 5, 6), (1, 31, 32), (2, 130, 200), (3, 64, 65), (4, 0, 40), (5, 0, 17)];
    steps.into_iter().for_each(|(i, from, upto)| rows(i, from, upto, &mut mixed));
    for (what, batch) in [("prompts", &prompts), ("a mixed step", &mixed)] {
        let wanted = eager(&by_torch, &mut caches.0, batch);
        let found = eager(&by_kernels, &mut caches.1, batch);
        close(&found, &wanted, what);
        let ends: Vec<usize> = batch.sequences.iter().map(|s| s.start + s.len - 1).collect();
        let best = by_kernels.best(&found, &ends).unwrap().unwrap();
        let logits = by_kernels.logits(&found, &ends).unwrap();
        let largest: Vec<i64> = Vec::try_from(logits.argmax(-1, false)).unwrap();
        assert_eq!(best.iter().map(|&token| i64::from(token)).collect::<Vec<_>>(), largest);
        assert!(by_torch.best(&wanted, &ends).unwrap().is_none());
    }
}

#[test]
fn latent_attention_of_prompts_agrees_with_libtorch() {
    prompts_agree(MLA);
}

#[test]
fn grouped_query_attention_of_prompts_agrees_with_libtorch() {
    prompts_agree(GQA);
}

fn gpu() -> Option<Gpu> {
    if let Some(why) = afd_gpu::Device::missing(1) {
        eprintln!("{why}");
        return None;
    }
    DeviceChoice::Cuda(0).load().unwrap();
    Gpu::open(DeviceChoice::Cuda(0)).unwrap()
}

#[test]
fn latent_attention_decodes_as_libtorch_does() {
    agree(MLA, Sides::default(), Echo::new(false));
    agree(MLA, Sides::default(), Echo::new(true));
}

#[test]
fn shared_experts_on_attention_decode_as_libtorch_does() {
    let mixture = MLA.replace("\"first_k_dense_replace\": 2", "\"first_k_dense_replace\": 1");
    let shared_experts = SharedExpertPlacement::Attention;
    agree(&mixture, Sides { shared_experts, ..Sides::default() }, Echo::new(true));
}

#[test]
fn grouped_query_attention_decodes_as_libtorch_does() {
    agree(GQA, Sides::default(), Echo::new(true));
}
