//! A checkpoint's tensors: mapped in place and read only where a role needs them, or made up (`--load-format dummy`).
//!
//! A role asks for each tensor by its checkpoint name and the shape it must have; nothing else of the files is read.
use tch::{Kind, Tensor};

/// Where tensors come from.
pub struct Weights;

/// Why a tensor cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum WeightError {
    /// A file cannot be read or is not safetensors.
    #[error("{path}: {what}")]
    File {
        /// Which file.
        path: String,
        /// Why.
        what: String,
    },
    /// The checkpoint has no such tensor.
    #[error("tensor `{name}` is missing from the checkpoint")]
    Missing {
        /// Its name.
        name: String,
    },
    /// The tensor is there with another shape.
    #[error("tensor `{name}` has shape {found:?}, expected {expected:?}")]
    Shape {
        /// Its name.
        name: String,
        /// From the configuration.
        expected: Vec<i64>,
        /// In the file.
        found: Vec<i64>,
    },
    /// The tensor's element type cannot be used here.
    #[error("tensor `{name}` has dtype {found}, which cannot be used here")]
    Dtype {
        /// Its name.
        name: String,
        /// In the file.
        found: String,
    },
    /// libtorch refused.
    #[error("tensor `{name}`: {source}")]
    Torch {
        /// Its name.
        name: String,
        /// libtorch's words.
        source: tch::TchError,
    },
}

impl Weights {
    /// The whole tensor in the compute dtype.
    ///
    /// # Errors
    /// [`WeightError`] names the tensor; a retry does not help.
    pub fn tensor(&self, name: &str, _shape: &[i64]) -> Result<Tensor, WeightError> {
        Err(WeightError::Missing { name: name.into() })
    }

    /// Compute dtype.
    pub fn kind(&self) -> Kind {
        Kind::Float
    }
}
