//! What a rank takes from the checkpoint: the attention half, the text files, and how large everything is.
use std::path::PathBuf;
use std::sync::Arc;

use afd_common::config::choices::LoadFormat;
use afd_common::config::idle;
use afd_common::config::model::{FfnConfig, ModelConfig, Selection};
use afd_common::frame::{RowType, SideKind};
use afd_common::identity::{self, ExpertRules, GatePlacement};
use afd_common::placement::PlacementFile;
use afd_common::proto::v1;
use afd_common::routing::Routing;
use afd_common::spelling;
use afd_common::weights::Weights;

use super::ServeError;
use crate::api::ServedModel;
use crate::config::{CapacityConfig, KvMemory, KvPlan, ModelSource, ServeConfig};
use crate::device::Gpu;
use crate::engine::{CachedAttention, EngineConfig, EngineTracing};
use crate::model::{AttentionModel, KvCache, bytes_per_block};
use crate::text::{Text, TokenizerFile};

/// A loaded model.
pub(super) struct Loaded {
    pub(super) config: ModelConfig,
    pub(super) rows: RowType,
    pub(super) attention: CachedAttention,
    pub(super) text: Text,
    pub(super) served: ServedModel,
    pub(super) identity: v1::ModelIdentity,
    pub(super) experts: ExpertRules,
    pub(super) weights: Weights,
    /// Where all of it is, when that is a GPU.
    pub(super) gpu: Option<Gpu>,
    kv: KvPlan,
}

/// Loads everything; takes as long as the disk does.
pub(super) fn load(
    source: &ModelSource,
    capacity: &CapacityConfig,
    ffn: &crate::config::FfnConfig,
) -> Result<Loaded, ServeError> {
    let config = ModelConfig::load(&source.folder)?;
    let rows = source.dtype.resolve(config.dtype);
    let weights = open_weights(source, &config, rows)?.on(source.device.torch())?;
    let gpu = Gpu::open(source.device)?;
    let memory = match &gpu {
        None => KvMemory::of_machine(),
        Some(gpu) => KvMemory::of_device(gpu.device().free_bytes()?),
    };
    let kv = capacity.kv_cache.plan(
        bytes_per_block(&config, capacity.block_size, rows.kind()),
        capacity.block_size,
        capacity.max_num_seqs,
        config.max_position_embeddings,
        source.max_model_len,
        memory,
    )?;
    ffn.sides.check(&config, &source.folder)?;
    let mut attention = AttentionModel::load(&config, &weights, kv.max_model_len)?;
    let experts = expert_rules(ffn, &config)?;
    attention.take_on(experts.sides, &weights)?;
    let cache = KvCache::new_on(
        &config,
        kv.num_blocks as usize,
        capacity.block_size,
        rows.kind(),
        source.device.torch(),
    )?;
    let tokenizer_file = match source.load_format {
        LoadFormat::Auto => TokenizerFile::Required,
        LoadFormat::Dummy => TokenizerFile::Optional,
    };
    let text = Text::load(&source.folder, tokenizer_file)?;
    if let Err(why) = &text.chat {
        tracing::warn!(why, "chat completions will be refused");
    }
    let identity = identity::model_identity(&config, weights.fingerprint(), rows, &experts);
    let served =
        ServedModel::new(&source.folder, source.name.clone(), &config, kv.max_model_len, identity.clone())
            .map_err(ServeError::Generation)?;
    let kv_cache_bytes = kv.num_blocks as usize * cache.bytes_per_block();
    let attention = CachedAttention::new(attention, cache)?;
    let attention = match gpu.clone() {
        None => attention,
        Some(gpu) => attention.on(gpu, capacity.graphs.clone())?,
    };
    let loaded = Loaded { attention, config, rows, text, served, identity, experts, weights, gpu, kv };
    loaded.log(source, capacity, kv_cache_bytes);
    Ok(loaded)
}

fn expert_rules(ffn: &crate::config::FfnConfig, config: &ModelConfig) -> Result<ExpertRules, ServeError> {
    let read = |path: &PathBuf| {
        let failed = |what| ServeError::Placement { path: path.display().to_string(), what };
        let placement = PlacementFile::read(path).map_err(failed)?.placement(config, None);
        placement.map(Arc::new).map_err(|error| failed(error.to_string()))
    };
    if !config.has_experts() {
        idle::warn(&ffn.idle_on_dense);
        return Ok(ExpertRules::default());
    }
    if ffn.routing == Routing::Balanced {
        tracing::warn!("{}", Routing::WARNING);
    }
    let placement = ffn.placement.as_ref().map(read).transpose()?;
    if let Some(warning) = placement.as_ref().and_then(|placed| placed.warning()) {
        tracing::warn!("{warning}");
    }
    Ok(ExpertRules { sides: ffn.sides, routing: ffn.routing, placement })
}

fn open_weights(source: &ModelSource, config: &ModelConfig, rows: RowType) -> Result<Weights, ServeError> {
    Ok(match source.load_format {
        LoadFormat::Auto => Weights::open(&source.folder, config, rows.kind())?,
        LoadFormat::Dummy => Weights::dummy(config, rows.kind(), source.seed),
    })
}

impl Loaded {
    fn log(&self, source: &ModelSource, capacity: &CapacityConfig, kv_cache_bytes: usize) {
        let (identity, max_model_len) = (&self.identity, self.kv.max_model_len);
        tracing::info!(
            name = source.name,
            architecture = identity.architecture,
            fingerprint = &identity.fingerprint[..12.min(identity.fingerprint.len())],
            dtype = %self.rows,
            gate = &*spelling::gate(identity.gate_placement),
            shared_experts = &*spelling::shared_experts(identity.shared_expert_placement),
            device = %source.device,
            load_format = %source.load_format,
            threads = capacity.threads,
            kv_cache_mib = kv_cache_bytes >> 20,
            max_model_len,
            "model loaded"
        );
        if self.kv.shortened {
            tracing::warn!(
                max_model_len,
                model_len = self.config.max_position_embeddings,
                "the KV cache is too small for the model's longest sequence (--kv-cache-memory, --kv-cache-blocks)"
            );
        }
    }

    /// Sizes of the engine.
    pub(super) fn engine_config(&self, config: &ServeConfig) -> EngineConfig {
        let capacity = &config.capacity;
        EngineConfig {
            max_num_seqs: capacity.max_num_seqs,
            max_num_batched_tokens: capacity.max_num_batched_tokens,
            block_size: capacity.block_size,
            num_blocks: self.kv.num_blocks,
            max_queue: capacity.max_queue,
            max_model_len: self.kv.max_model_len,
            stages: capacity.stages,
            prefix_cache: capacity.prefix_cache,
            ffn_loss_timeout: config.ffn.loss_timeout,
            tracing: EngineTracing { spans: config.trace.spans.clone(), hops_ratio: config.trace.hops_ratio },
        }
    }

    /// Most bytes of a row on the wire, either way: partial sums travel in f32.
    pub(super) fn max_row_bytes(&self, gate: GatePlacement) -> usize {
        let side = self.config.layers.iter().map(|layer| match (layer, gate) {
            (FfnConfig::Dense(_), _) => 0,
            (FfnConfig::Moe(moe), GatePlacement::Attention) => {
                SideKind::TopK.bytes_per_row(moe.experts_per_token)
            }
            (FfnConfig::Moe(moe), GatePlacement::Ffn) => match moe.router.selection {
                Selection::TokenTable { .. } => SideKind::InputIds.bytes_per_row(1),
                _ => 0,
            },
        });
        let side = side.max().unwrap_or(0);
        let hidden = self.config.hidden_size;
        (hidden * self.rows.bytes() + side).max(hidden * RowType::F32.bytes())
    }
}
