//! Projections around an attention block.
use afd_common::weights::{WeightError, Weights};
use tch::{TchError, Tensor};

/// The output projection, added to the residual in the same product.
pub(super) struct OutProjection {
    /// `[attended, hidden]`, a view.
    transposed: Tensor,
    bias: Option<Tensor>,
}

impl OutProjection {
    pub(super) fn load(
        weights: &Weights,
        prefix: &str,
        hidden: usize,
        attended: usize,
        bias: bool,
    ) -> Result<Self, WeightError> {
        let name = format!("{prefix}.o_proj.weight");
        let weight = weights.tensor(&name, &[hidden as i64, attended as i64])?;
        let transposed = weight.f_transpose(0, 1).map_err(|source| WeightError::Torch { name, source })?;
        let bias =
            bias.then(|| weights.tensor(&format!("{prefix}.o_proj.bias"), &[hidden as i64])).transpose()?;
        Ok(Self { transposed, bias })
    }

    /// `[hidden, attended]`, as stored; `None` with a bias.
    pub(super) fn without_bias(&self) -> Option<Result<Tensor, TchError>> {
        self.bias.is_none().then(|| self.transposed.f_transpose(0, 1))
    }

    /// `residual + attended · weightᵀ (+ bias)`, `[num_rows, hidden]`.
    pub(super) fn add_to(&self, residual: &Tensor, attended: &Tensor) -> Result<Tensor, TchError> {
        let sum = residual.f_addmm(attended, &self.transposed)?;
        match &self.bias {
            Some(bias) => sum.f_add(bias),
            None => Ok(sum),
        }
    }
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
