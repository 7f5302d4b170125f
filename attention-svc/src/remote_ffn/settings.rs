//! What the way to the FFN is told once, at the start of the process.
use std::sync::Arc;
use std::time::Duration;

use afd_common::config::model::ModelConfig;
use afd_common::frame::RowType;
use afd_common::identity::ExpertRules;
use afd_common::placement::Placement;
use afd_common::spelling::count;

use super::streams::StreamPlace;

/// What stays the same for the life of the process.
#[derive(Clone, Debug)]
pub struct PortSettings {
    /// Width of a row, elements.
    pub hidden_size: u32,
    /// Element type of dispatched rows and of the combined result.
    pub rows: RowType,
    /// This attention rank.
    pub rank: u32,
    /// Time without an answer or any progress after which an edge is lost, for a hop of few rows.
    pub hop_timeout: Duration,
    /// Added to it per outstanding row, so that a long prefill is not taken for a death.
    pub hop_timeout_per_row: Duration,
    /// The same for a hop of a step that warms ranks up, however many rows it has.
    pub warmup_timeout: Duration,
    /// Time a shard may have no rank before its requests fail.
    pub loss_timeout: Duration,
    /// What the model's layers are, for where their experts are.
    pub model: Arc<ModelConfig>,
    /// How experts are chosen and where they are.
    pub experts: ExpertRules,
    /// Where links that a stream drives begin; none without a GPU.
    pub place: Option<StreamPlace>,
}

impl PortSettings {
    /// Where experts are in a deployment of so many shards.
    pub(super) fn placement(&self, num_shards: u32) -> Result<Arc<Placement>, String> {
        match &self.experts.placement {
            None => Ok(Arc::new(Placement::contiguous(&self.model, num_shards))),
            Some(placement) if placement.num_shards() == num_shards => Ok(Arc::clone(placement)),
            Some(placement) => {
                let placed = count(placement.num_shards(), "shard");
                Err(format!("the placement has {placed}, the rank says {num_shards} (--placement)"))
            }
        }
    }
}
