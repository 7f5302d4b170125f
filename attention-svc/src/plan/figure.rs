//! A number and where it comes from, with its kind of quantity in its type.
use std::fmt;
use std::marker::PhantomData;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::units::{self, Dimension};

/// A kind of quantity, as a type.
pub trait Unit: Clone + fmt::Debug + PartialEq {
    /// Which one.
    const DIMENSION: Dimension;
}

macro_rules! unit {
    ($($name:ident),*) => {$(
        #[doc = concat!("Marks a figure as ", stringify!($name), ".")]
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct $name;

        impl Unit for $name {
            const DIMENSION: Dimension = Dimension::$name;
        }
    )*};
}
unit!(Bytes, BytesPerSecond, FlopPerSecond, Seconds, Fraction);

/// A number and where it comes from. In files `{ value = "4.8 TB/s", source = "…" }`; in memory SI.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure<U: Unit> {
    /// In SI units.
    pub value: f64,
    /// Who says so.
    pub source: String,
    unit: PhantomData<U>,
}

impl<U: Unit> Figure<U> {
    /// From SI.
    pub fn new(value: f64, source: impl Into<String>) -> Self {
        Self { value, source: source.into(), unit: PhantomData }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenFigure {
    value: String,
    source: String,
}

impl<U: Unit> Serialize for Figure<U> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let value = units::exact(self.value, U::DIMENSION);
        WrittenFigure { value, source: self.source.clone() }.serialize(serializer)
    }
}

impl<'de, U: Unit> Deserialize<'de> for Figure<U> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let written = WrittenFigure::deserialize(deserializer)?;
        let value = units::parse(&written.value, U::DIMENSION).map_err(D::Error::custom)?;
        Ok(Self::new(value, written.source))
    }
}
