//! Both halves together: logits of whole prompts, and every greedy continuation, token for token, with all prompts in
//! one batch: some still in chunks while others decode, over blocks that lie all over the cache.
use afd_common::config::model::ModelConfig;
use afd_common::identity::GatePlacement;
use afd_common::ids::{LayerIdx, Shard};
use afd_tests::fixtures::{self, ALL};
use attention_svc::model::{AttentionModel, KvCache, Reach, StageBatch};
use ffn_svc::model::{FfnModel, Side};
use tch::{Kind, Tensor};

use crate::stage::{Blocks, Sequence, stage};
use crate::{distance, load};

struct Halves {
    config: ModelConfig,
    attention: AttentionModel,
    ffn: FfnModel,
    kv: KvCache,
}

impl Halves {
    fn load(name: &str, num_blocks: usize, block_size: usize) -> Self {
        let (config, weights, attention) = load(name);
        let ffn = FfnModel::load(&config, &weights, Shard::WHOLE, GatePlacement::Ffn).unwrap();
        let kv = KvCache::new(&config, num_blocks, block_size, Kind::Float).unwrap();
        Self { config, attention, ffn, kv }
    }

    /// Logits of each sequence's last row.
    fn step(&mut self, batch: &StageBatch, reach: Reach) -> Tensor {
        let stage = self.attention.prepare_with(batch, reach).unwrap();
        let mut residual = self.attention.embed(&batch.input_ids).unwrap();
        for layer in (0..self.config.layers.len() as u16).map(LayerIdx) {
            let attended = self.attention.attend(layer, residual, &stage, &mut self.kv).unwrap();
            residual = attended.residual + self.ffn.forward(layer, &attended.ffn_in, &Side::None).unwrap();
        }
        let last: Vec<usize> = batch.sequences.iter().map(|rows| rows.start + rows.len - 1).collect();
        self.attention.logits(&residual, &last).unwrap()
    }
}

#[test]
fn logits_of_whole_prompts_are_the_reference_s() {
    tch::no_grad(|| {
        for name in ALL {
            let path = fixtures::root().join("expected").join(format!("{name}.logits.safetensors"));
            let golden = Tensor::read_safetensors(path).unwrap();
            let prompts = fixtures::expected(name).unwrap().prompts;
            for (what, golden) in &golden {
                let id = what.strip_prefix("logits.").unwrap();
                let prompt = prompts.iter().find(|prompt| prompt.id == id).unwrap();
                for (chunk, reach) in
                    [(usize::MAX, Reach::Auto), (usize::MAX, Reach::Direct), (17, Reach::Auto)]
                {
                    let mut halves = Halves::load(name, 32, 16);
                    let mut blocks = Blocks::new(32, 16);
                    let mut sequence = Sequence::new(&prompt.input_ids);
                    let mut logits = Tensor::new();
                    while sequence.cached < sequence.ids.len() {
                        let len = chunk.min(sequence.ids.len() - sequence.cached);
                        logits = halves.step(&stage(&mut blocks, &mut [(&mut sequence, len)]), reach);
                    }
                    let off = distance(&logits.get(0), golden);
                    assert!(off <= 3e-4, "{name}, {what}, chunks of {chunk}, {reach:?}: off by {off:e}");
                }
            }
        }
    });
}

#[test]
fn all_greedy_continuations_in_one_changing_batch() {
    tch::no_grad(|| {
        for name in ALL {
            for (chunk, block_size) in [(7, 16), (16, 4), (17, 16), (1000, 3)] {
                let prompts = fixtures::expected(name).unwrap().prompts;
                let num_blocks = 1000 / block_size;
                let mut halves = Halves::load(name, num_blocks, block_size);
                let mut blocks = Blocks::new(num_blocks as u32, block_size);
                let mut sequences: Vec<Sequence> =
                    prompts.iter().map(|prompt| Sequence::new(&prompt.input_ids)).collect();
                let wanted = |i: usize| prompts[i].input_ids.len() + prompts[i].generated_ids.len();
                for step in 0.. {
                    // One sequence joins with every step; each goes on with a chunk, or its newest token.
                    let mut rows = Vec::new();
                    let mut whose = Vec::new();
                    for (i, sequence) in sequences.iter_mut().enumerate().take(step + 1) {
                        let left = sequence.ids.len() - sequence.cached;
                        if sequence.ids.len() < wanted(i) {
                            rows.push((sequence, left.min(chunk)));
                            whose.push(i);
                        }
                    }
                    if rows.is_empty() {
                        break;
                    }
                    let batch = stage(&mut blocks, &mut rows);
                    let best =
                        Vec::<i64>::try_from(halves.step(&batch, Reach::Auto).argmax(-1, false)).unwrap();
                    for (i, best) in whose.into_iter().zip(best) {
                        let sequence = &mut sequences[i];
                        if sequence.cached == sequence.ids.len() {
                            sequence.ids.push(best as u32);
                        }
                    }
                }
                for (sequence, prompt) in sequences.iter().zip(&prompts) {
                    let found = &sequence.ids[prompt.input_ids.len()..];
                    assert_eq!(found, prompt.generated_ids, "{name}, {}, chunks of {chunk}", prompt.id);
                }
            }
        }
    });
}
