//! Any attention rank is an address for all: a generation request goes to the least loaded rank of the deployment, whole and
//! as it came, and its answer comes back as it is made, events and trailers included. A client that goes away is gone
//! for the rank that serves it too. What was forwarded once is not forwarded again.
//!
//! When the rank that serves a request is lost (its connection breaks, or it says nothing for `--peer-timeout`), a request
//! without an answer is served here, from its beginning. An answer that has begun cannot be made again: its client has
//! read a part of it, and another rank need not choose the same tokens. It ends with an error that names that rank
//! ([`relay`]).
use std::sync::Arc;
use std::time::Instant;

use afd_common::net::client;
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

mod outcome;
mod pieces;
mod relay;

use super::Api;
use super::error::ApiError;
use crate::membership::peers::{Chosen, PATIENCE};
use outcome::Outcome;
use relay::{Broken, Relay, cut, unavailable};

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

/// When a request came that was to be served elsewhere first: its deadline runs from there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrived(Instant);

impl Arrived {
    /// When a request with these extensions came.
    pub(super) fn of(extensions: &http::Extensions) -> Instant {
        extensions.get().map_or_else(Instant::now, |Self(arrived)| *arrived)
    }
}

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

async fn forward(api: &Arc<Api>, chosen: Chosen, request: Request, next: Next) -> Response {
    let arrived = Arrived(Instant::now());
    let (mut head, body) = request.into_parts();
    let body = match whole(body, api.limits.max_body_bytes).await {
        Ok(body) => body,
        Err(error) => return refusal(error, &head.headers),
    };
    let peer = chosen.peer;
    let mut outcome = Outcome::of(api);
    match answer(api, chosen, &head, body.clone()).await {
        Ok((head, relay)) => Response::from_parts(head, relay.into_body(outcome)),
        Err(Broken::Cut) => {
            let error = cut(&mut outcome);
            api.counts.failed(error.code());
            refusal(error, &head.headers)
        }
        Err(Broken::Lost(why)) => {
            api.peers.handle_failure(peer, "a request that was forwarded is served here", &why);
            outcome.count("redone");
            head.extensions.insert(arrived);
            serve(api, Request::from_parts(head, Body::from(body)), next).await
        }
    }
}

/// What a peer answers, once something has come that can be passed on.
///
/// # Errors
/// Why nothing has: the peer is lost, and the request can be served here; or this rank has no more time for it.
async fn answer(
    api: &Arc<Api>,
    chosen: Chosen,
    head: &http::request::Parts,
    body: Bytes,
) -> Result<(http::response::Parts, Relay), Broken> {
    let Chosen { peer, channel, lost, forwarded } = chosen;
    let sent = tokio::select! {
        sent = send(api, channel, head, body) => sent?,
        () = lost.cancelled() => return Err(api.peers.silence().into()),
        () = forwarded.cut() => return Err(Broken::Cut),
    };
    let (mut head, body) = sent.into_parts();
    HOP_BY_HOP.iter().for_each(|name| drop(head.headers.remove(name)));
    head.headers.insert(FORWARDED, HeaderValue::from(peer.rank));
    let relay = Relay::new(Arc::clone(api), peer, (&head.headers, body), lost, forwarded).begun().await?;
    Ok((head, relay))
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
    let answer = channel.oneshot(request).await;
    let answer = answer.map_err(|error| client::words(&tonic::Status::from_error(error.into())))?;
    // It is about to stop, or has lost its FFN since it was asked.
    match (answer.status(), unavailable(answer.headers())) {
        (StatusCode::SERVICE_UNAVAILABLE, _) => Err("it answered with 503".into()),
        (_, Some(why)) => Err(why),
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

/// An error as whoever sent these headers reads it.
fn refusal(error: ApiError, headers: &HeaderMap) -> Response {
    match is_grpc(headers) {
        true => tonic::Status::from(error).into_http(),
        false => error.into_response(),
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
        let answer = tokio::time::timeout(PATIENCE, InferenceServiceClient::new(channel).abort(asked)).await;
        if let Ok(Ok(answer)) = answer
            && answer.get_ref().aborted
        {
            return true;
        }
    }
    false
}
