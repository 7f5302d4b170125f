//! One batch: from the rows of several hops to the layer's output for all of them.
use afd_common::frame::SideKind;
use afd_common::ids::LayerIdx;
use afd_common::routing::{Routing, balanced_ids};
use tch::{Device, TchError, Tensor};

use super::{Waiting, Worker};
use crate::engine::StageModel;
use crate::engine::hop_error::HopError;
use crate::engine::staging::HopBytes;
use crate::hop_queue::QueuedHop;
use crate::model::{LayerSpec, Side};

impl<M: StageModel> Worker<M> {
    /// Runs `self.batch`, all of one layer, and answers every hop of it.
    pub(super) fn run_batch(&mut self, layer: LayerIdx) {
        let mut batch = std::mem::take(&mut self.batch);
        let started_us = self.clock.now_us();
        for source in &self.sources {
            // Whoever waits behind others is told that they get on.
            if self.queue.waiting_of(source.id) > 0 || batch.iter().any(|hop| hop.source == source.id) {
                source.accounts.handle_turn();
            }
        }
        // Rows of others that share a batch with made-up ones are not counted either: it is computed as one.
        let mut is_made_up = false;
        for hop in &batch {
            if let Some(source) = self.source(hop.source) {
                let begun = source.accounts.handle_begin(hop.key);
                self.metrics().unplanned.inc_by((!begun.is_planned).into());
                is_made_up |= begun.is_warmup;
            }
        }
        let members: Vec<_> = match self.options.board.is_zero() {
            true => Vec::new(),
            false => batch.iter().map(|hop| (hop.source, hop.key)).collect(),
        };
        let rows = batch.iter().map(|hop| hop.rows).sum();
        if !self.options.inject_delay.is_zero() {
            std::thread::sleep(self.options.inject_delay);
        }
        match self.compute(layer, &batch, is_made_up) {
            Ok(output) => self.send_all(&mut batch, output.as_ref(), started_us),
            Err(error) if batch.len() == 1 => {
                batch.drain(..).for_each(|hop| self.answer_error(hop.source, hop.payload.origin, &error));
            }
            // One of them spoiled it for all: each on its own, so that only that one fails.
            Err(_) => {
                for hop in batch.drain(..) {
                    match self.compute(layer, std::slice::from_ref(&hop), is_made_up) {
                        Ok(output) => self.send_all(&mut vec![hop], output.as_ref(), started_us),
                        Err(error) => self.answer_error(hop.source, hop.payload.origin, &error),
                    }
                }
            }
        }
        batch.clear();
        self.batch = batch;
        self.convoys.handle_executed(members.into_iter(), rows, started_us, self.clock.now_us());
        self.note_convoys();
    }

    fn note_convoys(&self) {
        let metrics = self.metrics();
        metrics.boarding.set(self.convoys.is_on().into());
        metrics.stragglers.inc_by(self.convoys.dropped() - metrics.stragglers.get());
    }

    /// The layer's output for all rows of these hops, `[rows, hidden]` in the combine dtype on the CPU; `None` when they
    /// have no rows. What `is_made_up` is rehearsed.
    fn compute(
        &mut self,
        layer: LayerIdx,
        hops: &[QueuedHop<Waiting>],
        is_made_up: bool,
    ) -> Result<Option<Tensor>, HopError> {
        let rows: usize = hops.iter().map(|hop| hop.rows as usize).sum();
        if rows == 0 {
            return Ok(None);
        }
        let failed = |what: String| HopError::Model { layer: layer.0, what };
        let inputs =
            self.spec.layers.get(usize::from(layer.0)).map(|inputs| (inputs.side, inputs.side_columns));
        let (side_kind, side_columns) = inputs.unwrap_or((SideKind::None, 0));
        let (hidden, dtype) = (self.spec.hidden_size, self.spec.activations);
        let bytes =
            hops.iter().map(|hop| HopBytes { rows: hop.rows as usize, body: hop.payload.origin.body() });
        let input =
            self.staging.rows(bytes.clone(), hidden, dtype).map_err(|error| failed(error.to_string()))?;
        let side = self
            .staging
            .side(bytes, hidden * dtype.bytes(), side_kind, side_columns as usize)
            .map_err(|error| failed(error.to_string()))?;
        let side = self.balanced(layer, hops).map_err(|error| failed(error.to_string()))?.unwrap_or(side);
        let output = match is_made_up {
            true => self.model.rehearse(layer, &input, &side),
            false => self.model.forward(layer, &input, &side),
        }
        .map_err(failed)?;
        let expected = [rows as i64, hidden as i64];
        if output.size() != expected {
            return Err(failed(format!("the model returned {:?} instead of {expected:?}", output.size())));
        }
        output
            .f_to_device(Device::Cpu)
            .and_then(|output| output.f_to_kind(self.spec.combine().kind()))
            .and_then(|output| output.f_contiguous())
            .map(Some)
            .map_err(|error| failed(error.to_string()))
    }

    /// The choice of `--routing balanced` for a layer that is routed here; `None` with the model's own routing.
    fn balanced(&self, layer: LayerIdx, hops: &[QueuedHop<Waiting>]) -> Result<Option<Side>, TchError> {
        let inputs = self.spec.layers.get(usize::from(layer.0));
        let routed_here = |inputs: &&LayerSpec| inputs.num_experts > 0 && inputs.side != SideKind::TopK;
        let Some(inputs) = inputs.filter(routed_here).filter(|_| self.options.routing == Routing::Balanced)
        else {
            return Ok(None);
        };
        let (top_k, num_experts) = (inputs.experts_per_token as usize, inputs.num_experts as usize);
        let mut ids = Vec::new();
        for hop in hops {
            // A call of its own, outside any link, counts as rank 0.
            let rank = self.source(hop.source).map_or(0, |source| source.rank);
            balanced_ids(&mut ids, rank, hop.key, hop.rows as usize, top_k, num_experts);
        }
        let shape = [-1, top_k as i64];
        let weights = vec![1.0 / top_k as f32; ids.len()];
        let ids = Tensor::f_from_slice(&ids)?.f_view(shape)?;
        Ok(Some(Side::TopK { ids, weights: Tensor::f_from_slice(&weights)?.f_view(shape)? }))
    }
}
