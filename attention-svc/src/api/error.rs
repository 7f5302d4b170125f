//! The one place where what went wrong becomes an HTTP answer (in OpenAI's shape) or a gRPC status (with
//! `google.rpc.BadRequest` and `RetryInfo`).
use std::time::Duration;

use afd_common::spelling::{cut, shown};
use axum::Json;
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use serde_json::{Value, json};
use tonic::Code;
use tonic_types::{ErrorDetails, StatusExt};

use super::validate::FieldError;
use crate::membership::peers::PeerName;
use crate::request::SequenceError;
use crate::text::TextError;

/// Most characters of a message.
const MOST_SAID: usize = 2000;

/// Why a request is not answered.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ApiError {
    /// A field of the request.
    #[error(transparent)]
    Field(#[from] FieldError),
    /// The body is not what it should be, as a whole.
    #[error("{0}")]
    Malformed(String),
    /// Another model than the one served.
    #[error("the model `{}` is not served here; this is `{served}`", shown(.asked))]
    ModelNotFound {
        /// In the request.
        asked: String,
        /// By this process.
        served: String,
    },
    /// The body is compressed, or encoded otherwise.
    #[error("`content-encoding` is {}; bodies are read as they are (identity)", shown(.0))]
    Encoded(String),
    /// The body exceeds the limit.
    #[error("the body is larger than {limit} bytes (--max-body)")]
    BodyTooLarge {
        /// The limit, bytes.
        limit: usize,
    },
    /// The body did not come in time.
    #[error("{0} (--body-timeout)")]
    BodyTimeout(String),
    /// A call that FFN ranks serve.
    #[error(
        "this is attention-svc (role ATTENTION), which serves InferenceService; {path} is a call to an ffn-svc (role \
         FFN): does --ffn name this process?", path = shown(.path)
    )]
    WrongRole {
        /// As asked.
        path: String,
    },
    /// No such path, or not with this method.
    #[error("there is no {} {} here", shown(.method), shown(.path))]
    UnknownRoute {
        /// As asked.
        method: String,
        /// As asked.
        path: String,
        /// Whether another method would do.
        path_exists: bool,
    },
    /// `request_id` names a request that is running.
    #[error("request_id: a request named `{0}` is running")]
    Duplicate(String),
    /// The attention rank that served the request for this one is gone.
    #[error("attention rank {peer}, which served this request (--peers), is lost: {why}")]
    PeerLost {
        /// Which.
        peer: PeerName,
        /// What was seen.
        why: String,
    },
    /// Somebody else records a profile.
    #[error("{0}")]
    ProfileUnderWay(String),
    /// Nothing came of a profile in its time.
    #[error("{0}")]
    NothingRecorded(String),
    /// The engine ended or refused the sequence.
    #[error(transparent)]
    Sequence(#[from] SequenceError),
}

/// How one kind of error is told.
struct Kind {
    http: StatusCode,
    grpc: Code,
    /// OpenAI's `error.type`.
    family: &'static str,
    /// OpenAI's `error.code`.
    code: &'static str,
    /// When to try again, where that may help.
    retry_after: Option<Duration>,
}

impl ApiError {
    /// A mistake of this software.
    pub fn internal(what: impl std::fmt::Display) -> Self {
        Self::Sequence(SequenceError::Internal(what.to_string()))
    }

    /// A text error as seen from the field the text came in.
    pub fn text(error: &TextError, param: &str) -> Self {
        match error {
            TextError::NoTokenizer | TextError::NoChatTemplate(_) | TextError::Refused(_) => {
                Self::Field(FieldError::new(param, format!("cannot be used: {error}")))
            }
            _ => Self::internal(error),
        }
    }

    fn kind(&self) -> Kind {
        let kind = |http, grpc, family, code| Kind { http, grpc, family, code, retry_after: None };
        let invalid = "invalid_request_error";
        let second = Some(Duration::from_secs(1));
        match self {
            Self::Field(_) => kind(StatusCode::BAD_REQUEST, Code::InvalidArgument, invalid, "invalid_value"),
            Self::Malformed(_) => {
                kind(StatusCode::BAD_REQUEST, Code::InvalidArgument, invalid, "invalid_body")
            }
            Self::ModelNotFound { .. } => {
                kind(StatusCode::NOT_FOUND, Code::NotFound, invalid, "model_not_found")
            }
            Self::Encoded(_) => kind(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                Code::InvalidArgument,
                invalid,
                "unsupported_content_encoding",
            ),
            Self::BodyTooLarge { .. } => {
                kind(StatusCode::PAYLOAD_TOO_LARGE, Code::ResourceExhausted, invalid, "body_too_large")
            }
            Self::BodyTimeout(_) => {
                kind(StatusCode::REQUEST_TIMEOUT, Code::DeadlineExceeded, invalid, "body_timeout")
            }
            Self::WrongRole { .. } => {
                kind(StatusCode::NOT_FOUND, Code::FailedPrecondition, invalid, "wrong_role")
            }
            Self::UnknownRoute { path_exists: true, .. } => {
                kind(StatusCode::METHOD_NOT_ALLOWED, Code::Unimplemented, invalid, "method_not_allowed")
            }
            Self::UnknownRoute { .. } => {
                kind(StatusCode::NOT_FOUND, Code::Unimplemented, invalid, "unknown_url")
            }
            Self::Duplicate(_) => {
                kind(StatusCode::CONFLICT, Code::AlreadyExists, invalid, "duplicate_request_id")
            }
            Self::ProfileUnderWay(_) => {
                kind(StatusCode::CONFLICT, Code::AlreadyExists, invalid, "profile_under_way")
            }
            Self::PeerLost { .. } => Kind {
                retry_after: second,
                ..kind(StatusCode::SERVICE_UNAVAILABLE, Code::Unavailable, "server_error", "peer_lost")
            },
            Self::Sequence(SequenceError::QueueFull { .. }) => Kind {
                retry_after: second,
                ..kind(
                    StatusCode::TOO_MANY_REQUESTS,
                    Code::ResourceExhausted,
                    "rate_limit_error",
                    "queue_full",
                )
            },
            Self::Sequence(SequenceError::TooLarge { .. }) => {
                kind(StatusCode::BAD_REQUEST, Code::InvalidArgument, invalid, "context_length_exceeded")
            }
            Self::Sequence(SequenceError::FfnUnavailable(_)) => Kind {
                retry_after: second,
                ..kind(StatusCode::SERVICE_UNAVAILABLE, Code::Unavailable, "server_error", "ffn_unavailable")
            },
            Self::Sequence(SequenceError::ShuttingDown) => Kind {
                retry_after: second,
                ..kind(StatusCode::SERVICE_UNAVAILABLE, Code::Unavailable, "server_error", "shutting_down")
            },
            Self::NothingRecorded(_) | Self::Sequence(SequenceError::DeadlineExceeded { .. }) => kind(
                StatusCode::GATEWAY_TIMEOUT,
                Code::DeadlineExceeded,
                "timeout_error",
                "deadline_exceeded",
            ),
            Self::Sequence(SequenceError::Internal(_)) => {
                kind(StatusCode::INTERNAL_SERVER_ERROR, Code::Internal, "server_error", "internal_error")
            }
        }
    }

    /// The field at fault.
    fn param(&self) -> Option<&str> {
        match self {
            Self::Field(error) => Some(&error.param),
            Self::ModelNotFound { .. } => Some("model"),
            Self::Encoded(_) => Some("content-encoding"),
            Self::BodyTooLarge { .. } | Self::BodyTimeout(_) => Some("body"),
            Self::Duplicate(_) => Some("request_id"),
            Self::Sequence(SequenceError::TooLarge { .. }) => Some("max_tokens"),
            _ => None,
        }
    }

    /// Whatever a caller wrote, or a template of the checkpoint said, it does not come back whole.
    fn message(&self) -> String {
        cut(&self.to_string(), MOST_SAID)
    }

    /// `{"error": {message, type, param, code}}`, as a body or as an SSE event.
    pub fn body(&self) -> Value {
        let kind = self.kind();
        let message = self.message();
        json!({"error": {"message": message, "type": kind.family, "param": self.param(), "code": kind.code}})
    }

    /// Name of the kind, for metrics and logs.
    pub fn code(&self) -> &'static str {
        self.kind().code
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let kind = self.kind();
        tracing::debug!(status = kind.http.as_u16(), error = self.message(), "refused");
        let mut response = (kind.http, Json(self.body())).into_response();
        if let Some(after) = kind.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(after.as_secs().max(1)));
        }
        response
    }
}

impl From<ApiError> for tonic::Status {
    fn from(error: ApiError) -> Self {
        let kind = error.kind();
        tracing::debug!(status = ?kind.grpc, error = error.message(), "refused");
        let mut details = ErrorDetails::new();
        if let (Some(param), Code::InvalidArgument) = (error.param(), kind.grpc) {
            details.add_bad_request_violation(param, error.message());
        }
        if kind.retry_after.is_some() {
            details.set_retry_info(kind.retry_after);
        }
        Self::with_error_details(kind.grpc, error.message(), details)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_error_names_the_field_on_both_faces() {
        let error = ApiError::Field(FieldError::new("top_p", "must be in (0, 1], got 0"));
        let body = error.body();
        assert_eq!(body["error"]["param"], "top_p");
        assert_eq!(body["error"]["message"], "`top_p` must be in (0, 1], got 0");
        assert_eq!(body["error"]["type"], "invalid_request_error");
        let status = tonic::Status::from(error);
        assert_eq!(status.code(), Code::InvalidArgument);
        assert_eq!(status.get_details_bad_request().unwrap().field_violations[0].field, "top_p");
    }

    #[test]
    fn a_full_queue_says_when_to_come_back() {
        let error = ApiError::from(SequenceError::QueueFull { waiting: 9 });
        let response = error.clone().into_response();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
        let status = tonic::Status::from(error);
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert_eq!(status.get_details_retry_info().unwrap().retry_delay, Some(Duration::from_secs(1)));
    }
}
