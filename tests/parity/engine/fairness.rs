//! Fair order: a prompt of 30,000 tokens stalls nobody who is already decoding, nor who comes after it.
use afd_common::config::model::ModelConfig;
use afd_common::identity::GatePlacement;
use afd_common::weights::Weights;
use attention_svc::engine::EngineConfig;
use attention_svc::request::{SamplingParams, SequenceEvent};
use serde_json::json;
use tch::Kind;

use crate::serving::{Events, Running, tokens};

const PROMPT: usize = 30_000;
const CHUNK: usize = 500;

/// Takes `count` tokens.
fn take(events: &mut Events, count: usize) {
    for _ in 0..count {
        match events.blocking_recv() {
            Some(SequenceEvent::Token(_)) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Tokens that are there already.
fn arrived(events: &mut Events) -> usize {
    std::iter::from_fn(|| events.try_recv().ok())
        .filter(|event| matches!(event, SequenceEvent::Token(_)))
        .count()
}

#[test]
fn a_long_prompt_stalls_nobody() {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 50, "num_hidden_layers": 1,
        "intermediate_size": 16, "max_position_embeddings": 40_000, "rms_norm_eps": 1e-6,
    });
    let model = ModelConfig::from_json(config.as_object().unwrap(), None).unwrap();
    let weights = Weights::dummy(&model, Kind::Float, 1);
    let config = EngineConfig {
        max_model_len: 40_000,
        max_num_seqs: 8,
        max_num_batched_tokens: CHUNK,
        num_blocks: 4_000,
        ..EngineConfig::default()
    };
    let running = Running::start(&model, &weights, config, 1, GatePlacement::Ffn);
    let greedy = SamplingParams::greedy;
    let mut decoding = running.submit("decoding", &[1, 2, 3], 20_000, greedy());
    take(&mut decoding, 5);

    let steps = || running.handle.metrics().steps.get();
    let before = steps();
    let prompt: Vec<u32> = (0..PROMPT as u32).map(|i| i % 50).collect();
    let mut long = running.submit("long", &prompt, 1, greedy());
    let late = running.submit("late", &[4, 5], 3, greedy());
    take(&mut long, 1);
    let during = steps() - before;
    let decoded = arrived(&mut decoding);
    assert!(during >= (PROMPT / CHUNK) as u64, "the prompt took {during} steps");
    // One for every step, but for those that ran before the prompt was taken and after its token was told.
    assert!(decoded as u64 + 2 >= during, "{decoded} tokens in {during} steps");
    assert!(decoded >= PROMPT / CHUNK, "{decoded} tokens while {} chunks were computed", PROMPT / CHUNK);
    assert_eq!(tokens(late).len(), 3);
    drop(decoding);
    running.end();
}
