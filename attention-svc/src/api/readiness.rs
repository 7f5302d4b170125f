//! Whether requests can be answered, as health checks tell it. Live and ready are kept apart: a process that lost its
//! FFN is alive and not ready.

/// State of the service; the process moves it on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Not yet, and for what it waits.
    Waiting(String),
    /// Every FFN shard has a warm rank.
    Ready,
    /// Requests that run are finished, new ones refused.
    Draining,
    /// The engine is gone; the process is about to end.
    Dead(String),
}

impl Readiness {
    /// Whether new requests can be answered.
    pub fn is_ready(&self) -> bool {
        *self == Self::Ready
    }

    /// Whether the process is worth keeping.
    pub fn is_live(&self) -> bool {
        !matches!(self, Self::Dead(_))
    }

    /// One word for health endpoints.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Waiting(_) => "waiting",
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Dead(_) => "dead",
        }
    }

    /// What it waits for or died of.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Waiting(why) | Self::Dead(why) => Some(why),
            _ => None,
        }
    }
}
