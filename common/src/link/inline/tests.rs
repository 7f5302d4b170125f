//! The contract over real gRPC servers, and the attachment.
use std::sync::Mutex;

use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response};

use super::*;
use crate::link::LinkKind;
use crate::link::contract::{self, Fixture, PATIENCE, Side, Wire};
use crate::net::{self, Listener};
use crate::proto::v1::layer_stage_service_server::{LayerStageService, LayerStageServiceServer};
use crate::proto::v1::{DescribeRequest, DescribeResponse, RunStageRequest, RunStageResponse};

const MAX_MESSAGE_BYTES: usize = 20 << 20;

type Accepted = std::sync::mpsc::Sender<InlineLink>;

/// Attaches the one stream it was made for; its ticket is [`ticket`].
struct Service {
    granted: Mutex<Option<(Limits, Doorbell)>>,
    accepted: Accepted,
}

#[tonic::async_trait]
impl LayerStageService for Service {
    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<DescribeResponse>, Status> {
        Err(Status::unimplemented("not in this test"))
    }

    async fn run_stage(&self, _: Request<RunStageRequest>) -> Result<Response<RunStageResponse>, Status> {
        Err(Status::unimplemented("not in this test"))
    }

    type StreamStagesStream = ResponseStream;

    async fn stream_stages(
        &self,
        request: Request<Streaming<StreamStagesRequest>>,
    ) -> Result<Response<ResponseStream>, Status> {
        let attach = |wanted: &Ticket| match wanted.link_id == ticket().link_id {
            true => {
                let (limits, bell) = self.granted.lock().unwrap().take().ok_or(Refusal::Unknown)?;
                Ok((limits, bell, ()))
            }
            false => Err(Refusal::WrongKind),
        };
        let (responses, link, ()) = answer(request.into_inner(), Duration::from_millis(500), attach).await?;
        let _ = self.accepted.send(link);
        Ok(Response::new(responses))
    }
}

fn ticket() -> Ticket {
    Ticket { link_id: LinkId(7), secret: Secret::from_slice(b"0123456789abcdef").unwrap() }
}

/// A server per pair, in a runtime per test.
pub(in crate::link) struct Inline {
    runtime: Runtime,
}

impl Inline {
    pub(in crate::link) fn new() -> Self {
        Self { runtime: Runtime::new().unwrap() }
    }

    fn serve(&self, limits: Limits, bell: Doorbell) -> (Channel, std::sync::mpsc::Receiver<InlineLink>) {
        let (accepted, links) = std::sync::mpsc::channel();
        let service = Service { granted: Mutex::new(Some((limits, bell))), accepted };
        let service = LayerStageServiceServer::new(service).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let router = tonic::service::Routes::new(service).into_axum_router();
        let channel = self.runtime.block_on(async {
            let listener = Listener::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
            let endpoint = net::client::endpoint(&listener.address().to_string(), PATIENCE).unwrap();
            tokio::spawn(listener.serve(router, None, net::Options::default(), CancellationToken::new()));
            endpoint.connect().await.unwrap()
        });
        (channel, links)
    }
}

impl Fixture for Inline {
    fn pair(&self, a: Limits, b: Limits) -> (Side, Side) {
        let bells = (Doorbell::default(), Doorbell::default());
        let (channel, links) = self.serve(b, bells.1.clone());
        let left = self.runtime.block_on(dial(channel, &ticket(), a, bells.0.clone(), PATIENCE)).unwrap();
        (Side::new(left, bells.0), Side::new(links.recv_timeout(PATIENCE).unwrap(), bells.1))
    }

    fn raw(&self, limits: Limits) -> Option<(Side, Box<dyn Wire>)> {
        let bell = Doorbell::default();
        let (channel, links) = self.serve(limits, bell.clone());
        let (out, outgoing) = mpsc::channel(16);
        let attach = StreamAttach { link_id: 7, secret: ticket().secret.expose().to_vec() };
        out.try_send(StreamStagesRequest { attach: Some(attach), frame: Bytes::new() }).unwrap();
        let responses = self.runtime.block_on(async {
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
        inline.runtime.block_on(dialed).map(|link| link.limits().kind)
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
        let status =
            inline.runtime.block_on(client.stream_stages(ReceiverStream::new(outgoing))).err().unwrap();
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
