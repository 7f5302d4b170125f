//! What every reference checkpoint's configuration is read as; [`refusals`] has what one wrong field does to it.
use std::path::PathBuf;

use serde_json::{Map, Value, json};

use super::*;

mod refusals;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
}

fn raw(name: &str) -> Map<String, Value> {
    read_object(&fixture(name).join("config.json")).unwrap()
}

fn load(name: &str) -> ModelConfig {
    ModelConfig::load(&fixture(name)).unwrap()
}

/// The fixture with some fields set, or removed when `null`.
fn mutated(name: &str, fields: Value) -> Result<ModelConfig, ConfigError> {
    let mut config = raw(name);
    for (field, value) in fields.as_object().unwrap() {
        config.insert(field.clone(), value.clone());
    }
    ModelConfig::from_json(&config, None)
}

/// The name of the refused field.
fn refused(name: &str, fields: Value) -> String {
    match mutated(name, fields) {
        Err(ConfigError::Field { field, .. } | ConfigError::Missing { field }) => field,
        other => panic!("{other:?}"),
    }
}

fn gqa(config: &ModelConfig) -> &GqaConfig {
    match &config.attention {
        AttentionConfig::Gqa(gqa) => gqa,
        other => panic!("{other:?}"),
    }
}

fn mla(config: &ModelConfig) -> &MlaConfig {
    match &config.attention {
        AttentionConfig::Mla(mla) => mla,
        other => panic!("{other:?}"),
    }
}

#[test]
fn llama_is_dense_with_tied_embeddings_and_two_end_tokens() {
    let config = load("tiny/tiny-llama");
    assert_eq!(config.architecture, Architecture::Llama);
    assert_eq!((config.hidden_size, config.vocab_size, config.num_layers()), (64, 768, 4));
    assert!(config.tie_word_embeddings);
    assert_eq!(config.dtype, CheckpointDtype::F32);
    assert_eq!((config.bos_token_id, config.eos_token_ids.as_slice()), (Some(763), [764, 767].as_slice()));
    assert_eq!((gqa(&config).num_heads, gqa(&config).num_kv_heads, gqa(&config).head_dim), (4, 2, 16));
    assert_eq!(config.layers[3], FfnConfig::Dense(DenseConfig { intermediate_size: 160, bias: false }));
}

#[test]
fn mixtral_renormalises_and_takes_its_head_width_from_hidden_size() {
    let config = load("tiny/tiny-mixtral");
    assert_eq!((gqa(&config).head_dim, config.rope.theta), (16, 1e6));
    let moe = config.moe(0).unwrap();
    assert_eq!((moe.num_experts, moe.experts_per_token, moe.intermediate_size), (8, 2, 96));
    assert!(moe.router.normalize && !moe.router.logits_in_f32);
    assert_eq!(moe.shared_intermediate_size, 0);
}

#[test]
fn qwen3_has_its_own_head_width_and_norms_each_head() {
    let config = load("tiny/tiny-qwen3-moe");
    assert_eq!((gqa(&config).head_dim, gqa(&config).qk_norm), (32, QkNorm::PerHead));
    assert_eq!((config.bos_token_id, config.moe(1).unwrap().num_experts), (None, 16));
    assert!(config.moe(1).unwrap().router.normalize);
    let published = load("configs/qwen3-30b-a3b");
    assert_eq!((published.num_layers(), published.moe(47).unwrap().num_experts), (48, 128));
}

#[test]
fn qwen3_mixes_dense_layers_in() {
    let config =
        mutated("tiny/tiny-qwen3-moe", json!({"decoder_sparse_step": 2, "mlp_only_layers": [3]})).unwrap();
    let is_moe: Vec<bool> = (0..4).map(|layer| config.moe(layer).is_some()).collect();
    assert_eq!(is_moe, [false, true, false, false]);
}

#[test]
fn olmoe_norms_the_whole_projection_and_does_not_renormalise() {
    let config = load("tiny/tiny-olmoe");
    assert_eq!((gqa(&config).qk_norm, gqa(&config).clip_qkv), (QkNorm::Whole, None));
    assert!(!config.moe(0).unwrap().router.normalize);
    let clipped = mutated("tiny/tiny-olmoe", json!({"clip_qkv": 8})).unwrap();
    assert_eq!(gqa(&clipped).clip_qkv, Some(8.0));
}

#[test]
fn deepseek_v2_scales_and_ignores_norm_topk_prob() {
    let config = load("tiny/tiny-deepseek-v2-group");
    assert_eq!(mla(&config).q_lora_rank, Some(48));
    assert!(config.moe(0).is_none());
    let moe = config.moe(1).unwrap();
    assert_eq!(moe.shared_intermediate_size, 64);
    assert_eq!(moe.router.selection, Selection::GroupLimited { num_groups: 4, topk_groups: 2 });
    assert_eq!(
        (moe.router.scaling_factor, moe.router.normalize, moe.router.logits_in_f32),
        (4.0, false, true)
    );
    let flagged = mutated("tiny/tiny-deepseek-v2-group", json!({"norm_topk_prob": true})).unwrap();
    assert_eq!(flagged.moe(1), config.moe(1));
    assert_eq!(
        config.rope.scaling,
        RopeScaling::Yarn {
            factor: 16.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: Some(0.707),
            mscale_all_dim: Some(0.707),
            attention_factor: None,
            truncate: true,
            original_max_position_embeddings: 64,
        }
    );
    let lite = load("configs/deepseek-v2-lite");
    assert_eq!((mla(&lite).q_lora_rank, lite.moe(1).unwrap().shared_intermediate_size), (None, 2816));
}

#[test]
fn deepseek_v3_chooses_by_biased_sigmoid_and_ignores_head_dim() {
    let config = load("tiny/tiny-deepseek-v3");
    let router = &config.moe(1).unwrap().router;
    assert_eq!(router.scoring, Scoring::Sigmoid);
    assert_eq!(router.selection, Selection::NoAuxTc { num_groups: 4, topk_groups: 2 });
    assert_eq!((router.scaling_factor, router.normalize, router.normalize_eps), (2.5, true, 1e-20));
    assert_eq!((mla(&config).qk_nope_head_dim, mla(&config).qk_rope_head_dim), (16, 8));
    assert!(mla(&config).rope_interleave);
}

#[test]
fn the_first_layers_may_route_by_token_id() {
    let config = load("tiny/tiny-hash-routed");
    assert!(config.moe(0).is_none(), "a dense layer routes nothing");
    let router = |layer| &config.moe(layer).unwrap().router;
    assert_eq!(router(1).selection, Selection::TokenTable { vocab_size: 97 });
    assert_eq!(router(2).selection, Selection::NoAuxTc { num_groups: 1, topk_groups: 1 });
    assert_eq!((router(1).scoring, router(1).scaling_factor), (Scoring::SqrtSoftplus, 1.5));
    let by_score = mutated("tiny/tiny-hash-routed", json!({"num_hash_layers": 0})).unwrap();
    assert_ne!(by_score.canonical_json(), config.canonical_json());
}

#[test]
fn moe_layers_follow_first_dense_and_frequency() {
    let config =
        mutated("tiny/tiny-deepseek-v3", json!({"first_k_dense_replace": 1, "moe_layer_freq": 2})).unwrap();
    let is_moe: Vec<bool> = (0..4).map(|layer| config.moe(layer).is_some()).collect();
    assert_eq!(is_moe, [false, false, true, false]);
}

#[test]
fn no_shared_experts_may_be_zero_or_null() {
    for none in [json!(0), Value::Null] {
        let config = mutated("tiny/tiny-deepseek-v3", json!({"n_shared_experts": none})).unwrap();
        assert_eq!(config.moe(1).unwrap().shared_intermediate_size, 0);
    }
}

#[test]
fn both_rope_dialects_mean_the_same() {
    let scaling = json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
        "original_max_position_embeddings": 512});
    let mut new = scaling.clone();
    new["rope_theta"] = json!(500000.0);
    let new = mutated("tiny/tiny-llama", json!({"rope_parameters": new})).unwrap();
    let mut old_scaling = scaling;
    let kind = old_scaling.as_object_mut().unwrap().remove("rope_type").unwrap();
    old_scaling["type"] = kind;
    let old = json!({"rope_parameters": null, "rope_theta": 500000, "rope_scaling": old_scaling});
    assert_eq!(mutated("tiny/tiny-llama", old).unwrap().rope, new.rope);
    assert!(matches!(new.rope.scaling, RopeScaling::Llama3 { factor: 8.0, .. }));
}

#[test]
fn block_fp8_is_read_and_other_quantisation_refused() {
    let fp8 = json!({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3",
        "activation_scheme": "dynamic", "weight_block_size": [128, 128]}});
    assert_eq!(mutated("tiny/tiny-deepseek-v3", fp8).unwrap().fp8_block, Some((128, 128)));
    let awq = json!({"quantization_config": {"quant_method": "awq"}});
    assert_eq!(refused("tiny/tiny-llama", awq), "quantization_config.quant_method");
    let per_tensor = json!({"quantization_config": {"quant_method": "fp8"}});
    assert_eq!(refused("tiny/tiny-llama", per_tensor), "quantization_config.weight_block_size");
}

#[test]
fn generation_config_overrides_the_end_tokens() {
    let generation = json!({"eos_token_id": [5, 6]});
    let config = ModelConfig::from_json(&raw("tiny/tiny-mixtral"), generation.as_object()).unwrap();
    assert_eq!(config.eos_token_ids, [5, 6]);
}

#[test]
fn canonical_form_follows_what_is_computed_only() {
    let config = load("tiny/tiny-mixtral");
    let other_end =
        mutated("tiny/tiny-mixtral", json!({"eos_token_id": 7, "attention_dropout": 0.5})).unwrap();
    assert_eq!(config.canonical_json(), other_end.canonical_json());
    let other_eps = mutated("tiny/tiny-mixtral", json!({"rms_norm_eps": 1e-6})).unwrap();
    assert_ne!(config.canonical_json(), other_eps.canonical_json());
}

#[test]
fn kimi_k2_is_deepseek_v3_in_other_numbers() {
    let path =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../attention-svc/src/plan/models/kimi-k2.json");
    let config = ModelConfig::from_json(&read_object(&path).unwrap(), None).unwrap();
    assert_eq!((config.architecture, config.num_layers()), (Architecture::DeepseekV3, 61));
    assert_eq!((mla(&config).num_heads, config.fp8_block), (64, Some((128, 128))));
    let moe = config.moe(60).unwrap();
    assert_eq!((moe.num_experts, moe.experts_per_token, moe.shared_intermediate_size), (384, 8, 2048));
    assert_eq!(moe.router.selection, Selection::NoAuxTc { num_groups: 1, topk_groups: 1 });
    assert!(config.moe(0).is_none());
}

/// As GLM-4.5 is published, in the dialect of its release.
fn glm() -> Value {
    json!({
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
        "pad_token_id": 151329, "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 5120, "partial_rotary_factor": 0.5, "initializer_range": 0.02, "intermediate_size": 12288,
        "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1536,
        "norm_topk_prob": true, "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 160,
        "n_shared_experts": 1, "routed_scaling_factor": 2.5, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "num_hidden_layers": 92, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": null, "rope_theta": 1000000, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "use_cache": true, "use_qk_norm": true, "vocab_size": 151552
    })
}

#[test]
fn glm_turns_half_of_a_head_and_has_deepseek_v3s_mixture() {
    let read = |change: Value| {
        let mut config = glm();
        config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        ModelConfig::from_json(config.as_object().unwrap(), None)
    };
    let config = read(json!({})).unwrap();
    let attention = gqa(&config);
    assert_eq!((attention.head_dim, attention.rotary_dim, attention.qk_norm), (128, 64, QkNorm::PerHead));
    assert_eq!((attention.qkv_bias, attention.o_bias), (true, false));
    let moe = config.moe(3).unwrap();
    assert_eq!((moe.num_experts, moe.shared_intermediate_size), (160, 1536));
    assert_eq!((moe.router.scoring, moe.router.scaling_factor), (Scoring::Sigmoid, 2.5));
    assert!(config.moe(2).is_none() && moe.router.normalize);
    let newer = json!({"rope_theta": null, "partial_rotary_factor": null, "use_qk_norm": false, "rope_parameters":
        {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}});
    let newer = read(newer).unwrap();
    assert_eq!((gqa(&newer).rotary_dim, gqa(&newer).qk_norm, newer.rope.theta), (32, QkNorm::None, 1e6));
    for (change, field) in [
        (json!({"partial_rotary_factor": 1.5}), "partial_rotary_factor"),
        (json!({"partial_rotary_factor": 0.001}), "partial_rotary_factor"),
        (json!({"scoring_func": "softmax"}), "scoring_func"),
        (json!({"rope_theta": null}), "rope_theta"),
    ] {
        match read(change) {
            Err(ConfigError::Field { field: found, .. } | ConfigError::Missing { field: found }) => {
                assert_eq!(found, field);
            }
            other => panic!("{other:?}"),
        }
    }
}
