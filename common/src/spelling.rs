//! What people read where the protocol has an enum: one spelling, that of the options. And how much people read of what a
//! caller wrote.
use std::fmt;

use crate::frame::RowType;
use crate::proto::v1;

/// As `--dtype` takes it.
impl fmt::Display for RowType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
        })
    }
}

/// An element type: as `--dtype` takes it, where it does.
pub fn dtype(dtype: v1::Dtype) -> &'static str {
    match dtype {
        v1::Dtype::Unspecified => "unspecified",
        v1::Dtype::F32 => "float32",
        v1::Dtype::Bf16 => "bfloat16",
        v1::Dtype::F16 => "float16",
        v1::Dtype::I32 => "int32",
        v1::Dtype::I64 => "int64",
    }
}

/// As `--gate` takes it.
pub fn gate(gate: v1::GatePlacement) -> &'static str {
    match gate {
        v1::GatePlacement::Unspecified => "unspecified",
        v1::GatePlacement::Ffn => "ffn",
        v1::GatePlacement::Attention => "attention",
    }
}

/// As `--shared-experts` takes it.
pub fn shared_experts(placed: v1::SharedExpertPlacement) -> &'static str {
    match placed {
        v1::SharedExpertPlacement::Unspecified => "unspecified",
        v1::SharedExpertPlacement::Ffn => "ffn",
        v1::SharedExpertPlacement::Attention => "attention",
    }
}

/// As `--routing` takes it.
pub fn routing(routing: v1::Routing) -> &'static str {
    match routing {
        v1::Routing::Unspecified => "unspecified",
        v1::Routing::Model => "model",
        v1::Routing::Balanced => "balanced",
    }
}

/// As `--link` takes it.
pub fn link(kind: v1::LinkKind) -> &'static str {
    match kind {
        v1::LinkKind::Unspecified => "unspecified",
        v1::LinkKind::Loopback => "loopback",
        v1::LinkKind::Tcp => "tcp",
        v1::LinkKind::Inline => "inline",
        v1::LinkKind::Shm => "shm",
        v1::LinkKind::Nccl => "nccl",
        v1::LinkKind::CudaIpc => "cuda-ipc",
    }
}

/// Several of them.
pub fn links(kinds: impl IntoIterator<Item = v1::LinkKind>) -> String {
    let names: Vec<_> = kinds.into_iter().map(link).collect();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

/// A role.
pub fn role(role: v1::Role) -> &'static str {
    match role {
        v1::Role::Unspecified => "unspecified",
        v1::Role::Attention => "attention",
        v1::Role::Ffn => "ffn",
    }
}

/// So many things, in their plural where it is due: "1 row", "2 rows".
pub fn count(number: impl Into<u64>, one: &str) -> String {
    let number = number.into();
    if number == 1 { format!("1 {one}") } else { format!("{number} {one}s") }
}

/// A span of time as people say it: "350 ms", "2.5 s".
pub fn span(time: std::time::Duration) -> String {
    if time.as_millis() < 1000 {
        format!("{} ms", time.as_millis())
    } else {
        format!("{:.1} s", time.as_secs_f64())
    }
}

/// Most characters of a caller's text in a message.
const MOST_SHOWN: usize = 60;

/// What a caller wrote, for a message that repeats it: cut where it is long, however long it is.
pub fn shown(text: &str) -> String {
    cut(text, MOST_SHOWN)
}

/// The first `most` characters, and a sign where that is not all.
pub fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::dtype::DtypeChoice;
    use crate::identity::{GatePlacement, SharedExpertPlacement};
    use crate::link::LinkKind;
    use crate::routing::Routing;

    #[test]
    fn numbers_agree_with_what_they_count() {
        assert_eq!(
            [count(0u32, "row"), count(1u32, "row"), count(2u64, "row")],
            ["0 rows", "1 row", "2 rows"]
        );
        let said = [0, 40, 999, 1000, 2540].map(|ms| span(std::time::Duration::from_millis(ms)));
        assert_eq!(said, ["0 ms", "40 ms", "999 ms", "1.0 s", "2.5 s"]);
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(shown(&"ü".repeat(60)), "ü".repeat(60));
        assert_eq!(shown(&"ü".repeat(61)), format!("{}…", "ü".repeat(60)));
        assert_eq!(cut("", 0), "");
    }

    #[test]
    fn what_is_shown_can_be_given() {
        for rows in [RowType::F32, RowType::Bf16] {
            let shown = dtype(crate::identity::dtype(rows));
            assert_eq!(rows.to_string(), shown);
            assert_eq!(shown.parse(), Ok(DtypeChoice::Fixed(rows)));
        }
        for side in [GatePlacement::Ffn, GatePlacement::Attention] {
            assert_eq!(gate(side.into()).parse(), Ok(side));
        }
        for side in [SharedExpertPlacement::Ffn, SharedExpertPlacement::Attention] {
            assert_eq!(shared_experts(side.into()).parse(), Ok(side));
        }
        for who in [Routing::Model, Routing::Balanced] {
            assert_eq!(routing(who.into()).parse(), Ok(who));
        }
        for kind in [LinkKind::Tcp, LinkKind::Inline, LinkKind::Shm, LinkKind::Nccl, LinkKind::CudaIpc] {
            assert!(
                [
                    v1::LinkKind::Tcp,
                    v1::LinkKind::Inline,
                    v1::LinkKind::Shm,
                    v1::LinkKind::Nccl,
                    v1::LinkKind::CudaIpc
                ]
                .into_iter()
                .any(|wire| link(wire) == kind.to_string())
            );
        }
    }
}
