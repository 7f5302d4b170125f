//! Scheduler, cache, attention, FFN and sampler together: the reference's greedy tokens for every fixture, all prompts at
//! once, whatever the blocks, chunks, prefixes, stages, shards and the place of the gate.
mod direct_ffn;
mod fairness;
mod fp8;
mod odd_numbers;
mod sampled;
mod serving;

use std::path::PathBuf;
use std::sync::Arc;

use afd_common::config::model::ModelConfig;
use afd_common::identity::{GatePlacement, SharedExpertPlacement, Sides};
use afd_common::weights::Weights;
use attention_svc::engine::{EngineConfig, EngineMetrics};
use attention_svc::request::SamplingParams;
use attention_svc::scheduler::StageRules;
use serving::{Running, tokens};
use tch::Kind;

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
    sides: Sides,
    /// How often the prompts are sent, one round after the other.
    rounds: usize,
}

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

fn check(name: &str, serving: Serving) -> Arc<EngineMetrics> {
    let folder = fixtures().join("tiny").join(name);
    let model_config = ModelConfig::load(&folder).unwrap();
    let weights = Weights::open(&folder, &model_config, Kind::Float).unwrap();
    let running = Running::start(&model_config, &weights, serving.config, serving.num_shards, serving.sides);

    let expected = fixtures().join("expected").join(format!("{name}.json"));
    let expected: Expected = serde_json::from_slice(&std::fs::read(expected).unwrap()).unwrap();
    let submit = |prompt: &Prompt| {
        let max_tokens = prompt.generated_ids.len() as u32;
        running.submit(&prompt.id, &prompt.input_ids, max_tokens, SamplingParams::greedy())
    };
    for round in 0..serving.rounds {
        let events: Vec<_> = expected.prompts.iter().map(submit).collect();
        for (prompt, events) in expected.prompts.iter().zip(events) {
            assert_eq!(tokens(events), prompt.generated_ids, "{name}, prompt {}, round {round}", prompt.id);
        }
    }
    running.end()
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

const ON_FFN: Sides = Sides { gate: GatePlacement::Ffn, shared_experts: SharedExpertPlacement::Ffn };

/// Room for a little more than the longest sequence, in blocks of 4, and chunks of 24.
fn cramped() -> EngineConfig {
    EngineConfig { block_size: 4, num_blocks: 70, max_num_batched_tokens: 24, ..config() }
}

fn roomy_and_cramped(name: &str) {
    check(name, Serving { config: config(), num_shards: 1, sides: ON_FFN, rounds: 1 });
    let cached = EngineConfig { stages: stages(2), ..cramped() };
    let metrics = check(name, Serving { config: cached, num_shards: 2, sides: ON_FFN, rounds: 2 });
    assert!(metrics.prefix_hits.get() > 0, "the second round begins like the first");
    assert!(metrics.preemptions.get() > 0, "blocks were to run out");
    let uncached = EngineConfig { stages: stages(3), prefix_cache: false, ..cramped() };
    let sides = Sides { gate: GatePlacement::Attention, ..ON_FFN };
    let metrics = check(name, Serving { config: uncached, num_shards: 3, sides, rounds: 1 });
    assert_eq!(metrics.prefix_hits.get(), 0);
    assert!(metrics.preemptions.get() > 0, "blocks were to run out");
}

/// The same with shared experts on attention, in any number of stages.
#[test]
fn shared_experts_on_attention() {
    for name in ["tiny-deepseek-v2", "tiny-deepseek-v2-group", "tiny-deepseek-v3", "tiny-hash-routed"] {
        for (max_stages, num_shards, gate) in [
            (1, 1, GatePlacement::Ffn),
            (2, 2, GatePlacement::Ffn),
            (3, 1, GatePlacement::Attention),
            (4, 3, GatePlacement::Attention),
        ] {
            let sides = Sides { gate, shared_experts: SharedExpertPlacement::Attention };
            let config = EngineConfig { stages: stages(max_stages), ..cramped() };
            check(name, Serving { config, num_shards, sides, rounds: 1 });
        }
    }
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
