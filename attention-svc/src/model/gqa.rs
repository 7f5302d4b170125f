//! Grouped-query attention: Llama, Mixtral, Qwen3-MoE (norm of each head), OLMoE (norm of the whole projection, clip).
use afd_common::config::model::{GqaConfig, ModelConfig, QkNorm};
use afd_common::ids::LayerIdx;
use afd_common::weights::{WeightError, Weights};
use afd_ffi::cpu_attention::CacheView;
use afd_ffi::cpu_rows::GqaShape;
use tch::Tensor;

use super::error::{At, ModelError};
use super::flash::causal_attention;
use super::kv::LayerCache;
use super::prepare::{GatheredRows, PreparedStage};
use super::project::{Projection, fused, out_projection};
use super::rope::Rope;
use super::rows::{Norm, Norms, direct_attention, gqa_rows};

mod prompts;

pub(super) use prompts::GqaPrompts;

/// One layer's attention.
pub(super) struct Gqa {
    /// Queries, keys and values, `[(num_heads + 2 num_kv_heads) * head_dim, hidden]`.
    qkv: Projection,
    out: Projection,
    shape: GqaShape,
    norms: Option<Norms>,
    clip: Option<f64>,
    scale: f64,
}

/// Norms of queries and keys, each head on its own.
type HeadNorms<'a> = Option<(&'a Norm, &'a Norm)>;

impl Gqa {
    /// Projection, norms and output projection, if that is all there is.
    pub(super) fn for_kernels(&self) -> Option<(&Tensor, HeadNorms<'_>, &Tensor)> {
        let per_head = |norm: &Norm| norm.len() == self.shape.head_dim as i64;
        let norms = self.norms.as_ref().map(|norms| (&norms.query, &norms.key));
        let fits = self.clip.is_none() && norms.is_none_or(|(query, key)| per_head(query) && per_head(key));
        if !fits {
            return None;
        }
        Some((self.qkv.without_bias()?, norms, self.out.without_bias()?))
    }

    /// `prefix` names the layer's attention in the checkpoint.
    pub(super) fn load(
        model: &ModelConfig,
        config: &GqaConfig,
        weights: &Weights,
        prefix: &str,
    ) -> Result<Self, ModelError> {
        if let Some(window) = config.sliding_window {
            let what = format!("{window}: sliding-window attention is not served, only null");
            return Err(ModelError::Unsupported { field: "sliding_window", what });
        }
        let &GqaConfig { num_heads, num_kv_heads, head_dim, .. } = config;
        let (hidden, q_len, kv_len) = (model.hidden_size, num_heads * head_dim, num_kv_heads * head_dim);
        let parts = [("q_proj", q_len), ("k_proj", kv_len), ("v_proj", kv_len)];
        let qkv = fused(weights, prefix, &parts, "weight", Some(hidden))?;
        let bias = config.qkv_bias.then(|| fused(weights, prefix, &parts, "bias", None)).transpose()?;
        let norm = |name: &str, len: usize| Norm::load(weights, &format!("{prefix}.{name}.weight"), len);
        let lens = match config.qk_norm {
            QkNorm::None => None,
            QkNorm::PerHead => Some((head_dim, head_dim)),
            QkNorm::Whole => Some((q_len, kv_len)),
        };
        let norms = lens
            .map(|(query, key)| -> Result<_, WeightError> {
                Ok(Norms {
                    query: norm("q_norm", query)?,
                    key: norm("k_norm", key)?,
                    eps: model.rms_norm_eps,
                })
            })
            .transpose()?;
        Ok(Self {
            qkv: Projection::new(qkv, bias),
            out: out_projection(weights, prefix, hidden, q_len, config.o_bias)?,
            shape: GqaShape { num_heads, num_kv_heads, head_dim },
            norms,
            clip: config.clip_qkv,
            scale: (head_dim as f64).powf(-0.5),
        })
    }

    /// Of the scores.
    pub(super) fn scale(&self) -> f64 {
        self.scale
    }

    /// Whether rows are better off reading the cache in place than having their context copied together.
    pub(super) fn prefers_direct(len: usize, _context_len: usize) -> bool {
        len <= 8
    }

    /// `residual` + attention of `x`, the residual's norm; both `[num_rows, hidden]`.
    pub(super) fn forward(
        &self,
        layer: LayerIdx,
        residual: &Tensor,
        x: &Tensor,
        rope: &Rope,
        stage: &PreparedStage,
        cache: &mut LayerCache,
    ) -> Result<Tensor, ModelError> {
        let LayerCache::Gqa { keys, values } = cache else { return Err(ModelError::Cache { layer }) };
        let GqaShape { num_heads, num_kv_heads, head_dim } = self.shape;
        let qkv = self.qkv.forward(x, &stage.crew).at(layer, "qkv_proj")?;
        gqa_rows(&qkv, self.shape, self.norms.as_ref(), self.clip, rope, stage, keys, values)
            .at(layer, "rope and cache")?;

        let rows = stage.num_rows as i64;
        let heads = qkv
            .f_view([rows, (num_heads + 2 * num_kv_heads) as i64, head_dim as i64])
            .at(layer, "queries")?;
        let queries = heads.f_narrow(1, 0, num_heads as i64).at(layer, "queries")?;
        let shape = [rows, num_heads as i64, head_dim as i64];
        let attended = Tensor::f_empty(shape, (qkv.kind(), qkv.device())).at(layer, "attention")?;
        let view = CacheView { keys, values, num_kv_heads, key_dim: head_dim, value_dim: head_dim };
        direct_attention(&[&queries], &view, stage, self.scale, &attended).at(layer, "attention")?;
        for sequence in &stage.gathered {
            self.gathered(sequence, &heads, keys, values, &attended).at(layer, "attention of a chunk")?;
        }
        let attended = attended.f_view([rows, (num_heads * head_dim) as i64]).at(layer, "attention")?;
        self.out.add_to(residual, &attended, &stage.crew).at(layer, "o_proj")
    }

    /// Attention of one sequence's rows; `heads` `[num_rows, num_heads + 2 num_kv_heads, head_dim]`.
    fn gathered(
        &self,
        sequence: &GatheredRows,
        heads: &Tensor,
        keys: &Tensor,
        values: &Tensor,
        attended: &Tensor,
    ) -> Result<(), tch::TchError> {
        let (num_kv, dim) = (self.shape.num_kv_heads as i64, self.shape.head_dim as i64);
        let num_heads = self.shape.num_heads as i64;
        let group = num_heads / num_kv;
        let (start, len) = (sequence.start as i64, sequence.len as i64);
        let context = sequence.context_len as i64;
        let rows = heads.f_narrow(0, start, len)?;
        // [len, num_kv, group, dim] → [num_kv, group, len, dim]; keys are shared by a group, not repeated for it.
        let queries =
            rows.f_narrow(1, 0, num_heads)?.f_unflatten(1, [num_kv, group])?.f_permute([1, 2, 0, 3])?;
        let shared = |cache: &Tensor, first: i64| {
            let tokens = if context == len {
                rows.f_narrow(1, first, num_kv)?
            } else {
                cache.f_index_select(0, &sequence.blocks)?.f_flatten(0, 1)?.f_narrow(0, 0, context)?
            };
            tokens.f_permute([1, 0, 2])?.f_unsqueeze(1)?.f_expand([num_kv, group, context, dim], false)
        };
        let out = causal_attention(
            &queries,
            &shared(keys, num_heads)?,
            &shared(values, num_heads + num_kv)?,
            self.scale,
        )?;
        let out = out.f_permute([2, 0, 1, 3])?.f_reshape([len, num_heads, dim])?;
        attended.f_narrow(0, start, len)?.f_copy_(&out)?;
        Ok(())
    }
}
