//! Everything that is served on the one port.
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use http::{StatusCode, header};
use serde_json::json;

use super::error::ApiError;
use super::{Api, forward, grpc, openai};

/// HTTP routes and gRPC services; `extra` are further gRPC services of this process.
///
/// # Errors
/// When the descriptors for reflection cannot be read: a mistake of the build.
pub fn router(
    api: Arc<Api>,
    extra: tonic::service::Routes,
) -> Result<Router, tonic_reflection::server::Error> {
    let http = Router::new()
        .route("/v1/completions", post(openai::completions::handle))
        .route("/v1/chat/completions", post(openai::chat::handle))
        .route("/v1/models", get(openai::models::list))
        .route("/v1/models/{*id}", get(openai::models::retrieve))
        .route("/tokenize", post(openai::tokenize::tokenize))
        .route("/detokenize", post(openai::tokenize::detokenize))
        .route("/health", get(ready))
        .route("/ready", get(ready))
        .route("/live", get(live))
        .route("/v2/health/ready", get(ready))
        .route("/v2/health/live", get(live))
        .route("/version", get(version))
        .method_not_allowed_fallback(method_not_allowed)
        .with_state(Arc::clone(&api))
        .merge(api.metrics.router());
    let limit = api.limits.max_body_bytes;
    let named =
        axum::middleware::map_response(move |answer: Response| async move { name_limit(answer, limit) });
    let forward = axum::middleware::from_fn_with_state(Arc::clone(&api), forward::to_the_least_loaded);
    let grpc = grpc::services(api, extra)?.into_axum_router().reset_fallback().route_layer(named);
    Ok(http.merge(grpc).route_layer(forward).fallback(not_found))
}

async fn ready(State(api): State<Arc<Api>>) -> Response {
    health(&api, |state| state.is_ready())
}

async fn live(State(api): State<Arc<Api>>) -> Response {
    health(&api, |state| state.is_live())
}

fn health(api: &Api, good: fn(&super::Readiness) -> bool) -> Response {
    let state = api.readiness.borrow().clone();
    let code = if good(&state) { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, Json(json!({"status": state.word(), "reason": state.reason()}))).into_response()
}

async fn version() -> Json<serde_json::Value> {
    let (major, minor) = (afd_common::proto::PROTOCOL_MAJOR, afd_common::proto::PROTOCOL_MINOR);
    Json(json!({"version": env!("CARGO_PKG_VERSION"), "protocol": format!("{major}.{minor}")}))
}

/// A gRPC message beyond the limit is refused where it is decoded, in words that do not know the option: here they are
/// ours.
fn name_limit(answer: Response, limit: usize) -> Response {
    match tonic::Status::from_header_map(answer.headers()) {
        Some(status)
            if status.code() == tonic::Code::OutOfRange
                && status.message().contains("message length too large") =>
        {
            tonic::Status::from(ApiError::BodyTooLarge { limit }).into_http()
        }
        _ => answer,
    }
}

async fn method_not_allowed(request: Request) -> Response {
    unknown(&request, true)
}

async fn not_found(request: Request) -> Response {
    unknown(&request, false)
}

/// A gRPC client cannot read a JSON body: it is told in its own language.
fn unknown(request: &Request, path_exists: bool) -> Response {
    let (method, path) = (request.method().to_string(), request.uri().path().to_owned());
    let of_ffn = ["/afd.v1.FfnControlService/", "/afd.v1.LayerStageService/"];
    let error = match of_ffn.iter().any(|service| path.starts_with(service)) {
        true => ApiError::WrongRole { path },
        false => ApiError::UnknownRoute { method, path, path_exists },
    };
    let is_grpc = request
        .headers()
        .get(header::CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
    if is_grpc { tonic::Status::from(error).into_http::<axum::body::Body>() } else { error.into_response() }
}
