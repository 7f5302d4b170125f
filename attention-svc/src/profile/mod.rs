//! `attention-svc profile`: the next steps of a running attention rank and its FFN ranks as one timeline, in Chrome's trace
//! format, for Perfetto.
//!
//! In reading order: this (the command) → [`route`] (what the rank does, for one caller at a time: asks the engine, collects
//! what FFN ranks report of the same steps) → [`chrome`] (times to lanes).
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use afd_common::config::units::Span;
use afd_common::process::exit::Exit;
use afd_common::process::out_file::OutFile;
use afd_common::spelling::{count, span};
use clap::Args;

pub mod chrome;
pub mod route;
mod under_way;

use crate::served;

/// Added to the server's own limit, for the answer to travel.
const FOR_THE_WAY: Duration = Duration::from_secs(10);

/// Record some steps of a running rank.
#[derive(Clone, Debug, Args)]
pub struct ProfileArgs {
    /// Attention rank to look at, such as http://127.0.0.1:8000
    #[arg(long, value_name = "URL", required = true, value_parser = served::url)]
    url: String,
    /// Steps to record, up to 1000; they need requests to run for
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=route::MAX_STEPS))]
    steps: u64,
    /// Time to wait for them, up to 10m
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = patience)]
    timeout: Span,
    /// Where to write the timeline; open it at https://ui.perfetto.dev; - is standard output
    #[arg(long, value_name = "FILE.json", default_value = "profile.json")]
    out: PathBuf,
    /// File with a bearer token to send
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
}

/// What an answer says beside its timeline.
#[derive(Debug, Default, serde::Deserialize)]
struct Answer {
    #[serde(default, rename = "otherData")]
    other_data: Recording,
}

/// See [`route`].
#[derive(Debug, Default, serde::Deserialize)]
#[serde(default)]
struct Recording {
    /// None in the answer of an earlier version.
    steps: Option<u64>,
    /// Why there are fewer than were asked for, with both numbers.
    fewer: Option<String>,
}

/// Why there is no timeline.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The server cannot be asked, or has nothing to show.
    #[error("{url} {what}")]
    Server {
        /// Which.
        url: String,
        /// What went wrong, as the sentence goes on behind its address.
        what: String,
    },
    /// A file.
    #[error("{option} {path}: {source}")]
    File {
        /// Which option names it.
        option: &'static str,
        /// Which file.
        path: String,
        /// The system's own words.
        source: std::io::Error,
    },
}

impl ProfileError {
    /// How the process ends with it.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Server { .. } => Exit::Failed,
            Self::File { .. } => Exit::Unusable,
        }
    }
}

/// Asks for the timeline and writes it.
///
/// # Errors
/// [`ProfileError`].
pub async fn run(args: ProfileArgs) -> Result<(), ProfileError> {
    // First: a path that is no good should not cost a recording.
    let out = match args.out.as_os_str() == "-" {
        true => None,
        false => Some(OutFile::open(&args.out).map_err(|source| file("--out", &args.out, source))?),
    };
    let failed = |what: String| ProfileError::Server { url: args.url.clone(), what };
    let limit = args.timeout.0 + FOR_THE_WAY;
    let client = reqwest::Client::builder().no_proxy().timeout(limit).build();
    let begun = Instant::now();
    let no_answer =
        |error: reqwest::Error| match (served::no_answer(&error, begun.elapsed()), error.is_timeout()) {
            (what, true) => {
                let way = span(FOR_THE_WAY);
                failed(format!("{what} (--timeout {}, and {way} for the answer's way)", span(args.timeout.0)))
            }
            (what, false) => failed(what),
        };
    let client = client.map_err(no_answer)?;
    let wanted = serde_json::json!({"steps": args.steps, "timeout_s": args.timeout.0.as_secs_f64()});
    let mut request = client.post(format!("{}/profile", args.url.trim_end_matches('/'))).json(&wanted);
    if let Some(path) = &args.api_key_file {
        let read = std::fs::read_to_string(path);
        let key = read.map_err(|source| file("--api-key-file", path, source))?;
        request = request.bearer_auth(key.trim());
    }
    let answer = request.send().await.map_err(no_answer)?;
    let status = answer.status();
    let text = answer.text().await.map_err(no_answer)?;
    if !status.is_success() {
        return Err(failed(format!("refuses: {}", served::refusal(status, &text))));
    }
    let Answer { other_data: Recording { steps, fewer } } = serde_json::from_str(&text).unwrap_or_default();
    let recorded = fewer.or(steps.map(|steps| count(steps, "step"))).unwrap_or_else(|| "recorded".into());
    let (bytes, path) = (text.len(), args.out.display());
    let written = match out {
        // What is read there is the timeline and nothing else.
        None => std::io::stdout()
            .lock()
            .write_all(text.as_bytes())
            .inspect(|()| eprintln!("{recorded}: {bytes} bytes")),
        Some(out) => out.write(&text).inspect(|()| {
            println!("{recorded}: {bytes} bytes written to {path}; open it at https://ui.perfetto.dev");
        }),
    };
    written.map_err(|source| file("--out", &args.out, source))
}

fn patience(text: &str) -> Result<Span, String> {
    match Span::positive(text)? {
        Span(time) if time <= route::MAX_TIMEOUT => Ok(Span(time)),
        _ => Err("expected at most 10m".into()),
    }
}

fn file(option: &'static str, path: &std::path::Path, source: std::io::Error) -> ProfileError {
    ProfileError::File { option, path: path.display().to_string(), source }
}
