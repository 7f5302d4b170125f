//! The rows of a dispatched hop, kept until its combine has arrived, and how they become a frame for each shard.
use afd_common::frame::{FrameHeader, FrameKind, RowType, SideKind};
use afd_common::ids::{Epoch, HopKey};
use afd_common::link::{HopLink, LinkError};
use afd_common::placement::{LayerPlacement, row_salt};
use afd_ffi::{FfiError, memory};
use tch::{Device, Kind, Tensor};

use super::routes::{Share, split};
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
    /// By shard; empty: every shard gets all.
    shares: Vec<Share>,
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
        let (rows, shares) = (as_wire(rows, row_kind(dtype))?, Vec::new());
        Ok(Self { key, num_rows, rows, side, side_columns, side_tensors, shares })
    }

    /// Finds out which rows each shard serves something of. Without this every shard gets every row; so it does when no
    /// expert was chosen here.
    ///
    /// # Errors
    /// When the rows' memory cannot be read.
    pub fn route(&mut self, placed: &LayerPlacement) -> Result<(), FfiError> {
        let (SideKind::TopK, Some(ids)) = (self.side, &self.side_tensors[0]) else { return Ok(()) };
        let ids = memory::bytes(ids)?.as_chunks::<4>().0;
        let top_k = self.side_columns as usize;
        let rows = memory::bytes(&self.rows)?;
        let row_bytes = rows.len() / (self.num_rows as usize).max(1);
        let salt = |row: usize| match placed.has_copies() {
            true => row_salt(&rows[row * row_bytes..][..row_bytes]),
            false => 0,
        };
        let choices = ids.chunks(top_k.max(1)).map(|row| row.iter().map(|id| i32::from_le_bytes(*id)));
        self.shares = split(choices, salt, placed);
        Ok(())
    }

    /// What of the hop goes to a shard.
    pub fn share(&self, shard: usize) -> &Share {
        self.shares.get(shard).unwrap_or(&Share::All)
    }

    /// How many rows go to a shard.
    pub fn num_rows_of(&self, shard: usize) -> u32 {
        match self.share(shard) {
            Share::All => self.num_rows,
            Share::Some(rows) => rows.len() as u32,
        }
    }

    /// Hands a shard's part of the hop to a link. `gathered` is memory to put rows together in, used again every time.
    ///
    /// # Errors
    /// [`LinkError`] as of [`HopLink::send`].
    pub fn send(
        &self,
        link: &mut dyn HopLink,
        shard: usize,
        dtype: RowType,
        hidden_size: u32,
        gathered: &mut Vec<u8>,
    ) -> Result<(), LinkError> {
        self.send_as(self.key, link, shard, dtype, hidden_size, gathered)
    }

    /// The same, as another hop.
    ///
    /// # Errors
    /// As of [`send`](Self::send).
    pub fn send_as(
        &self,
        hop: HopKey,
        link: &mut dyn HopLink,
        shard: usize,
        dtype: RowType,
        hidden_size: u32,
        gathered: &mut Vec<u8>,
    ) -> Result<(), LinkError> {
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
        if let Share::Some(rows) = self.share(shard) {
            gathered.clear();
            for part in parts {
                let row_bytes = part.len() / (self.num_rows as usize).max(1);
                rows.iter().for_each(|row| {
                    gathered.extend_from_slice(&part[*row as usize * row_bytes..][..row_bytes])
                });
            }
            parts = [gathered, &[], &[]];
        }
        let body_bytes: usize = parts.iter().map(|part| part.len()).sum();
        let header = FrameHeader {
            kind: FrameKind::Dispatch,
            dtype,
            side: self.side,
            epoch: Epoch::default(),
            hop,
            rows: self.num_rows_of(shard),
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

// Shares the tensors.
impl Clone for Kept {
    fn clone(&self) -> Self {
        let Self { key, num_rows, side, side_columns, .. } = *self;
        let side_tensors =
            self.side_tensors.each_ref().map(|tensor| tensor.as_ref().map(Tensor::shallow_clone));
        let (rows, shares) = (self.rows.shallow_clone(), self.shares.clone());
        Self { key, num_rows, rows, side, side_columns, side_tensors, shares }
    }
}

fn as_wire(tensor: &Tensor, kind: Kind) -> Result<Tensor, tch::TchError> {
    let tensor = if tensor.kind() == kind { tensor.shallow_clone() } else { tensor.f_to_kind(kind)? };
    // From a GPU this waits until the rows are there.
    tensor.f_to_device(Device::Cpu)?.f_contiguous()
}

/// tch's name of a row type.
pub fn row_kind(rows: RowType) -> Kind {
    match rows {
        RowType::F32 => Kind::Float,
        RowType::Bf16 => Kind::BFloat16,
    }
}
