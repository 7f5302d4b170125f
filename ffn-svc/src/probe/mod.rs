//! `ffn-svc probe`: one look at a running rank from outside, also as a container's health check, and with `--json` the
//! measure of the way to it.
use std::time::Duration;

use afd_common::net::client::endpoint;
use afd_common::proto::v1;
use afd_common::proto::v1::layer_stage_service_client::LayerStageServiceClient;
use anyhow::{Context, bail};
use serde_json::json;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

pub mod edge;

use edge::Edge;

/// Options of `ffn-svc probe`.
#[derive(Clone, Debug, clap::Args)]
pub struct ProbeOptions {
    /// Address of the rank, host:port
    pub address: String,
    /// How long to wait for all of its answers, milliseconds
    #[arg(long, value_name = "MS", default_value_t = 3000)]
    pub timeout_ms: u64,
    /// Measure bandwidth too, and print everything as JSON, with the point that `attention-svc plan calibrate` reads
    #[arg(long)]
    pub json: bool,
    /// Which of the planner's links the way to this rank is
    #[arg(long, value_name = "LINK", value_enum, default_value_t = LinkName::ScaleOut, requires = "json")]
    pub link: LinkName,
}

/// The planner's two kinds of link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkName {
    /// Within one fast domain
    ScaleUp,
    /// Between domains: the network
    ScaleOut,
}

/// What is to be printed about a rank that is ready: a sentence, or JSON.
///
/// # Errors
/// When it is not, or does not answer in time.
pub async fn probe(options: &ProbeOptions) -> anyhow::Result<String> {
    let patience = Duration::from_millis(options.timeout_ms);
    match timeout(patience, ask(options, patience)).await {
        Ok(answer) => answer.with_context(|| options.address.clone()),
        Err(_) => bail!("{} did not answer within {patience:?} (--timeout-ms)", options.address),
    }
}

async fn ask(options: &ProbeOptions, patience: Duration) -> anyhow::Result<String> {
    let channel = endpoint(&options.address, patience)?.connect().await.context("cannot connect")?;
    check_ready(channel.clone()).await?;
    let mut stages = LayerStageServiceClient::new(channel.clone());
    let described = stages.describe(v1::DescribeRequest {}).await?.into_inner();
    let edge = edge::measure(channel, options.json).await?;
    Ok(if options.json { json(options, &described, &edge) } else { sentence(options, &described, &edge) })
}

async fn check_ready(channel: Channel) -> anyhow::Result<()> {
    let asked = HealthCheckRequest { service: "ready".into() };
    let status = HealthClient::new(channel).check(asked).await.context("health")?.into_inner().status();
    if status != ServingStatus::Serving {
        bail!("not ready: {}", status.as_str_name());
    }
    Ok(())
}

fn sentence(options: &ProbeOptions, described: &v1::DescribeResponse, edge: &Edge) -> String {
    let (model, shard) = (described.model.clone().unwrap_or_default(), described.shard.unwrap_or_default());
    format!(
        "{} is ready: {} ({} layers, hidden size {}, {}), shard {} of {}, at most {} rows a stage; fingerprint {}; \
         round trip {} µs",
        options.address,
        model.architecture,
        model.num_layers,
        model.hidden_size,
        model.activation_dtype().as_str_name(),
        shard.index,
        shard.count,
        described.max_rows,
        model.fingerprint,
        edge.round_trip.as_micros()
    )
}

fn json(options: &ProbeOptions, described: &v1::DescribeResponse, edge: &Edge) -> String {
    let (model, shard) = (described.model.clone().unwrap_or_default(), described.shard.unwrap_or_default());
    let bandwidth = format!("{:e} B/s", edge.bandwidth.unwrap_or_default());
    let report = json!({
        "address": options.address,
        "model": {
            "architecture": model.architecture,
            "fingerprint": model.fingerprint,
            "layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "dtype": model.activation_dtype().as_str_name(),
        },
        "shard": {"index": shard.index, "count": shard.count},
        "max_rows": described.max_rows,
        "edge": edge.json(),
        "points": {"probes": [{"link": options.link, "latency_us": edge.latency_us(), "bandwidth": bandwidth}]},
    });
    format!("{report:#}")
}
