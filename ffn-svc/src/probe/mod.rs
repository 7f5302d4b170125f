//! `ffn-svc probe`: one look at a running rank from outside, also as a container's health check, and with `--json` the
//! measure of the way to it.
use std::path::PathBuf;
use std::time::Duration;

use afd_common::config::units::Millis;
use afd_common::proto::v1;
use afd_common::proto::v1::layer_stage_service_client::LayerStageServiceClient;
use afd_common::spelling;
use anyhow::{anyhow, bail};
use serde_json::json;
use tokio::time::timeout;
use tonic::{Code, Status};

pub mod dial;
pub mod edge;
pub mod ready;

use dial::{DialedChannel, TlsOptions, Token};
use edge::Edge;
use ready::check_ready;

/// Options of `ffn-svc probe`.
#[derive(Clone, Debug, clap::Args)]
pub struct ProbeOptions {
    /// Address of the rank, host:port
    #[arg(value_parser = dial::address)]
    pub address: String,
    /// How long to wait for all of its answers (a bare number: milliseconds)
    #[arg(long, value_name = "MS", default_value = "3000", value_parser = Millis::positive)]
    pub timeout_ms: Millis,
    /// How to get there
    #[command(flatten)]
    pub tls: TlsOptions,
    /// File with the rank's join token: without it a rank that has one is asked about its health only
    #[arg(long, value_name = "FILE")]
    pub join_token_file: Option<PathBuf>,
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
    let (address, patience) = (&options.address, options.timeout_ms.0);
    let tls = options.tls.load()?;
    let token = Token::read("--join-token-file", options.join_token_file.as_deref())?;
    let asked = async {
        let channel = dial::dial(address, tls.as_ref(), &token, patience).await;
        ask(options, channel.map_err(|error| anyhow!("cannot be reached: {error}"))?).await
    };
    about(address, patience, asked).await
}

/// What `asked` comes to within `patience`, as a sentence about `address`.
///
/// # Errors
/// The sentence goes on behind the address.
pub async fn about<T>(
    address: &str,
    patience: Duration,
    asked: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    match timeout(patience, asked).await {
        Ok(answer) => answer.map_err(|what| anyhow!("{address} {what:#}")),
        Err(_) => bail!("{address} did not answer within {patience:?} (--timeout-ms)"),
    }
}

async fn ask(options: &ProbeOptions, channel: DialedChannel) -> anyhow::Result<String> {
    check_ready(channel.clone(), v1::Role::Ffn).await?;
    let refused = |status: &Status| anyhow!("{}", dial::refusal(status, "--join-token-file"));
    let mut stages = LayerStageServiceClient::new(channel.clone());
    let described = match stages.describe(v1::DescribeRequest {}).await {
        Ok(described) => described.into_inner(),
        Err(status) if status.code() == Code::Unauthenticated && !options.json => {
            return Ok(format!(
                "{} is ready; it tells more to whoever has a token or certificate: {}",
                options.address,
                status.message()
            ));
        }
        Err(status) => return Err(refused(&status)),
    };
    let edge = edge::measure(channel, options.json).await.map_err(|status| refused(&status))?;
    Ok(if options.json { json(options, &described, &edge) } else { sentence(options, &described, &edge) })
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
        spelling::dtype(model.activation_dtype),
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
            "dtype": spelling::dtype(model.activation_dtype),
        },
        "shard": {"index": shard.index, "count": shard.count},
        "max_rows": described.max_rows,
        "edge": edge.json(),
        "points": {"probes": [{"link": options.link, "latency_us": edge.latency_us(), "bandwidth": bandwidth}]},
    });
    format!("{report:#}")
}
