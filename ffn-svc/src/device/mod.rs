//! The FFN of every layer on a GPU, in one copy of the weights and two ways to compute with them.
//!
//! [`DeviceModel`] is the whole: it loads this shard's part of every layer onto the device and answers rows of any number
//! eagerly, by libtorch and, on a GPU, kernels between its products ([`DeviceModel::forward`]). Where dtype, shapes and
//! router allow it ([`Unsupported`] says why not), its weights are stacked as the kernels of [`afd_gpu::ops::Moe`] want
//! them, and [`DeviceFfn`] enqueues a layer for the few rows of a decode step: nothing is allocated and the host waits
//! for nothing, so a graph can hold it.
//!
//! On a hop's path this stands where [`crate::model`] does on the CPU. In reading order: `stack` (how a layer is cut and
//! loaded), `eager` (by libtorch alone), `prompts` (many rows on a GPU), `kernels` (few), `shared` (for attention, where it has
//! the shared experts); then [`DeviceStage`], the engine's
//! view of it all, with `channels` (links that a stream drives), `graphs` (their steps, captured) and `marks` (their times,
//! when asked for). Nothing here knows sessions.
use std::sync::Arc;

use afd_common::config::model::ModelConfig;
use afd_common::identity::Sides;
use afd_common::ids::{LayerIdx, Shard};
use afd_common::placement::Placement;
use afd_common::weights::Weights;
use afd_gpu::ops::MoeOutput;
use afd_gpu::{Device, GpuError, Region, Stream};
use tch::Tensor;

mod channels;
mod eager;
mod graphs;
mod kernels;
mod marks;
mod prompts;
mod shared;
mod stack;
mod stage;
#[cfg(test)]
mod tests;

pub use kernels::DeviceFfn;
pub use shared::{SharedExperts, SharedKernels};
pub use stage::DeviceStage;

use crate::model::{AboutShard, At, FfnModel, FfnModelError, Side};
use prompts::Prompts;
use stack::Stack;

/// Why the kernels cannot serve a model: it is served by libtorch alone, step by step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not for the FFN kernels: {0}")]
pub struct Unsupported(pub String);

/// One shard of every layer's FFN on a device.
#[derive(Debug)]
pub struct DeviceModel {
    body: Body,
    about: AboutShard,
}

#[derive(Debug)]
enum Body {
    /// Experts of a layer in one tensor; kernels where there is a GPU, those for prompts once it is known on which stream.
    Stacked {
        layers: Vec<Stack>,
        kernels: Result<Box<DeviceFfn>, Unsupported>,
        prompts: Option<Box<Prompts>>,
    },
    /// As on the CPU.
    Plain { model: Box<FfnModel>, why: Unsupported },
}

impl DeviceModel {
    /// [`load_placed`](Self::load_placed) with every shard having a contiguous part of the experts.
    ///
    /// # Errors
    /// As there.
    pub fn load(
        config: &ModelConfig,
        weights: &Weights,
        shard: Shard,
        sides: impl Into<Sides>,
        device: Option<&Device>,
    ) -> Result<Self, FfnModelError> {
        let contiguous = Placement::contiguous(config, shard.count());
        Self::load_placed(config, weights, shard, sides, &contiguous, device)
    }

    /// Takes this shard's part of every layer, as [`FfnModel::load_placed`] does. `weights` hand out tensors on
    /// `device`; without one (tests) on the CPU, and there are no kernels. Waits until everything is there.
    ///
    /// # Errors
    /// [`FfnModelError::Weights`] names the tensor; [`FfnModelError::Gpu`]. A retry does not help.
    pub fn load_placed(
        config: &ModelConfig,
        weights: &Weights,
        shard: Shard,
        sides: impl Into<Sides>,
        placement: &Placement,
        device: Option<&Device>,
    ) -> Result<Self, FfnModelError> {
        let sides = sides.into();
        let kind = weights.kind();
        let (body, about) = match stack::shapes(config, kind, shard, sides, placement) {
            Err(why) => {
                let model = Box::new(FfnModel::load_placed(config, weights, shard, sides, placement)?);
                let about = model.about().clone();
                (Body::Plain { model, why }, about)
            }
            Ok(shapes) => {
                let layers = shapes
                    .into_iter()
                    .enumerate()
                    .map(|(index, shape)| Stack::load(config, weights, index, shape, (shard, sides)))
                    .collect::<Result<Vec<_>, _>>()?;
                let specs = layers.iter().map(Stack::spec).collect();
                let kernels = match device {
                    Some(device) => Ok(Box::new(DeviceFfn::new(device, &layers, output_of(shard))?)),
                    None => Err(Unsupported("the weights are not on a GPU".into())),
                };
                let about = AboutShard::new(specs, config.hidden_size, kind, shard);
                if let Ok(kernels) = &kernels {
                    about.expert_counts().count_elsewhere(kernels.counts()?);
                }
                (Body::Stacked { layers, kernels, prompts: None }, about)
            }
        };
        if let Some(device) = device {
            // libtorch filled them on a stream of its own, which orders with no other.
            device.synchronize()?;
        }
        Ok(Self { body, about })
    }

    /// What is true of this shard wherever it is computed.
    pub fn about(&self) -> &AboutShard {
        &self.about
    }

    /// From now on [`forward`](Self::forward) runs on `stream`, which is then libtorch's current one wherever it is called:
    /// kernels take the place of most operations. Nothing changes without a GPU. Compiles for some seconds.
    ///
    /// # Errors
    /// [`GpuError`].
    pub fn run_on(&mut self, stream: &Arc<Stream>) -> Result<(), GpuError> {
        if let Body::Stacked { layers, kernels: Ok(kernels), prompts } = &mut self.body {
            let output = output_of(self.about.shard());
            *prompts = Some(Box::new(Prompts::new(stream, layers, kernels.layers(), output)?));
        }
        Ok(())
    }

    /// One layer's FFN on `hidden`, `[rows, hidden]` on the weights' device, on libtorch's current stream: this shard's
    /// partial sum, `[rows, hidden]` of [`out_kind`](AboutShard::out_kind). Zero rows are legal.
    ///
    /// # Errors
    /// As [`FfnModel::forward`]; the model stays usable.
    pub fn forward(&self, layer: LayerIdx, hidden: &Tensor, side: &Side) -> Result<Tensor, FfnModelError> {
        match &self.body {
            Body::Plain { model, .. } => model.forward(layer, hidden, side),
            Body::Stacked { layers, prompts, .. } => {
                let Some(stack) = layers.get(usize::from(layer.0)) else {
                    return Err(FfnModelError::UnknownLayer { layer, count: layers.len() });
                };
                self.about.check_rows(layer, hidden)?;
                let out_kind = self.about.out_kind();
                match prompts.as_ref().filter(|prompts| prompts.take(stack, hidden, side)) {
                    Some(prompts) => {
                        let out = Tensor::f_empty(hidden.size(), (out_kind, hidden.device()));
                        let out = out.at(layer, "result")?;
                        prompts.forward(stack, layer, hidden, &prompts.region(&out)?)?;
                        Ok(out)
                    }
                    None => eager::forward(stack, layer, hidden, side, out_kind),
                }
            }
        }
    }

    /// The same, enqueued so that the result is written to `out`, which may be another device's memory. `false` where there is
    /// no way: nothing was done then.
    ///
    /// # Errors
    /// As for [`forward`](Self::forward).
    pub fn forward_to(&self, layer: LayerIdx, hidden: &Tensor, out: &Region) -> Result<bool, FfnModelError> {
        let Body::Stacked { layers, prompts: Some(prompts), .. } = &self.body else { return Ok(false) };
        match layers.get(usize::from(layer.0)).filter(|stack| prompts.take(stack, hidden, &Side::None)) {
            Some(stack) => prompts.forward(stack, layer, hidden, out).map(|()| true),
            None => Ok(false),
        }
    }

    /// The kernels, for up to [`DeviceFfn::MAX_ROWS`] rows.
    ///
    /// # Errors
    /// Why there are none.
    pub fn kernels(&mut self) -> Result<&mut DeviceFfn, &Unsupported> {
        match &mut self.body {
            Body::Plain { why, .. } => Err(why),
            Body::Stacked { kernels, .. } => match kernels {
                Ok(kernels) => Ok(kernels),
                Err(why) => Err(why),
            },
        }
    }

    /// The same, to look at.
    pub fn kernels_ref(&self) -> Option<&DeviceFfn> {
        match &self.body {
            Body::Plain { .. } => None,
            Body::Stacked { kernels, .. } => kernels.as_deref().ok(),
        }
    }
}

/// Partial sums travel as they are.
fn output_of(shard: Shard) -> MoeOutput {
    if shard.count() > 1 { MoeOutput::F32 } else { MoeOutput::Bf16 }
}
