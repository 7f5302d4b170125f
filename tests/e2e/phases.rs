//! A rank that falls silent while it is joined: what is said of it names it, the phase, the time and the option.
use std::net::SocketAddr;

use afd_common::proto::v1;
use afd_common::proto::v1::ffn_control_service_client::FfnControlServiceClient;
use afd_common::proto::v1::ffn_control_service_server::{FfnControlService, FfnControlServiceServer};
use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn};
use anyhow::ensure;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status, Streaming};

use crate::start;

const MODEL: &str = "tiny-mixtral";

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
