//! OpenAI's HTTP API. Each endpoint: read the fields, check them, run, write; streaming and not.
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::Request;
use http::HeaderMap;
use serde_json::{Value, json};

use super::error::ApiError;
use super::json::Fields;
use super::request_span::Incoming;
use super::validate::FieldError;
use super::{Api, body};
use crate::request::Usage;

pub(super) mod chat;
pub(super) mod completions;
mod fields;
mod logprobs;
pub(super) mod models;
mod sse;
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
    let arrived = Instant::now();
    let (head, body): (_, Body) = request.into_parts();
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
            format!("must be milliseconds from 1 to {day}, got {value:?}"),
        )),
    }
}

/// What every answer to one request has in common.
struct Envelope {
    id: Arc<str>,
    object: &'static str,
    created: u64,
    model: String,
    fingerprint: String,
}

impl Envelope {
    fn new(api: &Api, id: Arc<str>, object: &'static str) -> Self {
        let fingerprint: String = api.model.identity.fingerprint.chars().take(12).collect();
        let model = api.model.name.clone();
        Self { id, object, created: super::unix_seconds(), model, fingerprint: format!("fp_{fingerprint}") }
    }

    fn with(&self, choices: Vec<Value>) -> Value {
        json!({
            "id": *self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        })
    }
}

/// Tokens of all sequences of a request; a prompt counts once, however often it is continued.
#[derive(Default)]
struct TotalUsage {
    prompt: u64,
    completion: u64,
    cached: u64,
}

impl TotalUsage {
    fn add(&mut self, usage: Usage, is_first_of_prompt: bool) {
        self.completion += u64::from(usage.completion_tokens);
        if is_first_of_prompt {
            self.prompt += u64::from(usage.prompt_tokens);
            self.cached += u64::from(usage.cached_tokens);
        }
    }

    fn json(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        })
    }
}
