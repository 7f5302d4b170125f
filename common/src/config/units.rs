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

impl FromStr for Span {
    type Err = BadQuantity;

    fn from_str(text: &str) -> Result<Self, BadQuantity> {
        let parse = || {
            let (number, unit) = split(text)?;
            let seconds = match unit {
                "ms" => 0.001,
                "" | "s" => 1.0,
                "m" | "min" => 60.0,
                "h" => 3600.0,
                _ => return None,
            };
            // A year is as good as for ever, and fits every clock.
            Duration::try_from_secs_f64(number * seconds).ok().filter(|d| d.as_secs() < 31_536_000).map(Self)
        };
        let example = "write it like 500ms, 30s, 2m or 1h";
        parse().ok_or_else(|| BadQuantity { text: text.into(), what: "length of time below a year", example })
    }
}

impl Span {
    /// For options of which none at all makes no sense.
    ///
    /// # Errors
    /// What is wrong with it, as the sentence goes on behind the option.
    pub fn positive(text: &str) -> Result<Self, String> {
        match text.parse::<Self>() {
            Ok(Self(Duration::ZERO)) => Err("expected more than 0".into()),
            parsed => parsed.map_err(|error| error.to_string()),
        }
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_millis() {
            ms if ms % 1000 == 0 => write!(f, "{}s", ms / 1000),
            ms => write!(f, "{ms}ms"),
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
from_text_or_number!(ByteSize, Span);

#[cfg(test)]
mod tests {
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
        assert!("x".parse::<Span>().unwrap_err().to_string().contains("500ms"));
    }

    #[test]
    fn quantities_in_files_may_be_numbers_and_are_shown_as_they_can_be_read() {
        #[derive(Deserialize)]
        struct File {
            memory: ByteSize,
            wait: Span,
        }
        let file: File = toml::from_str("memory = \"1GiB\"\nwait = 1.5").unwrap();
        assert_eq!((file.memory.to_string(), file.wait.to_string()), ("1GiB".into(), "1500ms".into()));
        assert_eq!(ByteSize(3 << 29).to_string(), "1.5GiB");
    }
}
