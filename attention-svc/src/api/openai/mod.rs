//! OpenAI's HTTP API. Each endpoint: read the fields, check them, run, write; streaming and not.
use std::time::{Duration, Instant};

use afd_common::spelling::shown;
use axum::body::Body;
use axum::extract::Request;
use http::HeaderMap;

use super::error::ApiError;
use super::forward::Arrived;
use super::json::Fields;
use super::plan::Incoming;
use super::validate::FieldError;
use super::{Api, body};

pub(super) mod chat;
pub(super) mod completions;
mod fields;
mod frame;
mod logprobs;
pub(super) mod models;
mod respond;
pub(super) mod sse;
pub(super) mod tokenize;
mod unary;

/// How long the caller waits for the whole answer, in milliseconds.
const TIMEOUT_HEADER: &str = "x-request-timeout-ms";

/// What a request brings besides its fields.
struct Received {
    fields: Fields,
    deadline: Option<Instant>,
    trace: Incoming,
}

/// Reads a request's headers and body.
async fn receive(api: &Api, request: Request) -> Result<Received, ApiError> {
    let (head, body): (_, Body) = request.into_parts();
    let arrived = Arrived::of(&head.extensions);
    let deadline = timeout(&head.headers)?.map(|timeout| arrived + timeout);
    let bytes = body::read(&head.headers, body, api.limits.max_body_bytes).await?;
    let fields = Fields::parse(&bytes)?;
    Ok(Received { fields, deadline, trace: Incoming::read(&head.headers) })
}

fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, FieldError> {
    let Some(value) = headers.get(TIMEOUT_HEADER) else { return Ok(None) };
    let day = 24 * 60 * 60 * 1000;
    let milliseconds =
        value.to_str().ok().and_then(|text| text.parse().ok()).filter(|ms| (1..=day).contains(ms));
    match milliseconds {
        Some(milliseconds) => Ok(Some(Duration::from_millis(milliseconds))),
        None => Err(FieldError::new(
            TIMEOUT_HEADER,
            format!("must be milliseconds from 1 to {day}, got {}", shown(&format!("{value:?}"))),
        )),
    }
}
