//! The model as our kernels take it: every weight and every layer of the cache as a region of the device's memory, shared
//! with the tensors that libtorch computes with. Made only for what the kernels support.
use afd_common::config::model::AttentionConfig;
use afd_common::ids::LayerIdx;
use afd_ffi::FfiError;
use afd_ffi::cpu_rows::Pairing;
use afd_ffi::cuda::region;
use afd_gpu::ops::{Ahead, MlaSizes};
use afd_gpu::{Device, GpuError, Region};
use ffn_svc::device::SharedKernels;
use ffn_svc::model::FfnModelError;
use tch::{Kind, TchError, Tensor};

use super::kv::LayerCache;
use super::rows::Norm;
use super::{AttentionModel, Block, KvCache, Layer};

/// Everything that a decode step reads.
#[derive(Debug)]
pub struct KernelModel {
    /// `[vocab, hidden]` bf16
    pub embedding: Region,
    /// `[vocab, hidden]` bf16
    pub head: Region,
    /// `[hidden]` bf16
    pub final_norm: Region,
    /// In order.
    pub layers: Vec<KernelLayer>,
    /// `[max_model_len, rotary]` f32: of each position cosines, then sines.
    pub cos_sin: Region,
    /// Sizes.
    pub shape: KernelShape,
    /// Shared experts that are attention's.
    pub shared: Option<SharedKernels>,
}

/// Sizes that all layers share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelShape {
    /// Elements of a row.
    pub hidden: usize,
    /// Token ids.
    pub vocab: usize,
    /// Of the norms of the residual stream.
    pub epsilon: f32,
    /// Longest sequence, tokens.
    pub max_model_len: usize,
    /// Tokens of a cache block.
    pub block_size: usize,
    /// Of the scores.
    pub scale: f32,
    /// Elements of a head that turn.
    pub rotary: usize,
    /// Whether neighbours turn together; otherwise halves do.
    pub interleaved: bool,
    /// Heads.
    pub attention: AttentionShape,
}

/// Heads of either kind of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionShape {
    /// Grouped queries.
    Gqa {
        /// Query heads.
        heads: usize,
        /// Heads of the cache.
        kv: usize,
        /// Elements of a head.
        dim: usize,
    },
    /// Latent.
    Mla(MlaSizes),
}

impl KernelShape {
    fn of(model: &AttentionModel, cache: &KvCache) -> Result<Self, NoKernels> {
        let config = &model.config;
        let Some(first) = model.layers.first() else {
            return Err(NoKernels::Unsupported("a model without layers"));
        };
        let (attention, scale) = match (&config.attention, &first.attention) {
            (AttentionConfig::Gqa(gqa), Block::Gqa(block)) => {
                let (heads, kv, dim) = (gqa.num_heads, gqa.num_kv_heads, gqa.head_dim);
                (AttentionShape::Gqa { heads, kv, dim }, block.scale())
            }
            (AttentionConfig::Mla(mla), Block::Mla(block)) => {
                let sizes = MlaSizes {
                    heads: mla.num_heads,
                    latent: mla.kv_lora_rank,
                    rope: model.rope.dim,
                    nope: mla.qk_nope_head_dim,
                    value: mla.v_head_dim,
                };
                (AttentionShape::Mla(sizes), block.scale())
            }
            _ => return Err(NoKernels::Unsupported("mixed kinds of attention")),
        };
        Ok(Self {
            hidden: config.hidden_size,
            vocab: config.vocab_size,
            epsilon: config.rms_norm_eps as f32,
            max_model_len: model.max_model_len,
            block_size: cache.block_size(),
            scale: scale as f32,
            rotary: model.rope.dim,
            interleaved: model.rope.pairing == Pairing::Neighbours,
            attention,
        })
    }
}

/// One layer.
#[derive(Debug)]
pub struct KernelLayer {
    /// `[hidden]` bf16
    pub input_norm: Region,
    /// `[hidden]` bf16
    pub post_norm: Region,
    /// `[columns, hidden]` bf16: queries, keys and values, or queries, latent and rope key.
    pub projection: Region,
    /// `[hidden, attended]` bf16
    pub out: Region,
    /// The rest.
    pub attention: KernelAttention,
}

impl KernelLayer {
    fn new(
        device: &Device,
        layer: &Layer,
        cache: &LayerCache,
        shape: AttentionShape,
    ) -> Result<Self, NoKernels> {
        let norm = |norm: &Norm| region(device, norm.tensor());
        let (projection, out, attention) = match (&layer.attention, cache) {
            (Block::Gqa(block), LayerCache::Gqa { keys, values }) => {
                let Some((projection, norms, out)) = block.for_kernels() else {
                    return Err(NoKernels::Unsupported("biases, clipping or a norm over all heads"));
                };
                let norms = norms.map(|(query, key)| Ok::<_, FfiError>((norm(query)?, norm(key)?)));
                let attention = KernelAttention::Gqa {
                    norms: norms.transpose()?,
                    keys: region(device, keys)?,
                    values: region(device, values)?,
                };
                (projection, out, attention)
            }
            (Block::Mla(block), LayerCache::Mla(cache)) => {
                let Some((projection, kv_norm, up, out)) = block.for_kernels() else {
                    return Err(NoKernels::Unsupported("biases or a query latent"));
                };
                let attention = KernelAttention::Mla {
                    norm: norm(kv_norm)?,
                    up: region(device, &up_by_product(up, shape)?)?,
                    cache: region(device, cache)?,
                };
                (projection, out, attention)
            }
            _ => return Err(NoKernels::Unsupported("a cache of another kind of attention")),
        };
        Ok(Self {
            input_norm: norm(&layer.input_norm)?,
            post_norm: norm(&layer.post_norm)?,
            projection: region(device, projection)?,
            out: region(device, out)?,
            attention,
        })
    }

    /// Those that are read behind the write to the cache, and what is read `behind` them.
    pub fn behind_the_write<'a>(&'a self, behind: Option<&'a Region>) -> Ahead<'a> {
        let up = match &self.attention {
            KernelAttention::Gqa { .. } => None,
            KernelAttention::Mla { up, .. } => Some(up),
        };
        Ahead::of(up.into_iter().chain([&self.out]).chain(behind))
    }
}

/// What only one kind of attention has.
#[derive(Debug)]
pub enum KernelAttention {
    /// Grouped queries.
    Gqa {
        /// `[dim]` bf16 each, of queries and of keys.
        norms: Option<(Region, Region)>,
        /// `[blocks, block_size, kv, dim]` bf16
        keys: Region,
        /// The same.
        values: Region,
    },
    /// Latent.
    Mla {
        /// `[latent]` bf16
        norm: Region,
        /// Of every head W_UK, `[heads, latent, nope]`, then of every head W_UV, `[heads, value, latent]`, bf16: a copy, as
        /// products with a weight read it.
        up: Region,
        /// `[blocks, block_size, latent + rope]` bf16
        cache: Region,
    },
}

/// Why there is no [`KernelModel`]; the model is then computed by libtorch alone.
#[derive(Debug, thiserror::Error)]
pub enum NoKernels {
    /// Something that the kernels are not made for.
    #[error("the decode kernels do not support {0}")]
    Unsupported(&'static str),
    /// A tensor's memory cannot be used as it is.
    #[error(transparent)]
    Memory(#[from] FfiError),
    /// libtorch refused.
    #[error(transparent)]
    Torch(#[from] TchError),
    /// The device refused.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// Shared experts cannot be had.
    #[error("shared experts: {0}")]
    SharedExperts(#[from] FfnModelError),
}

impl KernelModel {
    /// Model and cache on `device`, which both are on.
    ///
    /// # Errors
    /// [`NoKernels`].
    pub fn new(device: &Device, model: &AttentionModel, cache: &KvCache) -> Result<Self, NoKernels> {
        let _no_grad = tch::no_grad_guard();
        check(model)?;
        let shape = KernelShape::of(model, cache)?;
        let layers = model.layers.iter().zip(cache.layers());
        let layers = layers.map(|(layer, cache)| KernelLayer::new(device, layer, cache, shape.attention));
        Ok(Self {
            embedding: region(device, &model.embedding)?,
            head: region(device, model.head.weight())?,
            final_norm: region(device, model.final_norm.tensor())?,
            layers: layers.collect::<Result<_, NoKernels>>()?,
            cos_sin: Region::from_slice(device, &cos_sin(model)?)?,
            shape,
            shared: model.shared_experts.as_ref().map(|shared| shared.kernels(device)).transpose()?,
        })
    }

    /// Whether attention has shared experts of layer `index`.
    pub fn has_shared(&self, index: usize) -> bool {
        self.shared.as_ref().is_some_and(|shared| shared.has(LayerIdx(index as u16)))
    }
}

/// Refuses what the kernels are not made for, beside what [`KernelShape`] and [`KernelLayer`] find.
fn check(model: &AttentionModel) -> Result<(), NoKernels> {
    let unsupported = |what| Err(NoKernels::Unsupported(what));
    if model.kind() != Kind::BFloat16 {
        return unsupported("other types than bfloat16");
    }
    if model.layers.iter().any(|layer| layer.mixture.gate.is_some()) {
        return unsupported("the gate on attention");
    }
    if model.layers.iter().any(|layer| layer.mixture.shared_experts.is_some()) {
        return unsupported("shared experts of these sizes on attention");
    }
    if (0..model.layers.len()).any(|i| model.routes_by_token(LayerIdx(i as u16))) {
        return unsupported("routing by token id");
    }
    Ok(())
}

/// [`KernelAttention::Mla::up`] of W_UK and W_UV, `[heads * (nope + value), latent]`.
fn up_by_product(up: &Tensor, shape: AttentionShape) -> Result<Tensor, TchError> {
    let AttentionShape::Mla(MlaSizes { heads, latent, nope, value, .. }) = shape else {
        return Ok(up.shallow_clone());
    };
    let (nope, value) = (nope as i64, value as i64);
    let by_head = up.f_view([heads as i64, nope + value, latent as i64])?;
    let keys = by_head.f_narrow(1, 0, nope)?.f_transpose(1, 2)?;
    let values = by_head.f_narrow(1, nope, value)?;
    Tensor::f_cat(&[keys.f_reshape([-1])?, values.f_reshape([-1])?], 0)
}

/// Of each position `rotary / 2` cosines, then as many sines.
pub(super) fn cos_sin(model: &AttentionModel) -> Result<Vec<f32>, TchError> {
    let positions: Vec<u32> = (0..model.max_model_len as u32).collect();
    let (cos, sin) = model.rope.rows(&positions)?;
    let shape = [positions.len() as i64, model.rope.dim as i64 / 2];
    let halves = [Tensor::f_from_slice(&cos)?.f_view(shape)?, Tensor::f_from_slice(&sin)?.f_view(shape)?];
    Vec::try_from(Tensor::f_cat(&halves, 1)?.f_view(-1)?)
}
