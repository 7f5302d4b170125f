//! Quantities as people write them (`"4.8 TB/s"`, `"3.1 us"`, `16k` tokens) and as the arithmetic needs them: `f64` in
//! SI units (bytes, seconds, operations, and their rates). Nothing else in the planner knows a prefix.
use std::fmt;

use afd_common::config::units::split;

/// What a quantity measures; decides which units it may be written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dimension {
    /// Bytes.
    Bytes,
    /// Bytes per second. `Gb/s` (bits) is accepted, because network links are sold in it.
    BytesPerSecond,
    /// Operations per second of dense matrix products; a multiply-add counts as two.
    FlopPerSecond,
    /// Seconds.
    Seconds,
    /// A part of one.
    Fraction,
    /// A whole number of things.
    Count,
}

impl Dimension {
    /// Accepted units with their factor to SI, the SI unit first.
    pub fn units(self) -> &'static [(&'static str, f64)] {
        match self {
            Self::Bytes => &[
                ("B", 1.0),
                ("kB", 1e3),
                ("MB", 1e6),
                ("GB", 1e9),
                ("TB", 1e12),
                ("KiB", 1024.0),
                ("MiB", 1048576.0),
                ("GiB", 1073741824.0),
                ("TiB", 1099511627776.0),
            ],
            Self::BytesPerSecond => &[
                ("B/s", 1.0),
                ("MB/s", 1e6),
                ("GB/s", 1e9),
                ("TB/s", 1e12),
                ("Mb/s", 1.25e5),
                ("Gb/s", 1.25e8),
                ("Tb/s", 1.25e11),
            ],
            Self::FlopPerSecond => &[("FLOP/s", 1.0), ("GFLOP/s", 1e9), ("TFLOP/s", 1e12), ("PFLOP/s", 1e15)],
            Self::Seconds => &[("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)],
            Self::Fraction => &[("", 1.0), ("%", 1e-2)],
            Self::Count => &[("", 1.0)],
        }
    }

    fn names(self) -> String {
        let names: Vec<_> =
            self.units().iter().map(|(name, _)| *name).filter(|name| !name.is_empty()).collect();
        if names.is_empty() { "a plain number".into() } else { names.join(", ") }
    }
}

/// Why a quantity cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}`: {what}")]
pub struct QuantityError {
    /// As written.
    pub text: String,
    /// What is wrong and what would be accepted.
    pub what: String,
}

/// Reads a number and its unit, with or without a space between them, into SI.
///
/// # Errors
/// [`QuantityError`] when it is not a finite number or the unit does not fit the dimension.
pub fn parse(text: &str, dimension: Dimension) -> Result<f64, QuantityError> {
    let fail = |what: String| QuantityError { text: text.into(), what };
    let (value, unit) = split(text).ok_or_else(|| fail("does not start with a finite number".into()))?;
    let factor = dimension.units().iter().find(|(name, _)| *name == unit).map(|(_, factor)| *factor);
    let factor = factor.ok_or_else(|| fail(format!("unit `{unit}` is not one of {}", dimension.names())))?;
    Ok(scale(value, factor))
}

/// `value × factor`, dividing by the reciprocal when that is the exact one of the two: `1000 ms` and `1 s` must be the
/// same number, not neighbours.
fn scale(value: f64, factor: f64) -> f64 {
    if factor < 1.0 { value / (1.0 / factor).round() } else { value * factor }
}

/// In SI with every digit, so that reading it back gives the same number.
pub fn exact(value: f64, dimension: Dimension) -> String {
    let (unit, _) = dimension.units()[0];
    if unit.is_empty() { format!("{value:e}") } else { format!("{value:e} {unit}") }
}

/// Three significant digits and a prefix, for people.
pub fn human(value: f64, dimension: Dimension) -> String {
    let decimal = |(name, _): &&(&str, f64)| !name.contains('i') && !name.contains('b');
    let mut units: Vec<_> = dimension.units().iter().filter(decimal).collect();
    units.sort_by(|a, b| a.1.total_cmp(&b.1));
    let fits = units.iter().rev().find(|(_, factor)| value.abs() >= *factor).or(units.first());
    let (name, factor) = fits.copied().copied().unwrap_or(("", 1.0));
    format!("{} {name}", significant(value / factor)).trim_end().into()
}

/// Three significant digits without an exponent.
pub fn significant(value: f64) -> String {
    let digits = if value == 0.0 { 0 } else { 2 - value.abs().log10().floor() as i32 };
    format!("{value:.*}", digits.clamp(0, 12) as usize)
}

/// Reads a number of tokens: plain, or with `k` (1,024) or `M` (1,048,576), as context lengths are named.
///
/// # Errors
/// [`QuantityError`] when it is not a whole number above zero.
pub fn parse_tokens(text: &str) -> Result<u64, QuantityError> {
    let fail = |what: &str| QuantityError { text: text.into(), what: what.into() };
    let trimmed = text.trim();
    let (number, factor) = match trimmed.char_indices().last() {
        Some((at, 'k' | 'K')) => (&trimmed[..at], 1024.0),
        Some((at, 'm' | 'M')) => (&trimmed[..at], 1048576.0),
        _ => (trimmed, 1.0),
    };
    let value =
        number.parse::<f64>().map_err(|_| fail("is not a number of tokens, such as 4096 or 16k"))? * factor;
    if !(1.0..=1e9).contains(&value) || value.fract() != 0.0 {
        return Err(fail("expected a whole number of tokens from 1 to 1e9"));
    }
    Ok(value as u64)
}

/// A context length as people name it.
pub struct Tokens(pub u64);

impl fmt::Display for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n if n >= 1024 && n.is_multiple_of(1024) => write!(f, "{}k", n / 1024),
            n => write!(f, "{n}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_quantity_in_any_unit_is_the_same_number() {
        let rate = |text| parse(text, Dimension::BytesPerSecond).unwrap();
        for other in ["400 Gb/s", "0.05 TB/s", "50000MB/s", "5e10 B/s"] {
            assert_eq!(rate("50 GB/s"), rate(other), "{other}");
        }
        let time = |text| parse(text, Dimension::Seconds).unwrap();
        assert_eq!(time("3.1 us"), time("3100 ns"));
        assert_eq!(parse("90 %", Dimension::Fraction).unwrap(), parse("0.9", Dimension::Fraction).unwrap());
    }

    #[test]
    fn what_is_printed_exactly_is_read_back_exactly() {
        for value in [4.613e12, 1.0 / 3.0, 6.2e-6 / 2.0, 1e-300] {
            let text = exact(value, Dimension::Seconds);
            assert_eq!(parse(&text, Dimension::Seconds).unwrap(), value, "{text}");
        }
    }

    #[test]
    fn a_wrong_unit_is_refused_with_the_right_ones() {
        let error = parse("4.8 TB", Dimension::BytesPerSecond).unwrap_err();
        assert!(error.to_string().contains("TB/s"), "{error}");
        assert!(parse("fast", Dimension::BytesPerSecond).is_err());
        assert!(parse("inf", Dimension::Seconds).is_err());
    }

    #[test]
    fn tokens_are_named_in_units_of_1024() {
        assert_eq!(parse_tokens("16k").unwrap(), 16384);
        assert_eq!(parse_tokens("1088").unwrap(), 1088);
        assert_eq!(parse_tokens("0.5k").unwrap(), 512);
        for bad in ["0", "-1k", "1.5", "many", "", "1e12"] {
            assert!(parse_tokens(bad).is_err(), "{bad}");
        }
        assert_eq!(Tokens(131072).to_string(), "128k");
        assert_eq!(Tokens(1088).to_string(), "1088");
    }

    #[test]
    fn people_read_three_digits() {
        assert_eq!(human(4.613e12, Dimension::BytesPerSecond), "4.61 TB/s");
        assert_eq!(human(3.1e-6, Dimension::Seconds), "3.10 us");
        assert_eq!(human(141e9, Dimension::Bytes), "141 GB");
    }
}
