//! The FFN without links, queue or thread: every dispatch is computed at once, shard by shard.
use std::collections::HashMap;

use afd_common::config::model::ModelConfig;
use afd_common::identity::Sides;
use afd_common::ids::{HopKey, Shard, StepId};
use afd_common::weights::Weights;
use attention_svc::engine::{FfnLoss, FfnPort, SideTensors, StepOutline};
use ffn_svc::model::{FfnModel, Side};
use tch::Tensor;

pub(crate) struct DirectFfn {
    shards: Vec<FfnModel>,
    results: HashMap<HopKey, Tensor>,
}

impl DirectFfn {
    pub(crate) fn load(config: &ModelConfig, weights: &Weights, num_shards: u32, sides: Sides) -> Self {
        let shard =
            |index| FfnModel::load(config, weights, Shard::new(index, num_shards).unwrap(), sides).unwrap();
        Self { shards: (0..num_shards).map(shard).collect(), results: HashMap::new() }
    }
}

fn side_of(side: &SideTensors) -> Side {
    match side {
        SideTensors::None => Side::None,
        SideTensors::RouterLogits(logits) => Side::RouterLogits(logits.shallow_clone()),
        SideTensors::TopK { ids, weights } => {
            Side::TopK { ids: ids.shallow_clone(), weights: weights.shallow_clone() }
        }
        SideTensors::InputIds(ids) => Side::InputIds(ids.shallow_clone()),
    }
}

impl FfnPort for DirectFfn {
    fn begin_step(&mut self, _: &StepOutline) -> Result<(), FfnLoss> {
        Ok(())
    }

    fn dispatch(&mut self, hop: HopKey, rows: &Tensor, side: &SideTensors) -> Result<(), FfnLoss> {
        let _no_grad = tch::no_grad_guard();
        let part = |shard: &FfnModel| shard.forward(hop.layer, rows, &side_of(side)).unwrap();
        let sum = self.shards.iter().map(part).reduce(|a, b| a + b).unwrap();
        self.results.insert(hop, sum.to_kind(rows.kind()));
        Ok(())
    }

    fn combine(&mut self, hop: HopKey) -> Result<Tensor, FfnLoss> {
        Ok(self.results.remove(&hop).unwrap())
    }

    fn end_step(&mut self, _: StepId) {
        assert!(self.results.is_empty(), "everything dispatched was combined");
    }

    fn ready(&self) -> bool {
        true
    }

    fn idle(&mut self) {}
}
