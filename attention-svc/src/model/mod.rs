//! The attention half of a decoder: embedding, attention of every layer, final norm and head. One file per attention
//! block. The FFN half is not here: between [`AttentionModel::attend`] of one layer and of the next, the engine sends
//! `ffn_in` to the FFN role and adds what comes back to the residual. Of its parameters only those are here that options
//! place on attention (`mixture`): routers, shared experts.
//!
//! In reading order: [`prepare`](AttentionModel::prepare) a stage once, then per layer `gqa` or `mla` over `kv`; on a GPU
//! `prompts` in their place, where it can.
use std::sync::Arc;

use afd_common::config::model::{AttentionConfig, ModelConfig};
use afd_common::ids::LayerIdx;
use afd_common::layers::FewRows;
use afd_common::weights::Weights;
use afd_ffi::Crew;
use afd_ffi::cpu_rows::Pairing;
use afd_gpu::Stream;
use ffn_svc::device::SharedExperts;
use tch::{Device, Kind, Tensor};

mod batch;
mod device_rows;
mod error;
mod flash;
mod gqa;
mod kv;
mod mixture;
mod mla;
mod on_device;
mod prepare;
mod project;
mod prompts;
mod rope;
mod rows;

use error::{At, outside_layers};
use gqa::Gqa;
use mixture::Mixture;
use mla::Mla;
use project::Projection;
use prompts::Prompts;
use rope::Rope;
use rows::{Norm, rms_norm};

pub use crate::kv_cache::BlockId;
pub use batch::{SequenceRows, StageBatch};
pub use error::ModelError;
pub use kv::{KvCache, bytes_per_block};
pub use on_device::{AttentionShape, KernelAttention, KernelLayer, KernelModel, KernelShape, NoKernels};
pub use prepare::{PreparedStage, Reach};

/// What attention of one layer leaves behind.
pub struct Attended {
    /// Residual stream after attention, `[num_rows, hidden]`.
    pub residual: Tensor,
    /// Its norm: what the FFN gets, `[num_rows, hidden]`.
    pub ffn_in: Tensor,
}

/// Weights of the attention role. Activations have the weights' dtype; one thread uses it at a time.
pub struct AttentionModel {
    config: ModelConfig,
    max_model_len: usize,
    /// `[vocab, hidden]`
    embedding: Tensor,
    layers: Vec<Layer>,
    rope: Rope,
    final_norm: Norm,
    /// `[vocab, hidden]`; the embedding when they are tied.
    head: Projection,
    /// Threads of the loops for few rows: as many as libtorch was told to use when the model was loaded.
    crew: Arc<Crew>,
    /// The short cut for few rows of shared experts, where those are here.
    few_rows: Option<FewRows>,
    /// Shared experts that are here, on a GPU for whose kernels they are.
    shared_experts: Option<SharedExperts>,
    /// On a GPU, once it is known on which stream.
    prompts: Option<Prompts>,
}

struct Layer {
    input_norm: Norm,
    attention: Block,
    post_norm: Norm,
    /// What of its mixture of experts is placed on attention.
    mixture: Mixture,
}

enum Block {
    Gqa(Gqa),
    Mla(Mla),
}

impl AttentionModel {
    /// Takes what attention needs of a checkpoint: embedding, attention, norms, head; nothing of the FFN.
    /// `max_model_len` bounds every sequence, tokens.
    ///
    /// # Errors
    /// [`ModelError`] names the tensor or the field; a retry does not help.
    pub fn load(config: &ModelConfig, weights: &Weights, max_model_len: usize) -> Result<Self, ModelError> {
        let _no_grad = tch::no_grad_guard();
        if max_model_len == 0 || max_model_len > config.max_position_embeddings {
            let what = format!(
                "{}, but the longest sequence shall be {max_model_len} tokens",
                config.max_position_embeddings
            );
            return Err(ModelError::Unsupported { field: "max_position_embeddings", what });
        }
        let (rope_dim, pairing) = match &config.attention {
            AttentionConfig::Gqa(gqa) => (gqa.rotary_dim, Pairing::Halves),
            AttentionConfig::Mla(mla) if mla.rope_interleave => (mla.qk_rope_head_dim, Pairing::Neighbours),
            AttentionConfig::Mla(mla) => (mla.qk_rope_head_dim, Pairing::Halves),
        };
        if rope_dim % 2 == 1 {
            let what = format!("{rope_dim}: rope turns pairs, an even number is needed");
            return Err(ModelError::Unsupported { field: "head_dim", what });
        }
        let table = [config.vocab_size as i64, config.hidden_size as i64];
        let embedding = weights.tensor("model.embed_tokens.weight", &table)?;
        let head = match config.tie_word_embeddings {
            true => embedding.shallow_clone(),
            false => weights.tensor("lm_head.weight", &table)?,
        };
        let threads = match embedding.device() {
            Device::Cpu => usize::try_from(tch::get_num_threads()).unwrap_or(1),
            _ => 1,
        };
        let layers = (0..config.layers.len())
            .map(|i| Layer::load(config, weights, &format!("model.layers.{i}")))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            max_model_len,
            embedding,
            layers,
            rope: Rope::new(&config.rope, rope_dim, pairing).map_err(outside_layers("rope"))?,
            final_norm: Norm::load(weights, "model.norm.weight", config.hidden_size)?,
            head: Projection::new(head, None),
            crew: Arc::new(Crew::new(threads).map_err(ModelError::Threads)?),
            few_rows: None,
            shared_experts: None,
            prompts: None,
            config: config.clone(),
        })
    }

    /// The threads of its loops, for another model of this process: they take turns anyway.
    pub fn crew(&self) -> &Arc<Crew> {
        &self.crew
    }

    /// What was loaded.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Where weights, activations and the cache are.
    pub fn device(&self) -> Device {
        self.embedding.device()
    }

    /// Dtype of activations and of the cache.
    pub fn kind(&self) -> Kind {
        self.embedding.kind()
    }

    /// Embeddings of `ids`, `[num_rows, hidden]`: the residual stream before the first layer.
    ///
    /// # Errors
    /// [`ModelError`] when an id is beyond the vocabulary.
    pub fn embed(&self, ids: &[u32]) -> Result<Tensor, ModelError> {
        let _no_grad = tch::no_grad_guard();
        if let Some(id) = ids.iter().find(|&&id| id as usize >= self.config.vocab_size) {
            let what = format!("token id {id} of a vocabulary of {}", self.config.vocab_size);
            return Err(ModelError::Stage { what });
        }
        let ids = self.token_ids(ids)?;
        self.embedding.f_index_select(0, &ids).map_err(outside_layers("embed_tokens"))
    }

    /// Token ids as a tensor, `[num_rows]` i64, on the model's device.
    ///
    /// # Errors
    /// libtorch's, when memory cannot be had.
    pub fn token_ids(&self, ids: &[u32]) -> Result<Tensor, ModelError> {
        let ids: Vec<i64> = ids.iter().map(|&id| i64::from(id)).collect();
        let placed = Tensor::f_from_slice(&ids).and_then(|ids| ids.f_to_device(self.device()));
        placed.map_err(outside_layers("token ids"))
    }

    /// Computes what all layers of a stage share.
    ///
    /// # Errors
    /// [`ModelError::Stage`] when the stage contradicts itself.
    pub fn prepare(&self, batch: &StageBatch) -> Result<PreparedStage, ModelError> {
        self.prepare_with(batch, Reach::Auto)
    }

    /// The same, with a say in how rows reach their context.
    ///
    /// # Errors
    /// As for [`prepare`](Self::prepare).
    pub fn prepare_with(&self, batch: &StageBatch, reach: Reach) -> Result<PreparedStage, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let numbering = match &self.config.attention {
            AttentionConfig::Gqa(_) => prepare::Numbering::Stage,
            AttentionConfig::Mla(_) => prepare::Numbering::DirectOnly,
        };
        let decide = |len, context_len| match reach {
            Reach::Direct => true,
            Reach::Gathered => false,
            // There every direct row has its whole context copied.
            Reach::Auto if self.device() != Device::Cpu => len == 1,
            Reach::Auto => match &self.config.attention {
                AttentionConfig::Gqa(_) => Gqa::prefers_direct(len, context_len),
                AttentionConfig::Mla(mla) => Mla::prefers_direct(mla, len, context_len),
            },
        };
        let place = (self.device(), self.prompts.as_ref().map(Prompts::block_size));
        PreparedStage::new(batch, &self.rope, self.max_model_len, place, &self.crew, numbering, decide)
    }

    /// Attention of one layer: `residual` is the stream before it, `[num_rows, hidden]`; the rows' keys and values are
    /// written to their slots of `kv`.
    ///
    /// # Errors
    /// [`ModelError`] names the layer and the operation. The cache may hold some of the rows' entries then, which harms
    /// nobody: they are beyond every other row's context.
    pub fn attend(
        &self,
        layer: LayerIdx,
        residual: Tensor,
        stage: &PreparedStage,
        kv: &mut KvCache,
    ) -> Result<Attended, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let Layer { input_norm, attention, post_norm, .. } =
            self.layers.get(layer.0 as usize).ok_or(ModelError::Cache { layer })?;
        let expected = [stage.num_rows() as i64, self.config.hidden_size as i64];
        if residual.size() != expected {
            let what = format!("{layer}: residual of shape {:?}, expected {expected:?}", residual.size());
            return Err(ModelError::Stage { what });
        }
        stage.check_gathered(layer, kv.num_blocks(), kv.block_size())?;
        let cache = kv.layer(layer)?;
        let eps = self.config.rms_norm_eps;
        let x = rms_norm(&residual, input_norm, eps).at(layer, "input_layernorm")?;
        let residual = match attention {
            _ if let (Some(prompts), Some(rows)) = (&self.prompts, &stage.on_device) => {
                prompts.forward(layer, attention, &residual, &x, (stage, rows), cache)?
            }
            Block::Gqa(gqa) => gqa.forward(layer, &residual, &x, &self.rope, stage, cache)?,
            Block::Mla(mla) => mla.forward(layer, &residual, &x, &self.rope, stage, cache)?,
        };
        let ffn_in = rms_norm(&residual, post_norm, eps).at(layer, "post_attention_layernorm")?;
        Ok(Attended { residual, ffn_in })
    }

    /// From now on stages run on `stream`, which is then libtorch's current one wherever this is called, over caches whose
    /// blocks have `block_size` tokens: kernels take the place of most operations, where the model allows it.
    ///
    /// # Errors
    /// [`NoKernels`] when it does not; nothing changes then.
    pub fn run_on(&mut self, stream: &Arc<Stream>, block_size: usize) -> Result<(), NoKernels> {
        self.prompts = Some(Prompts::new(stream, self, block_size)?);
        if let Some(shared) = &mut self.shared_experts {
            shared.run_on(stream)?;
        }
        Ok(())
    }

    /// Logits `[rows.len(), vocab]` f32, on the CPU, of some rows of the residual stream after the last layer,
    /// `[num_rows, hidden]`.
    ///
    /// # Errors
    /// [`ModelError`] when a row is out of bounds.
    pub fn logits(&self, residual: &Tensor, rows: &[usize]) -> Result<Tensor, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let logits = self.head(residual, rows)?;
        let on_host = logits.f_to_kind(Kind::Float).and_then(|logits| logits.f_to_device(Device::Cpu));
        on_host.map_err(outside_layers("lm_head"))
    }

    /// The token with the largest of those logits, of each row, the lowest on ties; `u32::MAX` where one is not a number or
    /// infinitely large. `None` where only the logits can say.
    ///
    /// # Errors
    /// As for [`logits`](Self::logits).
    pub fn best(&self, residual: &Tensor, rows: &[usize]) -> Result<Option<Vec<u32>>, ModelError> {
        let _no_grad = tch::no_grad_guard();
        match &self.prompts {
            Some(_) if rows.is_empty() => Ok(Some(Vec::new())),
            Some(prompts) => prompts.best(&self.head(residual, rows)?).map(Some),
            None => Ok(None),
        }
    }

    /// Logits `[rows.len(), vocab]`, where the weights are: f32 on the CPU, else in the compute dtype.
    fn head(&self, residual: &Tensor, rows: &[usize]) -> Result<Tensor, ModelError> {
        let index: Vec<i64> = rows.iter().map(|&row| row as i64).collect();
        if let Some(row) = rows.iter().find(|&&row| row as i64 >= residual.size()[0]) {
            let what = format!("logits of row {row} of {}", residual.size()[0]);
            return Err(ModelError::Stage { what });
        }
        let chosen = Tensor::f_from_slice(&index)
            .and_then(|index| residual.f_index_select(0, &index.f_to_device(self.device())?))
            .map_err(outside_layers("rows of the head"))?;
        let normed = rms_norm(&chosen, &self.final_norm, self.config.rms_norm_eps)
            .map_err(|error| error.at_place("final norm".into()))?;
        let logits = match normed.device() {
            Device::Cpu => self.head.forward_f32(&normed, &self.crew),
            _ => self.head.forward(&normed, &self.crew),
        };
        logits.map_err(|error| error.at_place("lm_head".into()))
    }
}

impl Layer {
    /// `prefix` names the layer in the checkpoint.
    fn load(config: &ModelConfig, weights: &Weights, prefix: &str) -> Result<Self, ModelError> {
        let norm = |name: &str| Norm::load(weights, &format!("{prefix}.{name}.weight"), config.hidden_size);
        let attention = format!("{prefix}.self_attn");
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            attention: match &config.attention {
                AttentionConfig::Gqa(gqa) => Block::Gqa(Gqa::load(config, gqa, weights, &attention)?),
                AttentionConfig::Mla(mla) => Block::Mla(Mla::load(config, mla, weights, &attention)?),
            },
            post_norm: norm("post_attention_layernorm")?,
            mixture: Mixture::default(),
        })
    }
}
