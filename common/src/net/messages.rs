//! Messages of gRPC calls that cannot be read, and what their senders are told. The libraries below call all of it an
//! internal error; it is the caller's, so here it is `INVALID_ARGUMENT`, or `RESOURCE_EXHAUSTED` for one that is too large.
//!
//! Framing is checked on the way in, by [`Framed`]; what is in a frame is decoded by the library, whose words are put
//! right on the way out.
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::middleware::{map_request, map_response};
use axum::response::Response;
use axum::{BoxError, Router};
use bytes::Bytes;
use http::StatusCode;
use hyper::body::{Frame, SizeHint};
use tonic::{Code, Status};

use super::{is_grpc, json_error};
use crate::spelling::shown;

/// A flag and a length.
const HEAD_BYTES: usize = 5;
/// How the decoder begins.
const UNDECODABLE: &str = "failed to decode Protobuf message";
const NO_MESSAGE: &str = "Missing request message.";
const TOO_LARGE: &str = "message length too large";

/// The router of gRPC services with their messages guarded. `limit_option`, where there is one, raises the limit that a
/// message is beyond: "--max-body".
pub fn guard(grpc: Router, limit_option: Option<&'static str>) -> Router {
    let framed = |request: Request| async {
        match is_grpc(&request) {
            true => Ok(request.map(|body| Body::new(Framed::new(body)))),
            false => Err(no_call(&request)),
        }
    };
    let answered = move |answer: Response| async move {
        match Status::from_header_map(answer.headers()) {
            Some(status) if status.code() != Code::Ok => match blamed(&status, limit_option) {
                Some(blamed) => blamed.into_http(),
                None => answer,
            },
            _ => answer,
        }
    };
    grpc.route_layer(map_request(framed)).route_layer(map_response(answered))
}

/// What is said to who asks for a call as if it were plain HTTP, and could not read a status in trailers.
fn no_call<B>(request: &http::Request<B>) -> Response {
    let path = shown(request.uri().path());
    let message =
        format!("{path} is a gRPC call: it takes a POST over HTTP/2 whose content-type is application/grpc");
    json_error(StatusCode::UNSUPPORTED_MEDIA_TYPE, "grpc_only", &message)
}

/// The status that blames the caller, where a library's does not though it is the caller's message that cannot be read.
pub fn blamed(status: &Status, limit_option: Option<&str>) -> Option<Status> {
    match (status.code(), status.message()) {
        (Code::Internal, words) if words.starts_with(UNDECODABLE) => {
            let what = words[UNDECODABLE.len()..].trim_start_matches(": ");
            Some(Status::invalid_argument(format!("the request is no message of this call: {what}")))
        }
        (Code::Internal, NO_MESSAGE) => Some(Status::invalid_argument("the request has no message")),
        (Code::OutOfRange, words) if words.contains(TOO_LARGE) => {
            let sizes = words.split_once(": ").map_or(words, |(_, sizes)| sizes);
            let option = limit_option.map(|option| format!(" ({option})")).unwrap_or_default();
            Some(Status::resource_exhausted(format!(
                "a message of the request is too large: {sizes}{option}"
            )))
        }
        _ => None,
    }
}

/// The frames of a request's messages, as far as they came. Pure.
#[derive(Debug, Default)]
struct Frames {
    head: [u8; HEAD_BYTES],
    head_bytes: usize,
    /// Bytes of the message under way that are still to come.
    missing: usize,
}

impl Frames {
    /// Takes in a piece of the body.
    ///
    /// # Errors
    /// A frame that begins with what is no flag.
    fn handle(&mut self, mut piece: &[u8]) -> Result<(), Status> {
        while !piece.is_empty() {
            if self.missing > 0 {
                let there = self.missing.min(piece.len());
                (self.missing, piece) = (self.missing - there, &piece[there..]);
                continue;
            }
            let there = (HEAD_BYTES - self.head_bytes).min(piece.len());
            self.head[self.head_bytes..self.head_bytes + there].copy_from_slice(&piece[..there]);
            (self.head_bytes, piece) = (self.head_bytes + there, &piece[there..]);
            if self.head_bytes == HEAD_BYTES {
                let [flag, length @ ..] = self.head;
                if flag > 1 {
                    return Err(Status::invalid_argument(format!(
                        "the body is no gRPC message: its first byte is {flag}, expected 0 or 1"
                    )));
                }
                (self.head_bytes, self.missing) = (0, u32::from_be_bytes(length) as usize);
            }
        }
        Ok(())
    }

    /// The body is over.
    ///
    /// # Errors
    /// It ended inside a frame.
    fn handle_end(&self) -> Result<(), Status> {
        match (self.head_bytes, self.missing) {
            (0, 0) => Ok(()),
            (0, missing) => Err(Status::invalid_argument(format!(
                "the body ended inside a message: {missing} bytes of it are missing"
            ))),
            (there, _) => Err(Status::invalid_argument(format!(
                "the body ended inside a message's head: {there} of {HEAD_BYTES} bytes came"
            ))),
        }
    }
}

/// A request's body whose framing is checked as it passes.
struct Framed {
    inner: Body,
    frames: Frames,
}

impl Framed {
    fn new(inner: Body) -> Self {
        Self { inner, frames: Frames::default() }
    }
}

impl HttpBody for Framed {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = match std::task::ready!(Pin::new(&mut self.inner).poll_frame(cx)) {
            None => return Poll::Ready(self.frames.handle_end().err().map(|status| Err(status.into()))),
            Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
            Some(Ok(frame)) => frame,
        };
        let checked = frame.data_ref().map_or(Ok(()), |piece| self.frames.handle(piece));
        Poll::Ready(Some(checked.map(|()| frame).map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream() && self.frames.handle_end().is_ok()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::v1;

    fn read(body: &[u8]) -> Result<(), String> {
        let mut frames = Frames::default();
        // Byte by byte: no cut of the network's may matter.
        let all = body.iter().try_for_each(|byte| frames.handle(&[*byte])).and_then(|()| frames.handle_end());
        let mut at_once = Frames::default();
        let same = at_once.handle(body).and_then(|()| at_once.handle_end());
        assert_eq!(all.as_ref().err().map(Status::message), same.as_ref().err().map(Status::message));
        all.map_err(|status| {
            assert_eq!(status.code(), Code::InvalidArgument);
            status.message().to_owned()
        })
    }

    #[test]
    fn whole_messages_pass_and_others_are_told_what_is_missing() {
        assert_eq!(read(b""), Ok(()));
        assert_eq!(read(b"\0\0\0\0\0"), Ok(()));
        assert_eq!(read(b"\0\0\0\0\x02ab\x01\0\0\0\x01c"), Ok(()));
        assert!(read(b"\0\0\0\0\x05ab").unwrap_err().contains("3 bytes of it are missing"));
        assert!(read(b"\0\0\0\0\x02ab\0\0").unwrap_err().contains("2 of 5 bytes came"));
        assert!(read(b"{\"prompt\": 1}").unwrap_err().contains("its first byte is 123"));
    }

    #[test]
    fn only_what_the_caller_sent_is_blamed_on_the_caller() {
        let blamed = |status: &Status| blamed(status, Some("--max-body"));
        let undecodable = <v1::DescribeResponse as prost::Message>::decode(&b"\xff"[..]).unwrap_err();
        let told = blamed(&Status::internal(undecodable.to_string())).unwrap();
        assert_eq!(told.code(), Code::InvalidArgument);
        assert!(told.message().starts_with("the request is no message of this call: "), "{told:?}");
        let long = "Error, decoded message length too large: found 9 bytes, the limit is: 4 bytes";
        let told = blamed(&Status::out_of_range(long)).unwrap();
        assert_eq!(told.code(), Code::ResourceExhausted);
        assert!(told.message().ends_with("found 9 bytes, the limit is: 4 bytes (--max-body)"), "{told:?}");
        assert!(blamed(&Status::internal("a mistake of ours")).is_none());
        assert!(blamed(&Status::out_of_range("step 9")).is_none());
    }
}
