//! The tensors of the paged KV cache, one set per layer. Which block belongs to whom is the block pool's business.
use afd_common::config::model::{AttentionConfig, ModelConfig};
use afd_common::ids::LayerIdx;
use tch::{Device, Kind, Tensor};

use super::error::ModelError;

/// Keys and values of every cached token.
pub struct KvCache {
    layers: Vec<LayerCache>,
    num_blocks: usize,
    block_size: usize,
    bytes_per_block: usize,
}

/// One layer of the cache. Every slot holds finite numbers from the start: unused ones are multiplied by zero.
pub(super) enum LayerCache {
    Gqa {
        /// `[num_blocks, block_size, num_kv_heads, head_dim]`
        keys: Tensor,
        /// The same.
        values: Tensor,
    },
    /// `[num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]`: the normed latent and the shared rope key, nothing
    /// else.
    Mla(Tensor),
}

/// Elements that one token takes in one layer: two tensors' or one's.
fn shapes(config: &ModelConfig) -> (usize, Vec<i64>) {
    match &config.attention {
        AttentionConfig::Gqa(gqa) => (2, vec![gqa.num_kv_heads as i64, gqa.head_dim as i64]),
        AttentionConfig::Mla(mla) => (1, vec![(mla.kv_lora_rank + mla.qk_rope_head_dim) as i64]),
    }
}

impl KvCache {
    /// Room for `num_blocks` blocks of `block_size` tokens in every layer, in `kind`, which must be the weights'.
    ///
    /// # Errors
    /// [`ModelError`] when libtorch cannot allocate it.
    pub fn new(
        config: &ModelConfig,
        num_blocks: usize,
        block_size: usize,
        kind: Kind,
    ) -> Result<Self, ModelError> {
        Self::new_on(config, num_blocks, block_size, kind, Device::Cpu)
    }

    /// The same on `device`, which must be the weights'.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn new_on(
        config: &ModelConfig,
        num_blocks: usize,
        block_size: usize,
        kind: Kind,
        device: Device,
    ) -> Result<Self, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let shape = [&[num_blocks as i64, block_size as i64], &shapes(config).1[..]].concat();
        let zeros = || {
            let zeros = match device {
                Device::Cpu => afd_ffi::zeroed_for_life(&shape, kind),
                _ => Tensor::f_zeros(&shape, (kind, device)).map_err(Into::into),
            };
            zeros.map_err(|source| ModelError::CacheMemory { source })
        };
        let layers = config
            .layers
            .iter()
            .map(|_| {
                Ok(match &config.attention {
                    AttentionConfig::Gqa(_) => LayerCache::Gqa { keys: zeros()?, values: zeros()? },
                    AttentionConfig::Mla(_) => LayerCache::Mla(zeros()?),
                })
            })
            .collect::<Result<_, ModelError>>()?;
        Ok(Self {
            layers,
            num_blocks,
            block_size,
            bytes_per_block: bytes_per_block(config, block_size, kind),
        })
    }

    /// Blocks in each layer.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Tokens in a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// What one block takes in all layers together.
    pub fn bytes_per_block(&self) -> usize {
        self.bytes_per_block
    }

    pub(super) fn layers(&self) -> &[LayerCache] {
        &self.layers
    }

    pub(super) fn layer(&mut self, layer: LayerIdx) -> Result<&mut LayerCache, ModelError> {
        self.layers.get_mut(layer.0 as usize).ok_or(ModelError::Cache { layer })
    }
}

/// What one block of `block_size` tokens takes in all layers together, before there is a cache: for sizing one.
pub fn bytes_per_block(config: &ModelConfig, block_size: usize, kind: Kind) -> usize {
    let (tensors, shape) = shapes(config);
    let elements = shape.iter().product::<i64>() as usize;
    tensors * elements * kind.elt_size_in_bytes() * block_size * config.layers.len()
}
