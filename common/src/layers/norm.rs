//! Root-mean-square norm, in the arithmetic of the reference implementation.
use tch::{Kind, TchError, Tensor};

use crate::weights::{WeightError, Weights};

/// `weight * x / sqrt(mean(x²) + eps)`: normalised in f32, rounded to the input's dtype, then weighed in that dtype.
#[derive(Debug)]
pub struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl RmsNorm {
    /// `{name}.weight`, `[width]`.
    ///
    /// # Errors
    /// [`WeightError`] names the tensor.
    pub fn load(weights: &Weights, name: &str, width: usize, eps: f64) -> Result<Self, WeightError> {
        Ok(Self { weight: weights.tensor(&format!("{name}.weight"), &[width as i64])?, eps })
    }

    /// Over the last dimension; any shape `[.., width]`.
    ///
    /// # Errors
    /// libtorch's, when shapes do not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, TchError> {
        let wide = x.f_to_kind(Kind::Float)?;
        let mean = wide.f_square()?.f_mean_dim(&[-1i64][..], true, Kind::Float)?;
        let normed = wide.f_mul(&mean.f_add_scalar(self.eps)?.f_rsqrt()?)?;
        normed.f_to_kind(x.kind())?.f_mul(&self.weight)
    }
}
