//! `attention-svc bench`: load on a running server, and how long its answers took. Any address that speaks OpenAI's
//! completions will do, so that servers can be compared.
//!
//! In reading order: `levels` (how much load) → `request` (one answer, timed as it streams) → `sides` (what the two sides
//! did meanwhile) → `stats` (percentiles) → `layers` (where a decode step goes, from the server's own `exposition`) →
//! `report` (tables and JSON). `links` is another command: it needs no server.
use std::path::{Path, PathBuf};

use afd_common::config::option::{OptionError, at_least, refuse};
use afd_common::config::units::Span;
use afd_common::process::exit::Exit;
use afd_common::process::out_file::JsonOut;
use clap::{Args, Subcommand};
use ffn_svc::probe::dial::TlsOptions;

mod exposition;
mod layers;
mod levels;
mod links;
mod report;
mod request;
mod sides;
mod stats;

use levels::{Level, Shape};
use report::Run;
pub(crate) use report::table;
use request::Target;
use sides::Sums;

use crate::served;

/// Measure a running server, or this machine's links.
#[derive(Clone, Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct BenchArgs {
    #[command(subcommand)]
    command: Option<BenchCommand>,
    #[command(flatten)]
    server: ServerArgs,
}

#[derive(Clone, Debug, Subcommand)]
enum BenchCommand {
    /// Round trips and bandwidth of every kind of link on this machine, beside a bare socket and a bare futex
    Links(links::LinksArgs),
}

/// Measure a running server. What is required is an optional type: with a subcommand, clap lets it be absent.
#[derive(Clone, Debug, Args)]
struct ServerArgs {
    /// Server to measure, such as http://127.0.0.1:8000
    #[arg(long, value_name = "URL", required = true, value_parser = served::url)]
    url: Option<String>,
    /// Another server, measured in turn with the first at every level
    #[arg(long, value_name = "URL", value_parser = served::url)]
    compare: Option<String>,
    /// Model to ask for [default: the first one that the server lists]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// File with a bearer token to send
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// File with the FFN ranks' join token, for --layers
    #[arg(long, value_name = "FILE", requires = "layers")]
    join_token_file: Option<PathBuf>,

    /// How to get there
    #[command(flatten)]
    tls: TlsOptions,

    /// Requests in flight, one level each: a new one starts when one ends
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1,4,16", help_heading = "Load")]
    concurrency: Vec<usize>,
    /// Requests a second instead, one level each: they start at random moments (Poisson), whatever is in flight
    #[arg(
        long,
        value_name = "R,…",
        value_delimiter = ',',
        conflicts_with = "concurrency",
        help_heading = "Load"
    )]
    rate: Vec<f64>,
    /// Requests of a level [default: 4 for each in flight, at least 8; 32 for a rate]
    #[arg(long, value_name = "N", help_heading = "Load")]
    requests_per_level: Option<usize>,
    /// Tokens of a prompt; every prompt is another one
    #[arg(long, value_name = "TOKENS", default_value_t = 128, help_heading = "Load")]
    input_len: usize,
    /// Tokens of an answer; end tokens are ignored
    #[arg(long, value_name = "TOKENS", default_value_t = 64, help_heading = "Load")]
    output_len: usize,
    /// Prompts are made of token ids from 3 to below this
    #[arg(long, value_name = "N", default_value_t = 500, help_heading = "Load")]
    vocab_size: u32,
    /// Seed of prompts and of the moments they start [default: another one every time, so that no prompt is cached]
    #[arg(long, value_name = "N", help_heading = "Load")]
    seed: Option<u64>,
    /// Time after which a request has failed
    #[arg(long, value_name = "TIME", default_value = "600s", value_parser = Span::positive, help_heading = "Load")]
    timeout: Span,

    /// Also measure where decode steps go: attention and FFN per layer at every concurrency, from the server's own counters.
    /// With --json, points for `plan calibrate`
    #[arg(long, conflicts_with = "rate")]
    layers: bool,
    /// Also write everything as JSON; - is standard output, without the table
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Why there is nothing to report.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// An option.
    #[error("{0}")]
    Option(String),
    /// The server cannot be asked, or answers something else.
    #[error("{url}: {what}")]
    Server {
        /// Which.
        url: String,
        /// What went wrong.
        what: String,
    },
    /// Every request of a level failed.
    #[error("{url}: every request failed, the first with: {what}")]
    AllFailed {
        /// Which server.
        url: String,
        /// The first failure.
        what: String,
    },
    /// The links of this machine cannot be measured.
    #[error("links: {0}")]
    Links(String),
    /// The report cannot be written.
    #[error("--json {path}: {source}")]
    Write {
        /// Where to.
        path: String,
        /// The system's own words.
        source: std::io::Error,
    },
}

impl BenchError {
    /// Of `--json`.
    fn write(path: Option<&Path>) -> impl Fn(std::io::Error) -> Self {
        let path = path.unwrap_or(Path::new("-")).display().to_string();
        move |source| Self::Write { path: path.clone(), source }
    }

    /// How the process ends with it.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Option(_) | Self::Write { .. } => Exit::Unusable,
            Self::Server { .. } | Self::AllFailed { .. } | Self::Links(_) => Exit::Failed,
        }
    }
}

impl ServerArgs {
    fn check(&self) -> Result<(), OptionError> {
        at_least("--input-len", 1, self.input_len)?;
        at_least("--output-len", 1, self.output_len)?;
        at_least("--vocab-size", 4, self.vocab_size)?;
        let least = layers::MIN_OUTPUT_LEN;
        if self.layers && self.output_len < least {
            let what = format!(
                "is {}; expected at least {least} with --layers, which looks at the server twice during an answer",
                self.output_len
            );
            return refuse("--output-len", what);
        }
        at_least("--requests-per-level", 1, self.requests_per_level.unwrap_or(1))?;
        self.concurrency.iter().try_for_each(|n| at_least("--concurrency", 1, *n).map(drop))?;
        match self.rate.iter().find(|rate| !(rate.is_finite() && **rate > 0.0)) {
            Some(rate) => refuse("--rate", format!("is {rate}; expected more than 0")),
            None => Ok(()),
        }
    }

    fn levels(&self) -> Result<Vec<Level>, BenchError> {
        self.check().map_err(|error| BenchError::Option(error.to_string()))?;
        let closed = |n: &usize| Level {
            shape: Shape::Concurrency(*n),
            requests: self.requests_per_level.unwrap_or((n * 4).max(8)),
        };
        let open =
            |rate: &f64| Level { shape: Shape::Rate(*rate), requests: self.requests_per_level.unwrap_or(32) };
        Ok(match self.rate.is_empty() {
            true => self.concurrency.iter().map(closed).collect(),
            false => self.rate.iter().map(open).collect(),
        })
    }

    async fn target(&self, url: &str) -> Result<Target, BenchError> {
        let token = |option: &str, path: &Option<PathBuf>| -> Result<Option<String>, BenchError> {
            let Some(path) = path else { return Ok(None) };
            let failed = |e| BenchError::Option(format!("{option} {}: {e}", path.display()));
            Ok(Some(std::fs::read_to_string(path).map_err(failed)?.trim().to_owned()))
        };
        let key = token("--api-key-file", &self.api_key_file)?;
        let tokens = [key, token("--join-token-file", &self.join_token_file)?];
        let tls = self.tls.load().map_err(|error| BenchError::Option(format!("{error:#}")))?;
        Target::find(url, self.model.clone(), tokens, tls.as_ref(), self.timeout.0).await
    }
}

/// Measures, prints tables and, where asked for, writes JSON.
///
/// # Errors
/// [`BenchError`]; single requests that fail are counted, not an error.
pub async fn run(args: BenchArgs) -> Result<(), BenchError> {
    match args.command {
        Some(BenchCommand::Links(links)) => links::run(links).await,
        None => server(args.server).await,
    }
}

async fn server(args: ServerArgs) -> Result<(), BenchError> {
    let levels = args.levels()?;
    let not_written = BenchError::write(args.json.as_deref());
    let out = JsonOut::open(args.json.as_deref()).map_err(&not_written)?;
    let url = args.url.as_deref().ok_or_else(|| BenchError::Option("--url is needed".into()))?;
    let mut targets = vec![args.target(url).await?];
    if let Some(url) = &args.compare {
        targets.push(args.target(url).await?);
    }
    let mut runs: Vec<Run> = targets.iter().map(|target| Run::new(target.url(), target.model())).collect();
    let prompts = levels::Prompts::new(
        args.seed.unwrap_or_else(rand::random),
        args.vocab_size,
        args.input_len,
        args.output_len,
    );
    for target in &targets {
        let warm_up = Level { shape: Shape::Concurrency(1), requests: 1 };
        levels::run(target, warm_up, &prompts.warm_up()).await?;
    }
    // Servers take turns at every level, so that a change of the machine's mood touches both.
    for (index, level) in levels.iter().enumerate() {
        for (target, run) in targets.iter().zip(&mut runs) {
            eprintln!("{}: {level}, {} requests", target.url(), level.requests);
            let before = Sums::read(target).await;
            let mut outcome = levels::run(target, *level, &prompts.of_level(index)).await?;
            if let (Some(before), Some(after)) = (before, Sums::read(target).await) {
                outcome.sides = before.until(after);
            }
            run.levels.push(outcome);
        }
    }
    let mut layers = Vec::new();
    for (index, concurrency) in args.concurrency.iter().enumerate().filter(|_| args.layers) {
        eprintln!("{}: layers, {concurrency} in flight", targets[0].url());
        layers.push(layers::measure(&targets[0], &prompts.of_level(index), *concurrency).await?);
    }
    let json = report::json(&runs, &layers, args.input_len, args.output_len);
    if out.write(&json).map_err(not_written)? {
        println!("{}", report::tables(&runs, &layers, args.input_len, args.output_len));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        bench: BenchArgs,
    }

    #[test]
    fn an_option_that_cannot_be_is_named_with_its_value_and_what_can() {
        for (given, said) in [
            ("--input-len 0", "--input-len is 0; expected at least 1"),
            ("--output-len 0", "--output-len is 0; expected at least 1"),
            ("--vocab-size 3", "--vocab-size is 3; expected at least 4"),
            ("--concurrency 1,0", "--concurrency is 0; expected at least 1"),
            ("--requests-per-level 0", "--requests-per-level is 0; expected at least 1"),
            ("--rate 2,0", "--rate is 0; expected more than 0"),
            (
                "--layers --output-len 7",
                "--output-len is 7; expected at least 8 with --layers, which looks at the server twice during an answer",
            ),
        ] {
            let words = format!("bench --url http://a:1 {given}");
            let line = Line::try_parse_from(words.split(' ')).unwrap();
            assert_eq!(line.bench.server.levels().unwrap_err().to_string(), said);
        }
    }
}
