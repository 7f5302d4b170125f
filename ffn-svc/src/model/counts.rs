//! How often each expert was chosen: what `expert imbalance` is computed from, and what placements are proposed by.
use std::sync::atomic::{AtomicU64, Ordering};

use afd_common::ids::LayerIdx;

use super::LayerSpec;

/// Rows given to each local expert of each layer since the process started.
#[derive(Debug)]
pub struct ExpertCounts {
    layers: Vec<(Vec<usize>, Vec<AtomicU64>)>,
}

impl ExpertCounts {
    pub(crate) fn new(specs: &[LayerSpec]) -> Self {
        let zeros = |spec: &LayerSpec| spec.local_experts.iter().map(|_| AtomicU64::new(0)).collect();
        Self { layers: specs.iter().map(|spec| (spec.local_experts.clone(), zeros(spec))).collect() }
    }

    /// `local_expert` counts from the shard's first.
    pub(super) fn add(&self, layer: LayerIdx, local_expert: usize, rows: usize) {
        if let Some(count) =
            self.layers.get(usize::from(layer.0)).and_then(|(_, counts)| counts.get(local_expert))
        {
            count.fetch_add(rows as u64, Ordering::Relaxed);
        }
    }

    /// `(expert id, rows)` of this shard's experts in a layer; empty for a dense or unknown one.
    pub fn of_layer(&self, layer: LayerIdx) -> Vec<(usize, u64)> {
        let Some((experts, counts)) = self.layers.get(usize::from(layer.0)) else { return Vec::new() };
        experts.iter().copied().zip(counts.iter().map(|count| count.load(Ordering::Relaxed))).collect()
    }
}
