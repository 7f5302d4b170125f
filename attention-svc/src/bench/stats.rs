//! Percentiles. Pure.
use std::time::Duration;

use serde_json::{Value, json};

/// A distribution of times, milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Spread {
    pub(super) mean: f64,
    pub(super) p50: f64,
    pub(super) p90: f64,
    pub(super) p99: f64,
}

impl Spread {
    /// Of some times; zeros when there are none.
    pub(super) fn of(times: impl IntoIterator<Item = Duration>) -> Self {
        let mut ms: Vec<f64> = times.into_iter().map(|t| t.as_secs_f64() * 1e3).collect();
        if ms.is_empty() {
            return Self::default();
        }
        ms.sort_unstable_by(f64::total_cmp);
        Self {
            mean: ms.iter().sum::<f64>() / ms.len() as f64,
            p50: percentile(&ms, 0.50),
            p90: percentile(&ms, 0.90),
            p99: percentile(&ms, 0.99),
        }
    }

    pub(super) fn json(self) -> Value {
        json!({"mean": self.mean, "p50": self.p50, "p90": self.p90, "p99": self.p99})
    }
}

/// Linear between the two nearest of the sorted values.
fn percentile(sorted: &[f64], part: f64) -> f64 {
    let at = part * (sorted.len() - 1) as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_lie_between_the_nearest_values() {
        let spread = Spread::of((1..=101).map(Duration::from_millis));
        assert_eq!((spread.p50, spread.p90, spread.p99, spread.mean), (51.0, 91.0, 100.0, 51.0));
        let two = Spread::of([10, 20].map(Duration::from_millis));
        assert!((two.p90 - 19.0).abs() < 1e-9);
        assert_eq!(Spread::of([]), Spread::default());
    }
}
