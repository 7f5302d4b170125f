//! Bodies of requests, bounded.
use std::time::Duration;

use afd_common::net::BodyTimeout;
use axum::body::{Body, Bytes};
use futures::StreamExt;
use http::{HeaderMap, header};

use super::error::ApiError;

/// How long, and how much, a refused body is read and thrown away, so that its sender gets to see the refusal instead
/// of a broken connection.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES: usize = 256 << 20;

/// Reads a body of at most `limit` bytes. One that announces more, or is compressed, is refused before anything of it is read.
///
/// # Errors
/// [`ApiError::Encoded`], [`ApiError::BodyTooLarge`], [`ApiError::BodyTimeout`], or [`ApiError::Malformed`] when the
/// sender broke off.
pub(crate) async fn read(headers: &HeaderMap, body: Body, limit: usize) -> Result<Bytes, ApiError> {
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    let mut frames = body.into_data_stream();
    let mut read = Vec::with_capacity(announced.unwrap_or(0).min(limit));
    let encoded = headers
        .get(header::CONTENT_ENCODING)
        .filter(|encoding| !encoding.is_empty() && *encoding != "identity");
    let mut too_large = announced.is_some_and(|length| length > limit);
    while !too_large && encoded.is_none() {
        match frames.next().await {
            None => return Ok(read.into()),
            Some(Ok(bytes)) if read.len() + bytes.len() <= limit => read.extend_from_slice(&bytes),
            Some(Ok(_)) => too_large = true,
            Some(Err(error)) => {
                return Err(match BodyTimeout::find(&error) {
                    Some(timeout) => ApiError::BodyTimeout(timeout.to_string()),
                    None => ApiError::Malformed(format!("the body broke off: {error}")),
                });
            }
        }
    }
    // Bounded in time and bytes, and ends with the connection: nobody needs to wait for it.
    drop(tokio::spawn(tokio::time::timeout(LINGER, async move {
        let mut left = LINGER_BYTES;
        while let Some(Ok(bytes)) = frames.next().await {
            match left.checked_sub(bytes.len()) {
                Some(rest) => left = rest,
                None => break,
            }
        }
    })));
    Err(match encoded {
        Some(encoding) => ApiError::Encoded(String::from_utf8_lossy(encoding.as_bytes()).into_owned()),
        None => ApiError::BodyTooLarge { limit },
    })
}
