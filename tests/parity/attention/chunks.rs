//! The same sequence in pieces of any size, alone or among others, by either way to the cache.
use afd_common::ids::LayerIdx;
use afd_tests::fixtures::ALL;
use attention_svc::model::{AttentionModel, KvCache, ModelError, Reach, StageBatch};
use tch::{Kind, Tensor};

use crate::stage::{Blocks, Sequence, stage};
use crate::{distance, load};

/// Rounding of f32 sums in another order, of numbers of size 1 to 10.
const TOLERANCE: f64 = 2e-5;

fn ids(count: usize, step: u32) -> Vec<u32> {
    (0..count as u32).map(|i| (i * step + 7) % 700).collect()
}

/// `ffn_in` of the first layer.
fn first_layer(model: &AttentionModel, kv: &mut KvCache, batch: &StageBatch, reach: Reach) -> Tensor {
    let stage = model.prepare_with(batch, reach).unwrap();
    let embedded = model.embed(&batch.input_ids).unwrap();
    model.attend(LayerIdx(0), embedded, &stage, kv).unwrap().ffn_in
}

#[test]
fn any_chunking_by_any_way_to_the_cache_gives_the_same() {
    let ids = ids(77, 31);
    for name in ALL {
        let (config, _, model) = load(name);
        let run = |chunk: usize, block_size: usize, reach: Reach| {
            let mut kv = KvCache::new(&config, 90, block_size, Kind::Float).unwrap();
            let mut blocks = Blocks::new(90, block_size);
            let mut sequence = Sequence::new(&ids);
            let mut parts = Vec::new();
            while sequence.cached < ids.len() {
                let len = chunk.min(ids.len() - sequence.cached);
                let batch = stage(&mut blocks, &mut [(&mut sequence, len)]);
                parts.push(first_layer(&model, &mut kv, &batch, reach));
            }
            Tensor::cat(&parts, 0)
        };
        let whole = run(ids.len(), 16, Reach::Gathered);
        for chunk in [1, 3, 7, 16, 17, ids.len()] {
            for (block_size, reach) in [
                (16, Reach::Auto),
                (16, Reach::Direct),
                (16, Reach::Gathered),
                (5, Reach::Auto),
                (1, Reach::Direct),
            ] {
                let off = distance(&run(chunk, block_size, reach), &whole);
                assert!(
                    off <= TOLERANCE,
                    "{name}: chunks of {chunk}, blocks of {block_size}, {reach:?}: off by {off:e}"
                );
            }
        }
    }
}

#[test]
fn a_stage_of_chunks_and_decode_rows_gives_each_what_it_gets_alone() {
    for name in ALL {
        let (config, _, model) = load(name);
        // Rows of each sequence in each of three stages: short and long chunks, decode, and chunks after context.
        let plan = [[9, 40, 1, 12], [1, 25, 1, 1], [1, 1, 30, 20]];
        let all: Vec<Vec<u32>> = (0..4).map(|i| ids(80, 13 + 2 * i)).collect();
        let mut kv = KvCache::new(&config, 64, 8, Kind::Float).unwrap();
        let mut blocks = Blocks::new(64, 8);
        let mut sequences: Vec<Sequence> = all.iter().map(|ids| Sequence::new(ids)).collect();
        let mut together: [Vec<Tensor>; 4] = Default::default();
        for lens in plan {
            let mut rows: Vec<_> = sequences.iter_mut().zip(lens).collect();
            let batch = stage(&mut blocks, &mut rows);
            let found = first_layer(&model, &mut kv, &batch, Reach::Auto);
            for (parts, rows) in together.iter_mut().zip(&batch.sequences) {
                parts.push(found.narrow(0, rows.start as i64, rows.len as i64));
            }
        }
        for (i, parts) in together.iter().enumerate() {
            let mut kv = KvCache::new(&config, 64, 8, Kind::Float).unwrap();
            let mut alone = Sequence::new(&all[i]);
            let len = sequences[i].cached;
            let batch = stage(&mut Blocks::new(64, 8), &mut [(&mut alone, len)]);
            let off = distance(&Tensor::cat(parts, 0), &first_layer(&model, &mut kv, &batch, Reach::Auto));
            assert!(off <= TOLERANCE, "{name}: sequence {i} is off by {off:e}");
        }
    }
}

#[test]
fn a_stage_without_rows_is_legal() {
    for name in ["tiny-llama", "tiny-deepseek-v3"] {
        let (config, _, model) = load(name);
        let mut kv = KvCache::new(&config, 2, 8, Kind::Float).unwrap();
        let found = first_layer(&model, &mut kv, &StageBatch::default(), Reach::Auto);
        assert_eq!(found.size(), [0, config.hidden_size as i64]);
        assert_eq!(model.logits(&found, &[]).unwrap().size(), [0, config.vocab_size as i64]);
    }
}

#[test]
fn a_stage_that_contradicts_itself_is_refused_in_words() {
    for name in ["tiny-llama", "tiny-deepseek-v3"] {
        let (config, _, model) = load(name);
        let mut kv = KvCache::new(&config, 4, 8, Kind::Float).unwrap();
        let good = stage(&mut Blocks::new(4, 8), &mut [(&mut Sequence::new(&ids(20, 3)), 20)]);
        let refused = |reach: Reach, change: &dyn Fn(&mut StageBatch), kv: &mut KvCache| -> String {
            let mut batch = good.clone();
            change(&mut batch);
            let stage = match model.prepare_with(&batch, reach) {
                Ok(stage) => stage,
                Err(error) => return error.to_string(),
            };
            let embedded = model.embed(&batch.input_ids).unwrap();
            let error: ModelError = model.attend(LayerIdx(1), embedded, &stage, kv).err().unwrap();
            error.to_string()
        };
        for reach in [Reach::Direct, Reach::Gathered] {
            let mut says = |change: &dyn Fn(&mut StageBatch), words: &str| {
                let found = refused(reach, change, &mut kv);
                assert!(found.contains(words), "{reach:?}: {found:?} does not say {words:?}");
            };
            says(&|b| b.positions.truncate(19), "19 positions, 20 ids");
            says(&|b| b.sequences[0].len = 19, "19 rows, the stage 20");
            says(&|b| b.sequences[0].start = 1, "expected some from 0 on");
            says(&|b| b.sequences[0].context_len = 19, "20 rows in a context of 19");
            says(&|b| b.sequences[0].context_len = 100_000, "at most");
            says(&|b| b.slot_mapping[3] = 32, "layer 1: rope and cache");
            says(&|b| b.slot_mapping[3] = -1, "slot -1 of 32");
            says(&|b| b.sequences[0].block_table.truncate(2), "layer 1: attention");
            says(&|b| b.sequences[0].block_table[1].0 = 4, "layer 1: attention");
        }
        assert!(model.embed(&[config.vocab_size as u32]).is_err());
        assert!(matches!(
            model.attend(
                LayerIdx(99),
                model.embed(&[]).unwrap(),
                &model.prepare(&StageBatch::default()).unwrap(),
                &mut kv
            ),
            Err(ModelError::Cache { layer: LayerIdx(99) })
        ));
    }
}
