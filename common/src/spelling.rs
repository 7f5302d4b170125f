//! What people read where the protocol has an enum: one spelling, that of the options, and the number itself where a newer
//! process sent one that this build has no name for. And how much people read of what a caller wrote.
use std::borrow::Cow;
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

/// The name of an enum's number as it came, or the number.
fn known<E: TryFrom<i32>>(wire: i32, name: impl FnOnce(E) -> &'static str) -> Cow<'static, str> {
    match E::try_from(wire) {
        Ok(value) => Cow::Borrowed(name(value)),
        Err(_) => Cow::Owned(format!("{wire} (not known here)")),
    }
}

/// An element type, as it came: as `--dtype` takes it, where it does.
pub fn dtype(wire: impl Into<i32>) -> Cow<'static, str> {
    known(wire.into(), |dtype| match dtype {
        v1::Dtype::Unspecified => "unspecified",
        v1::Dtype::F32 => "float32",
        v1::Dtype::Bf16 => "bfloat16",
        v1::Dtype::F16 => "float16",
        v1::Dtype::I32 => "int32",
        v1::Dtype::I64 => "int64",
    })
}

/// A side, as it came: as `--gate` takes it.
pub fn gate(wire: impl Into<i32>) -> Cow<'static, str> {
    known(wire.into(), |gate| match gate {
        v1::GatePlacement::Unspecified => "unspecified",
        v1::GatePlacement::Ffn => "ffn",
        v1::GatePlacement::Attention => "attention",
    })
}

/// A side, as it came: as `--shared-experts` takes it.
pub fn shared_experts(wire: impl Into<i32>) -> Cow<'static, str> {
    known(wire.into(), |placed| match placed {
        v1::SharedExpertPlacement::Unspecified => "unspecified",
        v1::SharedExpertPlacement::Ffn => "ffn",
        v1::SharedExpertPlacement::Attention => "attention",
    })
}

/// Who chooses experts, as it came: as `--routing` takes it.
pub fn routing(wire: impl Into<i32>) -> Cow<'static, str> {
    known(wire.into(), |routing| match routing {
        v1::Routing::Unspecified => "unspecified",
        v1::Routing::Model => "model",
        v1::Routing::Balanced => "balanced",
    })
}

/// A kind of link, as it came: as `--link` takes it.
pub fn link(wire: impl Into<i32>) -> Cow<'static, str> {
    known(wire.into(), |kind| match kind {
        v1::LinkKind::Unspecified => "unspecified",
        v1::LinkKind::Loopback => "loopback",
        v1::LinkKind::Tcp => "tcp",
        v1::LinkKind::Inline => "inline",
        v1::LinkKind::Shm => "shm",
        v1::LinkKind::Nccl => "nccl",
        v1::LinkKind::CudaIpc => "cuda-ipc",
    })
}

/// Several of them; the first few where a caller sent more than there are.
pub fn links(kinds: impl IntoIterator<Item = impl Into<i32>>) -> String {
    let names: Vec<_> = kinds.into_iter().map(link).collect();
    if names.is_empty() { "none".into() } else { first_few(&names, ", ") }
}

/// A role, as it came.
pub fn role(wire: impl Into<i32>) -> Cow<'static, str> {
    known(wire.into(), |role| match role {
        v1::Role::Unspecified => "unspecified",
        v1::Role::Attention => "attention",
        v1::Role::Ffn => "ffn",
    })
}

/// Most things of a list in one sentence.
pub const FEW: usize = 8;

/// The first [`FEW`] of a list, and how many more there are: "a, b, and 3 more".
pub fn first_few(all: &[impl AsRef<str>], separator: &str) -> String {
    let mut line = String::new();
    for (at, one) in all.iter().take(FEW).enumerate() {
        line.push_str(if at == 0 { "" } else { separator });
        line.push_str(one.as_ref());
    }
    match all.len().saturating_sub(FEW) {
        0 => line,
        more => format!("{line}{separator}and {more} more"),
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
    fn of_a_long_list_the_first_few_are_named_and_the_others_counted() {
        let names: Vec<String> = (0..FEW + 3).map(|n| n.to_string()).collect();
        assert_eq!(first_few(&names[..0], ", "), "");
        assert_eq!(first_few(&names[..2], "; "), "0; 1");
        assert_eq!(first_few(&names[..FEW], ", "), "0, 1, 2, 3, 4, 5, 6, 7");
        assert_eq!(first_few(&names, "; "), "0; 1; 2; 3; 4; 5; 6; 7; and 3 more");
    }

    #[test]
    fn a_number_without_a_name_is_told_as_it_came() {
        let spelled = [dtype(17), gate(17), shared_experts(17), routing(17), link(17), role(17)];
        assert!(spelled.iter().all(|told| told == "17 (not known here)"), "{spelled:?}");
        assert_eq!(links([2, -1, 4]), "tcp, -1 (not known here), shm");
        assert_eq!([dtype(0), gate(0), shared_experts(0), routing(0), link(0), role(0)], ["unspecified"; 6]);
    }

    #[test]
    fn what_is_shown_can_be_given() {
        for rows in [RowType::F32, RowType::Bf16] {
            let shown = dtype(crate::identity::dtype(rows));
            assert_eq!(rows.to_string(), shown);
            assert_eq!(shown.parse(), Ok(DtypeChoice::Fixed(rows)));
        }
        for side in [GatePlacement::Ffn, GatePlacement::Attention] {
            assert_eq!(gate(v1::GatePlacement::from(side)).parse(), Ok(side));
        }
        for side in [SharedExpertPlacement::Ffn, SharedExpertPlacement::Attention] {
            assert_eq!(shared_experts(v1::SharedExpertPlacement::from(side)).parse(), Ok(side));
        }
        for who in [Routing::Model, Routing::Balanced] {
            assert_eq!(routing(v1::Routing::from(who)).parse(), Ok(who));
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
