//! Which rows go to which expert: the rows of a stage sorted by expert, without tensors.
use std::ops::Range;

use afd_common::ids::Shard;
use afd_common::layers::NO_EXPERT;
use afd_common::placement::LayerPlacement;

/// The experts of a layer that this shard has, and which rows it serves with them.
#[derive(Debug)]
pub(super) struct LocalExperts {
    placed: LayerPlacement,
    shard: u32,
    /// Ascending.
    ids: Vec<usize>,
    /// By expert, its place in `ids`.
    slots: Vec<Option<usize>>,
}

impl LocalExperts {
    pub(super) fn new(placed: &LayerPlacement, shard: Shard) -> Self {
        let ids = placed.experts_of(shard.index());
        let mut slots = vec![None; placed.num_experts()];
        ids.iter().enumerate().for_each(|(slot, id)| slots[*id] = Some(slot));
        Self { placed: placed.clone(), shard: shard.index(), ids, slots }
    }

    pub(super) fn ids(&self) -> &[usize] {
        &self.ids
    }

    /// Whether rows need a salt.
    pub(super) fn has_copies(&self) -> bool {
        self.placed.has_copies()
    }

    /// Place in [`ids`](Self::ids) of an expert of the layer, if this shard serves it for a row of this salt.
    fn slot(&self, expert: usize, salt: u32) -> Option<usize> {
        let slot = self.slots[expert]?;
        (self.placed.server(expert, salt) == self.shard).then_some(slot)
    }

    /// The rows that this shard applies whole shared experts to, by the first choice of each.
    pub(super) fn shared_rows(&self, ids: &[i64], k: usize, salts: &[u32]) -> Vec<i64> {
        let firsts = ids.iter().step_by(k.max(1)).enumerate();
        let here = firsts.filter(|&(row, &first)| {
            self.placed.shared_server(first, salts.get(row).copied().unwrap_or(0)) == self.shard
        });
        here.map(|(row, _)| row as i64).collect()
    }
}

/// The work of this shard's experts, in order of their index; experts without rows do not occur.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Groups {
    /// `(expert counted from the shard's first, its work items from .. to)`.
    pub(super) experts: Vec<(usize, Range<usize>)>,
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

impl Groups {
    /// `ids` and `weights` are `[rows, k]`; `salts` are the rows', empty where no expert has copies. What other shards
    /// serve is left out, and so is [`NO_EXPERT`], which stands in padding rows. A counting sort: rows of an expert stay
    /// in order.
    pub(super) fn new(
        ids: &[i64],
        weights: &[f32],
        k: usize,
        local: &LocalExperts,
        salts: &[u32],
    ) -> Result<Self, UnknownExpert> {
        let slot_of = |at: usize, expert: usize| local.slot(expert, salts.get(at / k).copied().unwrap_or(0));
        let mut ends = vec![0usize; local.ids.len()];
        for (at, &expert) in ids.iter().enumerate() {
            match usize::try_from(expert) {
                Ok(id) if id < local.slots.len() => {
                    slot_of(at, id).into_iter().for_each(|slot| ends[slot] += 1);
                }
                Err(_) if expert == NO_EXPERT => {}
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
                && let Some(slot) = slot_of(at, expert)
            {
                let item = &mut next[slot];
                groups.rows[*item] = (at / k) as i64;
                groups.weights[*item] = weight;
                *item += 1;
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

    /// A shard of `lists`, one list of experts a shard.
    fn local(placed: &LayerPlacement, shard: u32) -> LocalExperts {
        LocalExperts::new(placed, Shard::new(shard, placed.num_shards()).unwrap())
    }

    #[test]
    fn rows_are_sorted_by_expert_and_keep_their_weights() {
        let placed = LayerPlacement::contiguous(10, 2);
        let groups =
            Groups::new(&[2, 0, 3, 2, 0, 9], &[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 2, &local(&placed, 0), &[])
                .unwrap();
        assert_eq!(groups.experts, [(0, 0..2), (2, 2..4), (3, 4..5)]);
        assert_eq!(groups.rows, [0, 2, 0, 1, 1]);
        assert_eq!(groups.weights, [0.2, 0.5, 0.1, 0.4, 0.3]);
        assert_eq!(groups.combine_matrix(3)[10..], [0.0, 0.5, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn experts_of_other_shards_and_padding_are_left_out_and_unknown_ones_refused() {
        let placed = LayerPlacement::contiguous(4, 4);
        let of =
            |ids: &[i64], shard| Groups::new(ids, &[1.0; 4][..ids.len()], 2, &local(&placed, shard), &[]);
        let groups = of(&[2, 0, 3, 2], 2).unwrap();
        assert_eq!((groups.experts, groups.rows), (vec![(0, 0..2)], vec![0, 1]));
        assert_eq!(of(&[0, 1, NO_EXPERT, NO_EXPERT], 3), Ok(Groups::default()));
        for expert in [-2, 4, i64::MAX] {
            assert_eq!(of(&[0, 1, 2, expert], 0), Err(UnknownExpert { row: 1, expert }));
        }
    }

    /// Every choice of every row is somebody's, copies or not, and every row's shared experts too.
    #[test]
    fn shards_share_out_all_choices_of_all_rows() {
        let config = afd_common::config::model::ModelConfig::load(
            &std::path::PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny/tiny-mixtral"),
        )
        .unwrap();
        let lists = vec![vec![0, 1, 2, 3], vec![0, 3, 4, 5], vec![0, 6, 7]];
        let file = afd_common::placement::PlacementFile { experts: Some(lists), layers: Default::default() };
        let placement = file.placement(&config, None).unwrap();
        let placed = placement.layer(0).unwrap();
        let ids = [0, 3, 0, 7, 3, 5, 6, 0, 0, 1, NO_EXPERT, NO_EXPERT];
        let salts: Vec<u32> = (0..6).map(|row| row * 0x1234_5677).collect();
        let (mut items, mut shared) = (Vec::new(), Vec::new());
        for shard in 0..3 {
            let local = local(placed, shard);
            let groups = Groups::new(&ids, &[1.0; 12], 2, &local, &salts).unwrap();
            for (expert, range) in groups.experts {
                let id = local.ids()[expert];
                items.extend(groups.rows[range].iter().map(|row| (*row, id as i64)));
            }
            shared.extend(local.shared_rows(&ids, 2, &salts));
        }
        items.sort_unstable();
        let mut expected: Vec<_> =
            ids[..10].iter().enumerate().map(|(at, id)| (at as i64 / 2, *id)).collect();
        expected.sort_unstable();
        assert_eq!(items, expected);
        shared.sort_unstable();
        assert_eq!(shared, [0, 1, 2, 3, 4, 5]);
    }
}
