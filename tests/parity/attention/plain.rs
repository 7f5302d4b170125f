//! Attention as the papers write it, in f64 and plain loops, one token after the other, no cache, no kernel, no
//! libtorch: a whole sequence in, `post_attn` and `ffn_in` of one layer out.
use std::collections::HashMap;

use afd_common::config::model::{AttentionConfig, GqaConfig, MlaConfig, ModelConfig, QkNorm};

/// Weights by checkpoint name, row-major.
pub(crate) type Weights = HashMap<String, Vec<f64>>;

type Rows = Vec<Vec<f64>>;

/// `post_attn` and `ffn_in` of layer 0 for a residual stream.
pub(crate) fn first_layer(config: &ModelConfig, weights: &Weights, residual: &Rows) -> (Rows, Rows) {
    let layer = "model.layers.0";
    let eps = config.rms_norm_eps;
    let norm = |x: &Vec<f64>, name: &str| rms_norm(x, &weights[&format!("{layer}.{name}.weight")], eps);
    let x: Rows = residual.iter().map(|x| norm(x, "input_layernorm")).collect();
    let block = Block { config, weights, prefix: format!("{layer}.self_attn") };
    let out = match &config.attention {
        AttentionConfig::Gqa(gqa) => block.gqa(gqa, &x),
        AttentionConfig::Mla(mla) => block.mla(mla, &x),
    };
    let post: Rows =
        residual.iter().zip(&out).map(|(a, b)| a.iter().zip(b).map(|(a, b)| a + b).collect()).collect();
    let ffn_in = post.iter().map(|x| norm(x, "post_attention_layernorm")).collect();
    (post, ffn_in)
}

struct Block<'a> {
    config: &'a ModelConfig,
    weights: &'a Weights,
    prefix: String,
}

impl Block<'_> {
    fn linear(&self, name: &str, x: &[f64], bias: bool) -> Vec<f64> {
        let weight = &self.weights[&format!("{}.{name}.weight", self.prefix)];
        let mut y: Vec<f64> = weight.chunks(x.len()).map(|row| dot(row, x)).collect();
        if bias {
            let bias = &self.weights[&format!("{}.{name}.bias", self.prefix)];
            y.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
        }
        y
    }

    fn norm(&self, name: &str, x: &[f64], eps: f64) -> Vec<f64> {
        rms_norm(x, &self.weights[&format!("{}.{name}.weight", self.prefix)], eps)
    }

    fn gqa(&self, gqa: &GqaConfig, x: &Rows) -> Rows {
        let dim = gqa.head_dim;
        let eps = self.config.rms_norm_eps;
        let project = |name: &str, norm: Option<&str>, x: &Vec<f64>| -> Vec<f64> {
            let mut y = self.linear(name, x, gqa.qkv_bias);
            match (gqa.qk_norm, norm) {
                (QkNorm::Whole, Some(norm)) => y = self.norm(norm, &y, eps),
                (QkNorm::PerHead, Some(norm)) => {
                    y = y.chunks(dim).flat_map(|head| self.norm(norm, head, eps)).collect();
                }
                _ => {}
            }
            if let Some(limit) = gqa.clip_qkv {
                y.iter_mut().for_each(|y| *y = y.clamp(-limit, limit));
            }
            y
        };
        let turned = |position: usize, y: Vec<f64>| -> Vec<f64> {
            let part = |head: &[f64]| {
                [&self.rope(position, &head[..gqa.rotary_dim], false), &head[gqa.rotary_dim..]].concat()
            };
            y.chunks(dim).flat_map(part).collect()
        };
        let queries: Rows =
            x.iter().enumerate().map(|(p, x)| turned(p, project("q_proj", Some("q_norm"), x))).collect();
        let keys: Rows =
            x.iter().enumerate().map(|(p, x)| turned(p, project("k_proj", Some("k_norm"), x))).collect();
        let values: Rows = x.iter().map(|x| project("v_proj", None, x)).collect();
        let group = gqa.num_heads / gqa.num_kv_heads;
        (0..x.len())
            .map(|row| {
                let heads = (0..gqa.num_heads).flat_map(|h| {
                    let own = h * dim..(h + 1) * dim;
                    let shared = h / group * dim..(h / group + 1) * dim;
                    let keys: Rows = keys[..=row].iter().map(|k| k[shared.clone()].to_vec()).collect();
                    let values: Rows = values[..=row].iter().map(|v| v[shared.clone()].to_vec()).collect();
                    attend(&queries[row][own], &keys, &values, (dim as f64).sqrt().recip())
                });
                self.linear("o_proj", &heads.collect::<Vec<_>>(), gqa.o_bias)
            })
            .collect()
    }

    fn mla(&self, mla: &MlaConfig, x: &Rows) -> Rows {
        let (nope, rope, value) = (mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim);
        let turn = |position: usize, y: &[f64]| self.rope(position, y, mla.rope_interleave);
        let query = |x: &Vec<f64>| match mla.q_lora_rank {
            None => self.linear("q_proj", x, false),
            Some(_) => {
                let latent = self.norm("q_a_layernorm", &self.linear("q_a_proj", x, mla.bias), 1e-6);
                self.linear("q_b_proj", &latent, false)
            }
        };
        let down: Rows = x.iter().map(|x| self.linear("kv_a_proj_with_mqa", x, mla.bias)).collect();
        let up: Rows = down
            .iter()
            .map(|c| self.norm("kv_a_layernorm", &c[..mla.kv_lora_rank], 1e-6))
            .map(|latent| self.linear("kv_b_proj", &latent, false))
            .collect();
        let scale = ((nope + rope) as f64).sqrt().recip();
        (0..x.len())
            .map(|row| {
                let query = query(&x[row]);
                let heads = (0..mla.num_heads).flat_map(|h| {
                    let own = &query[h * (nope + rope)..][..nope + rope];
                    let own = [&own[..nope], &turn(row, &own[nope..])].concat();
                    let of_head = |up: &Vec<f64>| up[h * (nope + value)..][..nope + value].to_vec();
                    let keys: Rows = (0..=row)
                        .map(|t| [&of_head(&up[t])[..nope], &turn(t, &down[t][mla.kv_lora_rank..])].concat())
                        .collect();
                    let values: Rows = (0..=row).map(|t| of_head(&up[t])[nope..].to_vec()).collect();
                    attend(&own, &keys, &values, scale)
                });
                self.linear("o_proj", &heads.collect::<Vec<_>>(), mla.bias)
            })
            .collect()
    }

    /// Without scaling; the fixtures and the unit tests of the frequencies have those.
    fn rope(&self, position: usize, x: &[f64], neighbours: bool) -> Vec<f64> {
        let half = x.len() / 2;
        let mut y = x.to_vec();
        for i in 0..half {
            let angle = position as f64 * self.config.rope.theta.powf(-(i as f64) / half as f64);
            let (a, b) = if neighbours { (2 * i, 2 * i + 1) } else { (i, i + half) };
            y[a] = x[a] * angle.cos() - x[b] * angle.sin();
            y[b] = x[b] * angle.cos() + x[a] * angle.sin();
        }
        y
    }
}

fn attend(query: &[f64], keys: &Rows, values: &Rows, scale: f64) -> Vec<f64> {
    let weights: Vec<f64> = keys.iter().map(|key| (dot(query, key) * scale).exp()).collect();
    let sum: f64 = weights.iter().sum();
    (0..values[0].len())
        .map(|d| weights.iter().zip(values).map(|(w, value)| w * value[d]).sum::<f64>() / sum)
        .collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn rms_norm(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    assert_eq!(x.len(), weight.len());
    let mean = dot(x, x) / x.len() as f64;
    x.iter().zip(weight).map(|(x, w)| x / (mean + eps).sqrt() * w).collect()
}
