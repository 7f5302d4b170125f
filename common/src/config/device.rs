//! `--device`: where a role's tensors live. CUDA is loaded at run time, so one binary serves both.
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What the user asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceChoice {
    /// The processor.
    #[default]
    Cpu,
    /// The GPU with this index among those that the process sees.
    Cuda(usize),
}

/// The device cannot be used. A retry does not help.
#[derive(Debug, thiserror::Error)]
#[error("--device {device}: {source}")]
pub struct DeviceError {
    /// What was asked for.
    pub device: DeviceChoice,
    /// Why.
    pub source: afd_ffi::cuda::CudaError,
}

impl DeviceChoice {
    /// Brings in what the device needs and checks that it is there. Before any tensor exists.
    ///
    /// # Errors
    /// [`DeviceError`] names the option.
    pub fn load(self) -> Result<(), DeviceError> {
        match self {
            Self::Cpu => Ok(()),
            Self::Cuda(ordinal) => {
                afd_ffi::cuda::load(ordinal).map_err(|source| DeviceError { device: self, source })
            }
        }
    }

    /// libtorch's name of it.
    pub fn torch(self) -> tch::Device {
        match self {
            Self::Cpu => tch::Device::Cpu,
            Self::Cuda(ordinal) => tch::Device::Cuda(ordinal),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ordinal = match text {
            "cpu" => return Ok(Self::Cpu),
            "cuda" => Some(0),
            other => other.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok()),
        };
        ordinal.map(Self::Cuda).ok_or_else(|| format!("{text:?} is no device; write cpu, or cuda:0"))
    }
}

impl TryFrom<String> for DeviceChoice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<DeviceChoice> for String {
    fn from(device: DeviceChoice) -> Self {
        device.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for name in ["cpu", "cuda:0", "cuda:7"] {
            assert_eq!(name.parse::<DeviceChoice>().unwrap().to_string(), name);
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        for name in ["gpu", "cuda:", "cuda:x", "cuda:-1", ""] {
            assert!(name.parse::<DeviceChoice>().unwrap_err().contains("cuda:0"), "{name}");
        }
    }

    #[test]
    fn a_gpu_that_is_not_there_is_named_with_the_option() {
        assert!(DeviceChoice::Cpu.load().is_ok());
        let error = DeviceChoice::Cuda(99).load().unwrap_err().to_string();
        assert!(error.starts_with("--device cuda:99: "), "{error}");
    }
}
