//! From the first connection to ready: a rank that falls silent on the way is named with the phase, the time and the
//! option, and those that answer are warm before anybody is served, or, when they come later, before they serve anybody.
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use afd_common::proto::v1;
use afd_common::proto::v1::ffn_control_service_client::FfnControlServiceClient;
use afd_common::proto::v1::ffn_control_service_server::{FfnControlService, FfnControlServiceServer};
use afd_common::proto::v1::inference_service_client::InferenceServiceClient;
use afd_tests::fixtures;
use afd_tests::harness::{self, Deployment, DeploymentSpec, Ffn, Pass, Process};
use afd_tests::oracle;
use anyhow::ensure;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status, Streaming};

use crate::start;

const MODEL: &str = "tiny-mixtral";
const LIMIT: Duration = Duration::from_secs(30);
/// Layers of the model, stages of a step with `--stages 2`, shapes of the warm-up.
const WARM_UP_HOPS: f64 = 4.0 * 2.0 * 2.0;

/// The call that is never answered.
#[derive(Clone, Copy, PartialEq)]
enum At {
    Join,
    OpenLinks,
}

/// Answers as the FFN rank behind it does, up to one call.
struct FallsSilent {
    rank: FfnControlServiceClient<Channel>,
    at: At,
}

#[tonic::async_trait]
impl FfnControlService for FallsSilent {
    async fn join(&self, request: Request<v1::JoinRequest>) -> Result<Response<v1::JoinResponse>, Status> {
        if self.at == At::Join {
            std::future::pending::<()>().await;
        }
        self.rank.clone().join(request.into_inner()).await
    }

    async fn open_links(
        &self,
        _: Request<v1::OpenLinksRequest>,
    ) -> Result<Response<v1::OpenLinksResponse>, Status> {
        std::future::pending().await
    }

    type StepsStream = Streaming<v1::StepsResponse>;

    async fn steps(
        &self,
        request: Request<Streaming<v1::StepsRequest>>,
    ) -> Result<Response<Self::StepsStream>, Status> {
        let requests = request.into_inner().map_while(Result::ok);
        self.rank.clone().steps(requests).await
    }

    async fn probe(&self, _: Request<v1::ProbeRequest>) -> Result<Response<v1::ProbeResponse>, Status> {
        Err(Status::unimplemented("probe"))
    }

    async fn drain(&self, _: Request<v1::DrainRequest>) -> Result<Response<v1::DrainResponse>, Status> {
        Err(Status::unimplemented("drain"))
    }
}

/// Starts one in front of the deployment's FFN rank: where it listens.
async fn falls_silent(deployment: &Deployment, at: At) -> anyhow::Result<SocketAddr> {
    let rank = deployment.spec.pass.grpc(deployment.ffn_addresses[0]).await?;
    let silent = FallsSilent { rank: FfnControlServiceClient::new(rank), at };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let server = Server::builder().add_service(FfnControlServiceServer::new(silent));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    Ok(address)
}

#[tokio::test]
async fn a_rank_that_falls_silent_while_it_is_joined_is_named_with_phase_time_and_option()
-> anyhow::Result<()> {
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 1, replicas: 1 });
    let deployment = Deployment::start(spec).await?;
    let folder = tempfile::tempdir()?;
    // Takes connections, and says nothing on them.
    let mute = std::net::TcpListener::bind("127.0.0.1:0")?;
    let (connects, joins, opens) = (
        mute.local_addr()?,
        falls_silent(&deployment, At::Join).await?,
        falls_silent(&deployment, At::OpenLinks).await?,
    );
    let cases = [
        (connects, format!("connecting: no answer from {connects} within 300 ms (--link-timeout)")),
        (joins, format!("join: no answer from {joins} within 300 ms (--link-timeout)")),
        (opens, format!("open links: no answer from F0 at {opens} within 300 ms (--link-timeout)")),
    ];
    for (n, (address, said)) in cases.into_iter().enumerate() {
        let (rank, name) = ((n + 1).to_string(), format!("A{}", n + 1));
        let more = ["--rank", &rank, "--link-timeout", "300ms", "--join-timeout", "2s"];
        let waiting =
            start::attention(&deployment.spec.model, &address.to_string(), &more, folder.path(), &name)?;
        let (code, log) = tokio::task::spawn_blocking(|| start::refused(waiting)).await??;
        let last = log.lines().last().unwrap_or_default();
        ensure!(code == 1 && last.contains(&said), "exit code {code}, `{said}` is not said:\n{log}");
    }
    Ok(())
}

/// A number that a process shows.
pub(crate) async fn metric(address: SocketAddr, name: &str) -> anyhow::Result<f64> {
    let client = reqwest::Client::builder().no_proxy().build()?;
    harness::metric(&client, &format!("http://{address}/metrics"), name).await
}

/// The model's own continuation of a prompt, asked of one attention rank.
async fn serves(address: SocketAddr) -> anyhow::Result<()> {
    let expected = fixtures::expected(MODEL)?.prompts.remove(0);
    let request = harness::greedy(&expected.input_ids, expected.generated_ids.len() as u32);
    let mut client = InferenceServiceClient::new(Pass::default().grpc(address).await?);
    let (mut stream, mut emitted) = (client.generate(request).await?.into_inner(), Vec::new());
    while let Some(piece) = stream.message().await? {
        emitted.extend(piece.token_ids);
    }
    oracle::same(&expected.generated_ids, &emitted)
}

pub(crate) async fn until(
    process: &Process,
    what: &str,
    is_so: impl AsyncFn() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let deadline = Instant::now() + LIMIT;
    while !is_so().await? {
        ensure!(Instant::now() < deadline, "{what}: not so\n{}", process.log());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

pub(crate) async fn until_ready(process: &Process, address: SocketAddr) -> anyhow::Result<()> {
    let client = reqwest::Client::builder().no_proxy().build()?;
    let url = format!("http://{address}/ready");
    until(process, "ready", async || Ok(client.get(&url).send().await?.status() == 200)).await
}

#[tokio::test]
async fn every_replica_is_warm_before_attention_is_ready_and_one_that_does_not_answer_is_lost_by_name()
-> anyhow::Result<()> {
    let (folder, model) = (tempfile::tempdir()?, fixtures::checkpoint(MODEL));
    let mut ranks = Vec::new();
    for (rank, name) in [("0", "F0"), ("1", "F1"), ("2", "F2")] {
        ranks.push(start::ffn(&model, &["--shard", "0/2", "--rank", rank], folder.path(), name)?);
    }
    let mut addresses = Vec::new();
    for rank in &mut ranks {
        addresses.push(rank.address(LIMIT)?);
    }
    // The other shard comes last: until then attention cannot be ready.
    let last = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let names: Vec<String> = addresses.iter().chain([&last]).map(ToString::to_string).collect();
    let more = ["--stages", "2", "--warmup-timeout", "500ms"];
    let mut attention = start::attention(&model, &names.join(","), &more, folder.path(), "A0")?;
    let address = attention.address(LIMIT)?;
    let joined = async || Ok(attention.log().matches("FFN rank joined").count() == 3);
    until(&attention, "three replicas join", joined).await?;
    ranks[2].signal("STOP")?;
    let listen = last.to_string();
    let other =
        start::ffn(&model, &["--listen", &listen, "--shard", "1/2", "--rank", "3"], folder.path(), "F3")?;
    until_ready(&attention, address).await?;
    for warm in [addresses[0], addresses[1], last] {
        let hops = metric(warm, "afd_ffn_hops_total").await?;
        ensure!(hops >= WARM_UP_HOPS, "ready, and {warm} has had {hops} hops:\n{}", attention.log());
    }
    ensure!(metric(address, "afd_steps_total").await? == 0.0, "the warm-up counts as steps");
    ensure!(metric(address, "afd_kv_blocks_used").await? == 0.0, "the warm-up holds blocks");
    let log = attention.log();
    let lost = log.lines().find(|line| line.contains("FFN rank lost")).unwrap_or_default();
    for part in [&format!("F2 at {}", addresses[2]), "within 500 ms for", "(--warmup-timeout)"] {
        ensure!(lost.contains(part), "`{part}` is not said:\n{log}\n{}", other.log());
    }
    serves(address).await
}

/// An FFN rank that serves, and attention rank 1, which takes the second of two replicas; where that will be.
struct Late {
    folder: tempfile::TempDir,
    _first: Process,
    attention: Process,
    address: SocketAddr,
    late: SocketAddr,
}

impl Late {
    async fn start() -> anyhow::Result<Self> {
        let (folder, model) = (tempfile::tempdir()?, fixtures::checkpoint(MODEL));
        let mut first = start::ffn(&model, &["--rank", "0"], folder.path(), "F0")?;
        let late = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let names = format!("{},{late}", first.address(LIMIT)?);
        let more = ["--rank", "1", "--stages", "2", "--warmup-timeout", "2s"];
        let mut attention = start::attention(&model, &names, &more, folder.path(), "A1")?;
        let address = attention.address(LIMIT)?;
        until_ready(&attention, address).await?;
        Ok(Self { folder, _first: first, attention, address, late })
    }

    /// The second replica: every batch of it takes so much longer.
    fn join(&self, delay: &str) -> anyhow::Result<Process> {
        let listen = self.late.to_string();
        let more = ["--listen", &listen, "--rank", "1", "--inject-delay", delay];
        start::ffn(&fixtures::checkpoint(MODEL), &more, self.folder.path(), "F1")
    }

    async fn until_said(&self, what: &str) -> anyhow::Result<()> {
        until(&self.attention, what, async || Ok(self.attention.log().contains(what))).await
    }

    /// The late rank has had some of its warm-up.
    async fn until_begun(&self) -> anyhow::Result<()> {
        let begun = async || Ok(metric(self.late, "afd_ffn_hops_total").await.is_ok_and(|hops| hops > 0.0));
        until(&self.attention, "the warm-up has begun", begun).await
    }
}

#[tokio::test]
async fn a_rank_that_joins_late_is_warmed_up_beside_the_requests_and_serves_nobody_before()
-> anyhow::Result<()> {
    let pair = Late::start().await?;
    let _late = pair.join("100ms")?;
    pair.until_begun().await?;
    let mut served = 0;
    loop {
        serves(pair.address).await?;
        let hops = metric(pair.late, "afd_ffn_hops_total").await?;
        // Looked at after the count: what is more than the warm-up came after it.
        if pair.attention.log().contains("FFN rank is warm") {
            break;
        }
        ensure!(hops <= WARM_UP_HOPS, "cold, and it has had {hops} hops:\n{}", pair.attention.log());
        served += 1;
    }
    ensure!(served > 0, "no request ended during the warm-up:\n{}", pair.attention.log());
    serves(pair.address).await?;
    let hops = metric(pair.late, "afd_ffn_hops_total").await?;
    ensure!(hops > WARM_UP_HOPS, "warm, and of no use: {hops} hops\n{}", pair.attention.log());
    ensure!(metric(pair.address, "afd_ffn_losses_total").await? == 0.0, "{}", pair.attention.log());
    Ok(())
}

#[tokio::test]
async fn a_late_rank_that_falls_silent_in_its_warm_up_costs_no_request_anything() -> anyhow::Result<()> {
    let pair = Late::start().await?;
    let late = pair.join("100ms")?;
    pair.until_begun().await?;
    late.signal("STOP")?;
    serves(pair.address).await?;
    pair.until_said("FFN rank lost").await?;
    let log = pair.attention.log();
    let lost = log.lines().find(|line| line.contains("FFN rank lost")).unwrap_or_default();
    for part in [&format!("F1 at {}", pair.late), "within 2.0 s while it was warmed up", "(--warmup-timeout)"]
    {
        ensure!(lost.contains(part), "`{part}` is not said:\n{log}");
    }
    ensure!(metric(pair.address, "afd_hop_replays_total").await? == 0.0, "{log}");
    late.signal("CONT")?;
    pair.until_said("FFN rank is warm").await?;
    serves(pair.address).await
}

#[tokio::test]
async fn the_ffn_in_the_same_process_is_warm_too() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let mut attention =
        start::attention(&fixtures::checkpoint(MODEL), "local", &["--stages", "2"], folder.path(), "A0")?;
    let address = attention.address(LIMIT)?;
    until_ready(&attention, address).await?;
    ensure!(metric(address, "afd_hops_total").await? == WARM_UP_HOPS, "{}", attention.log());
    serves(address).await
}
