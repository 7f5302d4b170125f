//! `attention-svc doctor`: looks at a deployment from outside and says what is wrong with it, in sentences.
//!
//! Joins nothing and changes nothing. In reading order: `look` (what each address says of itself) → `diagnose` (what does
//! not go together, pure; each cause once, which `told` keeps) → `report` (table and JSON). Latency and bandwidth are of the way from where it runs: run it
//! beside the attention rank to see that rank's.
use std::path::{Path, PathBuf};
use std::time::Duration;

use afd_common::config::option::{OptionError, refuse};
use afd_common::config::units::Span;
use afd_common::process::exit::Exit;
use afd_common::process::out_file::JsonOut;
use clap::Args;
use ffn_svc::probe::dial::{TlsOptions, Token, address};

mod diagnose;
mod look;
mod report;
#[cfg(test)]
mod tests;
mod told;

use diagnose::diagnose;
use look::{Look, Seen};

/// Check a running deployment from outside.
#[derive(Clone, Debug, Args)]
pub struct DoctorArgs {
    /// Attention ranks, host:port
    #[arg(
        long, value_name = "ADDR,…", value_delimiter = ',', value_parser = address, default_value = "127.0.0.1:8000"
    )]
    attention: Vec<String>,
    /// FFN ranks, host:port [default: those that the attention ranks use]
    #[arg(long, value_name = "ADDR,…", value_delimiter = ',', value_parser = address)]
    ffn: Vec<String>,
    /// How to get there
    #[command(flatten)]
    tls: TlsOptions,
    /// File with a bearer token of the attention ranks' API
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// File with the FFN ranks' join token
    #[arg(long, value_name = "FILE")]
    join_token_file: Option<PathBuf>,
    /// Time for all answers of one address
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = Span::positive)]
    timeout: Span,
    /// Clocks further apart than this are a fault
    #[arg(long, value_name = "TIME", default_value = "500ms")]
    max_clock_skew: Span,
    /// Leave the bandwidth out: it takes some 40 MB each way
    #[arg(long)]
    no_bandwidth: bool,
    /// Also write everything as JSON; - is standard output, without the table
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Looks, prints. [`Exit::Done`] when nothing is wrong, [`Exit::Failed`] when something is.
///
/// # Errors
/// A file of the options cannot be read or written: what is wrong with a deployment is an answer.
pub async fn run(args: DoctorArgs) -> anyhow::Result<Exit> {
    each_once(&args)?;
    let not_written = |error: std::io::Error| -> OptionError {
        let path = args.json.as_deref().unwrap_or(Path::new("-")).display();
        OptionError::Option { option: "--json", what: format!("{path}: {error}") }
    };
    let out = JsonOut::open(args.json.as_deref()).map_err(not_written)?;
    let look = Look {
        tls: args.tls.load()?,
        api_token: Token::read("--api-key-file", args.api_key_file.as_deref())?,
        join_token: Token::read("--join-token-file", args.join_token_file.as_deref())?,
        patience: args.timeout.0,
        bandwidth: !args.no_bandwidth,
    };
    let mut seen = look.at_attention(&args.attention).await;
    let ffn = if args.ffn.is_empty() { used_by(&seen) } else { args.ffn.clone() };
    seen.extend(look.at_ffn(&ffn).await);
    let findings = diagnose(&seen, args.max_clock_skew.0);
    if out.write(&report::json(&seen, &findings)).map_err(not_written)? {
        print!("{}", report::text(&seen, &findings));
    }
    Ok(if findings.is_empty() { Exit::Done } else { Exit::Failed })
}

/// An address given twice would be looked at twice, and in both options it would be two ranks.
fn each_once(args: &DoctorArgs) -> Result<(), OptionError> {
    for (option, names) in [("--attention", &args.attention), ("--ffn", &args.ffn)] {
        if let Some((_, name)) = names.iter().enumerate().find(|(at, name)| names[..*at].contains(name)) {
            return refuse(option, format!("{name:?} is given twice"));
        }
    }
    match args.ffn.iter().find(|name| args.attention.contains(name)) {
        Some(name) => refuse("--ffn", format!("{name:?} is in --attention too: a rank has one role")),
        None => Ok(()),
    }
}

/// Addresses that attention ranks say they use, each once.
fn used_by(seen: &[Seen]) -> Vec<String> {
    let mut all: Vec<String> = seen.iter().flat_map(Seen::peers).map(|peer| peer.address.clone()).collect();
    // The FFN of the monolithic mode has no address.
    all.retain(|address| address.contains(':'));
    all.sort();
    all.dedup();
    all
}

/// For people: "1.5 ms".
fn milliseconds(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}
