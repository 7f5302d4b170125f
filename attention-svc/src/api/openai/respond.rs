//! The way out of an answer: whole, or as a stream.
use axum::Json;
use axum::response::{IntoResponse, Response};

use super::super::error::ApiError;
use super::super::generation::Generation;
use super::frame::Writer;
use super::{sse, unary};

/// Answers a request that runs: as a stream, or in one piece when all of it is there.
///
/// # Errors
/// What failed before the first byte of the answer.
pub(super) async fn respond<W: Writer>(
    mut generation: Generation,
    mut writer: W,
) -> Result<Response, ApiError> {
    if writer.frame().delivery.stream {
        return sse::respond(generation, writer).await;
    }
    let sequences = unary::collect(&mut generation, writer.frame()).await?;
    let choices =
        sequences.into_iter().enumerate().map(|(index, sequence)| writer.choice(index, sequence)).collect();
    let frame = writer.frame();
    let mut answer = frame.envelope(choices);
    answer["usage"] = frame.usage();
    Ok(Json(answer).into_response())
}
