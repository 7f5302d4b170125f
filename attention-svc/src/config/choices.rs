//! Options that are one of a few words.
use std::fmt;
use std::str::FromStr;

use afd_common::link::LinkKind;
use afd_common::net::is_address;
use serde::{Deserialize, Serialize};

/// Where the FFN is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "OneOrMany", into = "OneOrMany")]
pub enum FfnTarget {
    /// In this process.
    Local,
    /// Behind these names, `host:port` each, and where ranks announce themselves; none: only there.
    Remote(Vec<String>),
}

/// In a file the addresses may be a list.
#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "expected addresses, one text or a list of them, or announced or local")]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl FromStr for FfnTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "local" {
            return Ok(Self::Local);
        }
        if text == "announced" {
            return Ok(Self::Remote(Vec::new()));
        }
        let names: Vec<String> = text.split(',').map(|name| name.trim().to_owned()).collect();
        if let Some(word) = names.iter().find(|name| ["local", "announced"].contains(&name.as_str())) {
            return Err(format!("{word:?} is given among other names; it stands alone"));
        }
        if let Some(name) = names.iter().find(|name| !is_address(name)) {
            return Err(format!("{name:?} is no address; expected host:port, announced or local"));
        }
        match names.iter().enumerate().find(|(at, name)| names[..*at].contains(name)) {
            Some((_, name)) => Err(format!("{name:?} is given twice")),
            None => Ok(Self::Remote(names)),
        }
    }
}

impl TryFrom<OneOrMany> for FfnTarget {
    type Error = String;

    fn try_from(value: OneOrMany) -> Result<Self, String> {
        match value {
            OneOrMany::One(text) => text.parse(),
            OneOrMany::Many(names) if names.is_empty() => Ok(Self::Remote(names)),
            OneOrMany::Many(names) => names.join(",").parse(),
        }
    }
}

impl From<FfnTarget> for OneOrMany {
    fn from(target: FfnTarget) -> Self {
        match target {
            FfnTarget::Local => Self::One("local".into()),
            FfnTarget::Remote(names) => Self::Many(names),
        }
    }
}

/// How many stages a step has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "NumberOrWord", into = "NumberOrWord")]
pub enum StageChoice {
    /// 1 or 2, whichever turns out faster.
    Auto,
    /// As many as a step can be split into, up to this.
    Fixed(usize),
}

/// In a file a number needs no quotes.
#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "expected 1 to 4, or auto")]
enum NumberOrWord {
    Number(usize),
    Word(String),
}

impl FromStr for StageChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse()) {
            ("auto", _) => Ok(Self::Auto),
            (_, Ok(count @ 1..=4)) => Ok(Self::Fixed(count)),
            _ => Err(format!("{text:?} is no number of stages; expected 1 to 4, or auto")),
        }
    }
}

impl TryFrom<NumberOrWord> for StageChoice {
    type Error = String;

    fn try_from(value: NumberOrWord) -> Result<Self, String> {
        match value {
            NumberOrWord::Number(count) => count.to_string().parse(),
            NumberOrWord::Word(word) => word.parse(),
        }
    }
}

impl From<StageChoice> for NumberOrWord {
    fn from(choice: StageChoice) -> Self {
        match choice {
            StageChoice::Auto => Self::Word("auto".into()),
            StageChoice::Fixed(count) => Self::Number(count),
        }
    }
}

/// How rows travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkChoice {
    /// The best kind that both ends offer.
    #[default]
    Auto,
    /// Device memory of GPUs of one host, driven by a stream.
    CudaIpc,
    /// NCCL between GPUs, of one host or several, driven by a stream.
    Nccl,
    /// A ring in shared memory; the FFN must be on this host.
    Shm,
    /// Frames on a TCP connection.
    Tcp,
    /// Frames in a gRPC stream.
    Inline,
}

impl LinkChoice {
    /// Kinds to offer, the best first; those that a stream drives only where attention has a GPU.
    pub fn kinds(self, on_gpu: bool) -> Vec<LinkKind> {
        let kinds: &[LinkKind] = match self {
            Self::Auto if on_gpu => {
                &[LinkKind::CudaIpc, LinkKind::Nccl, LinkKind::Shm, LinkKind::Tcp, LinkKind::Inline]
            }
            Self::Auto => &[LinkKind::Shm, LinkKind::Tcp, LinkKind::Inline],
            Self::CudaIpc => &[LinkKind::CudaIpc],
            Self::Nccl => &[LinkKind::Nccl],
            Self::Shm => &[LinkKind::Shm],
            Self::Tcp => &[LinkKind::Tcp],
            Self::Inline => &[LinkKind::Inline],
        };
        kinds.to_vec()
    }

    /// As it is written.
    fn word(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::CudaIpc => "cuda-ipc",
            Self::Nccl => "nccl",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Inline => "inline",
        }
    }

    /// Whether it needs attention to be on a GPU.
    pub fn needs_gpu(self) -> bool {
        matches!(self, Self::CudaIpc | Self::Nccl)
    }
}

impl fmt::Display for LinkChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl FromStr for LinkChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::Auto, Self::CudaIpc, Self::Nccl, Self::Shm, Self::Tcp, Self::Inline];
        all.into_iter().find(|choice| choice.word() == text).ok_or_else(|| {
            format!("{text:?} is no kind of link; known are auto, cuda-ipc, nccl, shm, tcp and inline")
        })
    }
}

/// What of a GPU's steps is captured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GraphMode {
    /// Nothing: every operation is launched by itself.
    None,
    /// Decode steps.
    #[default]
    Decode,
}

impl FromStr for GraphMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "decode" => Ok(Self::Decode),
            other => Err(format!("{other:?} is no graph mode; known are none and decode")),
        }
    }
}
