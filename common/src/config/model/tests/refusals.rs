//! What one wrong field does to a configuration: it is refused by its name, or reported where nobody knows it.
use serde_json::{Value, json};

use super::*;

#[test]
fn what_is_not_served_is_refused_by_name() {
    let (llama, mixtral, qwen) = ("tiny/tiny-llama", "tiny/tiny-mixtral", "tiny/tiny-qwen3-moe");
    let (v2, v3) = ("tiny/tiny-deepseek-v2-group", "tiny/tiny-deepseek-v3");
    let cases = [
        (llama, json!({"hidden_act": "gelu"}), "hidden_act"),
        (llama, json!({"pretraining_tp": 2}), "pretraining_tp"),
        (llama, json!({"num_attention_heads": 0}), "num_attention_heads"),
        (llama, json!({"num_key_value_heads": 3}), "num_key_value_heads"),
        (llama, json!({"num_key_value_heads": 0}), "num_key_value_heads"),
        (llama, json!({"head_dim": 15}), "head_dim"),
        (llama, json!({"hidden_size": -64}), "hidden_size"),
        (llama, json!({"hidden_size": 64.5}), "hidden_size"),
        (llama, json!({"hidden_size": "64"}), "hidden_size"),
        (llama, json!({"hidden_size": null}), "hidden_size"),
        (llama, json!({"head_dim": null, "hidden_size": 66}), "hidden_size"),
        (llama, json!({"hidden_size": 1e300}), "hidden_size"),
        (llama, json!({"num_hidden_layers": 70000}), "num_hidden_layers"),
        (llama, json!({"num_hidden_layers": 0}), "num_hidden_layers"),
        (llama, json!({"vocab_size": 0}), "vocab_size"),
        (llama, json!({"rms_norm_eps": 0}), "rms_norm_eps"),
        (llama, json!({"attention_bias": "yes"}), "attention_bias"),
        (llama, json!({"sliding_window": 128}), "sliding_window"),
        (llama, json!({"eos_token_id": -1}), "eos_token_id"),
        (llama, json!({"dtype": "float64"}), "dtype"),
        (llama, json!({"rope_parameters": {"rope_type": "longrope"}}), "rope_parameters.rope_type"),
        (llama, json!({"rope_parameters": {"rope_type": "linear"}}), "rope_parameters.factor"),
        (llama, json!({"rope_parameters": {"rope_theta": 1e4, "factor": 2}}), "rope_parameters.rope_type"),
        (llama, json!({"rope_parameters": null, "rope_scaling": {"type": "dynamic"}}), "rope_scaling.type"),
        (llama, json!({"rope_parameters": {"full_attention": {}}}), "rope_parameters.rope_type"),
        (llama, json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (llama, json!({"use_qk_norm": true}), "use_qk_norm"),
        (llama, json!({"logit_scale": 0.0625}), "logit_scale"),
        (llama, json!({"layer_types": ["sliding_attention"]}), "layer_types"),
        (mixtral, json!({"num_experts_per_tok": 9}), "num_experts_per_tok"),
        (mixtral, json!({"num_local_experts": 0}), "num_local_experts"),
        (mixtral, json!({"attention_bias": true}), "attention_bias"),
        (qwen, json!({"norm_topk_prob": null}), "norm_topk_prob"),
        (qwen, json!({"num_experts": 8}), "num_experts"),
        (qwen, json!({"mlp_only_layers": [4]}), "mlp_only_layers"),
        (qwen, json!({"decoder_sparse_step": 0}), "decoder_sparse_step"),
        (v2, json!({"topk_method": "noaux_tc"}), "topk_method"),
        (v2, json!({"scoring_func": "sigmoid"}), "scoring_func"),
        (v2, json!({"n_group": 3}), "n_group"),
        (v2, json!({"topk_group": 5}), "topk_group"),
        (v2, json!({"topk_group": 1, "num_experts_per_tok": 5}), "num_experts_per_tok"),
        (v2, json!({"qk_rope_head_dim": 15}), "qk_rope_head_dim"),
        (v2, json!({"kv_lora_rank": null}), "kv_lora_rank"),
        (v3, json!({"topk_method": "greedy"}), "topk_method"),
        (v3, json!({"scoring_func": "softmax"}), "scoring_func"),
        (v3, json!({"n_group": 16}), "n_group"),
        (v3, json!({"moe_layer_freq": 0}), "moe_layer_freq"),
        (v3, json!({"num_hash_layers": 5}), "num_hash_layers"),
        (v3, json!({"num_hash_layers": -1}), "num_hash_layers"),
        (v2, json!({"num_hash_layers": 1}), "num_hash_layers"),
        (mixtral, json!({"num_hash_layers": 1}), "num_hash_layers"),
    ];
    for (name, fields, field) in cases {
        assert_eq!(refused(name, fields.clone()), field, "{name} with {fields}");
    }
}

#[test]
fn an_unknown_architecture_is_refused_with_the_list_of_known_ones() {
    let error = mutated("tiny/tiny-llama", json!({"architectures": ["MambaForCausalLM"]})).unwrap_err();
    let message = error.to_string();
    assert!(message.contains("MambaForCausalLM") && message.contains("DeepseekV3ForCausalLM"), "{message}");
}

#[test]
fn harmless_fields_are_ignored() {
    let plain = load("tiny/tiny-mixtral");
    let extra = mutated("tiny/tiny-mixtral", json!({"made_up": {"a": 1}, "initializer_range": 9})).unwrap();
    assert_eq!(extra.canonical_json(), plain.canonical_json());
}

#[test]
fn a_broken_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    for text in ["{", "[]", ""] {
        std::fs::write(folder.path().join("config.json"), text).unwrap();
        let error = ModelConfig::load(folder.path()).unwrap_err();
        assert!(matches!(&error, ConfigError::File { path, .. } if path.ends_with("config.json")), "{error}");
    }
}

/// What is reported of a fixture with these fields set.
fn unknown(name: &str, fields: Value) -> Vec<String> {
    let mut config = raw(name);
    config.extend(fields.as_object().unwrap().clone());
    ModelConfig::read(&config, None).unwrap().1
}

#[test]
fn a_field_that_nobody_knows_is_reported_by_name_once() {
    assert_eq!(unknown("tiny/tiny-llama", json!({"swish_limit": 7.0})), ["swish_limit"]);
    // Known to another family only.
    assert_eq!(unknown("tiny/tiny-llama", json!({"num_experts": 8})), ["num_experts"]);
    let yarn = json!({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "warmth": 1});
    assert_eq!(unknown("tiny/tiny-llama", json!({"rope_parameters": yarn})), ["rope_parameters.warmth"]);
    assert!(unknown("tiny/tiny-llama", json!({"swish_limit": null, "dropout_of_old": null})).is_empty());
    assert!(refused("tiny/tiny-llama", json!({"rope_interleaved": true})).contains("rope_interleaved"));
}

#[test]
fn published_files_have_no_field_that_is_not_known() {
    let files = ["tiny", "configs"].into_iter().flat_map(|kind| std::fs::read_dir(fixture(kind)).unwrap());
    let mut folders: Vec<_> = files.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).collect();
    assert!(folders.len() >= 10, "{folders:?}");
    folders.sort();
    for folder in folders {
        let config = read_object(&folder.join("config.json")).unwrap();
        assert_eq!(ModelConfig::read(&config, None).unwrap().1, Vec::<String>::new(), "{}", folder.display());
    }
    // What the releases of the families have beside what the fixtures have.
    for (name, fields) in [
        (
            "tiny/tiny-llama",
            json!({"is_llama_config": true, "rope_interleaved": false, "transformers.js_config": {}}),
        ),
        ("tiny/tiny-qwen3-moe", json!({"max_window_layers": 48, "sliding_window": 4096})),
        ("tiny/tiny-deepseek-v3", json!({"auto_map": {}, "aux_loss_alpha": 0.001, "seq_aux": true})),
        ("tiny/tiny-olmoe", json!({"_name_or_path": "x", "temperature": 0.7})),
    ] {
        assert_eq!(unknown(name, fields), Vec::<String>::new(), "{name}");
    }
}
