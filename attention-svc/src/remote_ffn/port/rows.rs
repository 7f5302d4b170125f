//! What a hop's rows become on their way out, and what the shards' parts become on their way back.
use afd_common::ids::HopKey;
use afd_common::routing::{Routing, balanced_ids};
use tch::{Device, TchError, Tensor};

use super::RemoteFfn;
use crate::engine::SideTensors;
use crate::remote_ffn::kept::{Kept, row_kind};
use crate::remote_ffn::routes::Share;

impl RemoteFfn {
    /// Adds up what the shards returned, in their order, each row where it belongs.
    pub(super) fn add_up(&mut self, kept: &Kept) -> Result<Tensor, TchError> {
        let (num_rows, kind) = (kept.num_rows, row_kind(self.settings.rows));
        let hidden_size = self.settings.hidden_size;
        let no_rows_yet = |kind| Tensor::f_zeros([num_rows.into(), hidden_size.into()], (kind, Device::Cpu));
        let mut sum: Option<Tensor> = None;
        for (shard, part) in self.parts.drain(..) {
            sum = Some(match (kept.share(shard), sum) {
                (Share::All, None) => part,
                (Share::All, Some(mut sum)) => sum.f_add_(&part)?,
                (Share::Some(rows), sum) => {
                    let rows: Vec<i64> = rows.iter().map(|row| i64::from(*row)).collect();
                    let mut sum = sum.map_or_else(|| no_rows_yet(part.kind()), Ok)?;
                    sum.f_index_add_(0, &Tensor::f_from_slice(&rows)?, &part)?
                }
            });
        }
        let sum = sum.map_or_else(|| no_rows_yet(kind), Ok)?;
        if sum.kind() == kind { Ok(sum) } else { sum.f_to_kind(kind) }
    }

    /// The rows of a hop as they will be sent: with the experts of the cycle instead of the model's where that is asked
    /// for, and shared out over the shards where attention knows the experts.
    pub(super) fn keep(&self, hop: HopKey, rows: &Tensor, side: &SideTensors) -> Result<Kept, String> {
        let placed = self.placement.as_ref().and_then(|placement| placement.layer(hop.layer.0.into()));
        let cycle = match (side, placed) {
            (SideTensors::TopK { weights, .. }, Some(placed))
                if self.settings.experts.routing == Routing::Balanced =>
            {
                let cycle = balanced(self.settings.rank, hop, weights, placed.num_experts());
                Some(cycle.map_err(|error| error.to_string())?)
            }
            _ => None,
        };
        let side = cycle.as_ref().unwrap_or(side);
        let mut kept = Kept::new(hop, rows, side, self.settings.rows).map_err(|error| error.to_string())?;
        if let Some(placed) = placed.filter(|placed| placed.num_shards() > 1 && !self.is_warming) {
            kept.route(placed).map_err(|error| error.to_string())?;
        }
        Ok(kept)
    }
}

/// The choice of `--routing balanced` in place of the model's, with the model's weights.
fn balanced(rank: u32, hop: HopKey, weights: &Tensor, num_experts: usize) -> Result<SideTensors, TchError> {
    let (num_rows, top_k) = weights.size2()?;
    let mut ids = Vec::new();
    balanced_ids(&mut ids, rank, hop, num_rows as usize, top_k as usize, num_experts);
    let ids = Tensor::f_from_slice(&ids)?.f_view([num_rows, top_k])?;
    Ok(SideTensors::TopK { ids, weights: weights.shallow_clone() })
}
