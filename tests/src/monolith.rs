//! Both halves of a model in one plain loop: no scheduler, no link, no batch, one block table in order. Slow and easy to
//! believe; what the oracle teacher-forces through.
use std::path::Path;

use afd_common::config::model::ModelConfig;
use afd_common::identity::GatePlacement;
use afd_common::ids::{LayerIdx, Shard};
use afd_common::weights::Weights;
use anyhow::Context;
use attention_svc::model::{AttentionModel, BlockId, KvCache, SequenceRows, StageBatch};
use ffn_svc::model::{FfnModel, Side};
use tch::{Kind, Tensor};

const BLOCK_SIZE: usize = 16;

/// A model whose two halves call each other directly.
pub struct Monolith {
    /// What the checkpoint says.
    pub config: ModelConfig,
    attention: AttentionModel,
    ffn: FfnModel,
    kind: Kind,
}

impl Monolith {
    /// Loads a checkpoint in the given compute dtype.
    ///
    /// # Errors
    /// When the checkpoint is not what it should be.
    pub fn load(folder: &Path, kind: Kind) -> anyhow::Result<Self> {
        let config = ModelConfig::load(folder).with_context(|| folder.display().to_string())?;
        let weights = Weights::open(folder, &config, kind)?;
        Self::from_weights(config, &weights)
    }

    /// The same from weights that are there already.
    ///
    /// # Errors
    /// When a tensor is not what it should be.
    pub fn from_weights(config: ModelConfig, weights: &Weights) -> anyhow::Result<Self> {
        let attention = AttentionModel::load(&config, weights, config.max_position_embeddings)?;
        let ffn = FfnModel::load(&config, weights, Shard::WHOLE, GatePlacement::Ffn)?;
        Ok(Self { config, attention, ffn, kind: weights.kind() })
    }

    /// Logits `[len - from, vocab]` f32 of the positions `from..len` of one sequence, computed in one prefill.
    ///
    /// # Errors
    /// When a layer fails.
    pub fn logits(&self, tokens: &[u32], from: usize) -> anyhow::Result<Tensor> {
        let len = tokens.len();
        let num_blocks = len.div_ceil(BLOCK_SIZE);
        let mut kv = KvCache::new(&self.config, num_blocks, BLOCK_SIZE, self.kind)?;
        let batch = StageBatch {
            input_ids: tokens.to_vec(),
            positions: (0..len as u32).collect(),
            slot_mapping: (0..len as i64).collect(),
            sequences: vec![SequenceRows {
                start: 0,
                len,
                context_len: len,
                block_table: (0..num_blocks as u32).map(BlockId).collect(),
            }],
        };
        let prepared = self.attention.prepare(&batch)?;
        let mut residual = self.attention.embed(tokens)?;
        for layer in (0..self.config.layers.len() as u16).map(LayerIdx) {
            let attended = self.attention.attend(layer, residual, &prepared, &mut kv)?;
            let side = match self.attention.routes_by_token(layer) {
                true => Side::InputIds(self.attention.token_ids(tokens)?),
                false => Side::None,
            };
            residual = attended.residual + self.ffn.forward(layer, &attended.ffn_in, &side)?;
        }
        Ok(self.attention.logits(&residual, &(from..len).collect::<Vec<_>>())?)
    }
}
