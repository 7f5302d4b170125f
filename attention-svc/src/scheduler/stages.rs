//! Splits a step into stages: microbatches of whole sequences, of about equal size, so that one stage's FFN can run while
//! another's attention does.

use super::step::Phase;

/// When and how far a step is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageRules {
    /// Most stages of a step, 1 to 4.
    pub max_stages: usize,
    /// How many of them are used.
    pub pick: StagePick,
    /// Steps that only decode stay whole below this many tokens.
    pub min_decode_tokens: usize,
    /// All other steps stay whole below this many tokens.
    pub min_prefill_tokens: usize,
}

/// How many stages a step that may be split is split into.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StagePick {
    /// As many as it may.
    #[default]
    Most,
    /// As many as [turned out](super::StageCounts) to be the fastest.
    Measured,
}

impl Default for StageRules {
    fn default() -> Self {
        Self { max_stages: 1, pick: StagePick::Most, min_decode_tokens: 2, min_prefill_tokens: 12 }
    }
}

impl StageRules {
    /// Into how many stages a step of some sequences and tokens may be split.
    pub fn splittable(&self, phase: Phase, num_sequences: usize, num_tokens: usize) -> usize {
        let threshold = if phase == Phase::Decode { self.min_decode_tokens } else { self.min_prefill_tokens };
        if num_tokens >= threshold { self.max_stages.clamp(1, num_sequences.max(1)) } else { 1 }
    }

    /// Which items (by index) go into which stage, given the rows of each. Never an empty stage; items keep their order.
    pub(super) fn split(&self, phase: Phase, rows: &[usize]) -> Vec<Vec<usize>> {
        let num_stages = self.splittable(phase, rows.len(), rows.iter().sum());

        // Largest first into the emptiest stage: at most 4/3 of the best possible largest stage (Graham, 1969). Rows are
        // at least 1, so each of the first `num_stages` items opens a stage of its own.
        let mut by_size: Vec<usize> = (0..rows.len()).collect();
        by_size.sort_by_key(|item| std::cmp::Reverse(rows[*item]));
        let mut stages = vec![(0, Vec::new()); num_stages];
        for item in by_size {
            if let Some((size, items)) = stages.iter_mut().min_by_key(|(size, _)| *size) {
                *size += rows[item];
                items.push(item);
            }
        }
        let sorted = |(_, mut items): (usize, Vec<usize>)| {
            items.sort_unstable();
            items
        };
        stages.into_iter().map(sorted).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rules(max_stages: usize) -> StageRules {
        StageRules { max_stages, ..StageRules::default() }
    }

    #[test]
    fn splits_at_the_threshold_and_not_before() {
        assert_eq!(rules(2).split(Phase::Decode, &[1]).len(), 1);
        assert_eq!(rules(2).split(Phase::Decode, &[1, 1]), [[0], [1]]);
        assert_eq!(rules(2).split(Phase::Prefill, &[5, 6]).len(), 1);
        assert_eq!(rules(2).split(Phase::Prefill, &[6, 6]).len(), 2);
        assert_eq!(rules(2).split(Phase::Mixed, &[1, 12]).len(), 2);
        assert_eq!(rules(1).split(Phase::Decode, &[1; 9]), [[0, 1, 2, 3, 4, 5, 6, 7, 8]]);
        assert_eq!(rules(4).split(Phase::Prefill, &[100]).len(), 1);
    }

    proptest! {
        #[test]
        fn every_item_once_no_stage_empty_and_balanced(
            rows in prop::collection::vec(1usize..300, 1..40),
            max_stages in 1usize..=4,
        ) {
            let stages = rules(max_stages).split(Phase::Mixed, &rows);
            let mut seen: Vec<usize> = stages.iter().flatten().copied().collect();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..rows.len()).collect::<Vec<_>>());
            prop_assert!(stages.len() <= max_stages);
            let sizes: Vec<usize> = stages.iter().map(|items| items.iter().map(|item| rows[*item]).sum()).collect();
            prop_assert!(sizes.iter().all(|size| *size > 0));
            let (least, most) = (sizes.iter().min().unwrap(), sizes.iter().max().unwrap());
            prop_assert!(most - least <= *rows.iter().max().unwrap());
        }
    }
}
