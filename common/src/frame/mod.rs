//! The unit that travels on a link: a fixed 64-byte header and the rows it announces.
//!
//! ```text
//!  0  magic   "AFD1"      4 B     8  epoch   u64        32  rows        u32     48  body_sum  u64 (sum64)
//!  4  kind    u8                 16  step    u64        36  columns     u32     56  body_crc  u32 (CRC-32C)
//!  5  dtype   u8                 24  layer   u16        40  body_bytes  u32     60  header_crc u32 (CRC-32C of
//!  6  side    u8                 26  stage   u8         44  side_columns u32          bytes 0..60)
//!  7  flags   u8                 27..32 reserved, zero
//! ```
//! Little-endian; what is reserved is zero. The body is the rows `[rows, columns]` of `dtype`, then the side tensors of the
//! dispatch, in the order of [`SideKind`]; an error or close frame has neither and carries text instead.
//!
//! `flags` say how the body is summed and where its sum stands. 0: by CRC-32C, in `body_crc`. 1: by
//! [`sum64`](afd_ffi::sum64), in `body_sum`. 3: by that too, in eight bytes behind the body which `body_bytes` does not count,
//! so that a large body can be summed and sent piece by piece. The fields that are not used are zero. Which of the two sums a
//! link's frames carry is agreed when it is opened ([`Checksum`]); the other one is refused.
//!
//! A header that fails its checksum means the stream cannot be trusted any further; a body that fails its own is dropped and
//! the link reset. Nothing is ever used before it was verified.
use crate::ids::{Epoch, HopKey, LayerIdx, StageIdx, StepId};

mod checksum;

pub use checksum::{BodyCheck, BodySum, Checksum, body_sum, crc32c, verify_body};

/// Size of an encoded [`FrameHeader`], bytes.
pub const HEADER_BYTES: usize = 64;

/// Bytes behind a body whose sum stands there.
pub const TRAILER_BYTES: usize = 8;

/// Of `flags`: the body is summed by [`Checksum::Sum64`].
const SUM64: u8 = 1;
/// Of `flags`: its sum stands behind it.
const BEHIND: u8 = 2;

/// Most bytes of the body of an error or close frame, whatever was agreed for rows.
pub const MAX_TEXT_BYTES: u32 = 2048;

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
    /// Either way: the sender ends the link; the body is the reason in UTF-8. Links keep it to themselves.
    Close = 4,
}

impl FrameKind {
    fn from_wire(value: u8) -> Option<Self> {
        [Self::Dispatch, Self::Combine, Self::Error, Self::Close]
            .into_iter()
            .find(|kind| *kind as u8 == value)
    }

    /// Whether the body is text (behind a code, in an error frame) instead of rows.
    fn is_text(self) -> bool {
        matches!(self, Self::Error | Self::Close)
    }
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
    fn from_wire(value: u8) -> Option<Self> {
        [Self::F32, Self::Bf16].into_iter().find(|dtype| *dtype as u8 == value)
    }

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
    fn from_wire(value: u8) -> Option<Self> {
        [Self::None, Self::RouterLogits, Self::TopK, Self::InputIds]
            .into_iter()
            .find(|side| *side as u8 == value)
    }

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

/// What a receiver agreed to before it sizes anything by a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameLimits {
    /// Most rows of a frame.
    pub max_rows: u32,
    /// Most bytes of a body of rows; text has [`MAX_TEXT_BYTES`].
    pub max_body_bytes: u32,
    /// How bodies are summed.
    pub checksum: Checksum,
}

/// Why bytes are not a frame, or not one that was agreed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Something else speaks on this connection, or the stream lost its place.
    #[error("starts with {found:02x?} instead of \"AFD1\"")]
    Magic {
        /// What was there.
        found: [u8; 4],
    },
    /// The header was changed on its way.
    #[error("header checksum is {found:08x}, computed {computed:08x}")]
    HeaderChecksum {
        /// As sent.
        found: u32,
        /// As computed here.
        computed: u32,
    },
    /// The body was changed on its way.
    #[error("body checksum is {found:08x}, computed {computed:08x}")]
    BodyChecksum {
        /// As sent.
        found: u64,
        /// As computed here.
        computed: u64,
    },
    /// The body is summed in another way than was agreed.
    #[error("the body is summed by {found}, agreed is {agreed}")]
    OtherChecksum {
        /// As sent.
        found: Checksum,
        /// When the link was opened.
        agreed: Checksum,
    },
    /// A field has a value this version does not know.
    #[error("unknown {field}: {value}")]
    Unknown {
        /// Name of the field.
        field: &'static str,
        /// What was there.
        value: u8,
    },
    /// More than was agreed.
    #[error("{field} is {found}, agreed are at most {limit}")]
    OverLimit {
        /// Name of the field.
        field: &'static str,
        /// What was announced.
        found: u64,
        /// What was agreed.
        limit: u64,
    },
    /// The body's size does not follow from rows, columns, dtype and side tensors.
    #[error("body_bytes is {found}, shape and dtype make it {expected}")]
    BodySize {
        /// What was announced.
        found: u64,
        /// What it has to be.
        expected: u64,
    },
}

impl FrameHeader {
    /// The header on the wire, of a body that is summed to `sum`.
    pub fn encode(&self, sum: BodySum) -> [u8; HEADER_BYTES] {
        self.encoded(Some(sum))
    }

    /// The header on the wire, of a body whose [`sum64`](Checksum::Sum64) stands behind it.
    pub fn encode_before(&self) -> [u8; HEADER_BYTES] {
        self.encoded(None)
    }

    fn encoded(&self, sum: Option<BodySum>) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[..4].copy_from_slice(&MAGIC);
        out[4] = self.kind as u8;
        out[5] = self.dtype as u8;
        out[6] = self.side as u8;
        match sum {
            Some(BodySum::Crc32c(sum)) => out[56..60].copy_from_slice(&sum.to_le_bytes()),
            Some(BodySum::Sum64(sum)) => {
                out[7] = SUM64;
                out[48..56].copy_from_slice(&sum.to_le_bytes());
            }
            None => out[7] = SUM64 | BEHIND,
        }
        out[8..16].copy_from_slice(&self.epoch.0.to_le_bytes());
        out[16..24].copy_from_slice(&self.hop.step.0.to_le_bytes());
        out[24..26].copy_from_slice(&self.hop.layer.0.to_le_bytes());
        out[26] = self.hop.stage.0;
        out[32..36].copy_from_slice(&self.rows.to_le_bytes());
        out[36..40].copy_from_slice(&self.columns.to_le_bytes());
        out[40..44].copy_from_slice(&self.body_bytes.to_le_bytes());
        out[44..48].copy_from_slice(&self.side_columns.to_le_bytes());
        let header_crc = crc32c(&out[..60]);
        out[60..].copy_from_slice(&header_crc.to_le_bytes());
        out
    }

    /// A verified header within `limits`, and what its body must be summed to: `None` where that stands behind it, in
    /// [`TRAILER_BYTES`].
    ///
    /// # Errors
    /// [`FrameError`]; nothing behind these bytes can be trusted then.
    pub fn decode(
        bytes: &[u8; HEADER_BYTES],
        limits: &FrameLimits,
    ) -> Result<(Self, Option<BodySum>), FrameError> {
        if bytes[..4] != MAGIC {
            return Err(FrameError::Magic { found: field(bytes, 0) });
        }
        let (found, computed) = (u32::from_le_bytes(field(bytes, 60)), crc32c(&bytes[..60]));
        if found != computed {
            return Err(FrameError::HeaderChecksum { found, computed });
        }
        let unknown = |field, value| FrameError::Unknown { field, value };
        let (sum, unused) = match bytes[7] {
            0 => (Some(BodySum::Crc32c(u32::from_le_bytes(field(bytes, 56)))), 48..56),
            SUM64 => (Some(BodySum::Sum64(u64::from_le_bytes(field(bytes, 48)))), 56..60),
            flags if flags == SUM64 | BEHIND => (None, 48..60),
            other => return Err(unknown("flags", other)),
        };
        if let Some(value) = (27..32).chain(unused).map(|i| bytes[i]).find(|b| *b != 0) {
            return Err(unknown("reserved", value));
        }
        let found = sum.map_or(Checksum::Sum64, BodySum::checksum);
        if found != limits.checksum {
            return Err(FrameError::OtherChecksum { found, agreed: limits.checksum });
        }
        let header = Self {
            kind: FrameKind::from_wire(bytes[4]).ok_or(unknown("kind", bytes[4]))?,
            dtype: RowType::from_wire(bytes[5]).ok_or(unknown("dtype", bytes[5]))?,
            side: SideKind::from_wire(bytes[6]).ok_or(unknown("side", bytes[6]))?,
            epoch: Epoch(u64::from_le_bytes(field(bytes, 8))),
            hop: HopKey {
                step: StepId(u64::from_le_bytes(field(bytes, 16))),
                layer: LayerIdx(u16::from_le_bytes(field(bytes, 24))),
                stage: StageIdx(bytes[26]),
            },
            rows: u32::from_le_bytes(field(bytes, 32)),
            columns: u32::from_le_bytes(field(bytes, 36)),
            body_bytes: u32::from_le_bytes(field(bytes, 40)),
            side_columns: u32::from_le_bytes(field(bytes, 44)),
        };
        header.check(limits)?;
        Ok((header, sum))
    }

    /// Whether the frame is one that was agreed to: rows and bytes within `limits`, and a body as large as the shape
    /// says. Senders and receivers ask the same question.
    ///
    /// # Errors
    /// [`FrameError::OverLimit`] or [`FrameError::BodySize`].
    pub fn check(&self, limits: &FrameLimits) -> Result<(), FrameError> {
        let at_most = |field, found: u32, limit: u32| match found <= limit {
            true => Ok(()),
            false => Err(FrameError::OverLimit { field, found: found.into(), limit: limit.into() }),
        };
        if self.kind.is_text() {
            return at_most("body_bytes", self.body_bytes, MAX_TEXT_BYTES);
        }
        at_most("rows", self.rows, limits.max_rows)?;
        at_most("body_bytes", self.body_bytes, limits.max_body_bytes)?;
        match (u64::from(self.body_bytes), self.expected_body_bytes()) {
            (found, Some(expected)) if found == expected => Ok(()),
            (found, expected) => Err(FrameError::BodySize { found, expected: expected.unwrap_or(u64::MAX) }),
        }
    }

    /// What `rows`, `columns`, `dtype` and the side tensors make necessary, bytes; `None` when that exceeds u64.
    pub fn expected_body_bytes(&self) -> Option<u64> {
        let row = u64::from(self.columns) * self.dtype.bytes() as u64
            + self.side.bytes_per_row(self.side_columns as usize) as u64;
        row.checked_mul(u64::from(self.rows))
    }

    /// The identity of a hop in a test or an example.
    pub fn key(step: u64, layer: u16, stage: u8) -> HopKey {
        HopKey { step: StepId(step), layer: LayerIdx(layer), stage: StageIdx(stage) }
    }
}

/// `N` bytes at a fixed place.
fn field<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[at + i])
}

#[cfg(test)]
mod tests;
