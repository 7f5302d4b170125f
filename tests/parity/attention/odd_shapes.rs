//! Shapes that no published checkpoint has, with every option on and off, against the plain reference.
use afd_common::config::model::{
    Architecture, AttentionConfig, CheckpointDtype, DenseConfig, FfnConfig, GqaConfig, MlaConfig,
    ModelConfig, QkNorm, RopeConfig, RopeScaling,
};
use afd_common::ids::LayerIdx;
use afd_common::weights::Weights;
use attention_svc::model::{AttentionModel, KvCache, ModelError, Reach};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

use crate::stage::{Blocks, Sequence, stage};
use crate::{distance, plain};

const VOCAB: usize = 13;

fn model(hidden: usize, attention: AttentionConfig) -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Llama,
        hidden_size: hidden,
        vocab_size: VOCAB,
        max_position_embeddings: 64,
        rms_norm_eps: 1e-3,
        tie_word_embeddings: false,
        attention,
        rope: RopeConfig { theta: 100.0, scaling: RopeScaling::None },
        layers: vec![FfnConfig::Dense(DenseConfig { intermediate_size: 3, bias: false })],
        dtype: CheckpointDtype::F32,
        fp8_block: None,
        bos_token_id: None,
        eos_token_ids: vec![0],
    }
}

/// Everything that attention asks a checkpoint for.
fn shapes(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let hidden = config.hidden_size;
    let mut all = vec![
        ("model.embed_tokens.weight".into(), vec![VOCAB, hidden]),
        ("lm_head.weight".into(), vec![VOCAB, hidden]),
        ("model.norm.weight".into(), vec![hidden]),
        ("model.layers.0.input_layernorm.weight".into(), vec![hidden]),
        ("model.layers.0.post_attention_layernorm.weight".into(), vec![hidden]),
    ];
    let mut of_block = |name: &str, shape: &[usize]| {
        all.push((format!("model.layers.0.self_attn.{name}"), shape.to_vec()));
    };
    match &config.attention {
        AttentionConfig::Gqa(gqa) => {
            let (q, kv) = (gqa.num_heads * gqa.head_dim, gqa.num_kv_heads * gqa.head_dim);
            for (name, rows) in [("q_proj", q), ("k_proj", kv), ("v_proj", kv)] {
                of_block(&format!("{name}.weight"), &[rows, hidden]);
                if gqa.qkv_bias {
                    of_block(&format!("{name}.bias"), &[rows]);
                }
            }
            of_block("o_proj.weight", &[hidden, q]);
            if gqa.o_bias {
                of_block("o_proj.bias", &[hidden]);
            }
            let norms = match gqa.qk_norm {
                QkNorm::None => None,
                QkNorm::PerHead => Some((gqa.head_dim, gqa.head_dim)),
                QkNorm::Whole => Some((q, kv)),
            };
            if let Some((q, k)) = norms {
                of_block("q_norm.weight", &[q]);
                of_block("k_norm.weight", &[k]);
            }
        }
        AttentionConfig::Mla(mla) => {
            let query = mla.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim);
            let cached = mla.kv_lora_rank + mla.qk_rope_head_dim;
            match mla.q_lora_rank {
                None => of_block("q_proj.weight", &[query, hidden]),
                Some(rank) => {
                    of_block("q_a_proj.weight", &[rank, hidden]);
                    of_block("q_a_layernorm.weight", &[rank]);
                    of_block("q_b_proj.weight", &[query, rank]);
                    if mla.bias {
                        of_block("q_a_proj.bias", &[rank]);
                    }
                }
            }
            of_block("kv_a_proj_with_mqa.weight", &[cached, hidden]);
            of_block("kv_a_layernorm.weight", &[mla.kv_lora_rank]);
            of_block(
                "kv_b_proj.weight",
                &[mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank],
            );
            of_block("o_proj.weight", &[hidden, mla.num_heads * mla.v_head_dim]);
            if mla.bias {
                of_block("kv_a_proj_with_mqa.bias", &[cached]);
                of_block("o_proj.bias", &[hidden]);
            }
        }
    }
    all
}

/// A checkpoint of noise; norms around 1, so that a forgotten one shows.
fn checkpoint(config: &ModelConfig) -> (tempfile::TempDir, plain::Weights) {
    let mut plain = plain::Weights::new();
    let mut tensors = Vec::new();
    for (name, shape) in shapes(config) {
        let size: Vec<i64> = shape.iter().map(|&n| n as i64).collect();
        let noise = Tensor::randn(&size[..], (Kind::Float, Device::Cpu));
        let tensor = match shape[..] {
            [_, columns] => noise * (1.5 / (columns as f64).sqrt()),
            _ if name.ends_with("bias") => noise * 0.3,
            _ => noise * 0.2 + 1.0,
        };
        plain.insert(name.clone(), Vec::try_from(tensor.view(-1).to_kind(Kind::Double)).unwrap());
        tensors.push((name, tensor));
    }
    let folder = tempfile::tempdir().unwrap();
    Tensor::write_safetensors(&tensors, folder.path().join("model.safetensors")).unwrap();
    (folder, plain)
}

fn compare(
    config: &ModelConfig,
    tokens: usize,
    chunk: usize,
    block_size: usize,
) -> Result<(), TestCaseError> {
    let _no_grad = tch::no_grad_guard();
    let (folder, plain) = checkpoint(config);
    let weights = Weights::open(folder.path(), config, Kind::Float).unwrap();
    let model = AttentionModel::load(config, &weights, 64).unwrap();
    let ids: Vec<u32> = (0..tokens).map(|i| (i * 5 % VOCAB) as u32).collect();
    let hidden = config.hidden_size;
    let embedding = &plain["model.embed_tokens.weight"];
    let residual: Vec<Vec<f64>> =
        ids.iter().map(|&id| embedding[id as usize * hidden..][..hidden].to_vec()).collect();
    let (post_attn, ffn_in) = plain::first_layer(config, &plain, &residual);
    let tensor =
        |rows: &[Vec<f64>]| Tensor::from_slice(&rows.concat()).view([-1, hidden as i64]).to_kind(Kind::Float);
    let (post_attn, ffn_in) = (tensor(&post_attn), tensor(&ffn_in));

    for reach in [Reach::Auto, Reach::Direct, Reach::Gathered] {
        let mut kv = KvCache::new(config, 70, block_size, Kind::Float).unwrap();
        let mut blocks = Blocks::new(70, block_size);
        let mut sequence = Sequence::new(&ids);
        while sequence.cached < tokens {
            let from = sequence.cached as i64;
            let len = chunk.min(tokens - sequence.cached);
            let batch = stage(&mut blocks, &mut [(&mut sequence, len)]);
            let stage = model.prepare_with(&batch, reach).unwrap();
            let embedded = model.embed(&batch.input_ids).unwrap();
            let found = model.attend(LayerIdx(0), embedded, &stage, &mut kv).unwrap();
            for (found, expected) in [(&found.residual, &post_attn), (&found.ffn_in, &ffn_in)] {
                let off = distance(found, &expected.narrow(0, from, len as i64));
                prop_assert!(off < 2e-5, "{reach:?}, rows from {from}: off by {off:e}");
            }
        }
    }
    Ok(())
}

fn gqa() -> impl Strategy<Value = GqaConfig> {
    let norms = prop_oneof![Just(QkNorm::None), Just(QkNorm::PerHead), Just(QkNorm::Whole)];
    let rotary = (1..12usize).prop_flat_map(|half| (Just(half), 1..=half));
    (1..4usize, 1..6usize, rotary, any::<[bool; 2]>(), norms, prop::option::of(0.5..2.0f64)).prop_map(
        |(num_kv_heads, group, (half, turning), [qkv_bias, o_bias], qk_norm, clip_qkv)| GqaConfig {
            num_heads: num_kv_heads * group,
            num_kv_heads,
            head_dim: 2 * half,
            rotary_dim: 2 * turning,
            qkv_bias,
            o_bias,
            qk_norm,
            clip_qkv,
            sliding_window: None,
        },
    )
}

fn mla() -> impl Strategy<Value = MlaConfig> {
    (
        1..8usize,
        prop::option::of(1..20usize),
        1..40usize,
        1..20usize,
        1..9usize,
        1..30usize,
        any::<[bool; 2]>(),
    )
        .prop_map(
            |(num_heads, q_lora_rank, kv_lora_rank, nope, half, v_head_dim, [bias, interleave])| MlaConfig {
                num_heads,
                q_lora_rank,
                kv_lora_rank,
                qk_nope_head_dim: nope,
                qk_rope_head_dim: 2 * half,
                v_head_dim,
                bias,
                rope_interleave: interleave,
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn grouped_queries_of_any_shape(
        config in gqa(), hidden in 1..70usize, tokens in 1..30usize, chunk in 1..31usize, block_size in 1..18usize
    ) {
        compare(&model(hidden, AttentionConfig::Gqa(config)), tokens, chunk, block_size)?;
    }

    #[test]
    fn latent_attention_of_any_shape(
        config in mla(), hidden in 1..70usize, tokens in 1..30usize, chunk in 1..31usize, block_size in 1..18usize
    ) {
        compare(&model(hidden, AttentionConfig::Mla(config)), tokens, chunk, block_size)?;
    }
}

#[test]
fn what_is_not_served_is_refused_by_name() {
    let gqa = |change: &dyn Fn(&mut GqaConfig)| {
        let mut config = GqaConfig {
            num_heads: 2,
            num_kv_heads: 1,
            head_dim: 4,
            rotary_dim: 4,
            qkv_bias: false,
            o_bias: false,
            qk_norm: QkNorm::None,
            clip_qkv: None,
            sliding_window: None,
        };
        change(&mut config);
        model(8, AttentionConfig::Gqa(config))
    };
    let refused = |config: &ModelConfig, max_model_len: usize| -> ModelError {
        let weights = Weights::dummy(config, Kind::Float, 1);
        AttentionModel::load(config, &weights, max_model_len).err().unwrap()
    };
    let window = refused(&gqa(&|c| c.sliding_window = Some(4096)), 64).to_string();
    assert!(window.contains("sliding_window") && window.contains("4096"), "{window}");
    let odd = refused(&gqa(&|c| (c.head_dim, c.rotary_dim) = (5, 5)), 64).to_string();
    assert!(odd.contains("head_dim"), "{odd}");
    let long = refused(&gqa(&|_| {}), 65).to_string();
    assert!(long.contains("max_position_embeddings") && long.contains("65"), "{long}");
}
