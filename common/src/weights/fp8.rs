//! Block-quantised FP8 (`weight` F8_E4M3 with one f32 `weight_scale_inv` per block): value = stored × its block's scale.
use tch::{Device, Kind, TchError, Tensor};

/// A rectangle `[rows, columns]` whose first element stands at `origin` of the whole tensor; `scales` are the whole
/// tensor's, `[blocks of rows, blocks of columns]` f32. Returns f32.
pub(super) fn dequantise(
    stored: &Tensor,
    scales: &Tensor,
    block: (usize, usize),
    origin: (usize, usize),
) -> Result<Tensor, TchError> {
    let (rows, columns) = stored.size2()?;
    let blocks = |count: i64, first: usize, block: usize| {
        Tensor::f_arange_start(first as i64, first as i64 + count, (Kind::Int64, Device::Cpu))?
            .f_divide_scalar_mode(block as i64, "floor")
    };
    let scale_rows = scales.f_index_select(0, &blocks(rows, origin.0, block.0)?)?;
    let scale = scale_rows.f_index_select(1, &blocks(columns, origin.1, block.1)?)?;
    stored.f_to_kind(Kind::Float)?.f_mul(&scale)
}
