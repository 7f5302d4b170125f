//! Scheduler, cache, attention, FFN and sampler together: the reference's greedy tokens for every fixture, all prompts at
//! once, whatever the blocks, chunks, prefixes, stages, shards and the place of the gate.
mod direct_ffn;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use afd_common::config::model::ModelConfig;
use afd_common::identity::GatePlacement;
use afd_common::link::Doorbell;
use afd_common::weights::Weights;
use attention_svc::engine::{CachedAttention, EngineConfig, EngineMetrics, spawn};
use attention_svc::model::{AttentionModel, KvCache};
use attention_svc::request::{SamplingParams, SequenceEvent, SequenceRequest, StopRules};
use attention_svc::scheduler::StageRules;
use direct_ffn::DirectFfn;
use tch::Kind;
use tokio::sync::mpsc;

#[derive(serde::Deserialize)]
struct Expected {
    prompts: Vec<Prompt>,
}

#[derive(serde::Deserialize)]
struct Prompt {
    id: String,
    input_ids: Vec<u32>,
    generated_ids: Vec<u32>,
}

/// How the fixture is served.
struct Serving {
    config: EngineConfig,
    num_shards: u32,
    gate: GatePlacement,
    /// How often the prompts are sent, one round after the other.
    rounds: usize,
}

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

fn submit(
    handle: &attention_svc::engine::EngineHandle,
    prompt: &Prompt,
) -> mpsc::UnboundedReceiver<SequenceEvent> {
    let (events, receiver) = mpsc::unbounded_channel();
    let request = SequenceRequest {
        request_id: prompt.id.as_str().into(),
        prompt: prompt.input_ids.as_slice().into(),
        sampling: SamplingParams::greedy(),
        stop: StopRules {
            max_tokens: prompt.generated_ids.len() as u32,
            min_tokens: 0,
            stop_token_ids: vec![],
        },
        logprobs: None,
        prompt_logprobs: None,
        deadline: None,
        traceparent: None,
        events,
    };
    handle.submit(request).unwrap();
    receiver
}

/// Tokens until the sequence is finished; panics when it fails.
fn tokens(mut events: mpsc::UnboundedReceiver<SequenceEvent>) -> Vec<u32> {
    let mut tokens = Vec::new();
    loop {
        match events.blocking_recv().expect("a last event") {
            SequenceEvent::Token(token) => tokens.push(token.id),
            SequenceEvent::PromptLogprobs(_) => {}
            SequenceEvent::Finished { .. } => return tokens,
            SequenceEvent::Failed(error) => panic!("{error}"),
        }
    }
}

fn check(name: &str, serving: Serving) -> Arc<EngineMetrics> {
    let folder = fixtures().join("tiny").join(name);
    let model_config = ModelConfig::load(&folder).unwrap();
    let weights = Weights::open(&folder, &model_config, Kind::Float).unwrap();
    let config = serving.config;
    let mut model = AttentionModel::load(&model_config, &weights, config.max_model_len).unwrap();
    if serving.gate == GatePlacement::Attention {
        model.load_gates(&weights).unwrap();
    }
    let cache =
        KvCache::new(&model_config, config.num_blocks as usize, config.block_size, Kind::Float).unwrap();
    let attention = CachedAttention::new(model, cache).unwrap();
    let ffn = DirectFfn::load(&model_config, &weights, serving.num_shards, serving.gate);
    let (handle, thread) =
        spawn(config, attention, Box::new(ffn), Doorbell::default(), Arc::default()).unwrap();

    let expected = fixtures().join("expected").join(format!("{name}.json"));
    let expected: Expected = serde_json::from_slice(&std::fs::read(expected).unwrap()).unwrap();
    for round in 0..serving.rounds {
        let running: Vec<_> = expected.prompts.iter().map(|prompt| submit(&handle, prompt)).collect();
        for (prompt, events) in expected.prompts.iter().zip(running) {
            assert_eq!(tokens(events), prompt.generated_ids, "{name}, prompt {}, round {round}", prompt.id);
        }
    }
    handle.drain(Instant::now() + Duration::from_secs(60));
    thread.join().unwrap().unwrap();
    assert_eq!(handle.metrics().kv_blocks_used.get(), 0);
    Arc::clone(handle.metrics())
}

fn config() -> EngineConfig {
    EngineConfig {
        max_model_len: 256,
        max_num_seqs: 8,
        max_num_batched_tokens: 512,
        ..EngineConfig::default()
    }
}

fn stages(max_stages: usize) -> StageRules {
    StageRules { max_stages, ..StageRules::default() }
}

/// Room for a little more than the longest sequence, in blocks of 4, and chunks of 24.
fn cramped() -> EngineConfig {
    EngineConfig { block_size: 4, num_blocks: 70, max_num_batched_tokens: 24, ..config() }
}

fn roomy_and_cramped(name: &str) {
    let roomy = Serving { config: config(), num_shards: 1, gate: GatePlacement::Ffn, rounds: 1 };
    check(name, roomy);
    let cached = EngineConfig { stages: stages(2), ..cramped() };
    let metrics = check(name, Serving { config: cached, num_shards: 2, gate: GatePlacement::Ffn, rounds: 2 });
    assert!(metrics.prefix_hits.get() > 0, "the second round begins like the first");
    assert!(metrics.preemptions.get() > 0, "blocks were to run out");
    let uncached = EngineConfig { stages: stages(3), prefix_cache: false, ..cramped() };
    let metrics =
        check(name, Serving { config: uncached, num_shards: 3, gate: GatePlacement::Attention, rounds: 1 });
    assert_eq!(metrics.prefix_hits.get(), 0);
    assert!(metrics.preemptions.get() > 0, "blocks were to run out");
}

macro_rules! fixtures {
    ($($name:ident: $folder:literal),* $(,)?) => {$(
        #[test]
        fn $name() {
            roomy_and_cramped($folder);
        }
    )*};
}

fixtures! {
    llama: "tiny-llama",
    mixtral: "tiny-mixtral",
    qwen3_moe: "tiny-qwen3-moe",
    olmoe: "tiny-olmoe",
    deepseek_v2: "tiny-deepseek-v2",
    deepseek_v2_group: "tiny-deepseek-v2-group",
    deepseek_v3: "tiny-deepseek-v3",
    hash_routed: "tiny-hash-routed",
}
