//! A rank in this process, and an attention rank's side of the protocol towards it.
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use afd_common::frame::{FrameHeader, FrameKind, RowType, SideKind};
use afd_common::ids::{Epoch, HopKey, Shard};
use afd_common::link::attach::{self, AttachError};
use afd_common::link::contract;
use afd_common::link::grants::{LinkId, Secret, Ticket};
use afd_common::link::{Doorbell, HopLink, InFrame, Limits, LinkError, LinkKind, features, inline};
use afd_common::net::{Listener, client};
use afd_common::process::stop::Told;
use afd_common::proto::v1;
use afd_common::proto::v1::ffn_control_service_client::FfnControlServiceClient;
use afd_common::proto::v1::steps_response::Message;
use afd_common::proto::{PROTOCOL_MAJOR, PROTOCOL_MINOR};
use afd_common::telemetry::Metrics;
use ffn_svc::config::{Config, ServeOptions};
use ffn_svc::rank;
use ffn_svc::serve::{ServeError, Server};
use tch::Tensor;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

/// For everything that ought to take milliseconds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// What the reference's hidden states may differ by.
pub(crate) const TOLERANCE: f64 = 2e-4;

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures")
}

pub(crate) fn checkpoint(name: &str) -> PathBuf {
    fixtures().join("tiny").join(name)
}

/// The reference's hidden states of a checkpoint.
pub(crate) struct Golden(Vec<(String, Tensor)>);

/// What the file of a checkpoint's hidden states is called behind the checkpoint's name.
const HIDDEN: &str = ".hidden.safetensors";

impl Golden {
    /// All checkpoints that the reference computed hidden states of: those of `afd_tests::fixtures::ALL`, whose crate cannot be
    /// asked here because it is built on this one.
    pub(crate) fn names() -> Vec<String> {
        let files = std::fs::read_dir(fixtures().join("expected")).unwrap();
        let name =
            |file: std::fs::DirEntry| Some(file.file_name().to_str()?.strip_suffix(HIDDEN)?.to_owned());
        let names: Vec<_> = files.filter_map(|file| name(file.unwrap())).collect();
        assert!(!names.is_empty(), "no reference is there");
        names
    }

    pub(crate) fn load(name: &str) -> Self {
        let path = fixtures().join("expected").join(format!("{name}{HIDDEN}"));
        Self(Tensor::read_safetensors(path).unwrap())
    }

    pub(crate) fn get(&self, name: &str) -> Tensor {
        let found = self.0.iter().find(|(candidate, _)| candidate == name);
        found.unwrap_or_else(|| panic!("the reference has no {name}")).1.shallow_clone()
    }
}

pub(crate) fn options(name: &str) -> ServeOptions {
    ServeOptions {
        model: Some(checkpoint(name)),
        listen: Some("127.0.0.1:0".parse().unwrap()),
        dtype: Some("float32".parse().unwrap()),
        max_tokens_per_stage: Some(64),
        max_stages: Some(2),
        ..ServeOptions::default()
    }
}

/// A rank that runs until it is dropped or stopped.
pub(crate) struct Rank {
    pub(crate) address: SocketAddr,
    pub(crate) metrics: Metrics,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<Result<(), ServeError>>,
}

impl Rank {
    pub(crate) async fn start(options: ServeOptions) -> Self {
        let config = options.resolve().unwrap();
        let (listener, metrics) = (Listener::bind(config.listen).await.unwrap(), Metrics::new());
        let loaded = rank::load(&config).unwrap();
        let server = rank::start(&config, loaded, listener, &metrics).await.unwrap();
        Self::run(server, metrics, &config)
    }

    pub(crate) fn run(server: Server, metrics: Metrics, config: &Config) -> Self {
        let (stop, stopped) = oneshot::channel::<()>();
        let (address, drain) = (server.address(), config.drain);
        let asked = async {
            let _ = stopped.await;
            Told::Terminate
        };
        let task = tokio::spawn(server.run(asked, drain));
        Self { address, metrics, stop: Some(stop), task }
    }

    pub(crate) async fn shard(name: &str, index: u32, count: u32) -> Self {
        Self::start(ServeOptions { shard: Shard::new(index, count), ..options(name) }).await
    }

    /// Asks it to stop, as SIGTERM does.
    pub(crate) fn ask_to_stop(&mut self) {
        self.stop.take();
    }

    pub(crate) async fn ended(self) -> Result<(), ServeError> {
        timeout(PATIENCE, self.task).await.expect("the rank does not end").unwrap()
    }

    pub(crate) async fn channel(&self) -> Channel {
        client::endpoint(&self.address.to_string(), PATIENCE).unwrap().connect().await.unwrap()
    }

    /// What it serves, as it says itself.
    pub(crate) async fn describe(&self) -> v1::DescribeResponse {
        let mut client = v1::layer_stage_service_client::LayerStageServiceClient::new(self.channel().await);
        client.describe(v1::DescribeRequest {}).await.unwrap().into_inner()
    }

    pub(crate) async fn join_request(&self, rank: u32) -> v1::JoinRequest {
        v1::JoinRequest {
            protocol_major: PROTOCOL_MAJOR,
            protocol_minor: PROTOCOL_MINOR,
            identity: Some(v1::Identity {
                deployment: "test".into(),
                role: v1::Role::Attention.into(),
                rank,
                incarnation: 1,
            }),
            model: self.describe().await.model,
            shard_count: 0,
            link_kinds: [v1::LinkKind::Tcp, v1::LinkKind::Inline, v1::LinkKind::Shm].map(i32::from).to_vec(),
            max_stages: 2,
            max_tokens_per_stage: 64,
            features: Vec::new(),
            join_token: String::new(),
        }
    }

    pub(crate) fn metric(&self, line: &str) -> bool {
        self.metrics.render().unwrap().lines().any(|found| found == line)
    }
}

/// An attention rank's session with an FFN rank.
pub(crate) struct Attention {
    pub(crate) control: FfnControlServiceClient<Channel>,
    pub(crate) joined: v1::JoinResponse,
    pub(crate) steps: mpsc::Sender<v1::StepsRequest>,
    pub(crate) responses: Streaming<v1::StepsResponse>,
    channel: Channel,
    address: SocketAddr,
    row_bytes: usize,
}

impl Attention {
    pub(crate) async fn join(ffn: &Rank, rank: u32) -> Self {
        Self::join_as(ffn, ffn.join_request(rank).await).await.unwrap()
    }

    pub(crate) async fn join_as(ffn: &Rank, request: v1::JoinRequest) -> Result<Self, Status> {
        let channel = ffn.channel().await;
        let hidden = request.model.as_ref().map_or(0, |model| model.hidden_size as usize);
        let mut control = FfnControlServiceClient::new(channel.clone());
        let joined = control.join(request).await?.into_inner();
        let (steps, requests) = mpsc::channel(16);
        let hello = v1::StepsRequest {
            session_id: joined.session_id.clone(),
            message: Some(v1::steps_request::Message::Heartbeat(v1::Heartbeat::default())),
        };
        steps.send(hello).await.unwrap();
        let responses = control.steps(ReceiverStream::new(requests)).await?.into_inner();
        // f32 rows, and nothing beside them.
        let row_bytes = hidden * 4;
        Ok(Self { control, joined, steps, responses, channel, address: ffn.address, row_bytes })
    }

    pub(crate) async fn grant(&mut self, kind: v1::LinkKind) -> Result<v1::LinkGrant, Status> {
        let request = v1::OpenLinksRequest {
            session_id: self.joined.session_id.clone(),
            links: vec![v1::LinkRequest {
                kind: kind.into(),
                credits: 2,
                max_rows: 64,
                ..Default::default()
            }],
        };
        Ok(self.control.open_links(request).await?.into_inner().links.remove(0))
    }

    pub(crate) async fn open(&mut self, kind: v1::LinkKind) -> Link {
        let grant = self.grant(kind).await.unwrap();
        self.attach(&grant, kind).await.unwrap()
    }

    pub(crate) async fn attach(
        &self,
        grant: &v1::LinkGrant,
        kind: v1::LinkKind,
    ) -> Result<Link, AttachError> {
        let ticket =
            Ticket { link_id: LinkId(grant.link_id), secret: Secret::from_slice(&grant.secret).unwrap() };
        let link_kind = match kind {
            v1::LinkKind::Tcp => LinkKind::Tcp,
            v1::LinkKind::Shm => LinkKind::Shm,
            _ => LinkKind::Inline,
        };
        let limits = Limits {
            kind: link_kind,
            peer: format!("F0 at {}", self.address),
            epoch: Epoch(grant.epoch),
            credits: grant.credits,
            max_rows: grant.max_rows,
            max_body_bytes: Limits::body_bytes(grant.max_rows, self.row_bytes).unwrap(),
            checksum: features::checksum(link_kind, &self.joined.features),
        };
        let (bell, address) = (Doorbell::default(), self.address);
        let inner: Box<dyn HopLink> = match limits.kind {
            LinkKind::Inline => {
                Box::new(inline::dial(self.channel.clone(), &ticket, limits, bell.clone(), PATIENCE).await?)
            }
            _ => {
                let bell = bell.clone();
                let dial = move || attach::dial(address, None, &ticket, limits, bell, PATIENCE);
                tokio::task::spawn_blocking(dial).await.unwrap()?
            }
        };
        Ok(Link { inner, bell })
    }

    pub(crate) async fn say(&self, message: v1::steps_request::Message) {
        let request = v1::StepsRequest { session_id: String::new(), message: Some(message) };
        self.steps.send(request).await.unwrap();
    }

    pub(crate) async fn plan(&self, plan: v1::StepPlan) {
        self.say(v1::steps_request::Message::Plan(plan)).await;
    }

    /// The next response that `wanted` takes, or the stream's end.
    pub(crate) async fn hear<T>(
        &mut self,
        wanted: impl Fn(Message) -> Option<T>,
    ) -> Result<Option<T>, Status> {
        timeout(PATIENCE, async {
            while let Some(response) = self.responses.message().await? {
                if let Some(found) = response.message.and_then(&wanted) {
                    return Ok(Some(found));
                }
            }
            Ok(None)
        })
        .await
        .expect("nothing was heard")
    }

    pub(crate) async fn report(&mut self) -> v1::StepReport {
        let wanted = |message| match message {
            Message::Report(report) => Some(report),
            _ => None,
        };
        self.hear(wanted).await.unwrap().expect("the stream ended before a report")
    }

    /// The status that ends the stream.
    pub(crate) async fn refusal(&mut self) -> Status {
        match self.hear(|_| None::<()>).await {
            Err(status) => status,
            Ok(_) => panic!("the stream ended without a status"),
        }
    }
}

/// An attention rank's end of a link.
pub(crate) struct Link {
    inner: Box<dyn HopLink>,
    bell: Doorbell,
}

impl Link {
    /// Sends `[rows, hidden]` f32.
    pub(crate) fn dispatch(&mut self, hop: HopKey, rows: &Tensor) {
        let body = bytes_of(rows);
        let size = rows.size();
        let header = FrameHeader {
            kind: FrameKind::Dispatch,
            dtype: RowType::F32,
            side: SideKind::None,
            epoch: Epoch(0),
            hop,
            rows: size[0] as u32,
            columns: size[1] as u32,
            side_columns: 0,
            body_bytes: body.len() as u32,
        };
        self.inner.send(header, &[&body]).unwrap();
    }

    pub(crate) fn receive(&mut self) -> Result<InFrame, LinkError> {
        contract::next(self.inner.as_mut(), &self.bell)
    }

    /// Waits for the combine of a hop: `[rows, hidden]` f32.
    pub(crate) async fn combine(&mut self, hop: HopKey) -> Tensor {
        let frame = tokio::task::block_in_place(|| self.receive()).unwrap();
        let text = String::from_utf8_lossy(frame.body()).into_owned();
        assert_eq!((frame.header.kind, frame.header.hop), (FrameKind::Combine, hop), "{text}");
        let shape = [i64::from(frame.header.rows), i64::from(frame.header.columns)];
        Tensor::from_data_size(frame.body(), &shape, tch::Kind::Float)
    }

    /// Waits for an error frame: its code and message.
    pub(crate) async fn error(&mut self) -> (Code, String) {
        let frame = tokio::task::block_in_place(|| self.receive()).unwrap();
        assert_eq!(frame.header.kind, FrameKind::Error);
        let (code, text) = frame.body().split_at(4);
        let code = Code::from_i32(i32::from_le_bytes(code.try_into().unwrap()));
        (code, String::from_utf8(text.to_vec()).unwrap())
    }

    /// Waits for the link's end.
    pub(crate) async fn end(&mut self) -> LinkError {
        tokio::task::block_in_place(|| self.receive()).expect_err("the link lives")
    }
}

pub(crate) fn bytes_of(tensor: &Tensor) -> Vec<u8> {
    let tensor = tensor.contiguous();
    let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.copy_data_u8(&mut bytes, tensor.numel());
    bytes
}

pub(crate) fn assert_close(found: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(found.size(), expected.size(), "{what}");
    let worst = (found - expected).abs().max().double_value(&[]);
    assert!(worst <= TOLERANCE, "{what}: differs by {worst}");
}
