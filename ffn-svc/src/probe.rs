//! `ffn-svc probe`: one look at a running rank from outside, also as a container's health check.
use std::path::PathBuf;
use std::time::{Duration, Instant};

use afd_common::net::client;
use afd_common::net::tls::{ClientTls, Identity, PeerTls};
use afd_common::proto::v1;
use afd_common::proto::v1::ffn_control_service_client::FfnControlServiceClient;
use afd_common::proto::v1::layer_stage_service_client::LayerStageServiceClient;
use anyhow::{Context, anyhow, bail};
use tokio::time::timeout;
use tonic::Code;
use tonic::metadata::{Ascii, MetadataValue};
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
    /// CA of the rank's certificate, PEM: it is asked under TLS
    #[arg(long, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// Certificate to show, PEM
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// Key of --tls-cert, PEM
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// File with the rank's join token: without it a rank that has one is asked about its health only
    #[arg(long, value_name = "FILE")]
    pub join_token_file: Option<PathBuf>,
}

impl ProbeOptions {
    fn tls(&self) -> anyhow::Result<Option<PeerTls>> {
        let options = ["--tls-cert", "--tls-key"];
        let named = |(option, what): (&str, String)| anyhow!("{option}: {what}");
        let identity = Identity::of(self.tls_cert.clone(), self.tls_key.clone(), options).map_err(named)?;
        let Some(ca) = &self.tls_ca else { return Ok(None) };
        let tls = ClientTls::load(ca.clone(), identity).map_err(|what| anyhow!("--tls-ca: {what}"))?;
        let host = self.address.rsplit_once(':').map_or(self.address.as_str(), |(host, _)| host);
        Ok(Some(tls.peer(host)?))
    }

    fn token(&self) -> anyhow::Result<Option<MetadataValue<Ascii>>> {
        let Some(path) = &self.join_token_file else { return Ok(None) };
        let named = || format!("--join-token-file {}", path.display());
        let token = std::fs::read_to_string(path).with_context(named)?;
        Ok(Some(format!("Bearer {}", token.trim()).parse().with_context(named)?))
    }
}

/// A sentence about a rank that is ready.
///
/// # Errors
/// When it is not, or does not answer in time.
pub async fn probe(options: &ProbeOptions) -> anyhow::Result<String> {
    let (address, patience) = (&options.address, Duration::from_millis(options.timeout_ms));
    let (tls, token) = (options.tls()?, options.token()?);
    match timeout(patience, ask(address, tls, token, patience)).await {
        Ok(answer) => answer.with_context(|| address.clone()),
        Err(_) => bail!("{address} did not answer within {patience:?} (--timeout-ms)"),
    }
}

async fn ask(
    address: &str,
    tls: Option<PeerTls>,
    token: Option<MetadataValue<Ascii>>,
    patience: Duration,
) -> anyhow::Result<String> {
    let channel = client::connect(address, tls.as_ref(), patience).await;
    let channel = channel.map_err(|error| anyhow!("cannot connect: {error}"))?;
    let asked = HealthCheckRequest { service: "ready".into() };
    let status =
        HealthClient::new(channel.clone()).check(asked).await.context("health")?.into_inner().status();
    if status != ServingStatus::Serving {
        bail!("not ready: {}", status.as_str_name());
    }
    let with_token = move |mut request: tonic::Request<()>| {
        if let Some(token) = &token {
            request.metadata_mut().insert("authorization", token.clone());
        }
        Ok(request)
    };
    let mut stages = LayerStageServiceClient::with_interceptor(channel.clone(), with_token.clone());
    let described = match stages.describe(v1::DescribeRequest {}).await {
        Ok(described) => described.into_inner(),
        Err(status) if status.code() == Code::Unauthenticated => {
            return Ok(format!(
                "{address} is ready; it tells more to whoever has a token or certificate: {}",
                status.message()
            ));
        }
        Err(status) => return Err(status.into()),
    };
    let (model, shard) = (described.model.unwrap_or_default(), described.shard.unwrap_or_default());
    let mut control = FfnControlServiceClient::with_interceptor(channel, with_token);
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
