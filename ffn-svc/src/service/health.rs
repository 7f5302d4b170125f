//! Whether this rank serves, as health checks ask for it: `grpc.health.v1` under the name of each service, and `live`
//! and `ready` as names of their own.
use afd_common::net::health::{self, Standing};
use tokio::sync::watch;
use tonic_health::pb::health_server::{Health as HealthService, HealthServer};

/// Where the process is in its life.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Weights are not there yet.
    #[default]
    Loading,
    /// Sessions are welcome.
    Ready,
    /// A caller of `Drain` said so: who has joined may go on, nobody new is let in, and the process stays.
    Closed,
    /// It is ending: what is queued is finished, nobody new is let in.
    Draining,
    /// The engine thread is gone: these are its words.
    Dead(String),
}

impl Phase {
    /// Whether work may be sent here.
    pub fn is_ready(&self) -> bool {
        *self == Self::Ready
    }

    /// Whether the process is worth keeping.
    pub fn is_live(&self) -> bool {
        !matches!(self, Self::Dead(_))
    }

    /// The same for plain HTTP.
    pub fn standing(&self) -> Standing {
        let (word, reason) = match self {
            Self::Loading => ("loading", Some("weights are being loaded".into())),
            Self::Ready => ("ready", None),
            Self::Closed => {
                let why = "it was told to take nothing new (Drain), and lets nobody new in until it is started anew";
                ("draining", Some(why.into()))
            }
            Self::Draining => {
                let why = "it is ending: what is queued is finished, nobody new is let in (--drain-timeout)";
                ("draining", Some(why.into()))
            }
            Self::Dead(why) => ("dead", Some(why.clone())),
        };
        Standing { is_ready: self.is_ready(), is_live: self.is_live(), word, reason }
    }
}

/// The one place that knows the phase. Clones share it.
#[derive(Clone, Default)]
pub struct Health {
    phase: watch::Sender<Phase>,
}

impl Health {
    /// Moves on. A dead process stays dead.
    pub fn set(&self, phase: Phase) {
        self.phase.send_if_modified(|now| now.is_live() && std::mem::replace(now, phase.clone()) != phase);
    }

    /// Where the process is.
    pub fn phase(&self) -> Phase {
        self.phase.borrow().clone()
    }

    /// `grpc.health.v1`.
    pub fn service(&self) -> HealthServer<impl HealthService + use<>> {
        health::service(self.phase.subscribe(), |phase, name| match name {
            "live" => Some(phase.is_live()),
            // The empty one stands for the whole process.
            "" | "ready" | "afd.v1.FfnControlService" | "afd.v1.LayerStageService" => Some(phase.is_ready()),
            _ => None,
        })
    }
}
