//! Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), in the paper's symbols: what is cached per
//! token is the normed latent c and the rope key shared by all heads, nothing else.
//!
//! **Absorbed** (rows that read the cache in place): W_UK is multiplied into the query and W_UV into the result, so the
//! cache is read as it lies, once for all heads. **Expanded** (long pieces of a prompt): keys and values of every head
//! are computed from the latents, then it is ordinary attention.
use afd_common::config::model::{MlaConfig, ModelConfig};
use afd_common::ids::LayerIdx;
use afd_common::weights::{WeightError, Weights};
use afd_ffi::cpu_attention::CacheView;
use afd_ffi::cpu_heads::{StoredHeads, into_columns, into_rows};
use afd_ffi::cpu_linear;
use tch::{TchError, Tensor};

use super::error::{At, ModelError, RowsError, outside_layers};
use super::flash::causal_attention;
use super::kv::LayerCache;
use super::prepare::{GatheredRows, PreparedStage};
use super::project::{Projection, fused, out_projection};
use super::rope::{Rope, softmax_factor};
use super::rows::{Norm, direct_attention, mla_rows, rms_norm};

mod prompts;

pub(super) use prompts::MlaPrompts;

/// Epsilon of the norms of the latents, whatever the model's own is.
const LATENT_NORM_EPS: f64 = 1e-6;

/// One layer's attention.
pub(super) struct Mla {
    dims: Dims,
    /// W_DQ (or W_Q, without a query latent) and W_DKV with W_KR, `[num_queries + kv_lora_rank + rope, hidden]`.
    down: Projection,
    query_latent: Option<QueryLatent>,
    /// `[kv_lora_rank]`
    kv_norm: Norm,
    /// W_UK and W_UV, `[num_heads * (nope + value), kv_lora_rank]`.
    up: Tensor,
    /// W_UK, `[num_heads, nope, kv_lora_rank]`, a view.
    up_keys: Tensor,
    /// W_UVᵀ, `[num_heads, kv_lora_rank, value]`, a view.
    up_values: Tensor,
    /// Both for the loops for few rows; absent off the CPU.
    stored_up: Option<(StoredHeads, StoredHeads)>,
    out: Projection,
    scale: f64,
}

/// The query's low-rank projection.
struct QueryLatent {
    /// `[q_lora_rank]`
    norm: Norm,
    /// W_UQ with W_QR, `[num_heads * (nope + rope), q_lora_rank]`.
    up: Projection,
}

/// [`MlaConfig`]'s numbers as libtorch takes them.
#[derive(Clone, Copy)]
struct Dims {
    heads: i64,
    latent: i64,
    nope: i64,
    rope: i64,
    value: i64,
}

impl Dims {
    fn of(config: &MlaConfig) -> Self {
        Self {
            heads: config.num_heads as i64,
            latent: config.kv_lora_rank as i64,
            nope: config.qk_nope_head_dim as i64,
            rope: config.qk_rope_head_dim as i64,
            value: config.v_head_dim as i64,
        }
    }

    /// Width of a query.
    fn query(self) -> i64 {
        self.nope + self.rope
    }

    /// Multiply-adds per head of `len` rows with a context of `context` in either form, projections included.
    fn costs(self, len: i64, context: i64) -> (i64, i64) {
        // Of `len` rows on average half their own chunk is masked.
        let pairs = len * (context - len / 2);
        let per_token = (self.nope + self.value) * self.latent;
        let absorbed = pairs * (2 * self.latent + self.rope) + len * per_token;
        let expanded = pairs * (self.query() + self.query().max(self.value)) + context * per_token;
        (absorbed, expanded)
    }
}

impl Mla {
    /// `prefix` names the layer's attention in the checkpoint.
    pub(super) fn load(
        model: &ModelConfig,
        config: &MlaConfig,
        weights: &Weights,
        prefix: &str,
    ) -> Result<Self, ModelError> {
        let dims = Dims::of(config);
        let hidden = model.hidden_size;
        let query_rows = config.num_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim);
        let query = match config.q_lora_rank {
            Some(rank) => ("q_a_proj", rank),
            None => ("q_proj", query_rows),
        };
        let kv = ("kv_a_proj_with_mqa", config.kv_lora_rank + config.qk_rope_head_dim);
        let down = fused(weights, prefix, &[query, kv], "weight", Some(hidden))?;
        let down_bias = match (config.bias, config.q_lora_rank) {
            (false, _) => None,
            (true, Some(_)) => Some(fused(weights, prefix, &[query, kv], "bias", None)?),
            // Without a latent the query's projection never has a bias.
            (true, None) => {
                let kv_bias = fused(weights, prefix, &[kv], "bias", None)?;
                let padded = kv_bias.f_constant_pad_nd([query.1 as i64, 0]);
                Some(padded.map_err(outside_layers("kv_a_proj bias"))?)
            }
        };
        let query_latent = config
            .q_lora_rank
            .map(|rank| -> Result<_, WeightError> {
                Ok(QueryLatent {
                    norm: Norm::load(weights, &format!("{prefix}.q_a_layernorm.weight"), rank)?,
                    up: Projection::new(
                        weights.tensor(
                            &format!("{prefix}.q_b_proj.weight"),
                            &[query_rows as i64, rank as i64],
                        )?,
                        None,
                    ),
                })
            })
            .transpose()?;
        let name = format!("{prefix}.kv_b_proj.weight");
        let up = weights.tensor(&name, &[dims.heads * (dims.nope + dims.value), dims.latent])?;
        let (up_keys, up_values) =
            split_up(&up, dims).map_err(|source| WeightError::Torch { name, source })?;
        let stored_up = stored_up(&up_keys, &up_values);
        let attended = config.num_heads * config.v_head_dim;
        Ok(Self {
            dims,
            down: Projection::new(down, down_bias),
            query_latent,
            kv_norm: Norm::load(weights, &format!("{prefix}.kv_a_layernorm.weight"), config.kv_lora_rank)?,
            up,
            up_keys,
            up_values,
            stored_up,
            out: out_projection(weights, prefix, hidden, attended, config.bias)?,
            scale: (dims.query() as f64).powf(-0.5) * softmax_factor(&model.rope.scaling),
        })
    }

    /// Projection, norm of the latent, up-projection and output projection, if that is all there is.
    pub(super) fn for_kernels(&self) -> Option<(&Tensor, &Norm, &Tensor, &Tensor)> {
        let (down, out) = (self.down.without_bias()?, self.out.without_bias()?);
        self.query_latent.is_none().then_some((down, &self.kv_norm, &self.up, out))
    }

    /// Of the scores.
    pub(super) fn scale(&self) -> f64 {
        self.scale
    }

    /// Whether the absorbed form takes fewer operations.
    pub(super) fn prefers_direct(config: &MlaConfig, len: usize, context_len: usize) -> bool {
        let (absorbed, expanded) = Dims::of(config).costs(len as i64, context_len as i64);
        len == 1 || absorbed <= expanded
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
        let LayerCache::Mla(cache) = cache else { return Err(ModelError::Cache { layer }) };
        let Dims { heads, latent, rope: rope_dim, value, .. } = self.dims;
        let rows = stage.num_rows as i64;
        let down = self.down.forward(x, &stage.crew).at(layer, "q_proj and kv_a_proj")?;
        let num_queries = down.size()[1] - latent - rope_dim;
        let queries = down.f_narrow(1, 0, num_queries).at(layer, "q_proj")?;
        let latents = down.f_narrow(1, num_queries, latent + rope_dim).at(layer, "kv_a_proj")?;
        let queries = match &self.query_latent {
            None => queries,
            Some(query) => {
                let normed = rms_norm(&queries, &query.norm, LATENT_NORM_EPS).at(layer, "q_a_layernorm")?;
                query.up.forward(&normed, &stage.crew).at(layer, "q_b_proj")?
            }
        };
        let queries = queries.f_unflatten(1, [heads, self.dims.query()]).at(layer, "queries")?;
        mla_rows(&queries, &latents, &self.kv_norm, LATENT_NORM_EPS, rope, stage, cache)
            .at(layer, "rope and cache")?;

        let attended = if stage.gathered.is_empty() {
            self.absorbed(layer, &queries, stage, cache)?
        } else {
            let options = (x.kind(), x.device());
            let attended = Tensor::f_empty([rows, heads * value], options).at(layer, "attention")?;
            self.direct(layer, &queries, stage, cache, &attended)?;
            for sequence in &stage.gathered {
                self.expanded(sequence, &queries, cache, &attended).at(layer, "attention of a chunk")?;
            }
            attended
        };
        self.out.add_to(residual, &attended, &stage.crew).at(layer, "o_proj")
    }

    /// Writes attention of the stage's direct rows, if it has any, to `attended`, `[num_rows, num_heads * value]`, or the same
    /// by head.
    fn direct(
        &self,
        layer: LayerIdx,
        queries: &Tensor,
        stage: &PreparedStage,
        cache: &Tensor,
        attended: &Tensor,
    ) -> Result<(), ModelError> {
        let Dims { heads, value, .. } = self.dims;
        let mut attended = attended.f_view([-1, heads * value]).at(layer, "attention")?;
        if let Some(index) = &stage.direct_index {
            let queries = queries.f_index_select(0, index).at(layer, "queries")?;
            let direct = self.absorbed(layer, &queries, stage, cache)?;
            let _ = attended.f_index_copy_(0, index, &direct).at(layer, "attention")?;
        } else if stage.gathered.is_empty() {
            let direct = self.absorbed(layer, queries, stage, cache)?;
            attended.f_copy_(&direct).at(layer, "attention")?;
        }
        Ok(())
    }

    /// Attention of the stage's direct rows, `[direct rows, num_heads * value]`.
    fn absorbed(
        &self,
        layer: LayerIdx,
        queries: &Tensor,
        stage: &PreparedStage,
        cache: &Tensor,
    ) -> Result<Tensor, ModelError> {
        let Dims { heads, latent, nope, rope, value } = self.dims;
        let rows = queries.size()[0];
        let stored = self.stored_up.as_ref().filter(|_| cpu_linear::suits(rows as usize, queries.kind()));
        let content = queries.f_narrow(2, 0, nope).at(layer, "queries")?;
        let in_latent = match stored {
            Some((keys, _)) => into_columns(&content, keys, &stage.crew)
                .map_err(RowsError::from)
                .at(layer, "absorbing W_UK")?,
            // [heads, rows, nope] · [heads, nope, latent]
            None => content
                .f_transpose(0, 1)
                .and_then(|q| q.f_bmm(&self.up_keys)?.f_transpose(0, 1))
                .at(layer, "absorbing W_UK")?,
        };
        let rope_part = queries.f_narrow(2, nope, rope).at(layer, "queries")?;
        let options = (queries.kind(), queries.device());
        let out = Tensor::f_empty([heads, rows, latent], options).at(layer, "attention")?;
        let view = CacheView {
            keys: cache,
            values: cache,
            num_kv_heads: 1,
            key_dim: (latent + rope) as usize,
            value_dim: latent as usize,
        };
        let row_major = out.f_transpose(0, 1).at(layer, "attention")?;
        direct_attention(&[&in_latent, &rope_part], &view, stage, self.scale, &row_major)
            .at(layer, "attention")?;
        if let Some((_, values)) = stored {
            return into_rows(&out, values, &stage.crew).map_err(RowsError::from).at(layer, "absorbing W_UV");
        }
        // [heads, rows, latent] · [heads, latent, value]
        out.f_bmm(&self.up_values)
            .and_then(|out| out.f_transpose(0, 1)?.f_reshape([rows, heads * value]))
            .at(layer, "absorbing W_UV")
    }

    /// Attention of one sequence's rows, written to its part of `attended`.
    fn expanded(
        &self,
        sequence: &GatheredRows,
        queries: &Tensor,
        cache: &Tensor,
        attended: &Tensor,
    ) -> Result<(), TchError> {
        let Dims { heads, latent, nope, rope, value } = self.dims;
        let (start, len, context) = (sequence.start as i64, sequence.len as i64, sequence.context_len as i64);
        let cached = cache.f_index_select(0, &sequence.blocks)?.f_flatten(0, 1)?.f_narrow(0, 0, context)?;
        let expanded = cached.f_narrow(1, 0, latent)?.f_linear(&self.up, None::<Tensor>)?.f_view([
            context,
            heads,
            nope + value,
        ])?;
        let rope_keys = cached.f_narrow(1, latent, rope)?.f_unsqueeze(1)?.f_expand([-1, heads, -1], false)?;
        let keys = Tensor::f_cat(&[expanded.f_narrow(2, 0, nope)?, rope_keys], 2)?;
        let values = expanded.f_narrow(2, nope, value)?;
        // The fused kernel wants one width for all three; zeros change neither scores nor results.
        let width = self.dims.query().max(value);
        let by_head = |x: &Tensor| -> Result<Tensor, TchError> {
            let missing = width - x.size()[2];
            let x = if missing > 0 { x.f_constant_pad_nd([0, missing])? } else { x.shallow_clone() };
            x.f_transpose(0, 1)?.f_unsqueeze(0)
        };
        let queries = queries.f_narrow(0, start, len)?;
        let out = causal_attention(&by_head(&queries)?, &by_head(&keys)?, &by_head(&values)?, self.scale)?;
        let out = out.f_squeeze_dim(0)?.f_narrow(2, 0, value)?.f_transpose(0, 1)?;
        attended.f_narrow(0, start, len)?.f_copy_(&out.f_reshape([len, heads * value])?)?;
        Ok(())
    }
}

/// W_UK `[num_heads, nope, latent]` and W_UVᵀ `[num_heads, latent, value]` as views of `kv_b_proj`.
fn split_up(up: &Tensor, dims: Dims) -> Result<(Tensor, Tensor), TchError> {
    let by_head = up.f_view([dims.heads, dims.nope + dims.value, dims.latent])?;
    let keys = by_head.f_narrow(1, 0, dims.nope)?;
    let values = by_head.f_narrow(1, dims.nope, dims.value)?.f_transpose(1, 2)?;
    Ok((keys, values))
}

/// W_UK and W_UV as the loops for few rows take them; `None` where those cannot run.
fn stored_up(up_keys: &Tensor, up_values: &Tensor) -> Option<(StoredHeads, StoredHeads)> {
    let values = up_values.f_transpose(1, 2).ok()?;
    Some((StoredHeads::new(up_keys).ok()?, StoredHeads::new(&values).ok()?))
}
