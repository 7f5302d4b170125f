//! Options of both roles that are one of a few words.
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// `--load-format`: where weights come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LoadFormat {
    /// The checkpoint.
    #[default]
    Auto,
    /// Seeded random numbers.
    Dummy,
}

impl FromStr for LoadFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "dummy" => Ok(Self::Dummy),
            other => Err(format!("{other:?} is no load format; known are auto and dummy")),
        }
    }
}

impl fmt::Display for LoadFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Dummy => "dummy",
        })
    }
}
