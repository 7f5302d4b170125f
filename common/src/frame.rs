//! The unit that travels on a link: a fixed 64-byte header and the rows it announces.
//!
//! ```text
//!  0  magic   "AFD1"      4 B     8  epoch   u64        32  rows        u32     48  reserved, zero  8 B
//!  4  kind    u8                 16  step    u64        36  columns     u32     56  body_crc  u32 (CRC-32C)
//!  5  dtype   u8                 24  layer   u16        40  body_bytes  u32     60  header_crc u32 (CRC-32C of
//!  6  side    u8                 26  stage   u8         44  side_columns u32          bytes 0..60)
//!  7  flags   u8                 27..32 reserved, zero
//! ```
//! Little-endian. The body is the rows `[rows, columns]` of `dtype`, then the side tensors of the dispatch, in the
//! order of [`SideKind`]. A header that fails its checksum means the stream cannot be trusted any further; a body that
//! fails its own is dropped and the link reset. Nothing is ever used before it was verified.
use crate::ids::{Epoch, HopKey, LayerIdx, StageIdx, StepId};

/// Size of an encoded [`FrameHeader`], bytes.
pub const HEADER_BYTES: usize = 64;

/// First four bytes of every frame.
pub const MAGIC: [u8; 4] = *b"AFD1";

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FrameKind {
    /// Attention to FFN: normalised rows to run through a layer's FFN.
    Dispatch = 1,
    /// FFN to attention: the (partial) result of a dispatch.
    Combine = 2,
    /// FFN to attention: the dispatch failed; the body is `u32` gRPC code and a UTF-8 message.
    Error = 3,
}

/// Element type of the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RowType {
    /// binary32
    F32 = 1,
    /// bfloat16
    Bf16 = 2,
}

impl RowType {
    /// Size of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// Which side tensors follow the rows of a dispatch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum SideKind {
    /// Nothing.
    #[default]
    None = 0,
    /// Router logits `[rows, side_columns]` f32.
    RouterLogits = 1,
    /// Expert ids `[rows, side_columns]` i32, then their weights `[rows, side_columns]` f32.
    TopK = 2,
    /// Token ids `[rows]` i64; `side_columns` is 1.
    InputIds = 3,
}

impl SideKind {
    /// Bytes of side tensors per row.
    pub fn bytes_per_row(self, side_columns: usize) -> usize {
        match self {
            Self::None => 0,
            Self::RouterLogits => 4 * side_columns,
            Self::TopK => 8 * side_columns,
            Self::InputIds => 8,
        }
    }
}

/// Identity and shape of a frame. See the module's head for the encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// What it is.
    pub kind: FrameKind,
    /// Element type of the rows.
    pub dtype: RowType,
    /// Side tensors behind the rows.
    pub side: SideKind,
    /// Lifetime of the link it belongs to.
    pub epoch: Epoch,
    /// Which hop.
    pub hop: HopKey,
    /// Rows; zero is legal.
    pub rows: u32,
    /// Elements per row: the hidden size. 0 in an error frame.
    pub columns: u32,
    /// Elements per row of each side tensor.
    pub side_columns: u32,
    /// Bytes behind the header.
    pub body_bytes: u32,
}

impl FrameHeader {
    /// What `rows`, `columns`, `dtype` and the side tensors make necessary, bytes. Cannot overflow: computed in u64.
    pub fn expected_body_bytes(&self) -> u64 {
        let rows = u64::from(self.rows);
        rows * u64::from(self.columns) * self.dtype.bytes() as u64
            + rows * self.side.bytes_per_row(self.side_columns as usize) as u64
    }

    /// The identity of a hop in a test or an example.
    pub fn key(step: u64, layer: u16, stage: u8) -> HopKey {
        HopKey { step: StepId(step), layer: LayerIdx(layer), stage: StageIdx(stage) }
    }
}
