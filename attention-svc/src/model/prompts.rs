//! Attention of prompts on a GPU, where the model allows kernels: as `mla` and `gqa` compute it, with everything between
//! libtorch's products in a few kernels. One kernel norms, turns and writes to the cache; one call of flash attention
//! serves all sequences whose rows lie together, whatever their lengths and however much of them was cached before.
//!
//! Rows that come alone (decoding sequences in a step with prompts) go through the decode kernel where they are latent, and
//! otherwise the way that they go without kernels.
use std::sync::Arc;

use afd_common::config::model::AttentionConfig;
use afd_common::ids::LayerIdx;
use afd_ffi::cpu_rows::Pairing;
use afd_ffi::cuda;
use afd_gpu::ops::{Mla, MlaShape, RowPlaces, Rows};
use afd_gpu::{Device, GpuError, Region, Stream};
use tch::{Kind, Tensor};

use super::device_rows::{DeviceRows, Span};
use super::error::At;
use super::gqa::GqaPrompts;
use super::kv::LayerCache;
use super::mla::MlaPrompts;
use super::on_device::cos_sin;
use super::prepare::PreparedStage;
use super::{AttentionModel, Block, ModelError, NoKernels};

/// What all layers share, and what each has for itself.
pub(super) struct Prompts {
    pub(super) device: Device,
    pub(super) stream: Arc<Stream>,
    pub(super) kernels: Rows,
    /// For rows that come alone.
    pub(super) decode: Option<Mla>,
    /// `[max_model_len, rotary]` f32: of each position cosines, then sines.
    cos_sin: Region,
    block_size: usize,
    rotary: usize,
    interleaved: bool,
    layers: Vec<LayerPrompts>,
}

/// Rows that come alone, at most; more take the other way.
pub(super) const MAX_ALONE: usize = 256;

/// One layer's.
enum LayerPrompts {
    Mla(MlaPrompts),
    Gqa(GqaPrompts),
}

/// A layer's rows on their way through attention.
#[derive(Clone, Copy)]
pub(super) struct Pass<'a> {
    pub(super) prompts: &'a Prompts,
    pub(super) layer: LayerIdx,
    pub(super) stage: &'a PreparedStage,
    pub(super) rows: &'a DeviceRows,
    /// Elements of a head that turn.
    pub(super) rotary: usize,
    /// Whether neighbours turn together; otherwise halves do.
    pub(super) interleaved: bool,
}

impl Prompts {
    /// # Errors
    /// [`NoKernels`].
    pub(super) fn new(
        stream: &Arc<Stream>,
        model: &AttentionModel,
        block_size: usize,
    ) -> Result<Self, NoKernels> {
        let _no_grad = tch::no_grad_guard();
        if model.kind() != Kind::BFloat16 {
            return Err(NoKernels::Unsupported("other types than bfloat16"));
        }
        if !model.config.vocab_size.is_multiple_of(8) {
            return Err(NoKernels::Unsupported("a vocabulary that is not a multiple of 8"));
        }
        let device = stream.device();
        let of_layer = |layer: &super::Layer| match &layer.attention {
            Block::Mla(mla) => Ok(LayerPrompts::Mla(mla.prompts(device)?)),
            Block::Gqa(gqa) => Ok(LayerPrompts::Gqa(gqa.prompts(device)?)),
        };
        let decode = match &model.config.attention {
            AttentionConfig::Mla(mla) if mla.num_heads == 16 => {
                let (latent, rope) = (mla.kv_lora_rank, mla.qk_rope_head_dim);
                match Mla::new(device, MlaShape { latent, rope, block_size }, MAX_ALONE) {
                    Err(GpuError::Unsupported { .. }) => None,
                    made => Some(made?),
                }
            }
            _ => None,
        };
        Ok(Self {
            device: device.clone(),
            stream: Arc::clone(stream),
            kernels: Rows::new(device)?,
            decode,
            cos_sin: Region::from_slice(device, &cos_sin(model)?)?,
            block_size,
            rotary: model.rope.dim,
            interleaved: model.rope.pairing == Pairing::Neighbours,
            layers: model.layers.iter().map(of_layer).collect::<Result<_, NoKernels>>()?,
        })
    }

    pub(super) fn block_size(&self) -> usize {
        self.block_size
    }

    /// The largest of each row of `logits`, `[rows, vocab]` bf16, as
    /// [`AttentionModel::best`](super::AttentionModel::best) tells it.
    pub(super) fn best(&self, logits: &Tensor) -> Result<Vec<u32>, ModelError> {
        let failed = |what: String| ModelError::Device { place: "argmax".into(), what };
        let (rows, vocab) = logits.size2().map_err(|error| failed(error.to_string()))?;
        let chosen = || -> Result<Vec<i32>, NoKernels> {
            let (rows, vocab) = (rows as usize, vocab as usize);
            let out = Region::alloc(&self.device, rows * 4)?;
            self.kernels.argmax(&self.stream, &cuda::region(&self.device, logits)?, &out, rows, vocab)?;
            Ok(out.read_on(&self.stream)?)
        };
        let chosen = chosen().map_err(|error| failed(error.to_string()))?;
        Ok(chosen.into_iter().map(|token| u32::try_from(token).unwrap_or(u32::MAX)).collect())
    }

    /// `residual` + attention of `x`, the residual's norm; both `[num_rows, hidden]`.
    pub(super) fn forward(
        &self,
        layer: LayerIdx,
        block: &Block,
        residual: &Tensor,
        x: &Tensor,
        (stage, rows): (&PreparedStage, &DeviceRows),
        cache: &mut LayerCache,
    ) -> Result<Tensor, ModelError> {
        let (rotary, interleaved) = (self.rotary, self.interleaved);
        let pass = Pass { prompts: self, layer, stage, rows, rotary, interleaved };
        match (block, self.layers.get(usize::from(layer.0)), cache) {
            (Block::Mla(mla), Some(LayerPrompts::Mla(own)), LayerCache::Mla(cache)) => {
                mla.forward_by_kernels(pass, own, residual, x, cache)
            }
            (Block::Gqa(gqa), Some(LayerPrompts::Gqa(own)), LayerCache::Gqa { keys, values }) => {
                gqa.forward_by_kernels(pass, own, residual, x, (keys, values))
            }
            _ => Err(ModelError::Cache { layer }),
        }
    }
}

impl Pass<'_> {
    pub(super) fn region(&self, tensor: &Tensor) -> Result<Region, ModelError> {
        cuda::region(&self.prompts.device, tensor).at(self.layer, "memory")
    }

    /// Calls `write` with where the stage's rows are.
    pub(super) fn write(
        &self,
        write: impl FnOnce(&Rows, &Stream, &RowPlaces<'_>) -> Result<(), GpuError>,
    ) -> Result<(), ModelError> {
        let (positions, slots) = (self.region(&self.rows.positions)?, self.region(&self.rows.slots)?);
        let Prompts { kernels, stream, cos_sin, .. } = self.prompts;
        let rows = self.stage.num_rows;
        let places = RowPlaces { positions: &positions, slots: &slots, cos_sin, rows };
        write(kernels, stream, &places).at(self.layer, "rope and cache")
    }

    /// Attention of all rows, `[num_rows, heads, dim]` of `like`'s kind: `span` computes those of a span, `direct` writes those
    /// that come alone.
    pub(super) fn attended(
        &self,
        (heads, dim): (i64, i64),
        like: &Tensor,
        span: impl Fn(&Span) -> Result<Tensor, ModelError>,
        direct: impl FnOnce(&Tensor) -> Result<(), ModelError>,
    ) -> Result<Tensor, ModelError> {
        let num_rows = self.stage.num_rows as i64;
        if let [only] = &self.rows.spans[..]
            && only.rows == (0, num_rows)
        {
            return span(only);
        }
        let shape = [num_rows, heads, dim];
        let attended = Tensor::f_empty(shape, (like.kind(), like.device())).at(self.layer, "attention")?;
        for each in &self.rows.spans {
            let (start, len) = each.rows;
            let out = span(each)?;
            let copied = attended.f_narrow(0, start, len).and_then(|mut to| to.f_copy_(&out));
            copied.at(self.layer, "attention")?;
        }
        direct(&attended)?;
        Ok(attended)
    }
}
