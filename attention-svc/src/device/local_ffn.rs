//! The FFN on attention's own device and thread (`--ffn local` with a GPU): every dispatch is computed at once, or rather
//! enqueued, so there is nothing to wait for and nothing to lose.
use std::sync::Arc;

use afd_common::ids::{HopKey, LayerIdx, StepId};
use afd_gpu::{Device, GpuError, Region, Stream};
use ffn_svc::device::{DeviceFfn, DeviceModel};
use ffn_svc::model::Side;
use tch::Tensor;

use super::stream_ffn::{HopRows, StepRun, StreamFfn, StreamHop, Summand};
use crate::engine::{FfnLoss, FfnPort, SideTensors, StepOutline};

/// Stages of a step at most.
const MAX_STAGES: usize = 4;

/// See the module's head.
pub struct LocalFfn {
    model: DeviceModel,
    /// Of the stages in flight.
    results: Vec<(HopKey, Tensor)>,
    /// What the kernels write, by stage.
    outputs: Vec<Region>,
}

impl LocalFfn {
    /// `model` is the whole FFN, on attention's device, whose `stream` is that of the engine's thread.
    ///
    /// # Errors
    /// [`GpuError::Driver`] when memory is out.
    pub fn new(device: &Device, stream: &Arc<Stream>, mut model: DeviceModel) -> Result<Self, GpuError> {
        model.run_on(stream)?;
        let bytes = DeviceFfn::MAX_ROWS * model.about().hidden_size() * 2;
        let outputs = (0..MAX_STAGES).map(|_| Region::zeroed(device, bytes)).collect::<Result<_, _>>()?;
        Ok(Self { model, results: Vec::new(), outputs })
    }

    fn output(&self, hop: StreamHop) -> Result<Region, FfnLoss> {
        let output = self.outputs.get(usize::from(hop.stage.0));
        let part =
            output.map(|output| output.part(0..hop.padded_rows * self.model.about().hidden_size() * 2));
        match part {
            Some(Ok(part)) => Ok(part),
            _ => Err(fatal(format!("{}: stage {} of {} rows", hop.layer, hop.stage.0, hop.padded_rows))),
        }
    }
}

fn fatal(what: String) -> FfnLoss {
    FfnLoss::Fatal { what: format!("the FFN in this process: {what}") }
}

impl FfnPort for LocalFfn {
    fn begin_step(&mut self, _plan: &StepOutline) -> Result<(), FfnLoss> {
        Ok(())
    }

    fn dispatch(&mut self, hop: HopKey, rows: &Tensor, side: &SideTensors) -> Result<(), FfnLoss> {
        let side = match side {
            SideTensors::None => Side::None,
            SideTensors::RouterLogits(logits) => Side::RouterLogits(logits.shallow_clone()),
            SideTensors::TopK { ids, weights } => {
                Side::TopK { ids: ids.shallow_clone(), weights: weights.shallow_clone() }
            }
            SideTensors::InputIds(ids) => Side::InputIds(ids.shallow_clone()),
        };
        let rejected = |what: String| FfnLoss::Rejected { hop, peer: "the FFN in this process".into(), what };
        let sum = self.model.forward(hop.layer, rows, &side).map_err(|error| rejected(error.to_string()))?;
        let sum = sum.f_to_kind(rows.kind()).map_err(|error| rejected(error.to_string()))?;
        self.results.push((hop, sum));
        Ok(())
    }

    fn combine(&mut self, hop: HopKey) -> Result<Tensor, FfnLoss> {
        let found = self.results.iter().position(|(key, _)| *key == hop);
        let found = found.map(|at| self.results.swap_remove(at).1);
        found.ok_or_else(|| fatal(format!("{hop} was never dispatched")))
    }

    fn end_step(&mut self, _step: StepId) {
        self.results.clear();
    }

    fn ready(&self) -> bool {
        true
    }

    fn idle(&mut self) {}

    fn stream(&mut self) -> Option<&mut dyn StreamFfn> {
        if self.model.kernels().is_ok() { Some(self) } else { None }
    }
}

impl StreamFfn for LocalFfn {
    fn max_rows(&self) -> usize {
        DeviceFfn::MAX_ROWS
    }

    fn prepare(&mut self, padded_rows: &[usize]) -> Result<(), FfnLoss> {
        let kernels = self.model.kernels().map_err(|why| fatal(why.to_string()))?;
        padded_rows
            .iter()
            .try_for_each(|&rows| kernels.prepare(rows))
            .map_err(|error| fatal(error.to_string()))
    }

    fn announce(&mut self, _step: StepId, _padded_rows: &[usize], _run: StepRun) -> Result<(), FfnLoss> {
        Ok(())
    }

    fn dispatch(&mut self, stream: &Stream, hop: StreamHop, rows: &HopRows<'_>) -> Result<(), FfnLoss> {
        let output = self.output(hop)?;
        let kernels = self.model.kernels().map_err(|why| fatal(why.to_string()))?;
        kernels
            .enqueue(stream, hop.layer, hop.padded_rows, rows.rows, Some(rows.num_rows), &output)
            .map_err(|error| fatal(format!("{}: {error}", hop.layer)))
    }

    fn combine(&mut self, _stream: &Stream, hop: StreamHop) -> Result<Summand, FfnLoss> {
        self.output(hop).map(Summand::Whole)
    }

    fn check(&mut self) -> Result<(), FfnLoss> {
        Ok(())
    }

    fn weights_here(&self, layer: LayerIdx) -> Option<&Region> {
        self.model.kernels_ref()?.sure_to_be_read(layer)
    }

    fn generation(&self) -> u64 {
        0
    }
}
