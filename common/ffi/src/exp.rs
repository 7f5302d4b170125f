//! Exponentials for loops that the compiler vectorises: of a softmax, and of silu.

/// Replaces each x by e^(x - max), and returns their sum. Written so that the compiler vectorises it.
#[inline(always)]
pub(crate) fn exponentials(row: &mut [f32], max: f32) -> f32 {
    let mut sums = [0.0f32; 16];
    let (chunks, rest) = row.as_chunks_mut::<16>();
    for chunk in chunks {
        for (x, sum) in chunk.iter_mut().zip(&mut sums) {
            *x = exp(*x - max);
            *sum += *x;
        }
    }
    for (x, sum) in rest.iter_mut().zip(&mut sums) {
        *x = exp(*x - max);
        *sum += *x;
    }
    sums.iter().sum()
}

/// `x * sigmoid(x)`, relative error below 1e-6; NaN stays NaN.
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    let e = exp(-x.abs());
    let share = if x >= 0.0 { 1.0 } else { e };
    x * (share / (1.0 + e))
}

/// e^x for x ≤ 0, relative error below 2e-7: 2^n times a polynomial on [-ln2/2, ln2/2].
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// Adding it makes a float below 2^22 round to an integer in its lowest bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = x.max(-87.0);
    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    // Taylor's coefficients up to r^7 / 7!: the remainder is below 1e-8 on this interval.
    let mut p = 1.0 / 5040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = p * r + c;
    }
    let power = (rounded.to_bits() << 23).wrapping_add(127 << 23);
    p * f32::from_bits(power)
}

#[cfg(test)]
mod tests {
    use super::{exp, silu};

    #[test]
    fn silu_is_within_a_few_ulp_whichever_the_sign() {
        for i in -60_000..=60_000 {
            let x = i as f32 * 1e-3;
            let exact = f64::from(x) / (1.0 + (-f64::from(x)).exp());
            assert!((f64::from(silu(x)) - exact).abs() <= 1e-6 * exact.abs(), "silu({x}) = {}", silu(x));
        }
        assert!(silu(f32::NAN).is_nan());
        assert_eq!(silu(f32::INFINITY), f32::INFINITY);
        assert!(silu(-1e30).abs() < 1e-6);
    }

    #[test]
    fn exp_is_within_a_few_ulp_for_every_weight_a_softmax_can_have() {
        for i in 0..=870_000 {
            let x = -(i as f32) * 1e-4;
            let exact = f64::from(x).exp();
            let relative = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(relative < 3e-7, "exp({x}): {relative:e}");
        }
        assert!(exp(-1e30) < 2e-38 && exp(f32::NEG_INFINITY) < 2e-38);
        assert_eq!(exp(0.0), 1.0);
    }
}
