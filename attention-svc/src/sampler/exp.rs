//! The exponential function over a whole row. The standard library's is one call per element and would be most of what
//! sampling costs; this one is plain arithmetic that the compiler turns into vector instructions.

/// e^x for `x <= 0`, within 3e-7 of the true value relative to it; 0 below -87, where f32 ends.
fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to a whole number, which then stands in the lowest bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts: n * HIGH is exact for every n that occurs, which keeps the remainder exact too.
    const HIGH: f32 = 0.693_359_4;
    const LOW: f32 = -2.121_944_4e-4;

    let clamped = x.max(-87.0);
    let rounded = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let power_of_two =
        f32::from_bits(rounded.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23);
    // |r| <= ln 2 / 2: seven terms of the series are enough.
    let r = clamped - n * HIGH - n * LOW;
    let tail = 1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0)));
    let power = power_of_two * (1.0 + r * (1.0 + r * (0.5 + r * tail)));
    if x < -87.0 { 0.0 } else { power }
}

/// The sum of e^((logit - max) * scale), with every term appended to `weights`; `max` is the row's largest logit.
pub(super) fn weights(row: &[f32], max: f32, scale: f32, weights: &mut Vec<f32>) -> f64 {
    weights.clear();
    // The difference first: it is at most 0, so no temperature makes it overflow upwards; 0 * infinity is set right.
    weights.extend(row.iter().map(|logit| exp(((logit - max) * scale).min(0.0))));
    sum(weights)
}

/// Sum of numbers of one sign, in f64 from short runs on, so that its error does not grow with the vocabulary.
pub(super) fn sum(values: &[f32]) -> f64 {
    const LANES: usize = 16;
    let (chunks, rest) = values.as_chunks::<LANES>();
    let mut total = 0.0;
    for run in chunks.chunks(16) {
        let mut lanes = [0.0; LANES];
        for chunk in run {
            chunk.iter().zip(&mut lanes).for_each(|(value, lane)| *lane += value);
        }
        total += f64::from(lanes.iter().sum::<f32>());
    }
    total + rest.iter().map(|value| f64::from(*value)).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_the_exponential_function() {
        for step in 0..870_000 {
            let x = -step as f32 * 1e-4;
            let (found, expected) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((found / expected - 1.0).abs() < 3e-7, "e^{x}: {found}, expected {expected}");
        }
        assert_eq!((exp(0.0), exp(-87.5), exp(f32::NEG_INFINITY)), (1.0, 0.0, 0.0));
    }

    #[test]
    fn sums_long_rows() {
        let values: Vec<f32> = (0..100_003).map(|i| 1.0 / (1.0 + i as f32)).collect();
        let expected: f64 = values.iter().map(|value| f64::from(*value)).sum();
        assert!((sum(&values) / expected - 1.0).abs() < 1e-7);
    }
}
