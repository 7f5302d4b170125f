//! Everything that is served on the one port.
use std::sync::Arc;

use afd_common::net::{health, is_grpc, messages};
use axum::Router;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};

use super::error::ApiError;
use super::{Api, forward, grpc, openai};

/// HTTP routes and gRPC services; `extra` are further gRPC services of this process, and `more` further routes.
///
/// # Errors
/// When the descriptors for reflection cannot be read: a mistake of the build.
pub fn router(
    api: Arc<Api>,
    extra: tonic::service::Routes,
    more: Router,
) -> Result<Router, tonic_reflection::server::Error> {
    let readiness = api.readiness.clone();
    let http = Router::new()
        .route("/v1/completions", post(openai::completions::handle))
        .route("/v1/chat/completions", post(openai::chat::handle))
        .route("/v1/models", get(openai::models::list))
        .route("/v1/models/{*id}", get(openai::models::retrieve))
        .route("/tokenize", post(openai::tokenize::tokenize))
        .route("/detokenize", post(openai::tokenize::detokenize))
        .with_state(Arc::clone(&api))
        .merge(health::routes(move || readiness.borrow().standing()))
        .merge(api.metrics.router())
        .merge(more)
        // After all of them: it is theirs only.
        .method_not_allowed_fallback(method_not_allowed);
    let forward = axum::middleware::from_fn_with_state(Arc::clone(&api), forward::to_the_least_loaded);
    let grpc = grpc::services(api, extra)?.into_axum_router().reset_fallback();
    let grpc = messages::guard(grpc, Some("--max-body"));
    Ok(http.merge(grpc).route_layer(forward).fallback(not_found))
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
    if is_grpc(request) {
        tonic::Status::from(error).into_http::<axum::body::Body>()
    } else {
        error.into_response()
    }
}
