//! Numbers that no published checkpoint has, through both halves: any shard count and either gate give what the monolith
//! gives. Every configuration comes in as a `config.json` would, so that one that cannot be served would be refused by
//! name. (Each block alone against a plain reference, biases and norms of noise included: `tests/parity/attention`,
//! `ffn-svc/src/model/tests`. Made-up weights have biases of 0 and norms of 1.)
use afd_common::config::model::ModelConfig;
use afd_common::identity::GatePlacement;
use afd_common::weights::Weights;
use afd_tests::monolith::Monolith;
use afd_tests::oracle;
use attention_svc::engine::EngineConfig;
use attention_svc::request::{SamplingParams, SequenceEvent};
use attention_svc::scheduler::StageRules;
use proptest::prelude::*;
use serde_json::{Value, json};
use tch::{IndexOp, Kind, Tensor};

use crate::serving::Running;

/// Largest difference of a log probability.
const TOLERANCE: f64 = 1e-3;

const NEW_TOKENS: u32 = 4;

/// What all families have.
fn common() -> impl Strategy<Value = (Value, usize)> {
    (1..40usize, 1..4usize, 1..4usize, 1..7usize, 5..131usize, 1..4usize, 3..40usize, any::<bool>()).prop_map(
        |(hidden, kv_heads, group, half, vocab, layers, intermediate, tied)| {
            let config = json!({
                "hidden_size": 2 * hidden + 1, "num_attention_heads": kv_heads * group,
                "num_key_value_heads": kv_heads, "head_dim": 2 * half, "vocab_size": vocab,
                "num_hidden_layers": layers, "intermediate_size": intermediate, "tie_word_embeddings": tied,
                "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "torch_dtype": "float32",
            });
            (config, layers)
        },
    )
}

/// Experts, experts per token, their width, shared experts.
fn experts() -> impl Strategy<Value = (usize, usize, usize, usize)> {
    (3..12usize, 1..4usize, 1..20usize, 0..3usize)
}

fn with(mut config: Value, more: Value) -> Value {
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

fn grouped_queries() -> impl Strategy<Value = Value> {
    (common(), experts(), 0..5usize, any::<[bool; 3]>()).prop_map(
        |((config, layers), (experts, top_k, width, shared), family, [bias, flag, norm])| {
            let moe = json!({"num_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": width,
                "norm_topk_prob": norm});
            let more = match family {
                0 => json!({"architectures": ["LlamaForCausalLM"], "attention_bias": bias, "mlp_bias": flag}),
                1 => with(moe, json!({"architectures": ["MixtralForCausalLM"]})),
                2 => with(moe, json!({"architectures": ["OlmoeForCausalLM"], "attention_bias": bias,
                    "clip_qkv": flag.then_some(0.5)})),
                3 => with(moe, json!({"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": bias,
                    "mlp_only_layers": if flag { vec![layers - 1] } else { vec![] }})),
                _ => with(moe, json!({"architectures": ["Glm4MoeForCausalLM"], "attention_bias": bias,
                    "use_qk_norm": flag, "n_routed_experts": experts, "n_shared_experts": shared,
                    "partial_rotary_factor": if norm { 0.5 } else { 1.0 }, "head_dim": 8,
                    "routed_scaling_factor": 1.5, "first_k_dense_replace": layers / 2})),
            };
            with(config, more)
        },
    )
}

fn latent() -> impl Strategy<Value = Value> {
    let dims = (prop::option::of(1..20usize), 1..30usize, 1..12usize, 1..6usize, 1..12usize);
    (common(), experts(), dims, 0..4usize, any::<[bool; 2]>(), 1..4usize).prop_map(
        |((config, layers), (experts, top_k, width, shared), dims, family, [bias, norm], groups)| {
            let (q_lora_rank, kv_lora_rank, nope, half, value) = dims;
            let mla = json!({"q_lora_rank": q_lora_rank, "kv_lora_rank": kv_lora_rank, "qk_nope_head_dim": nope,
                "qk_rope_head_dim": 2 * half, "v_head_dim": value, "attention_bias": bias,
                "n_routed_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": width,
                "n_shared_experts": shared, "first_k_dense_replace": layers / 2, "norm_topk_prob": norm,
                "routed_scaling_factor": 1.5});
            // Groups hold enough experts for the best two of a group and for the best k of one.
            let grouped = json!({"n_group": groups, "topk_group": 1, "n_routed_experts": groups * experts.max(top_k)});
            let more = match family {
                0 => json!({"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "greedy"}),
                1 => with(grouped, json!({"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "group_limited_greedy"})),
                2 => with(grouped, json!({"architectures": ["DeepseekV3ForCausalLM"]})),
                _ => json!({"architectures": ["DeepseekV3ForCausalLM"], "num_hash_layers": layers,
                    "scoring_func": if norm { "sigmoid" } else { "sqrtsoftplus" }}),
            };
            with(with(config, mla), more)
        },
    )
}

/// What the monolith gives each prompt token but the first: log probabilities, `[len - 1]`.
fn reference(monolith: &Monolith, prompt: &[u32]) -> Vec<f64> {
    let logprobs = monolith.logits(prompt, 0).unwrap().log_softmax(-1, Kind::Double);
    let at = |(position, token): (usize, &u32)| logprobs.i((position as i64, i64::from(*token)));
    prompt[1..].iter().enumerate().map(|next| f64::try_from(at(next)).unwrap()).collect()
}

fn compare(config: &Value, prompt_len: usize, seed: u64) -> Result<(), TestCaseError> {
    let _no_grad = tch::no_grad_guard();
    let model = ModelConfig::from_json(config.as_object().unwrap(), None).unwrap();
    let weights = Weights::dummy(&model, Kind::Float, seed);
    let monolith = Monolith::from_weights(model.clone(), &weights).unwrap();
    let prompt: Vec<u32> = (0..prompt_len).map(|i| (i * 7 + 3) as u32 % model.vocab_size as u32).collect();
    let expected = reference(&monolith, &prompt);
    for (num_shards, gate, stages) in [
        (1, GatePlacement::Attention, 1),
        (2, GatePlacement::Ffn, 2),
        (3, GatePlacement::Attention, 2),
        (3, GatePlacement::Ffn, 1),
    ] {
        let config = EngineConfig {
            max_model_len: 128,
            max_num_seqs: 2,
            max_num_batched_tokens: 16,
            block_size: 3,
            num_blocks: 80,
            stages: StageRules { max_stages: stages, ..StageRules::default() },
            ..EngineConfig::default()
        };
        let running = Running::start(&model, &weights, config, num_shards, gate);
        let greedy = SamplingParams::greedy;
        let beside = running.submit("beside", &prompt[..1], NEW_TOKENS, greedy());
        let mut events = running.submit_with("odd", &prompt, NEW_TOKENS, greedy(), Some(0));
        let mut tokens = Vec::new();
        while let Some(event) = events.blocking_recv() {
            match event {
                SequenceEvent::Token(token) => tokens.push(token.id),
                SequenceEvent::PromptLogprobs(found) => {
                    prop_assert_eq!(found.len(), prompt.len());
                    for (position, (found, expected)) in found[1..].iter().zip(&expected).enumerate() {
                        let off = (f64::from(found.as_ref().unwrap().chosen) - expected).abs();
                        prop_assert!(
                            off < TOLERANCE,
                            "{} shards, {:?}, position {}: off by {:e}",
                            num_shards,
                            gate,
                            position,
                            off
                        );
                    }
                }
                SequenceEvent::Finished { .. } => break,
                SequenceEvent::Failed(error) => return Err(TestCaseError::fail(error.to_string())),
            }
        }
        oracle::judge(&monolith, &prompt, &tokens, Kind::Float)
            .map_err(|error| TestCaseError::fail(format!("{num_shards} shards, {gate:?}: {error}")))?;
        crate::serving::tokens(beside);
        running.end();
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn grouped_query_models(config in grouped_queries(), prompt_len in 2..40usize, seed: u64) {
        compare(&config, prompt_len, seed)?;
    }

    #[test]
    fn latent_attention_models(config in latent(), prompt_len in 2..40usize, seed: u64) {
        compare(&config, prompt_len, seed)?;
    }
}

#[test]
fn the_reference_is_no_constant() {
    // Were the monolith's log probabilities all alike, every comparison above would pass.
    let model = ModelConfig::load(&afd_tests::fixtures::checkpoint("tiny-olmoe")).unwrap();
    let weights = Weights::dummy(&model, Kind::Float, 1);
    let monolith = Monolith::from_weights(model, &weights).unwrap();
    let logprobs = reference(&monolith, &[5, 6, 7, 8, 9, 10]);
    let deviation = f64::try_from(Tensor::from_slice(&logprobs).std(true)).unwrap();
    assert!(deviation > 0.1, "{logprobs:?}");
}
