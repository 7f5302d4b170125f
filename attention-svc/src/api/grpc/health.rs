//! `grpc.health.v1`. The empty name and every service of this process answer whether it is ready; `live` and `ready`
//! are names of their own, so that a probe can ask for either.
use std::pin::Pin;

use futures::{Stream, StreamExt};
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use super::super::Readiness;

/// The health service, following `readiness`.
pub(super) fn service(readiness: watch::Receiver<Readiness>) -> HealthServer<impl Health> {
    HealthServer::new(Answers { readiness })
}

struct Answers {
    readiness: watch::Receiver<Readiness>,
}

/// Which question a service name asks.
fn question(service: &str) -> Option<fn(&Readiness) -> bool> {
    match service {
        "live" => Some(Readiness::is_live),
        "" | "ready" | "afd.v1.InferenceService" => Some(Readiness::is_ready),
        _ => None,
    }
}

fn answer(good: bool) -> HealthCheckResponse {
    let status = if good { ServingStatus::Serving } else { ServingStatus::NotServing };
    HealthCheckResponse { status: status.into() }
}

#[tonic::async_trait]
impl Health for Answers {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let service = request.into_inner().service;
        match question(&service) {
            Some(good) => Ok(Response::new(answer(good(&self.readiness.borrow())))),
            None => Err(Status::not_found(format!("there is no service `{service}` here"))),
        }
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let states = WatchStream::new(self.readiness.clone());
        let answers: Self::WatchStream = match question(&request.into_inner().service) {
            Some(good) => {
                let mut last = None;
                Box::pin(states.filter_map(move |state| {
                    let now = good(&state);
                    let changed = last.replace(now) != Some(now);
                    futures::future::ready(changed.then(|| Ok(answer(now))))
                }))
            }
            // A service that may come later is watched, as the protocol says.
            None => {
                let unknown = HealthCheckResponse { status: ServingStatus::ServiceUnknown.into() };
                Box::pin(futures::stream::once(async move { Ok(unknown) }).chain(futures::stream::pending()))
            }
        };
        Ok(Response::new(answers))
    }
}
