//! A straight line through measured points.
use super::CalibrateError;
use crate::plan::calibration::{Exact, Line};

/// `y = fixed + per_row · x` by least squares with neither part negative; `None` without points.
pub(super) fn fit(what: &'static str, samples: &[(f64, f64)]) -> Result<Option<Line>, CalibrateError> {
    weighted(what, samples, |_| 1.0)
}

/// The same with the squares of relative distances.
pub(super) fn fit_relative(
    what: &'static str,
    samples: &[(f64, f64)],
) -> Result<Option<Line>, CalibrateError> {
    weighted(what, samples, |y| 1.0 / (y * y))
}

fn weighted(
    what: &'static str,
    samples: &[(f64, f64)],
    weight: fn(f64) -> f64,
) -> Result<Option<Line>, CalibrateError> {
    let Some(&(first, _)) = samples.first() else { return Ok(None) };
    if let Some((x, _)) = samples.iter().find(|(x, y)| !(x.is_finite() && y.is_finite() && *x > 0.0)) {
        return Err(CalibrateError::Absurd {
            what,
            value: *x,
            why: "load and time must be finite, the load above zero",
        });
    }
    if let Some((_, y)) = samples.iter().find(|(_, y)| *y <= 0.0) {
        return Err(CalibrateError::Absurd {
            what,
            value: *y,
            why: "no time is left after what the profile accounts for",
        });
    }
    if samples.iter().all(|(x, _)| (x / first - 1.0).abs() < 1e-9) {
        return Err(CalibrateError::TooFew { what, count: samples.len() });
    }
    let sum =
        |of: &dyn Fn(f64, f64) -> f64| samples.iter().map(|(x, y)| weight(*y) * of(*x, *y)).sum::<f64>();
    let all = sum(&|_, _| 1.0);
    let (mean_x, mean_y) = (sum(&|x, _| x) / all, sum(&|_, y| y) / all);
    let slope = sum(&|x, y| (x - mean_x) * (y - mean_y)) / sum(&|x, _| (x - mean_x).powi(2));
    let (fixed, per_row) = match (slope, mean_y - slope * mean_x) {
        (slope, _) if slope < 0.0 => (mean_y, 0.0),
        (_, fixed) if fixed < 0.0 => (0.0, sum(&|x, y| x * y) / sum(&|x, _| x * x)),
        (slope, fixed) => (fixed, slope),
    };
    let off = samples.iter().map(|(x, y)| ((fixed + per_row * x) / y - 1.0).abs()).fold(0.0, f64::max);
    let source = format!("{what}, {} points, worst {:.1} % off", samples.len(), 100.0 * off);
    Ok(Some(Line { fixed: Exact(fixed), per_row: Exact(per_row), source }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(samples: &[(f64, f64)]) -> (f64, f64) {
        let line = fit("points", samples).unwrap().unwrap();
        (line.fixed.0, line.per_row.0)
    }

    #[test]
    fn two_points_give_the_fixed_and_the_linear_part() {
        let (fixed, per_row) = line(&[(10.0, 7.0), (30.0, 11.0)]);
        assert!((fixed - 5.0).abs() < 1e-12 && (per_row - 0.2).abs() < 1e-12);
    }

    #[test]
    fn a_large_sample_that_is_a_little_off_does_not_hide_the_fixed_part() {
        let samples = [(4e3, 5e-6 + 4e-7), (1e6, 5e-6 + 1e-4), (4e6, 1.2 * (5e-6 + 4e-4))];
        let relative = fit_relative("links", &samples).unwrap().unwrap();
        assert!((relative.fixed.0 / 5e-6 - 1.0).abs() < 0.1, "{relative:?}");
        assert_eq!(fit("links", &samples).unwrap().unwrap().fixed.0, 0.0);
    }

    #[test]
    fn neither_part_is_negative() {
        assert_eq!(line(&[(1.0, 8.0), (2.0, 4.0)]), (6.0, 0.0));
        let (fixed, per_row) = line(&[(1.0, 1.0), (2.0, 4.0)]);
        assert_eq!(fixed, 0.0);
        assert!((per_row - 9.0 / 5.0).abs() < 1e-12);
    }

    #[test]
    fn one_load_is_not_enough_and_says_so() {
        let error = fit("ffn", &[(4.0, 1.0), (4.0, 1.1)]).unwrap_err();
        assert!(error.to_string().contains("two different"), "{error}");
    }
}
