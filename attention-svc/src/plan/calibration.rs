//! Measured stage times that stand in for believed ones: a fixed part and a part per row. [`calibrate`](super::calibrate)
//! makes them, [`evaluate`](super::evaluate) uses them, profiles carry them.
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::units::{self, Dimension};

/// What was measured of a device running a model. Empty: the roofline is believed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// `T_A` = fixed + per row · `x` + reading the KV cache at the profile's bandwidth. What is measured stands for
    /// projections, kernels and their launches; reading the cache depends on the context and stays a formula.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention: Option<Line>,
    /// Measured steps showed that attention takes at most this part of its roofline time; 1 when nothing did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention_at_most: Option<Ratio>,
    /// `T_F` = fixed · (share / `share`) + per row · `X` · share, where share is the part of a layer's experts on the
    /// fullest rank: the fixed part is mostly reading weights, so it shrinks with them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ffn: Option<FfnLine>,
    /// `T_C`, each direction = fixed + per row · `x`, for AFD and colocated layouts alike: calibrate for the one you run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exchange: Option<Line>,
}

impl Calibration {
    /// Nothing was measured.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Time as a straight line over rows, per layer and stage. Neither part is negative.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    /// s.
    pub fixed: Exact,
    /// s per row.
    pub per_row: Exact,
    /// Which points, and how well it passes through them.
    pub source: String,
}

impl Line {
    /// s.
    pub fn at(&self, rows: f64) -> f64 {
        self.fixed.0 + self.per_row.0 * rows
    }
}

/// A [`Line`] of an FFN rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FfnLine {
    /// Part of a layer's experts on the fullest rank when it was measured.
    pub share: Ratio,
    /// Fixed part at that share; slope per row of the pool and unit of share.
    pub line: Line,
}

impl FfnLine {
    /// s, of a rank with a `share` of the experts for `rows` of the pool.
    pub fn at(&self, share: f64, rows: f64) -> f64 {
        self.line.fixed.0 * share / self.share.0 + self.line.per_row.0 * rows * share
    }
}

/// Seconds, written so that they are read back to the last bit.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Exact(pub f64);

impl Serialize for Exact {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        units::exact(self.0, Dimension::Seconds).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Exact {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        units::parse(&text, Dimension::Seconds).map(Self).map_err(serde::de::Error::custom)
    }
}

/// A part of one, written exactly.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio(pub f64);

impl Serialize for Ratio {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        units::exact(self.0, Dimension::Fraction).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Ratio {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        units::parse(&text, Dimension::Fraction).map(Self).map_err(serde::de::Error::custom)
    }
}
