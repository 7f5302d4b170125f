//! The rows of a dispatched hop, kept until its combine has arrived, and how they become a frame.
use afd_common::frame::{FrameHeader, FrameKind, RowType, SideKind};
use afd_common::ids::{Epoch, HopKey};
use afd_common::link::{HopLink, LinkError};
use afd_ffi::{FfiError, memory};
use tch::{Kind, Tensor};

use super::outstanding::row_kind;
use crate::engine::SideTensors;

/// One hop's rows and side tensors, contiguous on the CPU in the types of the wire.
pub struct Kept {
    /// Which hop.
    pub key: HopKey,
    /// Rows of it.
    pub num_rows: u32,
    rows: Tensor,
    side: SideKind,
    side_columns: u32,
    side_tensors: [Option<Tensor>; 2],
}

impl Kept {
    /// Keeps `rows` `[num_rows, hidden]`. Shares the caller's memory where dtype and layout already fit: the engine
    /// makes new tensors in every layer and never writes to old ones.
    ///
    /// # Errors
    /// When libtorch cannot convert.
    pub fn new(
        key: HopKey,
        rows: &Tensor,
        side: &SideTensors,
        dtype: RowType,
    ) -> Result<Self, tch::TchError> {
        let columns = |tensor: &Tensor| tensor.size().get(1).copied().unwrap_or(1) as u32;
        let (side, side_columns, side_tensors) = match side {
            SideTensors::None => (SideKind::None, 0, [None, None]),
            SideTensors::RouterLogits(logits) => {
                (SideKind::RouterLogits, columns(logits), [Some(as_wire(logits, Kind::Float)?), None])
            }
            SideTensors::TopK { ids, weights } => (
                SideKind::TopK,
                columns(ids),
                [Some(as_wire(ids, Kind::Int)?), Some(as_wire(weights, Kind::Float)?)],
            ),
            SideTensors::InputIds(ids) => (SideKind::InputIds, 1, [Some(as_wire(ids, Kind::Int64)?), None]),
        };
        let num_rows = rows.size().first().copied().unwrap_or(0) as u32;
        Ok(Self { key, num_rows, rows: as_wire(rows, row_kind(dtype))?, side, side_columns, side_tensors })
    }

    /// Hands the hop to a link.
    ///
    /// # Errors
    /// [`LinkError`] as of [`HopLink::send`].
    pub fn send(&self, link: &mut dyn HopLink, dtype: RowType, hidden_size: u32) -> Result<(), LinkError> {
        let unreadable = |link: &dyn HopLink, error: FfiError| LinkError::BadFrame {
            peer: link.limits().peer.clone(),
            what: error.to_string(),
        };
        let mut parts: [&[u8]; 3] = [&[]; 3];
        for (part, tensor) in parts.iter_mut().zip([
            Some(&self.rows),
            self.side_tensors[0].as_ref(),
            self.side_tensors[1].as_ref(),
        ]) {
            if let Some(tensor) = tensor {
                *part = memory::bytes(tensor).map_err(|error| unreadable(link, error))?;
            }
        }
        let body_bytes: usize = parts.iter().map(|part| part.len()).sum();
        let header = FrameHeader {
            kind: FrameKind::Dispatch,
            dtype,
            side: self.side,
            epoch: Epoch::default(),
            hop: self.key,
            rows: self.num_rows,
            columns: hidden_size,
            side_columns: self.side_columns,
            body_bytes: u32::try_from(body_bytes).map_err(|_| LinkError::BadFrame {
                peer: link.limits().peer.clone(),
                what: format!("a body of {body_bytes} bytes is more than a frame can carry"),
            })?,
        };
        link.send(header, &parts)
    }
}

fn as_wire(tensor: &Tensor, kind: Kind) -> Result<Tensor, tch::TchError> {
    let tensor = if tensor.kind() == kind { tensor.shallow_clone() } else { tensor.f_to_kind(kind)? };
    tensor.f_contiguous()
}
