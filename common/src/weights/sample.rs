//! Which values of a checkpoint stand for all of them in its fingerprint: reading all would cost as much as loading what
//! other roles own, and two models of equal shapes differ nearly everywhere.
use std::ops::Range;

use super::dummy::mix;

/// Most tensors that are looked into.
const MOST_TENSORS: usize = 256;
/// What is read of each.
const SAMPLE_BYTES: usize = 64;

/// Which of `num_tensors`, sorted by name: one of each of at most 256 equal stretches. Where in its stretch is scattered,
/// because names repeat with every layer and equal steps could meet only tensors of one sort.
pub(super) fn chosen(num_tensors: usize) -> impl Iterator<Item = usize> {
    let num_stretches = num_tensors.min(MOST_TENSORS);
    (0..num_stretches).map(move |nth| {
        let begin = nth * num_tensors / num_stretches;
        let end = (nth + 1) * num_tensors / num_stretches;
        begin + (mix(nth as u64) % (end - begin) as u64) as usize
    })
}

/// The middle 64 bytes of a tensor that lies at `begin..end`, or all of a smaller one.
pub(super) fn middle(begin: usize, end: usize) -> Range<usize> {
    let length = (end - begin).min(SAMPLE_BYTES);
    let from = begin + (end - begin - length) / 2;
    from..from + length
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_checkpoints_are_looked_into_everywhere_and_large_ones_evenly() {
        assert_eq!(chosen(0).count(), 0);
        assert!(chosen(3).eq(0..3));
        // Nine tensors a layer, so that a stretch is as long as a layer: every sort of tensor is met.
        let of_layers: Vec<_> = chosen(9 * MOST_TENSORS).collect();
        assert!(of_layers.len() == MOST_TENSORS && of_layers.is_sorted());
        assert!((0..9).all(|sort| of_layers.iter().any(|tensor| tensor % 9 == sort)), "{of_layers:?}");
    }

    #[test]
    fn the_middle_lies_within_the_tensor() {
        assert_eq!(middle(100, 1100), 568..632);
        assert_eq!(middle(100, 110), 100..110);
        assert_eq!(middle(7, 7), 7..7);
    }
}
