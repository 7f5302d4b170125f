//! Rotary position embedding: frequencies as Hugging Face computes them, and the angles of a stage's rows.
//!
//! Frequencies and angles are computed with the same f32 operations as there, in the same order: at position 100,000
//! one unit in the last place of a frequency is a hundredth of a turn.
use std::f64::consts::TAU;

use afd_common::config::model::{RopeConfig, RopeScaling};
use afd_ffi::cpu_rows::Pairing;
use tch::{Device, Kind, TchError, Tensor};

/// Rotary embedding of a model's heads.
pub(super) struct Rope {
    /// Radians per position, `[dim / 2]` f32.
    frequencies: Tensor,
    /// Multiplies cos and sin.
    factor: f64,
    /// Which elements turn together.
    pub(super) pairing: Pairing,
    /// Elements of a head that turn.
    pub(super) dim: usize,
}

impl Rope {
    pub(super) fn new(config: &RopeConfig, dim: usize, pairing: Pairing) -> Result<Self, TchError> {
        let (frequencies, factor) = frequencies(config, dim)?;
        Ok(Self { frequencies, factor, pairing, dim })
    }

    /// cos and sin of each row's angles, `[num_rows, dim / 2]` each.
    pub(super) fn rows(&self, positions: &[u32]) -> Result<(Vec<f32>, Vec<f32>), TchError> {
        let positions: Vec<f32> = positions.iter().map(|&p| p as f32).collect();
        let angles = Tensor::f_from_slice(&positions)?.f_unsqueeze(1)?.f_mul(&self.frequencies)?;
        let scaled = |x: Tensor| -> Result<Vec<f32>, TchError> {
            let x = if self.factor == 1.0 { x } else { x.f_mul_scalar(self.factor)? };
            Vec::try_from(x.f_contiguous()?.f_view(-1)?)
        };
        Ok((scaled(angles.f_cos()?)?, scaled(angles.f_sin()?)?))
    }
}

/// What YaRN multiplies magnitudes by when a model is stretched `factor` times.
fn mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

/// What the softmax scale of a DeepSeek model is multiplied by.
pub(super) fn softmax_factor(scaling: &RopeScaling) -> f64 {
    match scaling {
        RopeScaling::Yarn { factor, mscale_all_dim: Some(all_dim), .. } if *all_dim != 0.0 => {
            mscale(*factor, *all_dim).powi(2)
        }
        _ => 1.0,
    }
}

/// Radians per position, `[dim / 2]` f32, and the factor of cos and sin.
fn frequencies(config: &RopeConfig, dim: usize) -> Result<(Tensor, f64), TchError> {
    let exponents = Tensor::f_arange_start_step(0, dim as i64, 2, (Kind::Float, Device::Cpu))?
        .f_div_scalar(dim as f64)?;
    let periods = Tensor::f_pow_scalar(config.theta, &exponents)?;
    let plain = periods.f_reciprocal()?;
    match &config.scaling {
        RopeScaling::None => Ok((plain, 1.0)),
        RopeScaling::Linear { factor } => Ok((plain.f_div_scalar(*factor)?, 1.0)),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => {
            let original = *original_max_position_embeddings as f64;
            let wavelengths = plain.f_reciprocal()?.f_mul_scalar(TAU)?;
            // 0 where the wavelength is long (stretched in full), 1 where it is short (kept).
            let kept = wavelengths
                .f_reciprocal()?
                .f_mul_scalar(original)?
                .f_sub_scalar(*low_freq_factor)?
                .f_div_scalar(high_freq_factor - low_freq_factor)?
                .f_clamp(0.0, 1.0)?;
            let stretched = kept.f_neg()?.f_add_scalar(1.0)?.f_mul(&plain)?.f_div_scalar(*factor)?;
            Ok((stretched.f_add(&plain.f_mul(&kept)?)?, 1.0))
        }
        RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            mscale: of_rope,
            mscale_all_dim,
            attention_factor,
            truncate,
            original_max_position_embeddings,
        } => {
            let (low, high) = correction_range(
                (*beta_fast, *beta_slow),
                dim,
                config.theta,
                *original_max_position_embeddings as f64,
                *truncate,
            );
            // 1 where a dimension turns fast (kept), 0 where it turns slowly (stretched in full).
            let kept = Tensor::f_arange((dim / 2) as i64, (Kind::Float, Device::Cpu))?
                .f_sub_scalar(low)?
                .f_div_scalar(high - low)?
                .f_clamp(0.0, 1.0)?
                .f_neg()?
                .f_add_scalar(1.0)?;
            let stretched = periods.f_mul_scalar(*factor)?.f_reciprocal()?;
            let not_kept = kept.f_neg()?.f_add_scalar(1.0)?;
            let mixed = stretched.f_mul(&not_kept)?.f_add(&plain.f_mul(&kept)?)?;
            let given = |x: &Option<f64>| x.filter(|x| *x != 0.0);
            let magnitude =
                attention_factor.unwrap_or_else(|| match (given(of_rope), given(mscale_all_dim)) {
                    (Some(of_rope), Some(all_dim)) => mscale(*factor, of_rope) / mscale(*factor, all_dim),
                    _ => mscale(*factor, 1.0),
                });
            Ok((mixed, magnitude))
        }
    }
}

/// Between which dimensions YaRN goes over from keeping to stretching (arXiv 2309.00071, section 3.2).
fn correction_range(
    (beta_fast, beta_slow): (f64, f64),
    dim: usize,
    theta: f64,
    original: f64,
    truncate: bool,
) -> (f64, f64) {
    let dimension = |turns: f64| dim as f64 * (original / (turns * TAU)).ln() / (2.0 * theta.ln());
    let (low, high) = (dimension(beta_fast), dimension(beta_slow));
    let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
    let (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
    // A range of no width would divide by zero.
    if low == high { (low, high + 0.001) } else { (low, high) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(scaling: RopeScaling, theta: f64, dim: usize) -> (Vec<f32>, f64) {
        let (f, factor) = frequencies(&RopeConfig { theta, scaling }, dim).unwrap();
        (Vec::try_from(f).unwrap(), factor)
    }

    fn close(found: &[f32], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (a, b) in found.iter().zip(expected) {
            assert!((f64::from(*a) - b).abs() <= 2e-6 * b.abs(), "{found:?}, expected {expected:?}");
        }
    }

    #[test]
    fn plain_and_linear() {
        close(&of(RopeScaling::None, 10_000.0, 8).0, &[1.0, 0.1, 0.01, 0.001]);
        close(&of(RopeScaling::Linear { factor: 4.0 }, 10_000.0, 8).0, &[0.25, 0.025, 0.0025, 0.00025]);
    }

    #[test]
    fn llama3_keeps_short_waves_and_stretches_long_ones() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 256,
        };
        // Wavelengths 2π·{1, 10, 100, 1000}: limits at 64 and 256; the second is just inside, the third long.
        let (found, factor) = of(scaling, 10_000.0, 8);
        let smooth = (256.0 / (TAU * 10.0) - 1.0) / 3.0;
        let second = if smooth >= 1.0 { 0.1 } else { (1.0 - smooth) * 0.1 / 8.0 + smooth * 0.1 };
        close(&found, &[1.0, second, 0.01 / 8.0, 0.001 / 8.0]);
        assert_eq!(factor, 1.0);
    }

    fn yarn(mscale: Option<f64>, mscale_all_dim: Option<f64>, attention_factor: Option<f64>) -> RopeScaling {
        RopeScaling::Yarn {
            factor: 16.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale,
            mscale_all_dim,
            attention_factor,
            truncate: true,
            original_max_position_embeddings: 64,
        }
    }

    #[test]
    fn yarn_ramps_between_fast_and_slow_dimensions() {
        // dim 16: dimension(32 turns) < 0 → 0; dimension(1 turn) = 16 ln(64/2π) / (2 ln 10000) = 2.016 → 3.
        let (found, _) = of(yarn(None, None, None), 10_000.0, 16);
        let expected: Vec<f64> = (0..8)
            .map(|i| {
                let plain = 10_000f64.powf(-(i as f64) / 8.0);
                let stretch = (i as f64 / 3.0).min(1.0);
                plain / 16.0 * stretch + plain * (1.0 - stretch)
            })
            .collect();
        close(&found, &expected);
    }

    #[test]
    fn yarn_s_magnitudes() {
        let whole = 0.1 * 16f64.ln() + 1.0;
        let part = 0.1 * 0.707 * 16f64.ln() + 1.0;
        assert_eq!(of(yarn(None, None, None), 1e4, 16).1, whole);
        assert_eq!(of(yarn(Some(0.707), Some(0.707), None), 1e4, 16).1, 1.0);
        assert_eq!(of(yarn(Some(1.0), Some(0.707), None), 1e4, 16).1, whole / part);
        assert_eq!(of(yarn(Some(1.0), Some(0.707), Some(0.5)), 1e4, 16).1, 0.5);
        assert_eq!(softmax_factor(&yarn(Some(1.0), Some(0.707), None)), part * part);
        assert_eq!(softmax_factor(&yarn(Some(1.0), None, None)), 1.0);
        assert_eq!(softmax_factor(&RopeScaling::None), 1.0);
    }

    #[test]
    fn rows_are_positions_times_frequencies() {
        let config = RopeConfig { theta: 10_000.0, scaling: RopeScaling::None };
        let rope = Rope::new(&config, 4, Pairing::Halves).unwrap();
        let (cos, sin) = rope.rows(&[0, 3]).unwrap();
        let expected = [0.0f32, 0.0, 3.0, 0.03];
        for i in 0..4 {
            assert!((cos[i] - expected[i].cos()).abs() < 1e-6 && (sin[i] - expected[i].sin()).abs() < 1e-6);
        }
        assert!(rope.rows(&[]).unwrap().0.is_empty());
    }
}
