//! The attention stage of one layer: projections, KV cache, head.
use crate::plan::shape::{AttentionShape, Indexer};

/// Weights of the projections of one layer, elements. MLA's up-projections of keys and values count once: decoding
/// absorbs them into queries and output. Source: the families' checkpoints.
pub fn num_weights(attention: &AttentionShape, hidden: u32) -> f64 {
    let h = f64::from(hidden);
    match attention {
        AttentionShape::Gqa { heads, kv_heads, head_dim, .. } => {
            let head_dim = f64::from(*head_dim);
            2.0 * h * f64::from(*heads) * head_dim + 2.0 * h * f64::from(*kv_heads) * head_dim
        }
        AttentionShape::Mla {
            heads,
            q_lora_rank,
            kv_lora_rank,
            qk_nope_head_dim,
            qk_rope_head_dim,
            v_head_dim,
            indexer,
        } => {
            let (n, latent, rope) =
                (f64::from(*heads), f64::from(*kv_lora_rank), f64::from(*qk_rope_head_dim));
            let (nope, value) = (f64::from(*qk_nope_head_dim), f64::from(*v_head_dim));
            let query = match q_lora_rank {
                Some(rank) => f64::from(*rank) * (h + n * (nope + rope)),
                None => h * n * (nope + rope),
            };
            let scorer = indexer.map_or(0.0, |indexer| {
                let (heads, width) = (f64::from(indexer.heads), f64::from(indexer.head_dim));
                f64::from(q_lora_rank.unwrap_or(hidden)) * heads * width + h * (width + heads)
            });
            query + h * (latent + rope) + latent * n * (nope + value) + n * value * h + scorer
        }
    }
}

/// `kv`, cached elements per token and layer: `2 · n_kv · d_h`, or MLA's latent with its rope part (and the indexer's
/// key).
pub fn kv_elements_per_token(attention: &AttentionShape) -> f64 {
    match attention {
        AttentionShape::Gqa { kv_heads, head_dim, .. } => 2.0 * f64::from(*kv_heads) * f64::from(*head_dim),
        AttentionShape::Mla { kv_lora_rank, qk_rope_head_dim, indexer, .. } => {
            f64::from(*kv_lora_rank + *qk_rope_head_dim) + indexer_width(indexer)
        }
    }
}

/// Cached elements one sequence of `context` tokens holds, mean over `num_layers` layers: a window keeps its tokens only.
pub fn kv_elements_held(attention: &AttentionShape, context: f64, num_layers: u32) -> f64 {
    kv_elements_per_token(attention) * mean_tokens(attention, context, num_layers)
}

/// Cached elements that decoding one token of such a sequence reads, mean over layers. Sparse attention reads the
/// indexer's key of every token and the rest of the best ones.
pub fn kv_elements_read(attention: &AttentionShape, context: f64, num_layers: u32) -> f64 {
    match attention {
        AttentionShape::Mla { kv_lora_rank, qk_rope_head_dim, indexer: Some(indexer), .. } => {
            let chosen = context.min(f64::from(indexer.top_k));
            chosen * f64::from(*kv_lora_rank + *qk_rope_head_dim) + context * f64::from(indexer.head_dim)
        }
        _ => kv_elements_held(attention, context, num_layers),
    }
}

/// `F_att(S)`, operations per row: two per projection weight, and scores and weighted values over the context
/// (`4 · n_q · d_h · S`; absorbed MLA `2 · n · S · (2 · latent + rope)`, as its heads share the latent).
pub fn flop_per_row(attention: &AttentionShape, hidden: u32, context: f64, num_layers: u32) -> f64 {
    let projections = 2.0 * num_weights(attention, hidden);
    let over_context = match attention {
        AttentionShape::Gqa { heads, head_dim, .. } => {
            4.0 * f64::from(*heads) * f64::from(*head_dim) * mean_tokens(attention, context, num_layers)
        }
        AttentionShape::Mla { heads, kv_lora_rank, qk_rope_head_dim, indexer, .. } => {
            let width = 2.0 * f64::from(*kv_lora_rank) + f64::from(*qk_rope_head_dim);
            let chosen = indexer.map_or(context, |indexer| context.min(f64::from(indexer.top_k)));
            let scorer = indexer.map_or(0.0, |indexer| {
                2.0 * f64::from(indexer.heads) * f64::from(indexer.head_dim) * context
            });
            2.0 * f64::from(*heads) * chosen * width + scorer
        }
    };
    projections + over_context
}

/// Tokens attended to, mean over layers.
fn mean_tokens(attention: &AttentionShape, context: f64, num_layers: u32) -> f64 {
    match attention {
        AttentionShape::Gqa { window: Some(window), .. } => {
            let part = f64::from(window.num_layers) / f64::from(num_layers);
            (1.0 - part) * context + part * context.min(f64::from(window.tokens))
        }
        _ => context,
    }
}

fn indexer_width(indexer: &Option<Indexer>) -> f64 {
    indexer.map_or(0.0, |indexer| f64::from(indexer.head_dim))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::config_reader;

    #[test]
    fn qwen3_235b_caches_1024_elements_and_has_71_million_weights_a_layer() {
        let shape = config_reader::load("qwen3-235b-a22b-fp8").unwrap();
        assert_eq!(kv_elements_per_token(&shape.attention), 1024.0);
        assert!((num_weights(&shape.attention, shape.hidden) - 71.3e6).abs() < 0.1e6);
    }

    #[test]
    fn mla_caches_576_elements_whatever_its_heads() {
        for name in ["deepseek-v3", "kimi-k2", "deepseek-v2-lite"] {
            assert_eq!(kv_elements_per_token(&config_reader::load(name).unwrap().attention), 576.0);
        }
    }

    #[test]
    fn v2_lite_projects_with_13_8_million_weights_a_layer() {
        let shape = config_reader::load("deepseek-v2-lite").unwrap();
        assert!((num_weights(&shape.attention, shape.hidden) - 13.76e6).abs() < 0.01e6);
    }

    #[test]
    fn sparse_attention_reads_less_than_it_holds() {
        let attention = config_reader::load("deepseek-v3.2").unwrap().attention;
        let (held, read) =
            (kv_elements_held(&attention, 32768.0, 61), kv_elements_read(&attention, 32768.0, 61));
        assert_eq!(held, 32768.0 * 704.0);
        assert_eq!(read, 2048.0 * 576.0 + 32768.0 * 128.0);
    }

    #[test]
    fn a_window_in_half_of_the_layers_halves_long_contexts() {
        let attention = config_reader::load("gpt-oss-120b").unwrap().attention;
        assert_eq!(kv_elements_held(&attention, 1000.0, 36), 1024.0 * (0.5 * 1000.0 + 0.5 * 128.0));
        assert_eq!(kv_elements_held(&attention, 100.0, 36), 1024.0 * 100.0);
    }
}
