//! `grpc.health.v1` as probes and load balancers read it: by service name, live and ready kept apart.
use std::time::Duration;

use anyhow::{Context, ensure};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Streaming};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use crate::pair;

/// For a change that the other process must notice first.
const NOTICE_LIMIT: Duration = Duration::from_secs(60);

#[tokio::test]
async fn every_served_name_answers_a_probe() -> anyhow::Result<()> {
    let deployment = pair().await?;
    let ffn = ["afd.v1.FfnControlService", "afd.v1.LayerStageService"];
    for (address, services) in [
        (deployment.attention_addresses[0], &["afd.v1.InferenceService", "afd.v1.MembershipService"][..]),
        (deployment.ffn_addresses[0], &ffn[..]),
    ] {
        let mut probe = connect(&address.to_string()).await?;
        for name in ["", "live", "ready"].iter().chain(services) {
            let status = check(&mut probe, name).await?;
            ensure!(status == ServingStatus::Serving, "{address}: `{name}` is {status:?}");
        }
        // A probe tells a name that is not known from one that does not serve.
        let error = check(&mut probe, "afd.v1.NoSuchService").await.expect_err("there is no such service");
        ensure!(error.code() == Code::NotFound, "{error}");
        let mut watched = watch(&mut probe, "afd.v1.NoSuchService").await?;
        ensure!(next(&mut watched).await? == ServingStatus::ServiceUnknown);
    }
    Ok(())
}

#[tokio::test]
async fn attention_without_its_ffn_is_live_and_not_ready() -> anyhow::Result<()> {
    let mut deployment = pair().await?;
    let mut probe = connect(&deployment.attention_addresses[0].to_string()).await?;
    let mut ready = watch(&mut probe, "ready").await?;
    ensure!(next(&mut ready).await? == ServingStatus::Serving);

    deployment.ffn[0].kill()?;
    ensure!(next(&mut ready).await? == ServingStatus::NotServing);
    ensure!(check(&mut probe, "live").await? == ServingStatus::Serving);
    ensure!(check(&mut probe, "afd.v1.InferenceService").await? == ServingStatus::NotServing);
    for (path, status) in
        [("/live", 200), ("/v2/health/live", 200), ("/ready", 503), ("/v2/health/ready", 503)]
    {
        let answer = deployment.client().get(deployment.url(0, path)).send().await?;
        ensure!(answer.status() == status, "{path}: {}", answer.status());
    }

    let address = deployment.ffn_addresses[0].to_string();
    deployment.ffn[0] = deployment.start_ffn(0, &address)?;
    ensure!(next(&mut ready).await? == ServingStatus::Serving);
    let answer = deployment.client().get(format!("http://{address}/v2/health/ready")).send().await?;
    ensure!(answer.status() == 200, "/v2/health/ready of the FFN rank: {}", answer.status());
    Ok(())
}

async fn connect(address: &str) -> anyhow::Result<HealthClient<Channel>> {
    let channel = Endpoint::from_shared(format!("http://{address}"))?.connect().await?;
    Ok(HealthClient::new(channel))
}

async fn check(probe: &mut HealthClient<Channel>, service: &str) -> Result<ServingStatus, tonic::Status> {
    let request = HealthCheckRequest { service: service.to_owned() };
    Ok(probe.check(request).await?.into_inner().status())
}

async fn watch(
    probe: &mut HealthClient<Channel>,
    service: &str,
) -> anyhow::Result<Streaming<HealthCheckResponse>> {
    let request = HealthCheckRequest { service: service.to_owned() };
    Ok(probe.watch(request).await?.into_inner())
}

async fn next(watched: &mut Streaming<HealthCheckResponse>) -> anyhow::Result<ServingStatus> {
    let answer = tokio::time::timeout(NOTICE_LIMIT, watched.message()).await;
    let answer = answer.with_context(|| format!("nothing changed within {NOTICE_LIMIT:?}"))?;
    Ok(answer?.context("the watch ended")?.status())
}
