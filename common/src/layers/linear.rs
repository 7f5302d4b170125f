//! `y = x Wᵀ + b`.
use tch::{TchError, Tensor};

use crate::weights::{WeightError, Weights};

/// A linear map with the weight as checkpoints store it, `[out, in]`.
#[derive(Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// `{name}.weight` `[out, in]` and, if `bias`, `{name}.bias` `[out]`, in the compute dtype.
    ///
    /// # Errors
    /// [`WeightError`] names the tensor.
    pub fn load(
        weights: &Weights,
        name: &str,
        out: usize,
        input: usize,
        bias: bool,
    ) -> Result<Self, WeightError> {
        let weight = weights.tensor(&format!("{name}.weight"), &[out as i64, input as i64])?;
        let bias = bias.then(|| weights.tensor(&format!("{name}.bias"), &[out as i64])).transpose()?;
        Ok(Self { weight, bias })
    }

    /// From `[out, in]` and `[out]`.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { weight, bias }
    }

    /// `[rows, in]` to `[rows, out]`.
    ///
    /// # Errors
    /// libtorch's, when shapes or dtypes do not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, TchError> {
        x.f_linear(&self.weight, self.bias.as_ref())
    }
}
