//! Plain HTTP beside gRPC: health and version for probes and people, and an answer for whoever takes this role for the
//! one that talks to clients.
use std::sync::Arc;

use afd_common::net::{health, is_grpc, json_error};
use afd_common::spelling::shown;
use afd_common::telemetry::Metrics;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::get;
use axum::{Json, Router};

use super::Health;
use crate::place::ExpertReport;
use crate::session::sessions::Sessions;

/// Health, version and metrics; `/expert-counts` for `ffn-svc place`; under `/v1/` the sentence that says whom to ask.
pub(super) fn routes(
    state: Health,
    wrong_role: String,
    sessions: Arc<Sessions>,
    metrics: &Metrics,
) -> Router {
    let refuse = move || {
        let refusal = json_error(StatusCode::BAD_REQUEST, "wrong_role", &wrong_role);
        async move { refusal }
    };
    Router::new()
        .merge(health::routes(move || state.phase().standing()))
        .route("/expert-counts", get(move || expert_counts(sessions)))
        .route("/v1/{*rest}", axum::routing::any(refuse))
        .merge(metrics.router())
        .method_not_allowed_fallback(method_not_allowed)
        .fallback(not_found)
}

/// How often this rank's experts were chosen since its start.
async fn expert_counts(sessions: Arc<Sessions>) -> Json<ExpertReport> {
    Json(ExpertReport::of(sessions.engine()))
}

async fn not_found(request: Request) -> Response {
    unknown(&request, StatusCode::NOT_FOUND, "unknown_url")
}

async fn method_not_allowed(request: Request) -> Response {
    unknown(&request, StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed")
}

/// A gRPC client cannot read a JSON body: it is told in its own language.
fn unknown(request: &Request, status: StatusCode, code: &str) -> Response {
    let (method, path) = (shown(request.method().as_str()), shown(request.uri().path()));
    let message = format!("ffn-svc serves no {method} {path}");
    if is_grpc(request) {
        return tonic::Status::unimplemented(message).into_http::<axum::body::Body>();
    }
    json_error(status, code, &message)
}
