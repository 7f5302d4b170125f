//! Routed dispatch: with the gate on attention a row goes only to the shards that serve one of its experts. Pure.
//!
//! What every shard returns for a row that it serves nothing of would be zero, so leaving the row out changes no sum. A
//! shard without any row of a hop is not sent the hop and not waited for: an empty frame would cost both sides a wake-up,
//! and the FFN side needs none to know that a step goes on (its plan says what may come, not what must).
use afd_common::placement::LayerPlacement;

/// What of a hop goes to one shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Share {
    /// Every row.
    All,
    /// These rows, ascending; none: the shard is left out.
    Some(Vec<u32>),
}

impl Share {
    /// Whether the shard takes part in the hop.
    pub fn is_any(&self) -> bool {
        !matches!(self, Self::Some(rows) if rows.is_empty())
    }
}

/// Shares of all shards. `choices` are each row's experts; one that does not exist goes to the first shard, which refuses
/// it by name, and a row without any (padding) is the first shard's too.
pub fn split<R: Iterator<Item = i32>>(
    choices: impl ExactSizeIterator<Item = R>,
    salt: impl Fn(usize) -> u32,
    placed: &LayerPlacement,
) -> Vec<Share> {
    let (num_rows, num_experts) = (choices.len(), placed.num_experts());
    let mut lists = vec![Vec::new(); placed.num_shards() as usize];
    for (row, experts) in choices.enumerate() {
        let salt = salt(row);
        for expert in experts {
            let expert = usize::try_from(expert).ok().filter(|expert| *expert < num_experts);
            let list: &mut Vec<u32> =
                &mut lists[expert.map_or(0, |expert| placed.server(expert, salt)) as usize];
            if list.last() != Some(&(row as u32)) {
                list.push(row as u32);
            }
        }
    }
    let share = |rows: Vec<u32>| if rows.len() == num_rows { Share::All } else { Share::Some(rows) };
    lists.into_iter().map(share).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shares(rows: &[&[i32]], placed: &LayerPlacement) -> Vec<Share> {
        split(rows.iter().map(|row| row.iter().copied()), |row| row as u32 * 77, placed)
    }

    #[test]
    fn a_row_goes_where_its_experts_are_and_nowhere_else() {
        let placed = LayerPlacement::contiguous(6, 3);
        let found = shares(&[&[0, 1], &[5, 0], &[4, 5], &[1, 0]], &placed);
        assert_eq!(found, [Share::Some(vec![0, 1, 3]), Share::Some(vec![]), Share::Some(vec![1, 2])]);
        assert_eq!([true, false, true].to_vec(), found.iter().map(Share::is_any).collect::<Vec<_>>());
        assert_eq!(shares(&[&[0, 2], &[2, 1]], &placed)[..2], [Share::All, Share::All]);
        assert_eq!(shares(&[], &placed), [Share::All, Share::All, Share::All], "no rows: legal, and cheap");
        assert_eq!(
            shares(&[&[-1, -1], &[9, 2]], &placed)[0],
            Share::All,
            "padding, and what will be refused"
        );
    }

    proptest! {
        /// Every choice of every row is at the shard that serves it, and no shard gets a row for nothing.
        #[test]
        fn nothing_is_left_out_and_nothing_sent_in_vain(
            rows in prop::collection::vec(prop::collection::btree_set(0i32..9, 1..4), 1..30),
            shards in 1u32..6,
        ) {
            let placed = LayerPlacement::contiguous(9, shards);
            let rows: Vec<Vec<i32>> = rows.into_iter().map(|row| row.into_iter().collect()).collect();
            let slices: Vec<&[i32]> = rows.iter().map(Vec::as_slice).collect();
            for (shard, share) in shares(&slices, &placed).into_iter().enumerate() {
                for (row, experts) in rows.iter().enumerate() {
                    let wanted = experts.iter().any(|expert| placed.server(*expert as usize, 0) as usize == shard);
                    let sent = match &share {
                        Share::All => true,
                        Share::Some(list) => list.contains(&(row as u32)),
                    };
                    prop_assert_eq!(wanted, sent);
                }
            }
        }
    }
}
