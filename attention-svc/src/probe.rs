//! `attention-svc probe`: whether a rank is ready, as a container's health check asks. `doctor` looks closer.
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use ffn_svc::probe::check_ready;
use ffn_svc::probe::dial::{self, TlsOptions, Token};
use tokio::time::timeout;

/// Ask a running rank whether it is ready.
#[derive(Clone, Debug, Args)]
pub struct ProbeArgs {
    /// Address of the rank, host:port
    address: String,
    /// How long to wait for its answer, milliseconds
    #[arg(long, value_name = "MS", default_value_t = 3000)]
    timeout_ms: u64,
    /// How to get there
    #[command(flatten)]
    tls: TlsOptions,
}

/// A sentence about a rank that is ready.
///
/// # Errors
/// When it is not, or does not answer in time.
pub async fn run(args: ProbeArgs) -> anyhow::Result<String> {
    let (address, patience, tls) = (&args.address, Duration::from_millis(args.timeout_ms), args.tls.load()?);
    let asked = async {
        // Health is told to everybody.
        let channel = dial::dial(address, tls.as_ref(), &Token::default(), patience).await;
        check_ready(channel.map_err(|error| anyhow!("cannot connect: {error}"))?).await
    };
    match timeout(patience, asked).await {
        Ok(answer) => answer.with_context(|| address.clone()).map(|()| format!("{address} is ready")),
        Err(_) => bail!("{address} did not answer within {patience:?} (--timeout-ms)"),
    }
}
