//! The FFN on attention's own device and thread (`--ffn local` with a GPU): every dispatch is computed at once, or rather
//! enqueued, so there is nothing to wait for and nothing to lose.
use afd_common::ids::{HopKey, StepId};
use ffn_svc::model::{FfnModel, Side};
use tch::Tensor;

use crate::engine::{FfnLoss, FfnPort, SideTensors, StepOutline};

/// See the module's head.
pub struct LocalFfn {
    model: FfnModel,
    /// Of the stages in flight.
    results: Vec<(HopKey, Tensor)>,
}

impl LocalFfn {
    /// `model` is the whole FFN, on attention's device.
    pub fn new(model: FfnModel) -> Self {
        Self { model, results: Vec::new() }
    }
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
        found.ok_or_else(|| FfnLoss::Fatal { what: format!("{hop} was never dispatched") })
    }

    fn end_step(&mut self, _step: StepId) {
        self.results.clear();
    }

    fn ready(&self) -> bool {
        true
    }

    fn idle(&mut self) {}
}
