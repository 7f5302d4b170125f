//! A peer's answer on its way to the client: passed on piece by piece as it comes, and ended by an error of its own kind, an
//! SSE event or a gRPC status, when the peer is lost on the way, or this rank ends before it.
use std::convert::Infallible;
use std::sync::Arc;

use afd_common::net::client;
use axum::body::{Body, Bytes};
use bytes::BytesMut;
use futures::stream;
use http::HeaderMap;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use super::super::Api;
use super::super::error::ApiError;
use super::super::openai::sse::error_event;
use super::outcome::Outcome;
use super::pieces::Pieces;
use crate::membership::load::Forwarded;
use crate::membership::peers::PeerName;
use crate::request::SequenceError;

/// See the module's head.
pub(super) struct Relay {
    api: Arc<Api>,
    peer: PeerName,
    lost: CancellationToken,
    pieces: Pieces,
    from: tonic::body::Body,
    /// The beginning of a piece.
    held: BytesMut,
    /// To be passed on before anything else is read.
    ready: Option<Frame<Bytes>>,
    /// Nothing comes after what is held.
    ended: bool,
    /// Nothing is passed on any more.
    over: bool,
    forwarded: Forwarded,
}

/// Why nothing more comes of a peer's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Broken {
    /// What became of the peer.
    Lost(String),
    /// This rank has no more time for it (`--drain-timeout`).
    Cut,
}

impl From<String> for Broken {
    fn from(why: String) -> Self {
        Self::Lost(why)
    }
}

impl Relay {
    /// Of an answer with these headers and this body; `lost` is the peer's.
    pub(super) fn new(
        api: Arc<Api>,
        peer: PeerName,
        (headers, from): (&HeaderMap, tonic::body::Body),
        lost: CancellationToken,
        forwarded: Forwarded,
    ) -> Self {
        Self {
            api,
            peer,
            lost,
            pieces: Pieces::of(headers),
            from,
            held: BytesMut::new(),
            ready: None,
            ended: false,
            over: false,
            forwarded,
        }
    }

    /// Waits for something to pass on: for all of it, where only that is of use.
    ///
    /// # Errors
    /// Why there is nothing: the peer is lost, or cannot serve the request now, and another rank may; or this one ends.
    pub(super) async fn begun(mut self) -> Result<Self, Broken> {
        self.ready = self.next().await?;
        match self.ready.as_ref().and_then(Frame::trailers_ref).and_then(unavailable) {
            Some(why) => Err(why.into()),
            None => Ok(self),
        }
    }

    /// What the client reads.
    pub(super) fn into_body(self, outcome: Outcome) -> Body {
        let frames = stream::unfold((self, outcome), |(mut relay, mut outcome)| async move {
            let frame = relay.frame(&mut outcome).await?;
            Some((Ok::<_, Infallible>(frame), (relay, outcome)))
        });
        Body::new(StreamBody::new(frames))
    }

    async fn frame(&mut self, outcome: &mut Outcome) -> Option<Frame<Bytes>> {
        if self.over {
            return None;
        }
        let frame = self.next().await;
        // Nobody asks for what comes after trailers.
        self.over = frame.as_ref().map_or(true, |frame| frame.as_ref().is_none_or(Frame::is_trailers));
        match frame {
            Ok(frame) => {
                let data = frame.as_ref().and_then(Frame::data_ref);
                // A client that has all of it need not wait for its end.
                if self.over || data.is_some_and(|data| self.pieces.are_all(data)) {
                    outcome.count("answered");
                }
                frame
            }
            Err(why) => Some(self.broken(why, outcome)),
        }
    }

    /// What comes next of the answer, in whole pieces; `None` at its end.
    ///
    /// # Errors
    /// [`Broken`].
    async fn next(&mut self) -> Result<Option<Frame<Bytes>>, Broken> {
        if let Some(ready) = self.ready.take() {
            return Ok(Some(ready));
        }
        while !self.ended {
            let frame = tokio::select! {
                frame = self.from.frame() => frame,
                () = self.lost.cancelled() => return Err(self.api.peers.silence().into()),
                () = self.forwarded.cut() => return Err(Broken::Cut),
            };
            match frame.transpose().map_err(|status| client::words(&status))?.map(Frame::into_data) {
                Some(Ok(data)) => match self.complete(data) {
                    pieces if pieces.is_empty() => {}
                    pieces => return Ok(Some(Frame::data(pieces))),
                },
                Some(Err(trailers)) if self.held.is_empty() => return Ok(Some(trailers)),
                Some(Err(trailers)) => (self.ready, self.ended) = (Some(trailers), true),
                None => self.ended = true,
            }
        }
        let rest = self.held.split().freeze();
        Ok((!rest.is_empty()).then(|| Frame::data(rest)))
    }

    /// The pieces that `data` completes; holds the rest.
    fn complete(&mut self, data: Bytes) -> Bytes {
        if self.held.is_empty() {
            let end = self.pieces.complete(&data);
            self.held.extend_from_slice(&data[end..]);
            return data.slice(..end);
        }
        self.held.extend_from_slice(&data);
        let end = self.pieces.complete(&self.held);
        self.held.split_to(end).freeze()
    }

    /// The last that the client reads of an answer that does not come to its end.
    fn broken(&self, why: Broken, outcome: &mut Outcome) -> Frame<Bytes> {
        let error = match why {
            Broken::Cut => cut(outcome),
            Broken::Lost(why) => {
                self.api.peers.handle_failure(self.peer, "the answer to a forwarded request broke off", &why);
                outcome.count("lost");
                ApiError::PeerLost { peer: self.peer, why }
            }
        };
        self.api.counts.failed(error.code());
        match self.pieces {
            Pieces::Events | Pieces::Whole => Frame::data(error_event(&error)),
            Pieces::Messages => Frame::trailers(trailers(&error.into())),
        }
    }
}

/// What a forwarded request ends with that this rank has no more time for: the same as one that it serves itself.
pub(super) fn cut(outcome: &mut Outcome) -> ApiError {
    outcome.count("cut");
    SequenceError::ShuttingDown.into()
}

/// Why the peer cannot serve the request now, where its headers or trailers say so.
pub(super) fn unavailable(headers: &HeaderMap) -> Option<String> {
    let status = Status::from_header_map(headers).filter(|status| status.code() == Code::Unavailable)?;
    Some(format!("it answered with UNAVAILABLE: {}", status.message()))
}

fn trailers(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    if status.add_header(&mut trailers).is_err() {
        // A message that no header can carry is left out.
        trailers.insert("grpc-status", (status.code() as i32).into());
    }
    trailers
}
