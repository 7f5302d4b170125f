//! Errors of plain HTTP, in the shape that clients of OpenAI's API know: `{"error": {message, type, param, code}}`.
use axum::Json;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde_json::json;

/// The answer. `code` is for programs; the family follows from the status.
pub fn json_error(status: StatusCode, code: &str, message: &str) -> Response {
    let family = if status.is_server_error() { "server_error" } else { "invalid_request_error" };
    let error = json!({"message": message, "type": family, "param": null, "code": code});
    (status, Json(json!({"error": error}))).into_response()
}
