//! Who chooses experts: the model's router or, for benchmarks, a cycle that spreads rows over all experts evenly.
//!
//! The cycle replaces expert ids and nothing else; what comes out is no text. It follows from where a row comes from and
//! which hop it belongs to, so every shard comes to the same choice, whatever it puts into a batch.
use crate::ids::HopKey;

/// `--routing`; alike on both roles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Routing {
    /// The model's router.
    #[default]
    Model,
    /// A balanced cycle: benchmarks only.
    Balanced,
}

impl std::str::FromStr for Routing {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "model" => Ok(Self::Model),
            "balanced" => Ok(Self::Balanced),
            other => Err(format!("{other:?} is no routing; known are model and balanced")),
        }
    }
}

impl Routing {
    /// What both roles log at their start when this is not the model's own routing.
    pub const WARNING: &'static str = "--routing balanced: EXPERTS ARE NOT CHOSEN BY THE MODEL. What comes out is meaningless; for benchmarks only";
}

/// Appends the experts of a hop's rows, `top_k` each, row by row. `source` is the attention rank: ranks begin at different
/// places of the cycle, so that together they meet every expert equally often, and so does each from step to step.
pub fn balanced_ids(
    ids: &mut Vec<i64>,
    source: u32,
    hop: HopKey,
    num_rows: usize,
    top_k: usize,
    num_experts: usize,
) {
    let choices = (num_rows * top_k) as u64;
    let hops = u64::from(source).wrapping_add(hop.step.0).wrapping_add(hop.stage.0.into());
    let num_experts = (num_experts as u64).max(1);
    let start = (choices % num_experts) * (hops % num_experts);
    ids.extend((0..choices).map(|choice| ((start + choice) % num_experts) as i64));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::frame::FrameHeader;

    fn histogram(ranks: u32, steps: u64, rows: usize, top_k: usize, num_experts: usize) -> Vec<usize> {
        let mut counts = vec![0; num_experts];
        for (source, step) in (0..ranks).flat_map(|source| (0..steps).map(move |step| (source, step))) {
            let mut ids = Vec::new();
            balanced_ids(&mut ids, source, FrameHeader::key(step, 3, 0), rows, top_k, num_experts);
            assert_eq!(ids.len(), rows * top_k);
            ids.iter().for_each(|id| counts[*id as usize] += 1);
        }
        counts
    }

    #[test]
    fn ranks_of_one_row_meet_every_expert_once() {
        assert_eq!(histogram(4, 1, 1, 2, 8), [1; 8]);
        assert_eq!(histogram(3, 7, 5, 3, 16).iter().sum::<usize>(), 3 * 7 * 5 * 3);
    }

    proptest! {
        /// A cycle leaves no expert more than one choice behind for every rank.
        #[test]
        fn the_histogram_is_flat(ranks in 1u32..6, steps in 1u64..50, rows in 1usize..40, top_k in 1usize..9, more in 0usize..64) {
            let counts = histogram(ranks, steps, rows, top_k, top_k + more);
            let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
            prop_assert!(most - least <= ranks as usize, "{counts:?}");
        }

        /// No row is given an expert twice.
        #[test]
        fn a_row_has_different_experts(source: u32, step: u64, rows in 1usize..20, top_k in 1usize..9, more in 0usize..64) {
            let mut ids = Vec::new();
            balanced_ids(&mut ids, source, FrameHeader::key(step, 0, 1), rows, top_k, top_k + more);
            for row in ids.chunks(top_k) {
                let distinct: std::collections::BTreeSet<_> = row.iter().collect();
                prop_assert_eq!(distinct.len(), top_k);
            }
        }
    }
}
