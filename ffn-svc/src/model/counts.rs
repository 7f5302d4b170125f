//! How often each expert was chosen: what `expert imbalance` is computed from, and what placements are proposed by.
use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use afd_common::ids::LayerIdx;

use super::LayerSpec;

/// Rows given to each local expert of each layer since the process started; rows of a warm-up only where a device counts.
#[derive(Debug)]
pub struct ExpertCounts {
    layers: Vec<(Vec<usize>, Vec<AtomicU64>)>,
    elsewhere: OnceLock<Elsewhere>,
}

/// Rows of every expert of a layer, by its id, that were counted where they were computed.
struct Elsewhere(Box<dyn Fn(LayerIdx) -> Vec<u64> + Send + Sync>);

impl fmt::Debug for Elsewhere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Elsewhere")
    }
}

impl ExpertCounts {
    pub(crate) fn new(specs: &[LayerSpec]) -> Self {
        let zeros = |spec: &LayerSpec| spec.local_experts.iter().map(|_| AtomicU64::new(0)).collect();
        let ids = |spec: &LayerSpec| spec.local_experts.iter().map(|id| *id as usize).collect();
        let layers = specs.iter().map(|spec| (ids(spec), zeros(spec))).collect();
        Self { layers, elsewhere: OnceLock::new() }
    }

    /// Rows are counted by a device too, which is asked whenever somebody wants to know. The first one stays.
    pub(crate) fn count_elsewhere(&self, counts: impl Fn(LayerIdx) -> Vec<u64> + Send + Sync + 'static) {
        let _ = self.elsewhere.set(Elsewhere(Box::new(counts)));
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
        let elsewhere = self.elsewhere.get().map(|Elsewhere(counts)| counts(layer)).unwrap_or_default();
        let rows = |(&expert, count): (&usize, &AtomicU64)| {
            (expert, count.load(Ordering::Relaxed) + elsewhere.get(expert).copied().unwrap_or_default())
        };
        experts.iter().zip(counts).map(rows).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_a_device_counted_are_added_by_expert() {
        let spec = |local_experts| LayerSpec {
            num_experts: 4,
            experts_per_token: 2,
            local_experts,
            ..LayerSpec::dense()
        };
        let counts = ExpertCounts::new(&[spec(Vec::new()), spec(vec![1, 3])]);
        counts.add(LayerIdx(1), 1, 5);
        assert_eq!(counts.of_layer(LayerIdx(1)), [(1, 0), (3, 5)]);
        counts.count_elsewhere(|layer| if layer == LayerIdx(1) { vec![7, 8, 9, 10] } else { Vec::new() });
        assert_eq!(counts.of_layer(LayerIdx(1)), [(1, 8), (3, 15)]);
        assert_eq!((counts.of_layer(LayerIdx(0)), counts.of_layer(LayerIdx(2))), (vec![], vec![]));
    }
}
