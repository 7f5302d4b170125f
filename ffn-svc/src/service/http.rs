//! Plain HTTP beside gRPC: health and version for probes and people, and an answer for whoever takes this role for the
//! one that talks to clients.
use std::sync::Arc;

use afd_common::net::{health, is_grpc};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::json;

use super::Health;
use crate::place::ExpertReport;
use crate::session::sessions::Sessions;

/// Health and version; `/expert-counts` for `ffn-svc place`; under `/v1/` the sentence that says whom to ask.
pub(super) fn routes(state: Health, wrong_role: String, sessions: Arc<Sessions>) -> Router {
    let refuse = move || {
        let error = json!({"message": wrong_role, "type": "invalid_request_error", "code": "wrong_role"});
        async move { (StatusCode::BAD_REQUEST, Json(json!({"error": error}))) }
    };
    Router::new()
        .merge(health::routes(move || state.phase().standing()))
        .route("/expert-counts", get(move || expert_counts(sessions)))
        .route("/v1/{*rest}", axum::routing::any(refuse))
        .fallback(not_found)
}

/// How often this rank's experts were chosen since its start.
async fn expert_counts(sessions: Arc<Sessions>) -> Json<ExpertReport> {
    Json(ExpertReport::of(sessions.engine()))
}

/// A gRPC client cannot read a JSON body: it is told in its own language.
async fn not_found(request: Request) -> Response {
    let message = format!("ffn-svc serves no {} {}", request.method(), request.uri().path());
    if is_grpc(&request) {
        return tonic::Status::unimplemented(message).into_http::<axum::body::Body>();
    }
    (StatusCode::NOT_FOUND, Json(json!({"error": {"message": message, "type": "invalid_request_error"}})))
        .into_response()
}
