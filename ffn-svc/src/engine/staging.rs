//! Rows and side tensors of several hops as the tensors a layer takes: memory that stays, views that are made anew.
use afd_common::frame::{RowType, SideKind};
use afd_ffi::{FfiError, memory};
use tch::{Device, Kind, Tensor};

use crate::model::Side;

/// Memory for the inputs of one batch. Grows to the largest batch seen and is used again for the next one, so a view of
/// it is good until the next call.
pub(super) struct Staging {
    rows: Slab,
    side_first: Slab,
    side_second: Slab,
}

/// One hop of a batch.
#[derive(Clone, Copy)]
pub(super) struct HopBytes<'a> {
    /// How many rows.
    pub(super) rows: usize,
    /// The rows, then their side tensors, as in a frame.
    pub(super) body: &'a [u8],
}

impl Staging {
    pub(super) fn new() -> Self {
        Self { rows: Slab::new(), side_first: Slab::new(), side_second: Slab::new() }
    }

    /// `[rows, hidden]` of all hops, in order.
    ///
    /// # Errors
    /// libtorch's, when memory cannot be had.
    pub(super) fn rows<'a>(
        &mut self,
        hops: impl Iterator<Item = HopBytes<'a>> + Clone,
        hidden: usize,
        dtype: RowType,
    ) -> Result<Tensor, FfiError> {
        let row_bytes = hidden * dtype.bytes();
        self.rows.fill(hops.map(|hop| (hop, 0..hop.rows * row_bytes)), hidden, dtype.kind())
    }

    /// The side tensors of all hops, in order; `row_bytes` of rows come before them in every body.
    ///
    /// # Errors
    /// libtorch's, when memory cannot be had.
    pub(super) fn side<'a>(
        &mut self,
        hops: impl Iterator<Item = HopBytes<'a>> + Clone,
        row_bytes: usize,
        kind: SideKind,
        columns: usize,
    ) -> Result<Side, FfiError> {
        // Where the n-th side tensor of a hop lies, its elements and those before it being 4 or 8 bytes wide.
        let part = |before: usize, width: usize| {
            move |hop: HopBytes<'a>| {
                let begin = hop.rows * (row_bytes + before);
                (hop, begin..begin + hop.rows * width)
            }
        };
        Ok(match kind {
            SideKind::None => Side::None,
            SideKind::RouterLogits => Side::RouterLogits(self.side_first.fill(
                hops.map(part(0, 4 * columns)),
                columns,
                Kind::Float,
            )?),
            SideKind::TopK => {
                let ids = self.side_first.fill(hops.clone().map(part(0, 4 * columns)), columns, Kind::Int)?;
                let weights = part(4 * columns, 4 * columns);
                let weights = self.side_second.fill(hops.map(weights), columns, Kind::Float)?;
                Side::TopK { ids: ids.f_to_kind(Kind::Int64)?, weights }
            }
            SideKind::InputIds => {
                let ids = self.side_first.fill(hops.map(part(0, 8)), 1, Kind::Int64)?;
                Side::InputIds(ids.f_view([-1])?)
            }
        })
    }
}

/// One flat tensor that grows and is refilled.
struct Slab {
    flat: Tensor,
    kind: Kind,
}

impl Slab {
    fn new() -> Self {
        Self { flat: Tensor::new(), kind: Kind::Uint8 }
    }

    /// `[rows, columns]` with these parts of the hops' bodies, one after the other.
    fn fill<'a>(
        &mut self,
        parts: impl Iterator<Item = (HopBytes<'a>, std::ops::Range<usize>)> + Clone,
        columns: usize,
        kind: Kind,
    ) -> Result<Tensor, FfiError> {
        let rows: usize = parts.clone().map(|(hop, _)| hop.rows).sum();
        self.reserve(rows * columns, kind)?;
        let mut rest = memory::bytes_mut(&mut self.flat)?;
        for (hop, range) in parts {
            let found = hop.body.len();
            let part = hop.body.get(range.clone()).ok_or(FfiError::OutOfRange {
                begin: range.start,
                end: range.end,
                len: found,
            })?;
            let (here, behind) = std::mem::take(&mut rest).split_at_mut(part.len());
            here.copy_from_slice(part);
            rest = behind;
        }
        let (rows, columns) = (rows as i64, columns as i64);
        Ok(self.flat.f_narrow(0, 0, rows * columns)?.f_view([rows, columns])?)
    }

    fn reserve(&mut self, elements: usize, kind: Kind) -> Result<(), FfiError> {
        if self.kind != kind || self.flat.numel() < elements {
            let elements = elements.next_power_of_two() as i64;
            self.flat = Tensor::f_empty([elements], (kind, Device::Cpu))?;
            self.kind = kind;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn le(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn hops_become_one_tensor_in_order_and_empty_ones_leave_no_trace() {
        let (a, b) = (le(&[1.0, 2.0, 3.0, 4.0]), le(&[5.0, 6.0]));
        let hops =
            [HopBytes { rows: 2, body: &a }, HopBytes { rows: 0, body: &[] }, HopBytes { rows: 1, body: &b }];
        let mut staging = Staging::new();
        for _ in 0..2 {
            let rows = staging.rows(hops.iter().copied(), 2, RowType::F32).unwrap();
            assert_eq!(rows.size(), [3, 2]);
            assert_eq!(memory::f32s(&rows).unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        }
        let few = staging.rows(hops[2..].iter().copied(), 2, RowType::F32).unwrap();
        assert_eq!(memory::f32s(&few).unwrap(), [5.0, 6.0]);
    }

    #[test]
    fn side_tensors_are_taken_from_behind_the_rows() {
        let hop = |ids: &[i32], weights: &[f32]| {
            let mut body = le(&vec![9.0; ids.len() / 2]);
            ids.iter().for_each(|id| body.extend_from_slice(&id.to_le_bytes()));
            body.extend_from_slice(&le(weights));
            body
        };
        let (a, b) = (hop(&[1, 2, 3, 4], &[0.1, 0.2, 0.3, 0.4]), hop(&[5, 6], &[0.5, 0.6]));
        let hops = [HopBytes { rows: 2, body: &a }, HopBytes { rows: 1, body: &b }];
        let side = Staging::new().side(hops.iter().copied(), 4, SideKind::TopK, 2).unwrap();
        let Side::TopK { ids, weights } = side else { panic!("another kind") };
        assert_eq!((ids.size(), weights.size()), (vec![3, 2], vec![3, 2]));
        assert_eq!(memory::i64s(&ids).unwrap(), [1, 2, 3, 4, 5, 6]);
        assert_eq!(memory::f32s(&weights).unwrap(), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]);
    }

    #[test]
    fn input_ids_are_one_dimensional() {
        let mut body = le(&[0.0, 0.0]);
        [7i64, -1].iter().for_each(|id| body.extend_from_slice(&id.to_le_bytes()));
        let hops = [HopBytes { rows: 2, body: &body }];
        let side = Staging::new().side(hops.iter().copied(), 4, SideKind::InputIds, 1).unwrap();
        let Side::InputIds(ids) = side else { panic!("another kind") };
        assert_eq!(memory::i64s(&ids).unwrap(), [7, -1]);
    }
}
