//! `--dtype`: the element type that both roles compute in and send. It must come out alike on both sides, so both ask
//! here.
use std::fmt;
use std::str::FromStr;

use tch::Kind;

use super::model::CheckpointDtype;
use crate::frame::RowType;

/// What the user asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DtypeChoice {
    /// As the checkpoint is stored; float32 for what is stored in float16, which no link carries.
    #[default]
    Auto,
    /// Always this one.
    Fixed(RowType),
}

impl DtypeChoice {
    /// What that means for a checkpoint.
    pub fn resolve(self, checkpoint: CheckpointDtype) -> RowType {
        match (self, checkpoint) {
            (Self::Fixed(rows), _) => rows,
            (Self::Auto, CheckpointDtype::Bf16) => RowType::Bf16,
            (Self::Auto, CheckpointDtype::F32 | CheckpointDtype::F16) => RowType::F32,
        }
    }
}

impl RowType {
    /// libtorch's name of it.
    pub fn kind(self) -> Kind {
        match self {
            Self::F32 => Kind::Float,
            Self::Bf16 => Kind::BFloat16,
        }
    }
}

impl FromStr for DtypeChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "float32" | "f32" => Ok(Self::Fixed(RowType::F32)),
            "bfloat16" | "bf16" => Ok(Self::Fixed(RowType::Bf16)),
            other => {
                Err(format!("{other:?} is no dtype that is served; known are auto, float32 and bfloat16"))
            }
        }
    }
}

impl fmt::Display for DtypeChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Fixed(rows) => rows.fmt(f),
        }
    }
}

impl TryFrom<String> for DtypeChoice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<DtypeChoice> for String {
    fn from(choice: DtypeChoice) -> Self {
        choice.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_auto_follows_the_checkpoint() {
        for name in ["auto", "float32", "bfloat16"] {
            assert_eq!(name.parse::<DtypeChoice>().unwrap().to_string(), name);
        }
        assert!("float16".parse::<DtypeChoice>().unwrap_err().contains("float16"));
        assert_eq!(DtypeChoice::Auto.resolve(CheckpointDtype::Bf16), RowType::Bf16);
        assert_eq!(DtypeChoice::Auto.resolve(CheckpointDtype::F16), RowType::F32);
        assert_eq!(DtypeChoice::Fixed(RowType::F32).resolve(CheckpointDtype::Bf16), RowType::F32);
    }
}
