//! Block-quantised FP8 (`weight` F8_E4M3 with one f32 `weight_scale_inv` per block): value = stored × its block's scale.
use tch::{Device, Kind, TchError, Tensor};

/// Writes the values of a rectangle, `[rows, columns]`, to `out`, rounded once to its dtype. The first element of `stored`
/// stands at `origin` of the whole tensor; `scales` are the whole tensor's, `[blocks of rows, blocks of columns]` f32. A row of
/// blocks at a time is computed in `widened`, f32 for as many elements at least.
pub(super) fn dequantise(
    stored: &Tensor,
    scales: &Tensor,
    block: (usize, usize),
    origin: (usize, usize),
    widened: &Tensor,
    out: &Tensor,
) -> Result<(), TchError> {
    let (rows, columns) = stored.size2()?;
    let first_column = origin.1 as i64;
    let block_of_column =
        Tensor::f_arange_start(first_column, first_column + columns, (Kind::Int64, Device::Cpu))?
            .f_divide_scalar_mode(block.1 as i64, "floor")?;
    let mut from = 0;
    while from < rows {
        let at = origin.0 as i64 + from;
        let block_row = at / block.0 as i64;
        let len = ((block_row + 1) * block.0 as i64 - at).min(rows - from);
        let scale = scales.f_select(0, block_row)?.f_index_select(0, &block_of_column)?;
        let mut values = widened.f_narrow(0, 0, len * columns)?.f_view([len, columns])?;
        values.f_copy_(&stored.f_narrow(0, from, len)?)?;
        out.f_narrow(0, from, len)?.f_copy_(&values.f_mul_(&scale)?)?;
        from += len;
    }
    Ok(())
}
