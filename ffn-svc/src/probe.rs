//! `ffn-svc probe`: one look at a running rank from outside, also as a container's health check.
use std::time::{Duration, Instant};

use afd_common::net::client::endpoint;
use afd_common::proto::v1;
use afd_common::proto::v1::ffn_control_service_client::FfnControlServiceClient;
use afd_common::proto::v1::layer_stage_service_client::LayerStageServiceClient;
use anyhow::{Context, bail};
use tokio::time::timeout;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

/// Round trips of which the fastest is told.
const ROUND_TRIPS: usize = 5;

/// Options of `ffn-svc probe`.
#[derive(Clone, Debug, clap::Args)]
pub struct ProbeOptions {
    /// Address of the rank, host:port
    pub address: String,
    /// How long to wait for all of its answers, milliseconds
    #[arg(long, value_name = "MS", default_value_t = 3000)]
    pub timeout_ms: u64,
}

/// A sentence about a rank that is ready.
///
/// # Errors
/// When it is not, or does not answer in time.
pub async fn probe(options: &ProbeOptions) -> anyhow::Result<String> {
    let (address, patience) = (&options.address, Duration::from_millis(options.timeout_ms));
    match timeout(patience, ask(address, patience)).await {
        Ok(answer) => answer.with_context(|| address.clone()),
        Err(_) => bail!("{address} did not answer within {patience:?} (--timeout-ms)"),
    }
}

async fn ask(address: &str, patience: Duration) -> anyhow::Result<String> {
    let channel = endpoint(address, patience)?.connect().await.context("cannot connect")?;
    let asked = HealthCheckRequest { service: "ready".into() };
    let status =
        HealthClient::new(channel.clone()).check(asked).await.context("health")?.into_inner().status();
    if status != ServingStatus::Serving {
        bail!("not ready: {}", status.as_str_name());
    }
    let described =
        LayerStageServiceClient::new(channel.clone()).describe(v1::DescribeRequest {}).await?.into_inner();
    let (model, shard) = (described.model.unwrap_or_default(), described.shard.unwrap_or_default());
    let mut control = FfnControlServiceClient::new(channel);
    let mut fastest = Duration::MAX;
    for _ in 0..ROUND_TRIPS {
        let begun = Instant::now();
        control.probe(v1::ProbeRequest { payload: vec![0; 8] }).await?;
        fastest = fastest.min(begun.elapsed());
    }
    Ok(format!(
        "{address} is ready: {} ({} layers, hidden size {}, {}), shard {} of {}, at most {} rows a stage; fingerprint {}; \
         round trip {} µs",
        model.architecture,
        model.num_layers,
        model.hidden_size,
        model.activation_dtype().as_str_name(),
        shard.index,
        shard.count,
        described.max_rows,
        model.fingerprint,
        fastest.as_micros()
    ))
}
