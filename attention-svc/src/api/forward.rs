//! Any attention rank is an address for all: a generation request goes to the least loaded rank of the deployment, whole and
//! as it came, and its answer comes back as it is made, events and trailers included. A client that goes away is gone
//! for the rank that serves it too. What was forwarded once is not forwarded again.
use std::sync::Arc;

use afd_common::net::{BodyTimeout, Watched};
use afd_common::proto::v1;
use afd_common::proto::v1::inference_service_client::InferenceServiceClient;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use tonic::transport::Channel;
use tower::ServiceExt;

use super::Api;
use super::error::ApiError;
use crate::membership::peers::Chosen;

/// Says, on a forwarded request, which rank took it in, and on its answer, which one served it.
const FORWARDED_NAME: &str = "x-afd-forwarded";
const FORWARDED: HeaderName = HeaderName::from_static(FORWARDED_NAME);
/// Of the connection and not of the request.
const HOP_BY_HOP: [HeaderName; 6] = [
    header::CONNECTION,
    header::CONTENT_LENGTH,
    header::HOST,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
];

/// Whether a path generates, which is what may be done elsewhere.
fn generates(path: &str) -> bool {
    matches!(path, "/v1/completions" | "/v1/chat/completions" | "/afd.v1.InferenceService/Generate")
}

/// Middleware of all routes.
pub(super) async fn to_the_least_loaded(
    State(api): State<Arc<Api>>,
    request: Request,
    next: Next,
) -> Response {
    if !generates(request.uri().path()) {
        return next.run(request).await;
    }
    let may_leave = !request.headers().contains_key(&FORWARDED);
    let is_ready = api.readiness.borrow().is_ready();
    match may_leave.then(|| api.peers.choose(is_ready)).flatten() {
        Some(chosen) => forward(&api, chosen, request, next).await,
        None => serve(&api, request, next).await,
    }
}

/// Serves a request here, and counts it until its answer has been read.
async fn serve(api: &Api, request: Request, next: Next) -> Response {
    let serving = api.peers.serve();
    next.run(request).await.map(|body| Body::new(Watched::new(body, serving)))
}

async fn forward(api: &Api, chosen: Chosen, request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    let body = match whole(body, api.limits.max_body_bytes).await {
        Ok(body) => body,
        Err(error) if is_grpc(&head.headers) => return tonic::Status::from(error).into_http(),
        Err(error) => return error.into_response(),
    };
    let Chosen { address, rank, channel, forwarded } = chosen;
    match send(api, channel, &head, body.clone()).await {
        Ok(mut answer) => {
            HOP_BY_HOP.iter().for_each(|name| drop(answer.headers_mut().remove(name)));
            answer.headers_mut().insert(FORWARDED, HeaderValue::from(rank));
            answer.map(|body| Body::new(Watched::new(Body::new(body), forwarded)))
        }
        // Nothing of an answer has come: the request can still be served here.
        Err(why) => {
            api.peers.handle_failure(address, &why);
            serve(api, Request::from_parts(head, Body::from(body)), next).await
        }
    }
}

async fn send(
    api: &Api,
    channel: Channel,
    head: &http::request::Parts,
    body: Bytes,
) -> Result<http::Response<tonic::body::Body>, String> {
    let mut request = http::Request::new(tonic::body::Body::new(Full::new(body)));
    *request.method_mut() = head.method.clone();
    *request.uri_mut() = head.uri.path_and_query().map_or_else(Default::default, |path| path.clone().into());
    *request.headers_mut() = head.headers.clone();
    HOP_BY_HOP.iter().for_each(|name| drop(request.headers_mut().remove(name)));
    request.headers_mut().insert(FORWARDED, HeaderValue::from(api.peers.identity().rank));
    let answer = channel.oneshot(request).await.map_err(|error| error.to_string())?;
    match answer.status() {
        // It is about to stop, or has lost its FFN since it was asked.
        StatusCode::SERVICE_UNAVAILABLE => Err("it answered with 503".into()),
        _ => Ok(answer),
    }
}

/// The body, which may have to be sent twice.
async fn whole(body: Body, limit: usize) -> Result<Bytes, ApiError> {
    match Limited::new(body, limit).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(ApiError::BodyTooLarge { limit }),
        Err(error) => Err(match BodyTimeout::find(error.as_ref()) {
            Some(timeout) => ApiError::BodyTimeout(timeout.to_string()),
            None => ApiError::Malformed(format!("the body broke off: {error}")),
        }),
    }
}

fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

/// Ends a request that may have been forwarded: asks every peer, until one knew it.
pub(super) async fn abort_elsewhere(api: &Api, request: tonic::Request<v1::AbortRequest>) -> bool {
    let (mut metadata, _, request) = request.into_parts();
    if metadata.contains_key(FORWARDED_NAME) {
        return false;
    }
    metadata.insert(FORWARDED_NAME, api.peers.identity().rank.into());
    for channel in api.peers.channels() {
        let mut asked = tonic::Request::new(request.clone());
        *asked.metadata_mut() = metadata.clone();
        let answer = InferenceServiceClient::new(channel).abort(asked).await;
        if answer.is_ok_and(|answer| answer.into_inner().aborted) {
            return true;
        }
    }
    false
}
