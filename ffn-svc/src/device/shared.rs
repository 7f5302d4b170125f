//! The shared experts of every mixture by themselves, for attention on a GPU (`--shared-experts attention`): computed there
//! while the FFN computes the routed ones. One copy of the weights, cut as the FFN's own are, and its two ways to compute with
//! them: [`SharedExperts`] for any number of rows, [`SharedKernels`] for the few of a decode step.
use std::sync::Arc;

use afd_common::config::model::{FfnConfig, ModelConfig, MoeConfig};
use afd_common::ids::LayerIdx;
use afd_common::layers::FfnNames;
use afd_common::weights::Weights;
use afd_gpu::ops::{Moe, MoeOutput};
use afd_gpu::{Device, GpuError, Region, Stream};
use tch::{Kind, Tensor};

use super::prompts::Prompts;
use super::stack::{self, Stack};
use super::{DeviceFfn, Unsupported, eager};
use crate::model::{At, FfnModelError, Side};

/// Of every layer that has any, as they lie on the device.
#[derive(Debug)]
pub struct SharedExperts {
    stacks: Vec<Stack>,
    places: Places,
    prompts: Option<Prompts>,
}

/// The kernels for few rows; the contract is [`DeviceFfn`]'s.
#[derive(Debug)]
pub struct SharedKernels {
    ffn: DeviceFfn,
    places: Places,
}

/// By layer, which of the stacks is its.
#[derive(Clone, Debug)]
struct Places(Vec<Option<usize>>);

impl Places {
    fn of(&self, layer: LayerIdx) -> Option<usize> {
        self.0.get(usize::from(layer.0)).copied().flatten()
    }
}

impl SharedExperts {
    /// Whether the kernels can have a model's shared experts, its rows being of `kind`.
    ///
    /// # Errors
    /// Why they cannot.
    pub fn check(config: &ModelConfig, kind: Kind) -> Result<(), Unsupported> {
        if kind != Kind::BFloat16 {
            return Err(Unsupported(format!("{kind:?} rows; they take bf16")));
        }
        mixtures(config).try_for_each(|(layer, moe)| {
            let shape = stack::dense(config.hidden_size, moe.shared_intermediate_size);
            let checked = shape.and_then(|shape| Moe::check(&shape).map_err(|error| error.to_string()));
            checked.map_err(|what| Unsupported(format!("{}, shared experts: {what}", LayerIdx(layer as u16))))
        })
    }

    /// Takes them from `weights`, which hand out tensors on a GPU (tests: on the CPU), of a model that passed
    /// [`check`](Self::check).
    ///
    /// # Errors
    /// [`FfnModelError::Weights`] names the tensor. A retry does not help.
    pub fn load(config: &ModelConfig, weights: &Weights) -> Result<Self, FfnModelError> {
        let mut places = Places(vec![None; config.layers.len()]);
        let mut stacks = Vec::new();
        for (layer, moe) in mixtures(config) {
            let size = moe.shared_intermediate_size;
            let unfit = |what| GpuError::Unsupported { what };
            let shape = stack::dense(config.hidden_size, size).map_err(unfit)?;
            let names = FfnNames::new(config.architecture, layer).shared();
            places.0[layer] = Some(stacks.len());
            stacks.push(Stack::load_dense(weights, shape, &names, size, 0..size)?);
        }
        Ok(Self { stacks, places, prompts: None })
    }

    /// From now on [`forward`](Self::forward) runs on `stream`, as [`DeviceModel::run_on`](super::DeviceModel::run_on) says.
    ///
    /// # Errors
    /// [`FfnModelError::Gpu`], [`FfnModelError::Memory`].
    pub fn run_on(&mut self, stream: &Arc<Stream>) -> Result<(), FfnModelError> {
        let ffn = DeviceFfn::new(stream.device(), &self.stacks, MoeOutput::F32)?;
        self.prompts = Some(Prompts::new(stream, &self.stacks, ffn.layers(), MoeOutput::F32)?);
        Ok(())
    }

    /// A layer's shared experts for `x`, `[rows, hidden]`: `[rows, hidden]` f32; `None` where it has none.
    ///
    /// # Errors
    /// As [`FfnModel::forward`](crate::model::FfnModel::forward).
    pub fn forward(&self, layer: LayerIdx, x: &Tensor) -> Result<Option<Tensor>, FfnModelError> {
        let Some(stack) = self.places.of(layer).map(|at| &self.stacks[at]) else { return Ok(None) };
        match self.prompts.as_ref().filter(|prompts| prompts.take(stack, x, &Side::None)) {
            Some(prompts) => {
                let out = Tensor::f_empty(x.size(), (Kind::Float, x.device())).at(layer, "result")?;
                prompts.forward(stack, layer, x, &prompts.region(&out)?)?;
                Ok(Some(out))
            }
            None => eager::forward(stack, layer, x, &Side::None, Kind::Float).map(Some),
        }
    }

    /// The kernels for few rows, over the same weights.
    ///
    /// # Errors
    /// [`FfnModelError::Gpu`], [`FfnModelError::Memory`].
    pub fn kernels(&self, device: &Device) -> Result<SharedKernels, FfnModelError> {
        let ffn = DeviceFfn::new(device, &self.stacks, MoeOutput::F32)?;
        Ok(SharedKernels { ffn, places: self.places.clone() })
    }
}

impl SharedKernels {
    /// Whether the layer has shared experts.
    pub fn has(&self, layer: LayerIdx) -> bool {
        self.places.of(layer).is_some()
    }

    /// As [`DeviceFfn::prepare`].
    ///
    /// # Errors
    /// As there.
    pub fn prepare(&mut self, padded_rows: usize) -> Result<(), GpuError> {
        self.ffn.prepare(padded_rows)
    }

    /// Enqueues a layer's shared experts: `input` `[padded_rows, hidden]` bf16, of which `num_rows` (one i32 on the device) are
    /// real, to `output` `[padded_rows, hidden]` f32.
    ///
    /// # Errors
    /// As [`DeviceFfn::enqueue`]; [`GpuError::Unsupported`] for a layer that has none.
    pub fn enqueue(
        &mut self,
        stream: &Stream,
        layer: LayerIdx,
        padded_rows: usize,
        (input, num_rows): (&Region, &Region),
        output: &Region,
    ) -> Result<(), GpuError> {
        let none = || GpuError::Unsupported { what: format!("{layer}: no shared experts") };
        let at = LayerIdx(self.places.of(layer).ok_or_else(none)? as u16);
        self.ffn.enqueue(stream, at, padded_rows, input, Some(num_rows), output)
    }
}

/// Layers with shared experts.
fn mixtures(config: &ModelConfig) -> impl Iterator<Item = (usize, &MoeConfig)> {
    config.layers.iter().enumerate().filter_map(|(layer, ffn)| match ffn {
        FfnConfig::Moe(moe) if moe.shared_intermediate_size > 0 => Some((layer, moe)),
        _ => None,
    })
}
