//! Quantities as people write them in options and configuration files: `1GiB`, `30s`.
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A number of bytes: `512MiB`, `1.5GiB`, `2GB` or plain bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "TextOrNumber", into = "String")]
pub struct ByteSize(pub u64);

/// A length of time: `500ms`, `30s`, `2m`, `1h` or plain seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "TextOrNumber", into = "String")]
pub struct Span(pub Duration);

/// The same for options whose name ends in `-ms`: a plain number is milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "TextOrNumber", into = "String")]
pub struct Millis(pub Duration);

/// How all options take times; for the end of `--help`.
pub const TIMES: &str = "Times are written like 200us, 500ms, 30s, 2m or 1h; a number without a unit is seconds, or \
                         milliseconds where the option's name ends in -ms.";

/// A text that is no quantity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no {what}; {example}")]
pub struct BadQuantity {
    text: String,
    what: &'static str,
    example: &'static str,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a number, or a text with a unit such as 30s or 1GiB")]
enum TextOrNumber {
    Text(String),
    Whole(u64),
    Number(f64),
}

impl fmt::Display for TextOrNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Whole(number) => number.fmt(f),
            Self::Number(number) => number.fmt(f),
        }
    }
}

/// The finite number that a text begins with, such as `1.5`, `-2`, `5e10` or `65_536`, and the unit that follows it, with or
/// without a space between them.
pub fn split(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let numeric = |c: char| c.is_ascii_digit() || matches!(c, '.' | '-' | '+' | 'e' | 'E' | '_');
    let (number, unit) = text.split_at(text.find(|c: char| !numeric(c)).unwrap_or(text.len()));
    let number: f64 = number.replace('_', "").parse().ok()?;
    number.is_finite().then_some((number, unit.trim_start()))
}

impl FromStr for ByteSize {
    type Err = BadQuantity;

    fn from_str(text: &str) -> Result<Self, BadQuantity> {
        let parse = || {
            let (number, unit) = split(text).filter(|(number, _)| *number >= 0.0)?;
            let scale: u64 = match unit.to_ascii_lowercase().as_str() {
                "" | "b" => 1,
                "kb" => 1000,
                "mb" => 1_000_000,
                "gb" => 1_000_000_000,
                "tb" => 1_000_000_000_000,
                "kib" | "k" => 1 << 10,
                "mib" | "m" => 1 << 20,
                "gib" | "g" => 1 << 30,
                "tib" | "t" => 1 << 40,
                _ => return None,
            };
            let bytes = number * scale as f64;
            (bytes < 9e18).then_some(Self(bytes as u64))
        };
        let example = "write it like 512MiB, 1.5GiB or 2GB";
        parse().ok_or_else(|| BadQuantity { text: text.into(), what: "size", example })
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
        match units.into_iter().find(|(_, shift)| self.0 >= 1 << shift) {
            Some((unit, shift)) if self.0.is_multiple_of(1 << shift) => {
                write!(f, "{}{unit}", self.0 >> shift)
            }
            Some((unit, shift)) => write!(f, "{:.1}{unit}", self.0 as f64 / (1u64 << shift) as f64),
            None => write!(f, "{}B", self.0),
        }
    }
}

/// A number and how many of its units are a second, which keeps `200us` what it is.
fn seconds(text: &str, bare: &str) -> Option<f64> {
    let (number, unit) = split(text)?;
    Some(match if unit.is_empty() { bare } else { unit } {
        "ns" => number / 1e9,
        "us" | "µs" | "μs" => number / 1e6,
        "ms" => number / 1e3,
        "s" => number,
        "m" | "min" => number * 60.0,
        "h" => number * 3600.0,
        _ => return None,
    })
}

fn time(text: &str, bare: &str) -> Result<Duration, BadQuantity> {
    let parsed = seconds(text, bare).and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    // A year is as good as for ever, and fits every clock.
    parsed.filter(|time| time.as_secs() < 31_536_000).ok_or_else(|| no_time(text))
}

fn no_time(text: &str) -> BadQuantity {
    let example = "write it like 500ms, 30s, 2m or 1h";
    BadQuantity { text: text.into(), what: "length of time below a year", example }
}

/// Milliseconds as the arithmetic takes them, from a time as [`Millis`] is written: a plain number is itself.
///
/// # Errors
/// [`BadQuantity`].
pub fn milliseconds(text: &str) -> Result<f64, BadQuantity> {
    match split(text) {
        Some((number, "" | "ms")) => Ok(number),
        _ => seconds(text, "ms").map(|seconds| seconds * 1e3).ok_or_else(|| no_time(text)),
    }
}

impl FromStr for Span {
    type Err = BadQuantity;

    fn from_str(text: &str) -> Result<Self, BadQuantity> {
        time(text, "s").map(Self)
    }
}

impl FromStr for Millis {
    type Err = BadQuantity;

    fn from_str(text: &str) -> Result<Self, BadQuantity> {
        time(text, "ms").map(Self)
    }
}

/// For options of which none at all makes no sense.
fn more_than_none(text: &str, bare: &str) -> Result<Duration, String> {
    match time(text, bare) {
        Ok(Duration::ZERO) => Err("expected more than 0".into()),
        parsed => parsed.map_err(|error| error.to_string()),
    }
}

impl Span {
    /// For options of which none at all makes no sense.
    ///
    /// # Errors
    /// What is wrong with it, as the sentence goes on behind the option.
    pub fn positive(text: &str) -> Result<Self, String> {
        more_than_none(text, "s").map(Self)
    }
}

impl Millis {
    /// As [`Span::positive`].
    ///
    /// # Errors
    /// What is wrong with it, as the sentence goes on behind the option.
    pub fn positive(text: &str) -> Result<Self, String> {
        more_than_none(text, "ms").map(Self)
    }
}

/// In the largest unit of which it is a whole number: shown to people, and read again.
impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_nanos() {
            ns if ns % 1_000_000_000 == 0 => write!(f, "{}s", ns / 1_000_000_000),
            ns if ns % 1_000_000 == 0 => write!(f, "{}ms", ns / 1_000_000),
            ns if ns % 1000 == 0 => write!(f, "{}us", ns / 1000),
            ns => write!(f, "{ns}ns"),
        }
    }
}

/// The same; none at all in the unit of a bare number.
impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Duration::ZERO => f.write_str("0ms"),
            time => Span(time).fmt(f),
        }
    }
}

macro_rules! from_text_or_number {
    ($($quantity:ty),*) => {$(
        impl TryFrom<TextOrNumber> for $quantity {
            type Error = BadQuantity;

            fn try_from(value: TextOrNumber) -> Result<Self, BadQuantity> {
                value.to_string().parse()
            }
        }

        impl From<$quantity> for String {
            fn from(value: $quantity) -> Self {
                value.to_string()
            }
        }
    )*};
}
from_text_or_number!(ByteSize, Span, Millis);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn quantities_are_read_as_people_write_them() {
        let bytes = |text: &str| text.parse::<ByteSize>().map(|b| b.0).ok();
        assert_eq!(bytes("1GiB"), Some(1 << 30));
        assert_eq!(bytes("1.5 gib"), Some(3 << 29));
        assert_eq!(bytes("2GB"), Some(2_000_000_000));
        assert_eq!((bytes("4096"), bytes("65_536"), bytes("1e3")), (Some(4096), Some(65536), Some(1000)));
        assert_eq!([bytes("-1"), bytes("GiB"), bytes("1 parsec"), bytes("")], [None; 4]);
        let span = |text: &str| text.parse::<Span>().map(|s| s.0).ok();
        assert_eq!(span("500ms"), Some(Duration::from_millis(500)));
        assert_eq!(span("1.5"), Some(Duration::from_millis(1500)));
        assert_eq!(span("2m"), Some(Duration::from_secs(120)));
        assert_eq!([span("-1s"), span("1e9h"), span("soon"), span("99999999h")], [None; 4]);
        assert_eq!([span("200us"), span("200 µs")], [Some(Duration::from_micros(200)); 2]);
        assert!("x".parse::<Span>().unwrap_err().to_string().contains("500ms"));
    }

    #[test]
    fn a_number_without_a_unit_is_seconds_or_what_the_name_of_the_option_says() {
        let millis = |text: &str| text.parse::<Millis>().map(|time| time.0).ok();
        assert_eq!([millis("300"), millis("300ms"), millis("0.3s")], [Some(Duration::from_millis(300)); 3]);
        assert_eq!(millis("0.25"), Some(Duration::from_micros(250)));
        assert_eq!([millis("-1"), millis("soon")], [None; 2]);
        assert_eq!(["50", "33.3", "0.1s", "-5"].map(milliseconds), [Ok(50.0), Ok(33.3), Ok(100.0), Ok(-5.0)]);
        assert!(milliseconds("1 fortnight").unwrap_err().to_string().contains("500ms"));
        assert_eq!(Millis::positive("0").unwrap_err(), "expected more than 0");
        assert_eq!(
            (Millis(Duration::ZERO).to_string(), Span(Duration::ZERO).to_string()),
            ("0ms".into(), "0s".into())
        );
        assert_eq!(Span::positive("1").unwrap().0, 1000 * Millis::positive("1").unwrap().0);
    }

    proptest! {
        /// A time is shown as it can be read again, whichever way a bare number is read.
        #[test]
        fn times_survive_being_shown(nanos in 0u64..86_400_000_000_000, unit in 0u32..4) {
            let time = Duration::from_nanos(nanos - nanos % 1000u64.pow(unit));
            prop_assert_eq!(Span(time).to_string().parse(), Ok(Span(time)));
            prop_assert_eq!(Millis(time).to_string().parse(), Ok(Millis(time)));
        }
    }

    #[test]
    fn quantities_in_files_may_be_numbers_and_are_shown_as_they_can_be_read() {
        #[derive(Deserialize)]
        struct File {
            memory: ByteSize,
            wait: Span,
            lease_ms: Millis,
        }
        let file: File = toml::from_str("memory = \"1GiB\"\nwait = 1.5\nlease_ms = 5000").unwrap();
        assert_eq!(file.lease_ms.0, Duration::from_secs(5));
        assert_eq!((file.memory.to_string(), file.wait.to_string()), ("1GiB".into(), "1500ms".into()));
        assert_eq!(ByteSize(3 << 29).to_string(), "1.5GiB");
    }
}
