//! The model behind the engine's seam: attention's weights and the KV cache's tensors, together.
use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use afd_common::ids::{LayerIdx, StepId};
use afd_common::layers::Selected;
use afd_ffi::Crew;
use afd_gpu::GpuError;
use tch::Tensor;

use super::{
    AttentionError, AttentionPort, DecodeEnd, DecodeLaunch, DecodeStage, DecodeTurn, EagerReason, FfnLoss,
    FfnPort, SideTensors, StepOutline,
};
use crate::device::{Decoder, Gpu, GraphSettings};
use crate::model::{
    Attended, AttentionModel, KernelModel, KvCache, ModelError, NoKernels, PreparedStage, StageBatch,
};

/// A model with the cache it writes to.
pub struct CachedAttention {
    model: AttentionModel,
    cache: KvCache,
    num_layers: u16,
    gpu: Option<Gpu>,
    decoder: Option<Decoder>,
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
        Ok(Self { model, cache, num_layers, gpu: None, decoder: None })
    }

    /// The threads of the model's loops.
    pub fn crew(&self) -> &Arc<Crew> {
        self.model.crew()
    }

    /// The GPU that model and cache are on. Where its kernels support the model, decode steps run on it alone.
    ///
    /// # Errors
    /// [`NoKernels`], but for models that the kernels are not made for.
    pub fn on(mut self, gpu: Gpu, graphs: GraphSettings) -> Result<Self, NoKernels> {
        let device = gpu.device();
        let decoder = KernelModel::new(device, &self.model, &self.cache)
            .and_then(|model| Ok(Decoder::new(device, model, graphs)?));
        match decoder {
            Ok(decoder) => self.decoder = Some(decoder),
            Err(error @ (NoKernels::Unsupported(_) | NoKernels::Gpu(GpuError::Unsupported { .. }))) => {
                tracing::warn!(why = %error, "decode steps run operation by operation");
            }
            Err(error) => return Err(error),
        }
        match self.model.run_on(gpu.stream(), self.cache.block_size()) {
            Ok(()) => {}
            Err(error @ (NoKernels::Unsupported(_) | NoKernels::Gpu(GpuError::Unsupported { .. }))) => {
                tracing::warn!(why = %error, "prompts are computed operation by operation");
            }
            Err(error) => return Err(error),
        }
        self.gpu = Some(gpu);
        Ok(self)
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

    fn shared_experts(&self, layer: LayerIdx, ffn_in: &Tensor) -> Result<Option<Tensor>, AttentionError> {
        Ok(self.model.shared_experts(layer, ffn_in)?)
    }

    fn warms_up(&self) -> bool {
        self.decoder.is_some()
    }

    fn warms_prompts(&self) -> Option<usize> {
        self.gpu.as_ref().map(|_| self.model.config().vocab_size)
    }

    fn is_warm(&self, ffn: &mut dyn FfnPort) -> bool {
        match (&self.decoder, ffn.stream()) {
            (Some(decoder), Some(ffn)) => decoder.is_warm(ffn),
            _ => true,
        }
    }

    fn warm_up(&mut self, ffn: &mut dyn FfnPort, first: StepId) -> Result<u64, FfnLoss> {
        let (Some(gpu), Some(decoder), Some(ffn)) = (&self.gpu, &mut self.decoder, ffn.stream()) else {
            return Ok(0);
        };
        let begun = Instant::now();
        let steps = decoder.warm_up(gpu.stream(), ffn, first)?;
        let took_ms = begun.elapsed().as_millis() as u64;
        tracing::info!(steps, graphs = decoder.num_graphs(), took_ms, "decode steps are warm");
        Ok(steps)
    }

    fn launch(
        &mut self,
        ffn: &mut dyn FfnPort,
        plan: &StepOutline,
        stages: &[DecodeStage<'_>],
        turn: DecodeTurn,
    ) -> Result<DecodeLaunch, FfnLoss> {
        let Some(gpu) = &self.gpu else { return Ok(DecodeLaunch::Unknown) };
        let Some(decoder) = &mut self.decoder else { return Ok(DecodeLaunch::Eager(EagerReason::Model)) };
        let ffn = match turn {
            DecodeTurn::Behind => ffn.stream_under_way(),
            DecodeTurn::First | DecodeTurn::Next => ffn.stream(),
        };
        let Some(ffn) = ffn else { return Ok(DecodeLaunch::Eager(EagerReason::Link)) };
        let key = match decoder.key(ffn, stages) {
            Err(reason) => return Ok(DecodeLaunch::Eager(reason)),
            Ok(key) => key,
        };
        match decoder.launch(gpu.stream(), ffn, (plan.step, plan.profile), (&key, stages), turn)? {
            true => Ok(DecodeLaunch::Launched { replayed: decoder.captures() && !plan.profile }),
            false => Ok(DecodeLaunch::Eager(EagerReason::Link)),
        }
    }

    fn is_over(&self) -> bool {
        self.decoder.as_ref().is_none_or(Decoder::is_over)
    }

    fn finish(&mut self, ffn: &mut dyn FfnPort, num_rows: &[usize]) -> Result<DecodeEnd, FfnLoss> {
        let (Some(decoder), Some(ffn)) = (&mut self.decoder, ffn.stream_under_way()) else {
            return Err(FfnLoss::Fatal { what: "no decode step is under way".into() });
        };
        decoder.finish(ffn, num_rows)
    }

    fn best(&self, x: &Tensor, rows: &[usize]) -> Result<Option<Vec<u32>>, AttentionError> {
        Ok(self.model.best(x, rows)?)
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
