//! Which ranks there are and how they split a step.
use std::fmt;

use serde::{Deserialize, Serialize};

/// A way to lay a model over devices. One rank is one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Layout {
    /// Attention and FFN on different ranks.
    Afd {
        /// `n_A`.
        attention: u32,
        /// `n_F`, each owning a shard of every layer's experts.
        ffn: u32,
        /// `m`.
        stages: u32,
    },
    /// Attention data-parallel and experts spread over the same ranks: what others call DP + EP.
    Colocated {
        /// `R`.
        ranks: u32,
        /// `m`; 2 overlaps one half's exchange with the other's work.
        stages: u32,
    },
}

impl Layout {
    /// Devices it takes.
    pub fn num_devices(self) -> u32 {
        match self {
            Self::Afd { attention, ffn, .. } => attention + ffn,
            Self::Colocated { ranks, .. } => ranks,
        }
    }

    /// Ranks that hold sequences.
    pub fn attention_ranks(self) -> u32 {
        match self {
            Self::Afd { attention, .. } => attention,
            Self::Colocated { ranks, .. } => ranks,
        }
    }

    /// Ranks that hold experts.
    pub fn ffn_ranks(self) -> u32 {
        match self {
            Self::Afd { ffn, .. } => ffn,
            Self::Colocated { ranks, .. } => ranks,
        }
    }

    /// `m`.
    pub fn stages(self) -> u32 {
        match self {
            Self::Afd { stages, .. } | Self::Colocated { stages, .. } => stages,
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Afd { attention, ffn, stages } => write!(f, "{attention}A + {ffn}F, {stages} st."),
            Self::Colocated { ranks, stages } => write!(f, "EP{ranks}, {stages} st."),
        }
    }
}
