//! Health, following whatever state a role keeps: plain HTTP for probes and people, and `grpc.health.v1`. A name that is not
//! known there is an error to `Check`, and to `Watch` a state of its own that may change: as the protocol says, and as load
//! balancers rely on.
use std::pin::Pin;

use axum::routing::get;
use axum::{Json, Router};
use futures::{Stream, StreamExt};
use http::StatusCode;
use serde_json::json;
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use crate::proto::{PROTOCOL_MAJOR, PROTOCOL_MINOR};

/// How a process stands, for plain HTTP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Work may be sent here.
    pub is_ready: bool,
    /// The process is worth keeping.
    pub is_live: bool,
    /// One word.
    pub word: &'static str,
    /// What it waits for or died of.
    pub reason: Option<String>,
}

/// `/ready` and `/health`, `/live`, the same under KServe's names, and `/version`. `look` is asked for every answer.
pub fn routes(look: impl Fn() -> Standing + Clone + Send + Sync + 'static) -> Router {
    let answer = |is_good: fn(&Standing) -> bool| {
        let look = look.clone();
        get(move || async move {
            let standing = look();
            let good = is_good(&standing);
            let code = if good { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
            (code, Json(json!({"status": standing.word, "reason": standing.reason})))
        })
    };
    let (ready, live) = (answer(|standing| standing.is_ready), answer(|standing| standing.is_live));
    let version = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "protocol": format!("{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"),
    });
    Router::new()
        .route("/health", ready.clone())
        .route("/ready", ready.clone())
        .route("/v2/health/ready", ready)
        .route("/live", live.clone())
        .route("/v2/health/live", live)
        .route("/version", get(move || async move { Json(version) }))
}

/// Whether the service of a name serves in a state; `None` where there is no such name.
pub type Question<S> = fn(&S, &str) -> Option<bool>;

/// `grpc.health.v1`: `question` is asked about the latest `state`.
pub fn service<S>(state: watch::Receiver<S>, question: Question<S>) -> HealthServer<impl Health + use<S>>
where
    S: Clone + Send + Sync + 'static,
{
    HealthServer::new(Answers { state, question })
}

struct Answers<S> {
    state: watch::Receiver<S>,
    question: Question<S>,
}

fn answer(serves: Option<bool>) -> HealthCheckResponse {
    let status = match serves {
        Some(true) => ServingStatus::Serving,
        Some(false) => ServingStatus::NotServing,
        None => ServingStatus::ServiceUnknown,
    };
    HealthCheckResponse { status: status.into() }
}

#[tonic::async_trait]
impl<S: Clone + Send + Sync + 'static> Health for Answers<S> {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let service = request.into_inner().service;
        match (self.question)(&self.state.borrow(), &service) {
            None => Err(Status::not_found(format!("there is no service `{service}` here"))),
            serves => Ok(Response::new(answer(serves))),
        }
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let (service, question) = (request.into_inner().service, self.question);
        let mut last = None;
        let answers = WatchStream::new(self.state.clone()).filter_map(move |state| {
            let now = answer(question(&state, &service));
            let changed = last.replace(now.status) != Some(now.status);
            futures::future::ready(changed.then_some(Ok(now)))
        });
        Ok(Response::new(Box::pin(answers)))
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    fn number(state: &u32, name: &str) -> Option<bool> {
        (name == "even").then_some(state.is_multiple_of(2))
    }

    fn about(name: &str) -> Request<HealthCheckRequest> {
        Request::new(HealthCheckRequest { service: name.to_owned() })
    }

    #[tokio::test]
    async fn a_watch_tells_changes_only() {
        let (state, receiver) = watch::channel(0);
        let answers = Answers { state: receiver, question: number };
        let mut watched = answers.watch(about("even")).await.unwrap().into_inner();
        let mut next = async || watched.next().await.unwrap().unwrap().status();
        assert_eq!(next().await, ServingStatus::Serving);
        state.send(2).unwrap();
        state.send(3).unwrap();
        assert_eq!(next().await, ServingStatus::NotServing);
        drop(state);
        assert!(watched.next().await.is_none());
    }

    #[tokio::test]
    async fn an_unknown_name_is_an_error_to_ask_for_and_a_state_to_watch() {
        let (_state, receiver) = watch::channel(0);
        let answers = Answers { state: receiver, question: number };
        assert_eq!(answers.check(about("odd")).await.unwrap_err().code(), Code::NotFound);
        assert_eq!(answers.check(about("even")).await.unwrap().into_inner().status(), ServingStatus::Serving);
        let mut watched = answers.watch(about("odd")).await.unwrap().into_inner();
        assert_eq!(watched.next().await.unwrap().unwrap().status(), ServingStatus::ServiceUnknown);
    }
}
