//! Whether requests can be answered, as health checks tell it. Live and ready are kept apart: a process that lost its
//! FFN is alive and not ready.
use std::fmt;
use std::sync::Arc;

use afd_common::net::health::Standing;

/// What is waited for, found out when somebody asks: what was true when the wait began may be so no longer.
#[derive(Clone)]
pub struct Reason(Arc<dyn Fn() -> String + Send + Sync>);

impl Reason {
    /// One that is looked up.
    pub fn new(look: impl Fn() -> String + Send + Sync + 'static) -> Self {
        Self(Arc::new(look))
    }

    /// As it is now.
    pub fn now(&self) -> String {
        (self.0)()
    }
}

impl From<&str> for Reason {
    /// One that does not change.
    fn from(text: &str) -> Self {
        let text = text.to_owned();
        Self::new(move || text.clone())
    }
}

impl PartialEq for Reason {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Reason {}

impl fmt::Debug for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.now())
    }
}

/// State of the service; the process moves it on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Not yet, and for what it waits.
    Waiting(Reason),
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

    /// The same for plain HTTP.
    pub fn standing(&self) -> Standing {
        let (is_ready, is_live) = (self.is_ready(), self.is_live());
        Standing { is_ready, is_live, word: self.word(), reason: self.reason() }
    }

    /// Why it is not ready: what it waits for, or died of.
    pub fn reason(&self) -> Option<String> {
        match self {
            Self::Waiting(why) => Some(why.now()),
            Self::Dead(why) => Some(why.clone()),
            Self::Draining => {
                Some("it is ending: running requests finish, new ones are refused (--drain-timeout)".into())
            }
            Self::Ready => None,
        }
    }
}
