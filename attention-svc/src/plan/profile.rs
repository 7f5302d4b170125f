//! What a device and its links can do, each figure with its source.
//!
//! A profile is a TOML file; those of common devices are built in. Figures are believed until `plan calibrate` replaces
//! them by measured ones. A missing or absurd figure is refused by its name, because a planner that computes with a wrong
//! number gives a wrong answer with three digits.
use serde::{Deserialize, Serialize};

use super::calibration::Calibration;
use super::figure::{Bytes, BytesPerSecond, Figure, FlopPerSecond, Fraction, Seconds};
use super::shape::ElementType;
use super::units::{self, Dimension};

const BUILT_IN: [(&str, &str); 7] = [
    ("a100", include_str!("profiles/a100.toml")),
    ("h100", include_str!("profiles/h100.toml")),
    ("h200", include_str!("profiles/h200.toml")),
    ("b200", include_str!("profiles/b200.toml")),
    ("gb200-nvl72", include_str!("profiles/gb200-nvl72.toml")),
    ("ascend-910c-die", include_str!("profiles/ascend-910c-die.toml")),
    ("cpu-server", include_str!("profiles/cpu-server.toml")),
];

/// A device, its host and its links. One rank runs on one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// For people.
    pub name: String,
    /// What to know before believing it.
    pub notes: Option<String>,
    /// `G`, devices that share a host (and whose network cards work in parallel).
    pub devices_per_host: u32,
    /// The device's memory.
    pub memory: Memory,
    /// Dense matrix rates.
    pub compute: Compute,
    /// What joins devices.
    pub links: Links,
    /// Time that does not depend on the load.
    #[serde(default)]
    pub fixed: FixedTimes,
    /// What was measured instead.
    #[serde(default, skip_serializing_if = "Calibration::is_empty")]
    pub calibration: Calibration,
}

/// `M` and `BW`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// `M`.
    pub size: Figure<Bytes>,
    /// Part of it that weights, KV cache and buffers may take; the rest is for activations, graphs and the runtime.
    pub usable: Figure<Fraction>,
    /// `BW`, reading.
    pub bandwidth: Figure<BytesPerSecond>,
}

/// `P` per element type of the weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compute {
    /// bfloat16, accumulating in f32. Every profile has it.
    pub bf16: Figure<FlopPerSecond>,
    /// binary32, where weights are kept so.
    pub f32: Option<Figure<FlopPerSecond>>,
    /// 8-bit float; without it, weights are widened and multiplied as bfloat16.
    pub fp8: Option<Figure<FlopPerSecond>>,
    /// 8-bit integer; likewise.
    pub int8: Option<Figure<FlopPerSecond>>,
}

impl Compute {
    /// `P` for weights of a type, operations/s. Types without a rate of their own run at the bfloat16 rate.
    pub fn rate(&self, weights: ElementType) -> f64 {
        let own = match weights {
            ElementType::F32 => self.f32.as_ref(),
            ElementType::Fp8 => self.fp8.as_ref(),
            ElementType::Int8 => self.int8.as_ref(),
            ElementType::Bf16 | ElementType::Mxfp4 => None,
        };
        own.unwrap_or(&self.bf16).value
    }
}

/// The two kinds of link.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Links {
    /// Within one fast domain: a host's NVLink, a rack's, shared memory.
    pub scale_up: ScaleUp,
    /// Between domains: the network card of a device.
    pub scale_out: Link,
}

/// A fast domain and what each of its devices has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScaleUp {
    /// Devices it joins.
    pub devices: u32,
    /// `W`, one direction.
    pub bandwidth: Figure<BytesPerSecond>,
    /// `α`, as of [`Link`].
    pub latency: Figure<Seconds>,
}

/// What a device has between domains.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// `W`, one direction.
    pub bandwidth: Figure<BytesPerSecond>,
    /// `α`, one way, of an empty dispatch or combine: launching, writing, noticing.
    pub latency: Figure<Seconds>,
}

/// `t0`: launching, synchronising, scheduling.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FixedTimes {
    /// `t0_A`, per layer and stage.
    pub attention_stage: Option<Figure<Seconds>>,
    /// `t0_F`, per layer and stage.
    pub ffn_stage: Option<Figure<Seconds>>,
    /// Per step: scheduling, sampling, agreeing on the batch.
    pub step: Option<Figure<Seconds>>,
}

impl FixedTimes {
    /// Seconds; zero where nothing is said.
    pub fn seconds(figure: &Option<Figure<Seconds>>) -> f64 {
        figure.as_ref().map_or(0.0, |figure| figure.value)
    }
}

/// Why a profile is refused. A retry does not help.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProfileError {
    /// Neither a built-in name nor a readable file.
    #[error("hardware `{given}`: {what}; give a TOML file or one of {known}")]
    NotFound {
        /// As given.
        given: String,
        /// What was tried.
        what: String,
        /// The built-in names, comma separated.
        known: String,
    },
    /// Not TOML, a figure is missing, or it has no unit; the message names line and field.
    #[error("hardware profile {path}: {what}")]
    Malformed {
        /// Which file.
        path: String,
        /// Line and field.
        what: String,
    },
    /// A figure no device has.
    #[error("hardware profile {name}: `{figure}` is {value}, outside {low} to {high}: check its unit")]
    Absurd {
        /// Which profile.
        name: String,
        /// Which figure.
        figure: &'static str,
        /// As read.
        value: String,
        /// Smallest accepted.
        low: String,
        /// Largest accepted.
        high: String,
    },
}

/// Names that `--hardware` knows without a file.
pub fn built_in_names() -> impl Iterator<Item = &'static str> {
    BUILT_IN.iter().map(|(name, _)| *name)
}

impl Profile {
    /// Resolves `--hardware`.
    ///
    /// # Errors
    /// [`ProfileError`] names the file and the figure.
    pub fn load(given: &str) -> Result<Self, ProfileError> {
        if let Some((name, text)) = BUILT_IN.iter().find(|(name, _)| *name == given) {
            return Self::from_toml(name, text);
        }
        let text = std::fs::read_to_string(given).map_err(|error| ProfileError::NotFound {
            given: given.into(),
            what: error.to_string(),
            known: built_in_names().collect::<Vec<_>>().join(", "),
        })?;
        Self::from_toml(given, &text)
    }

    /// Reads and checks a profile; `path` is for messages.
    ///
    /// # Errors
    /// [`ProfileError`].
    pub fn from_toml(path: &str, text: &str) -> Result<Self, ProfileError> {
        let malformed = |what: String| ProfileError::Malformed { path: path.into(), what };
        let profile: Self = toml::from_str(text).map_err(|error| malformed(error.to_string()))?;
        profile.check()?;
        Ok(profile)
    }

    /// As a file that [`from_toml`](Self::from_toml) reads back to the same profile.
    ///
    /// # Errors
    /// [`ProfileError::Malformed`] when it holds a value TOML cannot carry.
    pub fn to_toml(&self) -> Result<String, ProfileError> {
        let malformed = |what: String| ProfileError::Malformed { path: self.name.clone(), what };
        toml::to_string_pretty(self).map_err(|error| malformed(error.to_string()))
    }

    /// Refuses figures outside what any device of the last and next ten years has.
    ///
    /// # Errors
    /// [`ProfileError::Absurd`] names the figure.
    pub fn check(&self) -> Result<(), ProfileError> {
        use Dimension as D;
        let rate = |figure: &Option<Figure<FlopPerSecond>>| figure.as_ref().map(|figure| figure.value);
        let (up, out) = (&self.links.scale_up, &self.links.scale_out);
        let checks: [(&'static str, Option<f64>, D, f64, f64); 16] = [
            ("devices_per_host", Some(f64::from(self.devices_per_host)), D::Count, 1.0, 1024.0),
            ("memory.size", Some(self.memory.size.value), D::Bytes, 1e8, 1e14),
            ("memory.usable", Some(self.memory.usable.value), D::Fraction, 0.05, 1.0),
            ("memory.bandwidth", Some(self.memory.bandwidth.value), D::BytesPerSecond, 1e9, 1e15),
            ("compute.bf16", Some(self.compute.bf16.value), D::FlopPerSecond, 1e9, 1e18),
            ("compute.f32", rate(&self.compute.f32), D::FlopPerSecond, 1e9, 1e18),
            ("compute.fp8", rate(&self.compute.fp8), D::FlopPerSecond, 1e9, 1e18),
            ("compute.int8", rate(&self.compute.int8), D::FlopPerSecond, 1e9, 1e18),
            ("links.scale_up.devices", Some(f64::from(up.devices)), D::Count, 1.0, 1e6),
            ("links.scale_up.bandwidth", Some(up.bandwidth.value), D::BytesPerSecond, 1e6, 1e14),
            ("links.scale_up.latency", Some(up.latency.value), D::Seconds, 0.0, 0.1),
            ("links.scale_out.bandwidth", Some(out.bandwidth.value), D::BytesPerSecond, 1e6, 1e14),
            ("links.scale_out.latency", Some(out.latency.value), D::Seconds, 0.0, 1.0),
            (
                "fixed.attention_stage",
                Some(FixedTimes::seconds(&self.fixed.attention_stage)),
                D::Seconds,
                0.0,
                1.0,
            ),
            ("fixed.ffn_stage", Some(FixedTimes::seconds(&self.fixed.ffn_stage)), D::Seconds, 0.0, 1.0),
            ("fixed.step", Some(FixedTimes::seconds(&self.fixed.step)), D::Seconds, 0.0, 10.0),
        ];
        for (figure, value, dimension, low, high) in checks {
            let Some(value) = value else { continue };
            if !(low..=high).contains(&value) {
                let show = |value: f64| units::human(value, dimension);
                let (value, low, high) = (show(value), show(low), show(high));
                return Err(ProfileError::Absurd { name: self.name.clone(), figure, value, low, high });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_profiles_are_sound_and_survive_being_written() {
        for name in built_in_names() {
            let profile = Profile::load(name).unwrap_or_else(|error| panic!("{error}"));
            let text = profile.to_toml().unwrap();
            assert_eq!(Profile::from_toml(name, &text).unwrap(), profile, "{text}");
        }
    }

    #[test]
    fn every_figure_has_a_source() {
        for (name, text) in BUILT_IN {
            for line in text.lines().filter(|line| line.contains("value = ")) {
                assert!(line.contains("source = \""), "{name}: {line}");
                assert!(!line.contains("source = \"\""), "{name}: {line}");
            }
        }
    }

    #[test]
    fn a_missing_figure_is_named() {
        let (_, text) = BUILT_IN[2];
        let without: String =
            text.lines().filter(|line| !line.starts_with("bandwidth")).collect::<Vec<_>>().join("\n");
        let error = Profile::from_toml("mine.toml", &without).unwrap_err();
        assert!(error.to_string().contains("bandwidth"), "{error}");
    }

    #[test]
    fn an_absurd_figure_is_named_with_what_is_accepted() {
        let (_, text) = BUILT_IN[2];
        let text = text.replace("value = \"141 GB\"", "value = \"141 B\"");
        let error = Profile::from_toml("mine.toml", &text).unwrap_err();
        assert!(matches!(error, ProfileError::Absurd { figure: "memory.size", .. }), "{error}");
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        assert!(Profile::load("h2oo").unwrap_err().to_string().contains("gb200-nvl72"));
    }

    #[test]
    fn weights_without_a_rate_of_their_own_run_as_bfloat16() {
        let a100 = Profile::load("a100").unwrap();
        assert_eq!(a100.compute.rate(ElementType::Fp8), a100.compute.bf16.value);
        assert!(a100.compute.rate(ElementType::Int8) > a100.compute.bf16.value);
    }
}
