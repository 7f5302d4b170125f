//! `attention-svc probe`: whether a rank is ready, as a container's health check asks. `doctor` looks closer.
use afd_common::config::units::Millis;
use afd_common::proto::v1;
use anyhow::anyhow;
use clap::Args;
use ffn_svc::probe::about;
use ffn_svc::probe::dial::{self, TlsOptions, Token};
use ffn_svc::probe::ready::check_ready;

/// Ask a running rank whether it is ready.
#[derive(Clone, Debug, Args)]
pub struct ProbeArgs {
    /// Address of the rank, host:port
    #[arg(value_parser = dial::address)]
    address: String,
    /// How long to wait for its answer (a bare number: milliseconds)
    #[arg(long, value_name = "MS", default_value = "3000", value_parser = Millis::positive)]
    timeout_ms: Millis,
    /// How to get there
    #[command(flatten)]
    tls: TlsOptions,
}

/// A sentence about a rank that is ready.
///
/// # Errors
/// When it is not, or does not answer in time.
pub async fn run(args: ProbeArgs) -> anyhow::Result<String> {
    let (address, patience, tls) = (&args.address, args.timeout_ms.0, args.tls.load()?);
    let asked = async {
        // Health is told to everybody.
        let channel = dial::dial(address, tls.as_ref(), &Token::default(), patience).await;
        let channel = channel.map_err(|error| anyhow!("cannot be reached: {error}"))?;
        check_ready(channel, v1::Role::Attention).await
    };
    about(address, patience, asked).await.map(|()| format!("{address} is ready"))
}
