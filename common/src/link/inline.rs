//! Frames as messages of `LayerStageService.StreamStages`: the slowest link, and one that is there wherever gRPC is.
//!
//! The engine's end is an ordinary [`HopLink`]; a task per end moves frames between it and the stream. What is sent waits
//! in a channel with room for every frame that credits allow for, so a stream that does not flow holds up no engine. Whoever
//! sent a frame that cannot be right is told so by a close frame, as on every link, and by an FFN rank in gRPC's own way too:
//! it ends the stream with `INVALID_ARGUMENT` and the reason. Bodies have CRC-32C, whatever else was agreed: this is the link
//! of clients in any language.
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt, stream};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

use super::grants::{LinkId, Refusal, Secret, Ticket};
use super::inbox::Inbox;
use super::port::Port;
use super::socket::AttachError;
use super::{Body, Doorbell, HopLink, InFrame, Limits, LinkError, LinkStats};
use crate::frame::{
    Checksum, FrameHeader, FrameKind, FrameLimits, HEADER_BYTES, MAX_TEXT_BYTES, body_sum, verify_body,
};
use crate::proto::v1::layer_stage_service_client::LayerStageServiceClient;
use crate::proto::v1::{StreamAttach, StreamStagesRequest, StreamStagesResponse};

/// Longest time that a dropped link goes on listening, so that its farewell reaches the peer before the stream is reset.
const LINGER: Duration = Duration::from_secs(2);

/// The answer of an FFN rank to an attached stream.
pub type ResponseStream = Pin<Box<dyn Stream<Item = Result<StreamStagesResponse, Status>> + Send>>;

/// One end of a link over a gRPC stream.
pub struct InlineLink {
    port: Port,
    /// `None` once closed.
    out: Option<mpsc::Sender<Bytes>>,
    closed: CancellationToken,
}

/// Size of the largest message of a link with these limits, for the service's and the client's decoder.
pub fn max_message_bytes(max_body_bytes: u32) -> usize {
    // Field tags, lengths and the attachment take less than this.
    const AROUND_A_FRAME: usize = 256;
    AROUND_A_FRAME + HEADER_BYTES + max_body_bytes.max(MAX_TEXT_BYTES) as usize
}

/// Attaches to the link that `ticket` is for, over `channel`.
///
/// # Errors
/// [`AttachError`]; the ticket is used up unless the channel could not connect.
pub async fn dial(
    channel: Channel,
    ticket: &Ticket,
    limits: Limits,
    bell: Doorbell,
    patience: Duration,
) -> Result<InlineLink, AttachError> {
    let peer = limits.peer.clone();
    let (link, outgoing) = InlineLink::new(limits, bell);
    let attach = StreamAttach { link_id: ticket.link_id.0, secret: ticket.secret.expose().to_vec() };
    let first = StreamStagesRequest { attach: Some(attach), frame: Bytes::new() };
    let frames = outgoing.map(|frame| StreamStagesRequest { attach: None, frame });
    let requests = stream::once(async { first }).chain(frames);
    let mut client = LayerStageServiceClient::new(channel)
        .max_decoding_message_size(max_message_bytes(link.port.limits.max_body_bytes));
    let opened = timeout(patience, async {
        let mut responses = client.stream_stages(requests).await?.into_inner();
        let first = responses.message().await?;
        Ok::<_, Status>((responses, first))
    });
    let (responses, first) = match opened.await {
        Ok(Ok(opened)) => opened,
        Ok(Err(status)) => return Err(refused(peer, &status)),
        Err(_) => return Err(AttachError::Timeout { peer, after: patience }),
    };
    match first {
        Some(response) if response.frame.is_empty() => {}
        other => {
            let what =
                format!("the first response is {}", if other.is_some() { "not empty" } else { "missing" });
            return Err(AttachError::Protocol { peer, what });
        }
    }
    tokio::spawn(link.pump().run(responses.map(|message| message.map(|message| message.frame))));
    Ok(link)
}

/// Answers a stream: reads its attachment, lets `attach` look the ticket up in the grants and say what was agreed, whose
/// bell to ring and what the caller wants to know the link by. Returns the response stream and the engine's end.
///
/// # Errors
/// The status to answer with: `INVALID_ARGUMENT`, `DEADLINE_EXCEEDED`, or `FAILED_PRECONDITION` for a [`Refusal`].
pub async fn answer<T>(
    mut requests: Streaming<StreamStagesRequest>,
    patience: Duration,
    attach: impl FnOnce(&Ticket) -> Result<(Limits, Doorbell, T), Refusal>,
) -> Result<(ResponseStream, InlineLink, T), Status> {
    let first = timeout(patience, requests.message())
        .await
        .map_err(|_| Status::deadline_exceeded(format!("no attach message came within {patience:?}")))??
        .ok_or_else(|| Status::invalid_argument("attach: the stream ended before its first message"))?;
    let wanted =
        first.attach.ok_or_else(|| Status::invalid_argument("attach: missing in the first message"))?;
    if !first.frame.is_empty() {
        return Err(Status::invalid_argument("frame: the first message carries none"));
    }
    let secret = Secret::from_slice(&wanted.secret).ok_or_else(|| {
        Status::invalid_argument(format!("attach.secret: must have {} bytes", Secret::BYTES))
    })?;
    let ticket = Ticket { link_id: LinkId(wanted.link_id), secret };
    let (limits, bell, session) =
        attach(&ticket).map_err(|refusal| Status::failed_precondition(refusal.to_string()))?;
    let (link, outgoing) = InlineLink::new(limits, bell);
    let pump = link.pump();
    let refused = Arc::clone(&pump.refused);
    tokio::spawn(pump.run(requests.map(|message| message.map(|message| message.frame))));
    let attached = stream::once(async { Bytes::new() });
    let frames = attached.chain(outgoing).map(|frame| Ok(StreamStagesResponse { frame }));
    // Looked at when the link is closed, which is after it has heard what is wrong.
    let end = stream::once(async move { refused.get().cloned().map(Err) }).filter_map(std::future::ready);
    Ok((Box::pin(frames.chain(end)), link, session))
}

fn refused(peer: String, status: &Status) -> AttachError {
    match status.code() {
        tonic::Code::FailedPrecondition => {
            let known = [Refusal::Unknown, Refusal::WrongKind, Refusal::Unavailable];
            let said = known.into_iter().find(|refusal| refusal.to_string() == status.message());
            AttachError::Refused { peer, refusal: said.unwrap_or(Refusal::Unavailable) }
        }
        code => AttachError::Transport { peer, what: format!("{code:?}: {}", status.message()) },
    }
}

impl InlineLink {
    fn new(limits: Limits, bell: Doorbell) -> (Self, ReceiverStream<Bytes>) {
        // Unanswered dispatches, answers, and the farewell.
        let (out, outgoing) = mpsc::channel(2 * limits.credits as usize + 1);
        let link = Self { port: Port::new(limits, bell), out: Some(out), closed: CancellationToken::new() };
        (link, ReceiverStream::new(outgoing))
    }

    fn pump(&self) -> Pump {
        Pump {
            inbox: Arc::clone(&self.port.inbox),
            limits: FrameLimits { checksum: Checksum::Crc32c, ..self.port.limits.frame_limits() },
            closed: self.closed.clone(),
            refused: Arc::default(),
        }
    }

    /// Nothing more is sent.
    fn hang_up(&mut self) {
        self.out = None;
        self.closed.cancel();
    }

    fn push(&self, header: &FrameHeader, body: &[&[u8]]) -> Result<(), LinkError> {
        let mut frame = BytesMut::with_capacity(HEADER_BYTES + header.body_bytes as usize);
        frame.extend_from_slice(&header.encode(body_sum(Checksum::Crc32c, body)));
        body.iter().for_each(|part| frame.extend_from_slice(part));
        let out = self.out.as_ref().ok_or_else(|| self.port.inbox.closed("closed"))?;
        out.try_send(frame.freeze()).map_err(|error| {
            self.port.inbox.lost(match error {
                mpsc::error::TrySendError::Closed(_) => "the stream is gone",
                mpsc::error::TrySendError::Full(_) => "the stream does not flow",
            })
        })
    }
}

impl HopLink for InlineLink {
    fn limits(&self) -> &Limits {
        &self.port.limits
    }

    fn send(&mut self, mut header: FrameHeader, body: &[&[u8]]) -> Result<(), LinkError> {
        self.port.check_send(&mut header, body)?;
        self.push(&header, body)?;
        self.port.handle_sent(&header);
        Ok(())
    }

    fn poll_recv(&mut self) -> Result<Option<InFrame>, LinkError> {
        self.port.poll_recv()
    }

    fn close(&mut self, reason: &str) {
        let Some((header, text)) = self.port.close(reason) else { return };
        // A failure means that the peer is gone already.
        let _ = self.push(&header, &[text]);
        self.hang_up();
    }

    fn stats(&self) -> Arc<LinkStats> {
        Arc::clone(&self.port.inbox.stats)
    }
}

impl Drop for InlineLink {
    fn drop(&mut self) {
        self.close("the other end was dropped");
        if let Some((header, text)) = self.port.blame() {
            let _ = self.push(&header, &[text.as_bytes()]);
        }
        self.hang_up();
    }
}

/// The receiving half of one end. Ends when the stream does, and at the latest [`LINGER`] after its link was closed.
struct Pump {
    inbox: Arc<Inbox>,
    limits: FrameLimits,
    closed: CancellationToken,
    /// What the stream is ended with where the peer is at fault.
    refused: Arc<OnceLock<Status>>,
}

impl Pump {
    async fn run(self, frames: impl Stream<Item = Result<Bytes, Status>>) {
        tokio::pin!(frames);
        let lingered = async {
            self.closed.cancelled().await;
            sleep(LINGER).await;
        };
        let ended = async {
            let end = self.receive(&mut frames).await;
            // A peer whose frames were damaged is still to be told: until then the stream is not reset.
            let is_to_be_told = matches!(end, LinkError::Corrupt { .. });
            self.inbox.end(end);
            while is_to_be_told && frames.next().await.is_some_and(|message| message.is_ok()) {}
        };
        tokio::select! {
            () = ended => {}
            () = lingered => {}
        }
    }

    async fn receive(&self, mut frames: impl Stream<Item = Result<Bytes, Status>> + Unpin) -> LinkError {
        loop {
            let message = match frames.next().await {
                Some(Ok(message)) => message,
                Some(Err(status)) => {
                    // A message that cannot be read; nobody hears it where the connection is gone.
                    self.refused.get_or_init(|| Status::new(status.code(), status.message()));
                    return self.inbox.lost(format!("{:?}: {}", status.code(), status.message()));
                }
                None => return self.inbox.lost("the stream ended"),
            };
            if let Err(end) = self.handle_message(message) {
                if matches!(end, LinkError::Corrupt { .. }) {
                    self.refused.get_or_init(|| Status::invalid_argument(format!("frame: {end}")));
                }
                return end;
            }
        }
    }

    fn handle_message(&self, mut message: Bytes) -> Result<(), LinkError> {
        let Some(header) = message.first_chunk::<HEADER_BYTES>() else {
            return Err(self
                .inbox
                .corrupt(format!("a message of {} bytes has no room for a header", message.len())));
        };
        let (header, sum) =
            FrameHeader::decode(header, &self.limits).map_err(|error| self.inbox.corrupt(error))?;
        let body = message.split_off(HEADER_BYTES);
        if body.len() != header.body_bytes as usize {
            let what = format!(
                "the header says {} bytes of body, the message has {}",
                header.body_bytes,
                body.len()
            );
            return Err(self.inbox.corrupt(what));
        }
        let sum = sum.ok_or_else(|| self.inbox.corrupt("a message has nothing behind its body"))?;
        verify_body(&body, sum).map_err(|error| self.inbox.corrupt(error))?;
        if header.kind == FrameKind::Close {
            return Err(self.inbox.closed(String::from_utf8_lossy(&body)));
        }
        if self.inbox.admits(&header) {
            self.inbox.deliver(header, Body::Message(body));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
