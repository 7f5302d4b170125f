//! The contract over real gRPC servers, and the attachment.
use std::sync::mpsc::Receiver;

use super::*;
use crate::link::LinkKind;
use crate::link::contract::{self, Fixture, PATIENCE, Side, Wire};
use crate::link::pairs::{Pairs, ticket};
use crate::proto::v1::StreamStagesResponse;

/// A server per pair, in a runtime per test.
struct Inline(Pairs);

impl Inline {
    fn new() -> Self {
        Self(Pairs::new().unwrap())
    }

    fn serve(&self, limits: Limits, bell: Doorbell) -> (Channel, Receiver<InlineLink>) {
        self.0.serve_inline(limits, bell).unwrap()
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.0.runtime().block_on(future)
    }
}

impl Fixture for Inline {
    fn pair(&self, a: Limits, b: Limits) -> (Side, Side) {
        let (a, b) = self.0.open(LinkKind::Inline, a, b).unwrap();
        (Side::boxed(a.link, a.bell), Side::boxed(b.link, b.bell))
    }

    fn raw(&self, limits: Limits) -> Option<(Side, Box<dyn Wire>)> {
        let bell = Doorbell::default();
        let (channel, links) = self.serve(limits, bell.clone());
        let (out, outgoing) = mpsc::channel(16);
        let attach = StreamAttach { link_id: 7, secret: ticket().secret.expose().to_vec() };
        out.try_send(StreamStagesRequest { attach: Some(attach), frame: Bytes::new() }).unwrap();
        let responses = self.block_on(async {
            let requests = ReceiverStream::new(outgoing);
            LayerStageServiceClient::new(channel).stream_stages(requests).await.unwrap().into_inner()
        });
        let side = Side::new(links.recv_timeout(PATIENCE).unwrap(), bell);
        Some((side, Box::new(RawStream { out: Some(out), _responses: responses })))
    }
}

struct RawStream {
    out: Option<mpsc::Sender<StreamStagesRequest>>,
    _responses: Streaming<StreamStagesResponse>,
}

impl Wire for RawStream {
    fn write(&mut self, bytes: &[u8]) {
        let frame = Bytes::copy_from_slice(bytes);
        let out = self.out.as_ref().unwrap();
        out.blocking_send(StreamStagesRequest { attach: None, frame }).unwrap();
    }

    /// Half a message cannot be sent; the stream ends instead.
    fn cut_within(&mut self, _: &[u8]) {
        self.out = None;
    }
}

contract::contract_tests!(Inline::new());

#[test]
fn an_attachment_is_refused_by_name() {
    let inline = Inline::new();
    let (channel, _links) = inline.serve(contract::limits("A"), Doorbell::default());
    let dial = |ticket: Ticket| {
        let dialed = dial(channel.clone(), &ticket, contract::limits("B"), Doorbell::default(), PATIENCE);
        inline.block_on(dialed).map(|link| link.limits().kind)
    };
    let refusal = |result: Result<LinkKind, AttachError>| match result {
        Err(AttachError::Refused { refusal, .. }) => refusal,
        other => panic!("{other:?}"),
    };
    assert_eq!(refusal(dial(Ticket { link_id: LinkId(8), ..ticket() })), Refusal::WrongKind);
    assert!(dial(ticket()).is_ok());
    assert_eq!(refusal(dial(ticket())), Refusal::Unknown);
}

#[test]
fn a_stream_that_does_not_attach_is_ended() {
    let inline = Inline::new();
    let (channel, _links) = inline.serve(contract::limits("A"), Doorbell::default());
    let open = |first: Option<StreamStagesRequest>| {
        let (out, outgoing) = mpsc::channel(1);
        first.into_iter().for_each(|first| out.try_send(first).unwrap());
        let mut client = LayerStageServiceClient::new(channel.clone());
        let status = inline.block_on(client.stream_stages(ReceiverStream::new(outgoing))).err().unwrap();
        drop(out);
        status
    };
    assert_eq!(open(None).code(), tonic::Code::DeadlineExceeded);
    let unattached = open(Some(StreamStagesRequest { attach: None, frame: Bytes::from_static(b"x") }));
    assert!(unattached.message().starts_with("attach:"), "{unattached}");
    let attach = StreamAttach { link_id: 7, secret: vec![1; 15] };
    let short = open(Some(StreamStagesRequest { attach: Some(attach), frame: Bytes::new() }));
    assert!(short.message().starts_with("attach.secret:"), "{short}");
}
