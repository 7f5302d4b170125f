//! What can be wrong with one hop: it is answered with an error frame, and nobody else notices.
use afd_common::frame::{FrameHeader, FrameKind, MAX_TEXT_BYTES, RowType, SideKind};
use tonic::Code;

use super::StageSpec;
use crate::hop_queue::Refused;

/// Why a hop has no result. The caller's mistake unless it is [`HopError::Model`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HopError {
    /// The queue does not take it.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The rows are those of another model.
    #[error("rows have {found} columns, expected the hidden size {expected}")]
    Columns {
        /// Hidden size.
        expected: usize,
        /// As sent.
        found: u32,
    },
    /// The rows are of another element type.
    #[error("rows are {found}, expected the activation dtype {expected}")]
    RowType {
        /// As agreed.
        expected: RowType,
        /// As sent.
        found: RowType,
    },
    /// More rows than this rank takes at once.
    #[error("{found} rows, at most {max} were agreed (--max-tokens-per-stage)")]
    Rows {
        /// Limit.
        max: u32,
        /// As sent.
        found: u32,
    },
    /// Not the side tensors that the layer takes.
    #[error("layer {layer} takes {}, received {}", side(*.expected), side(*.found))]
    Side {
        /// Which layer.
        layer: u16,
        /// Kind and columns.
        expected: (SideKind, u32),
        /// Kind and columns as sent.
        found: (SideKind, u32),
    },
    /// The bytes do not add up.
    #[error("a body of {found} bytes, rows and side tensors make it {expected}")]
    Body {
        /// From the shape.
        expected: u64,
        /// As sent.
        found: u64,
    },
    /// What came is not a dispatch.
    #[error("a {found:?} frame, expected a Dispatch")]
    Kind {
        /// As sent.
        found: FrameKind,
    },
    /// The model failed on these rows.
    #[error("layer {layer}: {what}")]
    Model {
        /// Which layer.
        layer: u16,
        /// Its own words.
        what: String,
    },
    /// The engine has stopped, or is about to.
    #[error("the FFN engine has stopped")]
    Stopped,
}

impl HopError {
    /// The gRPC code it travels with.
    pub fn code(&self) -> Code {
        match self {
            Self::Refused(Refused::Duplicate { .. }) => Code::AlreadyExists,
            Self::Refused(Refused::NotOpen { .. }) | Self::Stopped => Code::Unavailable,
            Self::Model { .. } => Code::Internal,
            _ => Code::InvalidArgument,
        }
    }

    /// All [reasons](Self::reason).
    pub const REASONS: [&str; 13] = [
        "duplicate",
        "stale",
        "layer",
        "stage",
        "link",
        "columns",
        "dtype",
        "rows",
        "side",
        "body",
        "kind",
        "model",
        "stopped",
    ];

    /// Short name for a metric's label.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Refused(Refused::Duplicate { .. }) => "duplicate",
            Self::Refused(Refused::Stale { .. }) => "stale",
            Self::Refused(Refused::Layer { .. }) => "layer",
            Self::Refused(Refused::Stage { .. }) => "stage",
            Self::Refused(Refused::NotOpen { .. }) => "link",
            Self::Columns { .. } => "columns",
            Self::RowType { .. } => "dtype",
            Self::Rows { .. } => "rows",
            Self::Side { .. } => "side",
            Self::Body { .. } => "body",
            Self::Kind { .. } => "kind",
            Self::Model { .. } => "model",
            Self::Stopped => "stopped",
        }
    }

    /// The body of an error frame: the code and the message, cut to what a frame may carry.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let message = self.to_string();
        let room = MAX_TEXT_BYTES as usize - size_of::<u32>();
        out.clear();
        out.extend_from_slice(&(self.code() as u32).to_le_bytes());
        out.extend_from_slice(&message.as_bytes()[..message.floor_char_boundary(room)]);
    }
}

/// Whether a dispatch is one that `spec` has a layer for. The layer's and stage's range is the queue's to check; a layer
/// that is out of range passes here.
///
/// # Errors
/// [`HopError`] with expected and received.
pub(super) fn check(
    spec: &StageSpec,
    max_rows: u32,
    header: &FrameHeader,
    body_bytes: usize,
) -> Result<(), HopError> {
    if header.kind != FrameKind::Dispatch {
        return Err(HopError::Kind { found: header.kind });
    }
    if header.columns as usize != spec.hidden_size {
        return Err(HopError::Columns { expected: spec.hidden_size, found: header.columns });
    }
    if header.dtype != spec.activations {
        return Err(HopError::RowType { expected: spec.activations, found: header.dtype });
    }
    if header.rows > max_rows {
        return Err(HopError::Rows { max: max_rows, found: header.rows });
    }
    if let Some(layer) = spec.layers.get(usize::from(header.hop.layer.0)) {
        let (expected, found) = ((layer.side, layer.side_columns), (header.side, header.side_columns));
        // Without side tensors their width says nothing.
        if expected != found && (expected.0, found.0) != (SideKind::None, SideKind::None) {
            return Err(HopError::Side { layer: header.hop.layer.0, expected, found });
        }
    }
    let expected = header.expected_body_bytes().unwrap_or(u64::MAX);
    if expected != body_bytes as u64 {
        return Err(HopError::Body { expected, found: body_bytes as u64 });
    }
    Ok(())
}

fn side((kind, columns): (SideKind, u32)) -> String {
    match kind {
        SideKind::None => "no side tensors".into(),
        SideKind::RouterLogits => format!("router_logits [rows, {columns}]"),
        SideKind::TopK => format!("topk_ids and topk_weights [rows, {columns}]"),
        SideKind::InputIds => "input_ids [rows]".into(),
    }
}

#[cfg(test)]
mod tests {
    use afd_common::ids::{Epoch, Shard};

    use super::*;
    use crate::model::LayerSpec;

    fn layer(side: SideKind, side_columns: u32) -> LayerSpec {
        LayerSpec { side, side_columns, num_experts: 8, experts_per_token: 2, ..LayerSpec::dense() }
    }

    fn spec() -> StageSpec {
        StageSpec {
            hidden_size: 4,
            activations: RowType::F32,
            shard: Shard::WHOLE,
            layers: vec![layer(SideKind::None, 0), layer(SideKind::TopK, 2)],
        }
    }

    fn header(layer: u16) -> FrameHeader {
        FrameHeader {
            kind: FrameKind::Dispatch,
            dtype: RowType::F32,
            side: SideKind::None,
            epoch: Epoch(1),
            hop: FrameHeader::key(1, layer, 0),
            rows: 2,
            columns: 4,
            side_columns: 0,
            body_bytes: 32,
        }
    }

    fn message(change: impl FnOnce(&mut FrameHeader)) -> String {
        let mut header = header(0);
        change(&mut header);
        let bytes = header.expected_body_bytes().unwrap() as usize;
        check(&spec(), 8, &header, bytes).expect_err("must be refused").to_string()
    }

    #[test]
    fn a_hop_that_fits_its_layer_passes() {
        assert_eq!(check(&spec(), 8, &header(0), 32), Ok(()));
        let topk = FrameHeader { side: SideKind::TopK, side_columns: 2, ..header(1) };
        assert_eq!(check(&spec(), 8, &topk, 32 + 32), Ok(()));
        assert_eq!(check(&spec(), 8, &FrameHeader { rows: 0, ..header(0) }, 0), Ok(()));
    }

    #[test]
    fn what_is_wrong_is_named_with_expected_and_received() {
        assert_eq!(message(|h| h.columns = 5), "rows have 5 columns, expected the hidden size 4");
        assert_eq!(
            message(|h| h.dtype = RowType::Bf16),
            "rows are bfloat16, expected the activation dtype float32"
        );
        assert_eq!(message(|h| h.rows = 9), "9 rows, at most 8 were agreed (--max-tokens-per-stage)");
        assert_eq!(
            message(|h| h.hop.layer.0 = 1),
            "layer 1 takes topk_ids and topk_weights [rows, 2], received no side tensors"
        );
        assert_eq!(
            message(|h| (h.side, h.side_columns) = (SideKind::RouterLogits, 8)),
            "layer 0 takes no side tensors, received router_logits [rows, 8]"
        );
        assert_eq!(message(|h| h.kind = FrameKind::Combine), "a Combine frame, expected a Dispatch");
        let short = check(&spec(), 8, &header(0), 31).unwrap_err();
        assert_eq!(short, HopError::Body { expected: 32, found: 31 });
    }

    #[test]
    fn an_error_frame_has_its_code_and_as_much_text_as_fits() {
        let mut body = Vec::new();
        HopError::Model { layer: 3, what: "ä".repeat(4000) }.encode(&mut body);
        assert!(body.len() <= MAX_TEXT_BYTES as usize);
        assert_eq!(body[..4], (Code::Internal as u32).to_le_bytes());
        assert!(std::str::from_utf8(&body[4..]).unwrap().starts_with("layer 3: ä"));
    }
}
