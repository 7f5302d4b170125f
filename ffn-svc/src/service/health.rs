//! Whether this rank serves, as health checks ask for it: `grpc.health.v1` under the name of each service, and `live`
//! and `ready` as names of their own.
use std::sync::{Arc, Mutex};

use tonic_health::ServingStatus;
use tonic_health::pb::health_server::{Health as HealthService, HealthServer};
use tonic_health::server::{HealthReporter, HealthService as Reported};

/// Names that follow readiness; the empty one stands for the whole process.
const READY_NAMES: [&str; 4] = ["", "ready", "afd.v1.FfnControlService", "afd.v1.LayerStageService"];

/// Where the process is in its life.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Weights are not there yet.
    #[default]
    Loading,
    /// Sessions are welcome.
    Ready,
    /// What is queued is finished, nobody new is let in.
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

    /// One word, and the reason when there is one.
    pub fn words(&self) -> (&'static str, Option<&str>) {
        match self {
            Self::Loading => ("loading", None),
            Self::Ready => ("ready", None),
            Self::Draining => ("draining", None),
            Self::Dead(why) => ("dead", Some(why)),
        }
    }
}

/// The one place that knows the phase. Clones share it.
#[derive(Clone)]
pub struct Health {
    phase: Arc<Mutex<Phase>>,
    reporter: HealthReporter,
}

impl Health {
    /// Loading.
    pub async fn new() -> Self {
        let health = Self { phase: Arc::default(), reporter: HealthReporter::new() };
        health.publish(&Phase::Loading).await;
        health
    }

    /// Moves on. A dead process stays dead.
    pub async fn set(&self, phase: Phase) {
        {
            let mut now = self.lock();
            if !now.is_live() {
                return;
            }
            *now = phase.clone();
        }
        self.publish(&phase).await;
    }

    /// Where the process is.
    pub fn phase(&self) -> Phase {
        self.lock().clone()
    }

    /// `grpc.health.v1`.
    pub fn service(&self) -> HealthServer<impl HealthService + use<>> {
        HealthServer::new(Reported::from_health_reporter(self.reporter.clone()))
    }

    async fn publish(&self, phase: &Phase) {
        let status = |good| if good { ServingStatus::Serving } else { ServingStatus::NotServing };
        for name in READY_NAMES {
            self.reporter.set_service_status(name, status(phase.is_ready())).await;
        }
        self.reporter.set_service_status("live", status(phase.is_live())).await;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
