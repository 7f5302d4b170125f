//! Which padded batch sizes decode steps are captured for.

/// Sizes, rising, without duplicates, none of them 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaptureSizes(Vec<usize>);

/// What every size is below: our kernels take no more rows at once.
pub const MAX_CAPTURE_SIZE: usize = 256;
const MORE_THAN_CAPTURED: usize = MAX_CAPTURE_SIZE + 1;

impl CaptureSizes {
    /// Those that were asked for, in any order.
    ///
    /// # Errors
    /// For a size that is 0 or too large, or no size at all; as the sentence goes on behind the option.
    pub fn new(sizes: &[usize]) -> Result<Self, String> {
        let mut sorted = sizes.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        match (sorted.first(), sorted.last()) {
            (None, _) | (_, None) => Err("leaves no size".into()),
            (Some(wrong @ 0), _) | (_, Some(wrong @ MORE_THAN_CAPTURED..)) => {
                Err(format!("has {wrong}; expected sizes from 1 to {MAX_CAPTURE_SIZE}"))
            }
            _ => Ok(Self(sorted)),
        }
    }

    /// The default up to `max`: dense where a step's cost grows fast with its rows, `max` itself always there.
    pub fn up_to(max: usize) -> Self {
        let max = max.clamp(1, MAX_CAPTURE_SIZE);
        let dense = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256];
        let mut sizes: Vec<usize> = dense.into_iter().filter(|size| *size < max).collect();
        sizes.push(max);
        Self(sizes)
    }

    /// The smallest size that holds `rows`.
    pub fn padded(&self, rows: usize) -> Option<usize> {
        self.0.iter().copied().find(|size| *size >= rows)
    }

    /// All of them.
    pub fn as_slice(&self) -> &[usize] {
        &self.0
    }

    /// The largest.
    pub fn largest(&self) -> usize {
        self.0.last().copied().unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorted_without_duplicates_and_checked() {
        assert_eq!(CaptureSizes::new(&[8, 1, 8, 64]).unwrap().as_slice(), [1, 8, 64]);
        for sizes in [&[][..], &[0, 1], &[257]] {
            assert!(CaptureSizes::new(sizes).is_err(), "{sizes:?}");
        }
        assert_eq!(CaptureSizes::up_to(1).as_slice(), [1]);
        assert_eq!(CaptureSizes::up_to(10).as_slice(), [1, 2, 4, 8, 10]);
        assert_eq!(CaptureSizes::up_to(10_000).largest(), MAX_CAPTURE_SIZE);
    }

    #[test]
    fn rows_are_padded_to_the_next_size() {
        let sizes = CaptureSizes::new(&[1, 4, 16]).unwrap();
        let padded: Vec<_> = [1, 2, 4, 5, 16, 17].into_iter().map(|rows| sizes.padded(rows)).collect();
        assert_eq!(padded, [Some(1), Some(4), Some(4), Some(16), Some(16), None]);
    }
}
