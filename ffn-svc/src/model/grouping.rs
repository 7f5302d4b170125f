//! Which rows go to which expert: the rows of a stage sorted by expert, without tensors.
use afd_common::layers::NO_EXPERT;

/// The work of this shard's experts, in order of their index; experts without rows do not occur.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Groups {
    /// `(expert counted from the shard's first, its work items from .. to)`.
    pub(super) experts: Vec<(usize, std::ops::Range<usize>)>,
    /// Row of each work item.
    pub(super) rows: Vec<i64>,
    /// Weight of each work item.
    pub(super) weights: Vec<f32>,
}

/// A row that names an expert that does not exist.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct UnknownExpert {
    pub(super) row: usize,
    pub(super) expert: i64,
}

/// What [`NO_EXPERT`] means in place of an expert's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unrouted {
    /// A padding row, which no expert sees.
    Padding,
    /// A mistake of the sender.
    Refused,
}

impl Groups {
    /// `ids` and `weights` are `[rows, k]`; `local` are the experts of this shard out of `num_experts`. A counting sort:
    /// rows of an expert stay in order.
    pub(super) fn new(
        ids: &[i64],
        weights: &[f32],
        k: usize,
        local: &std::ops::Range<usize>,
        num_experts: usize,
        unrouted: Unrouted,
    ) -> Result<Self, UnknownExpert> {
        let mut ends = vec![0usize; local.len()];
        for (at, &expert) in ids.iter().enumerate() {
            match usize::try_from(expert) {
                Ok(id) if local.contains(&id) => ends[id - local.start] += 1,
                Ok(id) if id < num_experts => {}
                Err(_) if expert == NO_EXPERT && unrouted == Unrouted::Padding => {}
                _ => return Err(UnknownExpert { row: at / k, expert }),
            }
        }
        let mut experts = Vec::new();
        let mut total = 0;
        for (expert, end) in ends.iter_mut().enumerate() {
            let count = std::mem::replace(end, total);
            if count > 0 {
                experts.push((expert, total..total + count));
            }
            total += count;
        }
        let mut next = ends;
        let mut groups = Self { experts, rows: vec![0; total], weights: vec![0.0; total] };
        for (at, (&expert, &weight)) in ids.iter().zip(weights).enumerate() {
            if let Ok(expert) = usize::try_from(expert)
                && local.contains(&expert)
            {
                let slot = &mut next[expert - local.start];
                groups.rows[*slot] = (at / k) as i64;
                groups.weights[*slot] = weight;
                *slot += 1;
            }
        }
        Ok(groups)
    }

    /// Row-major `[rows, items]`: what each item contributes to each row, so that the weighted sum is one product.
    pub(super) fn combine_matrix(&self, num_rows: usize) -> Vec<f32> {
        let items = self.rows.len();
        let mut matrix = vec![0.0; num_rows * items];
        for (item, (&row, &weight)) in self.rows.iter().zip(&self.weights).enumerate() {
            matrix[row as usize * items + item] = weight;
        }
        matrix
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_sorted_by_expert_and_keep_their_weights() {
        let groups = Groups::new(
            &[2, 0, 3, 2, 0, 9],
            &[0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
            2,
            &(0..4),
            10,
            Unrouted::Refused,
        )
        .unwrap();
        assert_eq!(groups.experts, [(0, 0..2), (2, 2..4), (3, 4..5)]);
        assert_eq!(groups.rows, [0, 2, 0, 1, 1]);
        assert_eq!(groups.weights, [0.2, 0.5, 0.1, 0.4, 0.3]);
        assert_eq!(groups.combine_matrix(3)[10..], [0.0, 0.5, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn experts_of_other_shards_are_left_out_and_unknown_ones_refused() {
        let groups = Groups::new(&[2, 0, 3, 2], &[1.0; 4], 2, &(2..3), 4, Unrouted::Refused).unwrap();
        assert_eq!((groups.experts, groups.rows), (vec![(0, 0..2)], vec![0, 1]));
        assert_eq!(Groups::new(&[0, 1], &[1.0; 2], 2, &(3..3), 4, Unrouted::Refused), Ok(Groups::default()));
        for expert in [-1, 4, i64::MAX] {
            let refused = Groups::new(&[0, 1, 2, expert], &[1.0; 4], 2, &(0..2), 4, Unrouted::Refused);
            assert_eq!(refused, Err(UnknownExpert { row: 1, expert }));
        }
    }

    #[test]
    fn padding_goes_to_no_expert_where_it_is_known() {
        let ids = [1, 0, NO_EXPERT, NO_EXPERT, 0, 3];
        let groups = Groups::new(&ids, &[0.5; 6], 2, &(0..2), 4, Unrouted::Padding).unwrap();
        assert_eq!((groups.experts, groups.rows), (vec![(0, 0..2), (1, 2..3)], vec![0, 2, 0]));
        let other = Groups::new(&[-2, 0], &[0.5; 2], 2, &(0..2), 4, Unrouted::Padding);
        assert_eq!(other, Err(UnknownExpert { row: 0, expert: -2 }));
    }
}
