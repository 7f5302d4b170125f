//! Server-sent events. The status line waits for the first update, so that what fails before the first token still has
//! its own HTTP code; what fails later ends the stream with an `error` event and without `[DONE]`.
use std::collections::VecDeque;
use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::response::{IntoResponse, Response};
use futures::stream;
use http::{HeaderValue, header};
use serde_json::Value;

use super::super::error::ApiError;
use super::super::generation::Generation;
use super::frame::Writer;

struct Streaming<W> {
    generation: Generation,
    writer: W,
    ready: VecDeque<Bytes>,
    ended: bool,
}

/// Streams the answer. When the client goes away the body is dropped, and with it the generation.
///
/// # Errors
/// What failed before the first token.
pub(super) async fn respond<W: Writer>(
    mut generation: Generation,
    mut writer: W,
) -> Result<Response, ApiError> {
    let mut ready = VecDeque::new();
    if let Some(first) = generation.next().await {
        ready.extend(writer.chunks(first?).iter().map(event));
    }
    let streaming = Streaming { generation, writer, ready, ended: false };
    let events = stream::unfold(streaming, |mut streaming| async move {
        let bytes = streaming.next().await?;
        Some((Ok::<_, Infallible>(bytes), streaming))
    });
    let mut response = Body::from_stream(events).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies such as nginx hold streams back unless told otherwise.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

impl<W: Writer> Streaming<W> {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(bytes) = self.ready.pop_front() {
                return Some(bytes);
            }
            if self.ended {
                return None;
            }
            match self.generation.next().await {
                Some(Ok(update)) => self.ready.extend(self.writer.chunks(update).iter().map(event)),
                Some(Err(error)) => {
                    self.ended = true;
                    self.ready.push_back(error_event(&error));
                }
                None => {
                    self.ended = true;
                    self.ready.extend(self.writer.frame().last_chunk().as_ref().map(event));
                    self.ready.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
                }
            }
        }
    }
}

fn event(value: &Value) -> Bytes {
    format!("data: {value}\n\n").into()
}

/// The last event of a stream that fails.
pub(in super::super) fn error_event(error: &ApiError) -> Bytes {
    format!("event: error\ndata: {}\n\n", error.body()).into()
}
