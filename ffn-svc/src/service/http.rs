//! Plain HTTP beside gRPC: health and version for probes and people, and an answer for whoever takes this role for the
//! one that talks to clients.
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::json;

use super::Health;
use crate::place::ExpertReport;
use crate::session::sessions::Sessions;

/// `/health` and `/ready`, `/live`, the same under KServe's names, `/version`; `/expert-counts` for `ffn-svc place`; under
/// `/v1/` the sentence that says whom to ask.
pub(super) fn routes(health: Health, wrong_role: String, sessions: Arc<Sessions>) -> Router {
    let refuse = move || {
        let error = json!({"message": wrong_role, "type": "invalid_request_error", "code": "wrong_role"});
        async move { (StatusCode::BAD_REQUEST, Json(json!({"error": error}))) }
    };
    Router::new()
        .route("/health", get(ready))
        .route("/ready", get(ready))
        .route("/live", get(live))
        .route("/v2/health/ready", get(ready))
        .route("/v2/health/live", get(live))
        .with_state(health)
        .route("/version", get(version))
        .route("/expert-counts", get(move || expert_counts(sessions)))
        .route("/v1/{*rest}", axum::routing::any(refuse))
        .fallback(not_found)
}

async fn ready(State(health): State<Health>) -> Response {
    let phase = health.phase();
    answer(phase.is_ready(), &phase)
}

async fn live(State(health): State<Health>) -> Response {
    let phase = health.phase();
    answer(phase.is_live(), &phase)
}

fn answer(good: bool, phase: &super::Phase) -> Response {
    let code = if good { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let (status, reason) = phase.words();
    (code, Json(json!({"status": status, "reason": reason}))).into_response()
}

async fn version() -> Json<serde_json::Value> {
    let (major, minor) = (afd_common::proto::PROTOCOL_MAJOR, afd_common::proto::PROTOCOL_MINOR);
    Json(json!({"version": env!("CARGO_PKG_VERSION"), "protocol": format!("{major}.{minor}")}))
}

/// How often this rank's experts were chosen since its start.
async fn expert_counts(sessions: Arc<Sessions>) -> Json<ExpertReport> {
    Json(ExpertReport::of(sessions.engine()))
}

/// A gRPC client cannot read a JSON body: it is told in its own language.
async fn not_found(request: Request) -> Response {
    let message = format!("ffn-svc serves no {} {}", request.method(), request.uri().path());
    let kind = request.headers().get(header::CONTENT_TYPE);
    if kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc")) {
        return tonic::Status::unimplemented(message).into_http::<axum::body::Body>();
    }
    (StatusCode::NOT_FOUND, Json(json!({"error": {"message": message, "type": "invalid_request_error"}})))
        .into_response()
}
