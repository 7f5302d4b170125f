//! A stacked layer by libtorch, for any number of rows: rows sorted by expert, two grouped products, and each row's parts
//! added up in the order of choice. Nothing is read back, so the host runs ahead of the device.
use afd_common::ids::LayerIdx;
use afd_common::layers::Selected;
use tch::{Kind, TchError, Tensor};

use super::stack::{Routed, Stack};
use crate::model::{At, FfnModelError, Side};

/// This shard's part of the layer for `x`, `[rows, hidden]`, as `out_kind`.
pub(super) fn forward(
    stack: &Stack,
    layer: LayerIdx,
    x: &Tensor,
    side: &Side,
    out_kind: Kind,
) -> Result<Tensor, FfnModelError> {
    if !matches!(side, Side::None) {
        return Err(FfnModelError::Side { layer, expected: "none".into(), found: side.kind() });
    }
    if x.size()[0] == 0 {
        return Tensor::f_zeros(x.size(), (out_kind, x.device())).at(layer, "no rows");
    }
    let mut sum = shared(stack, x).at(layer, "shared experts")?;
    if let Some(routed) = &stack.routed
        && !routed.local.is_empty()
    {
        let part = experts(stack, routed, x).at(layer, "experts")?;
        sum = match sum {
            Some(mut sum) => Some(sum.f_add_(&part).at(layer, "sum")?),
            None => Some(part),
        };
    }
    match sum {
        Some(sum) => sum.f_to_kind(out_kind).at(layer, "output dtype"),
        None => Tensor::f_zeros(x.size(), (out_kind, x.device())).at(layer, "nothing of it is here"),
    }
}

/// Pieces that every row goes through; `[rows, hidden]` f32.
fn shared(stack: &Stack, x: &Tensor) -> Result<Option<Tensor>, TchError> {
    let first = stack.num_here() as i64;
    let mut sum: Option<Tensor> = None;
    for piece in first..first + stack.shape.num_shared as i64 {
        let both = x.f_mm(&stack.gate_up.f_get(piece)?.f_transpose(0, 1)?)?;
        let out = activate(&both)?.f_mm(&stack.down.f_get(piece)?.f_transpose(0, 1)?)?;
        let out = out.f_to_kind(Kind::Float)?;
        sum = Some(match sum {
            Some(mut sum) => sum.f_add_(&out)?,
            None => out,
        });
    }
    Ok(sum)
}

/// The routed experts of this shard; `[rows, hidden]` f32.
fn experts(stack: &Stack, routed: &Routed, x: &Tensor) -> Result<Tensor, TchError> {
    let (rows, device) = (x.size()[0], x.device());
    let (first, here, top_k) =
        (routed.local.start as i64, routed.local.len() as i64, stack.shape.top_k as i64);
    let Selected { ids, weights } = routed.selector.select(&routed.router.logits(x)?)?;
    // Experts of other shards sort behind all of ours, and their rows are in no group.
    let ids = ids.f_sub_scalar(first)?;
    let elsewhere = ids.f_lt(0)?.f_logical_or(&ids.f_ge(here)?)?;
    let ids = ids.f_masked_fill(&elsewhere, here)?.f_view([-1])?;
    let (sorted, order) = ids.f_sort_stable(true, 0, false)?;
    let ends = Tensor::f_arange(here, (Kind::Int64, device))?.f_searchsorted(
        &sorted,
        true,
        true,
        "right",
        None::<&Tensor>,
    )?;
    let gathered = x.f_index_select(0, &order.f_divide_scalar_mode(top_k, "floor")?)?;
    let grouped = |rows: &Tensor, weight: &Tensor| {
        let weight = weight.f_narrow(0, 0, here)?.f_transpose(1, 2)?;
        rows.f_internal_grouped_mm(&weight, Some(&ends), None, None)
    };
    let both = grouped(&gathered, &stack.gate_up)?;
    let out = grouped(&activate(&both)?, &stack.down)?;
    // Back to the order of rows and choices. What no group wrote is not even a number.
    let parts = out.f_index_select(0, &order.f_argsort(0, false)?)?.f_view([rows, top_k, -1])?;
    let parts = parts.f_to_kind(Kind::Float)?.f_masked_fill_(&elsewhere.f_unsqueeze(-1)?, 0.0)?;
    let mut parts = parts;
    parts.f_mul_(&weights.f_unsqueeze(-1)?)?.f_sum_dim_intlist(&[1i64][..], false, Kind::Float)
}

/// `silu(gate) * up` of `[rows, 2 * intermediate]`.
fn activate(both: &Tensor) -> Result<Tensor, TchError> {
    let width = both.size()[1] / 2;
    let mut gate = both.f_narrow(1, 0, width)?.f_silu()?;
    gate.f_mul_(&both.f_narrow(1, width, width)?)
}
