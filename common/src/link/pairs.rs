//! Both ends of a link in one process, over the transport that two processes would use: for [`timing`](super::timing) and
//! for tests.
use std::net::{SocketAddr, TcpListener};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};

use super::attach::{self, AttachError};
use super::grants::{LinkId, Refusal, Secret, Ticket};
use super::inline::{self, InlineLink, ResponseStream};
use super::{Doorbell, HopLink, InFrame, Limits, LinkError, LinkKind, loopback};
use crate::net::{self, Listener, NetError};
use crate::proto::v1::layer_stage_service_server::{LayerStageService, LayerStageServiceServer};
use crate::proto::v1::{
    DescribeRequest, DescribeResponse, RunStageRequest, RunStageResponse, StreamStagesRequest,
};

/// For a handshake within one process.
const PATIENCE: Duration = Duration::from_secs(20);
/// What both ends know a link by.
const LINK: LinkId = LinkId(7);
const SECRET: &[u8; Secret::BYTES] = b"0123456789abcdef";

/// One end and the bell it rings.
pub struct End {
    /// The end.
    pub link: Box<dyn HopLink>,
    /// Rung by it.
    pub bell: Doorbell,
}

impl End {
    /// The next frame, waiting for it.
    ///
    /// # Errors
    /// As [`HopLink::poll_recv`]; [`LinkError::Lost`] when nothing comes within `patience`.
    pub fn next(&mut self, patience: Duration) -> Result<InFrame, LinkError> {
        let deadline = Instant::now() + patience;
        loop {
            let seen = self.bell.count();
            if let Some(frame) = self.link.poll_recv()? {
                return Ok(frame);
            }
            if !self.bell.wait(seen, Some(deadline)) {
                let peer = self.link.limits().peer.clone();
                return Err(LinkError::Lost { peer, what: format!("nothing came within {patience:?}") });
            }
        }
    }
}

/// Why there is no pair.
#[derive(Debug, thiserror::Error)]
pub enum PairError {
    /// No socket, or no thread.
    #[error("a link within this process: {0}")]
    System(#[from] std::io::Error),
    /// The handshake failed.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// No port for the inline link.
    #[error(transparent)]
    Net(#[from] NetError),
    /// The inline link's server cannot be reached.
    #[error("connecting to the inline link: {0}")]
    Connect(#[from] tonic::transport::Error),
    /// The dialed end was never handed over.
    #[error("the far end of the {0} link did not come up")]
    FarEnd(LinkKind),
}

/// Opens pairs; the runtime serves inline links for as long as it lives.
pub struct Pairs {
    runtime: Runtime,
}

impl Pairs {
    /// Starts a runtime.
    ///
    /// # Errors
    /// The system has no threads for it.
    pub fn new() -> Result<Self, PairError> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        Ok(Self { runtime })
    }

    /// For what else belongs to an inline link.
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// Two ends of `kind` joined to each other, the dialing one first. Blocks.
    ///
    /// # Errors
    /// [`PairError`].
    pub fn open(&self, kind: LinkKind, a: Limits, b: Limits) -> Result<(End, End), PairError> {
        let (bell_a, bell_b) = (Doorbell::default(), Doorbell::default());
        let (a, b) = (Limits { kind, ..a }, Limits { kind, ..b });
        let (ours, theirs): (Box<dyn HopLink>, Box<dyn HopLink>) = match kind {
            LinkKind::Loopback => {
                let (a, b) = loopback::pair((a, bell_a.clone()), (b, bell_b.clone()));
                (Box::new(a), Box::new(b))
            }
            LinkKind::Tcp | LinkKind::Shm => attached((a, bell_a.clone()), (b, bell_b.clone()))?,
            LinkKind::Inline => {
                let (channel, links) = self.serve_inline(b, bell_b.clone())?;
                let ticket = ticket();
                let dialed = inline::dial(channel, &ticket, a, bell_a.clone(), PATIENCE);
                let dialed = self.runtime.block_on(dialed)?;
                let answered = links.recv_timeout(PATIENCE).map_err(|_| PairError::FarEnd(kind))?;
                (Box::new(dialed), Box::new(answered))
            }
            // No host-driven link.
            LinkKind::Nccl | LinkKind::CudaIpc => return Err(PairError::FarEnd(kind)),
        };
        Ok((End { link: ours, bell: bell_a }, End { link: theirs, bell: bell_b }))
    }

    /// A server that answers the one stream with [`ticket`], and where its end comes out.
    ///
    /// # Errors
    /// [`PairError`].
    pub(super) fn serve_inline(
        &self,
        limits: Limits,
        bell: Doorbell,
    ) -> Result<(Channel, mpsc::Receiver<InlineLink>), PairError> {
        let (accepted, links) = mpsc::channel();
        let max_message_bytes = inline::max_message_bytes(limits.max_body_bytes);
        let service = OneStream { granted: Mutex::new(Some((limits, bell))), accepted };
        let service = LayerStageServiceServer::new(service).max_decoding_message_size(max_message_bytes);
        let router = tonic::service::Routes::new(service).into_axum_router();
        let channel = self.runtime.block_on(async {
            let listener = Listener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await?;
            let endpoint = net::client::endpoint(&listener.address().to_string(), PATIENCE)?;
            tokio::spawn(listener.serve(router, None, net::Options::default(), CancellationToken::new()));
            Ok::<_, PairError>(endpoint.connect().await?)
        })?;
        Ok((channel, links))
    }
}

/// What the dialing end shows.
pub(super) fn ticket() -> Ticket {
    Ticket { link_id: LINK, secret: Secret::from(*SECRET) }
}

type Ends = (Box<dyn HopLink>, Box<dyn HopLink>);

fn attached(a: (Limits, Doorbell), b: (Limits, Doorbell)) -> Result<Ends, PairError> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let accepting = thread::Builder::new().name("accept".into()).spawn(move || {
        let (stream, _) = listener.accept()?;
        let answer = |_: &Ticket| Ok((b.0, b.1, ()));
        Ok::<_, PairError>(attach::accept(stream, PATIENCE, answer)?.0)
    })?;
    let kind = a.0.kind;
    // Had nobody dialed, the thread would wait for ever: it is joined only once somebody has.
    let dialed = attach::dial(address, None, &ticket(), a.0, a.1, PATIENCE)?;
    let answered = accepting.join().map_err(|_| PairError::FarEnd(kind))??;
    Ok((dialed, answered))
}

/// Attaches the one stream it was made for.
struct OneStream {
    granted: Mutex<Option<(Limits, Doorbell)>>,
    accepted: mpsc::Sender<InlineLink>,
}

#[tonic::async_trait]
impl LayerStageService for OneStream {
    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<DescribeResponse>, Status> {
        Err(Status::unimplemented("only a link is served here"))
    }

    async fn run_stage(&self, _: Request<RunStageRequest>) -> Result<Response<RunStageResponse>, Status> {
        Err(Status::unimplemented("only a link is served here"))
    }

    type StreamStagesStream = ResponseStream;

    async fn stream_stages(
        &self,
        request: Request<Streaming<StreamStagesRequest>>,
    ) -> Result<Response<ResponseStream>, Status> {
        let attach = |wanted: &Ticket| match wanted.link_id == LINK {
            true => {
                let mut granted = self.granted.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                let (limits, bell) = granted.take().ok_or(Refusal::Unknown)?;
                Ok((limits, bell, ()))
            }
            false => Err(Refusal::WrongKind),
        };
        let (responses, link, ()) =
            inline::answer(request.into_inner(), Duration::from_millis(500), attach).await?;
        let _ = self.accepted.send(link);
        Ok(Response::new(responses))
    }
}
