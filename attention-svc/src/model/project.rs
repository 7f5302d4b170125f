//! Projections around an attention block: by loops of our own for few rows on the CPU, else by libtorch.
use afd_common::weights::{WeightError, Weights};
use afd_ffi::Crew;
use afd_ffi::cpu_linear::{self, StoredMatrix};
use tch::{Kind, Tensor};

use super::error::RowsError;

/// A weight `[out, in]` and how it is multiplied with.
pub(super) struct Projection {
    weight: Tensor,
    bias: Option<Tensor>,
    /// The same weight for the loops for few rows; absent with a bias, or off the CPU.
    stored: Option<StoredMatrix>,
}

impl Projection {
    pub(super) fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        let stored = if bias.is_none() { StoredMatrix::new(&weight).ok() } else { None };
        Self { weight, bias, stored }
    }

    /// `[out, in]`, as stored.
    pub(super) fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The same; `None` with a bias.
    pub(super) fn without_bias(&self) -> Option<&Tensor> {
        self.bias.is_none().then_some(&self.weight)
    }

    /// `[num_rows, in]` to `[num_rows, out]`.
    pub(super) fn forward(&self, x: &Tensor, crew: &Crew) -> Result<Tensor, RowsError> {
        match self.stored_for(x) {
            Some(stored) => Ok(cpu_linear::linear(x, stored, None, x.kind(), crew)?),
            None => Ok(x.f_linear(&self.weight, self.bias.as_ref())?),
        }
    }

    /// The same in f32.
    pub(super) fn forward_f32(&self, x: &Tensor, crew: &Crew) -> Result<Tensor, RowsError> {
        match self.stored_for(x) {
            Some(stored) => Ok(cpu_linear::linear(x, stored, None, Kind::Float, crew)?),
            None => Ok(x.f_linear(&self.weight, self.bias.as_ref())?.f_to_kind(Kind::Float)?),
        }
    }

    /// `onto + x · weightᵀ (+ bias)`, `[num_rows, out]`, rounded once without a bias.
    pub(super) fn add_to(&self, onto: &Tensor, x: &Tensor, crew: &Crew) -> Result<Tensor, RowsError> {
        if let Some(stored) = self.stored_for(x) {
            return Ok(cpu_linear::linear(x, stored, Some(onto), x.kind(), crew)?);
        }
        let sum = onto.f_addmm(x, &self.weight.f_transpose(0, 1)?)?;
        match &self.bias {
            Some(bias) => Ok(sum.f_add(bias)?),
            None => Ok(sum),
        }
    }

    fn stored_for(&self, x: &Tensor) -> Option<&StoredMatrix> {
        let num_rows = x.size().first().map_or(0, |&rows| rows as usize);
        self.stored.as_ref().filter(|_| cpu_linear::suits(num_rows, x.kind()))
    }
}

/// The output projection.
pub(super) fn out_projection(
    weights: &Weights,
    prefix: &str,
    hidden: usize,
    attended: usize,
    bias: bool,
) -> Result<Projection, WeightError> {
    let weight = weights.tensor(&format!("{prefix}.o_proj.weight"), &[hidden as i64, attended as i64])?;
    let bias =
        bias.then(|| weights.tensor(&format!("{prefix}.o_proj.bias"), &[hidden as i64])).transpose()?;
    Ok(Projection::new(weight, bias))
}

/// Projections of the same input as one: their `what` (weight or bias), below one another. A copy; the checkpoint's
/// pages are given back.
pub(super) fn fused(
    weights: &Weights,
    prefix: &str,
    parts: &[(&str, usize)],
    what: &str,
    columns: Option<usize>,
) -> Result<Tensor, WeightError> {
    let names: Vec<String> = parts.iter().map(|(name, _)| format!("{prefix}.{name}.{what}")).collect();
    let tensors = names
        .iter()
        .zip(parts)
        .map(|(name, (_, rows))| {
            let shape: Vec<i64> = [Some(*rows), columns].into_iter().flatten().map(|n| n as i64).collect();
            weights.tensor(name, &shape)
        })
        .collect::<Result<Vec<_>, _>>()?;
    let joined = Tensor::f_cat(&tensors, 0)
        .map_err(|source| WeightError::Torch { name: names.join(" | "), source })?;
    drop(tensors);
    names.iter().for_each(|name| weights.release(name));
    Ok(joined)
}
