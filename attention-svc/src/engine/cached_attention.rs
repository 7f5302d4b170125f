//! The model behind the engine's seam: attention's weights and the KV cache's tensors, together.
use std::any::Any;

use afd_common::ids::LayerIdx;
use afd_common::layers::Selected;
use tch::Tensor;

use super::{AttentionError, AttentionPort, SideTensors};
use crate::device::Gpu;
use crate::model::{Attended, AttentionModel, KvCache, ModelError, PreparedStage, StageBatch};

/// A model with the cache it writes to.
pub struct CachedAttention {
    model: AttentionModel,
    cache: KvCache,
    num_layers: u16,
    gpu: Option<Gpu>,
}

impl CachedAttention {
    /// `cache` has as many blocks, of the same size, as the engine is configured with.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] when a hop's key could not name every layer.
    pub fn new(model: AttentionModel, cache: KvCache) -> Result<Self, ModelError> {
        let num_layers = model.config().layers.len();
        let num_layers = u16::try_from(num_layers).map_err(|_| ModelError::Unsupported {
            field: "num_hidden_layers",
            what: format!("{num_layers}; at most {} are served", u16::MAX),
        })?;
        Ok(Self { model, cache, num_layers, gpu: None })
    }

    /// The device that model and cache are on, when it is a GPU.
    pub fn on(mut self, gpu: Option<Gpu>) -> Self {
        self.gpu = gpu;
        self
    }
}

impl AttentionPort for CachedAttention {
    type Prepared = PreparedStage;

    fn enter_thread(&mut self) -> Result<Box<dyn Any>, AttentionError> {
        let Some(gpu) = &self.gpu else { return Ok(Box::new(())) };
        let guard = gpu.enter().map_err(|error| AttentionError(format!("--device: {error}")))?;
        Ok(Box::new(guard))
    }

    fn num_layers(&self) -> u16 {
        self.num_layers
    }

    fn prepare(&self, batch: &StageBatch) -> Result<PreparedStage, AttentionError> {
        Ok(self.model.prepare(batch)?)
    }

    fn embed(&self, input_ids: &[u32]) -> Result<Tensor, AttentionError> {
        Ok(self.model.embed(input_ids)?)
    }

    fn attend(
        &mut self,
        layer: LayerIdx,
        x: Tensor,
        stage: &PreparedStage,
    ) -> Result<Attended, AttentionError> {
        Ok(self.model.attend(layer, x, stage, &mut self.cache)?)
    }

    fn side_tensors(
        &self,
        layer: LayerIdx,
        ffn_in: &Tensor,
        input_ids: &[u32],
    ) -> Result<SideTensors, AttentionError> {
        match self.model.route(layer, ffn_in, input_ids)? {
            Some(Selected { ids, weights }) => Ok(SideTensors::TopK { ids, weights }),
            None if self.model.routes_by_token(layer) => {
                Ok(SideTensors::InputIds(self.model.token_ids(input_ids)?))
            }
            None => Ok(SideTensors::None),
        }
    }

    fn logits(&self, x: &Tensor, rows: &[usize]) -> Result<Tensor, AttentionError> {
        Ok(self.model.logits(x, rows)?)
    }
}

impl From<ModelError> for AttentionError {
    fn from(error: ModelError) -> Self {
        Self(error.to_string())
    }
}
