//! attention-svc: reads its command line and does what it says.
use std::process::ExitCode;
use std::time::{Duration, Instant};

use afd_common::config::idle;
use afd_common::config::option::OptionError;
use afd_common::process::exit::Exit;
use afd_common::process::stop::Stop;
use afd_common::telemetry::{KeyValue, LogError, OtlpError, OtlpSettings, logs};
use attention_svc::bench::{self, BenchError};
use attention_svc::cli::{Cli, Command};
use attention_svc::config::{ServeArgs, ServeConfig};
use attention_svc::profile::{self, ProfileError};
use attention_svc::serve::{ServeError, Server};
use attention_svc::{doctor, plan, probe};
use clap::Parser;

/// Time for the last spans to be sent.
const FLUSH_LIMIT: Duration = Duration::from_secs(3);

fn main() -> ExitCode {
    // First: told to end in its first moments, a service ends as well as ever.
    afd_ffi::process::hold_end();
    // Before anything is opened: libgomp reads its waiting policy before main.
    if let Err(error) = afd_ffi::process::reexec_with_passive_wait() {
        eprintln!("attention-svc: going on with busy waiting, which is slow: {error}");
    }
    afd_ffi::process::keep_nccl_graphs_apart();
    let command = Cli::parse().command;
    if !matches!(command, Command::Serve(_)) {
        afd_ffi::process::let_end();
    }
    Exit::end("attention-svc", run(command), exit_of)
}

fn run(command: Command) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = match command {
        Command::Serve(args) => runtime.block_on(serve(*args)).map(|()| Exit::Done),
        Command::Bench(args) => runtime.block_on(bench::run(*args)).map(|()| Exit::Done).map_err(Into::into),
        Command::Doctor(args) => runtime.block_on(doctor::run(*args)),
        Command::Probe(args) => runtime.block_on(probe::run(*args)).map(|sentence| {
            println!("{sentence}");
            Exit::Done
        }),
        Command::Profile(args) => {
            runtime.block_on(profile::run(args)).map(|()| Exit::Done).map_err(Into::into)
        }
        Command::Plan(args) => plan::cli::run(*args).map(|()| Exit::Done),
    };
    // What still blocks a thread (a tokenizer on a huge text) must not keep the process.
    runtime.shutdown_background();
    outcome
}

async fn serve(args: ServeArgs) -> anyhow::Result<()> {
    let mut config = ServeConfig::new(args)?;
    logs::init(&config.log)?;
    idle::warn(&config.idle);
    export_traces(&mut config)?;
    let spans = config.trace.spans.clone();
    let mut stop = Stop::new()?;
    let (begun, drain) = (Instant::now(), config.drain_timeout);
    let started = tokio::select! {
        started = Server::start(config) => started,
        told = stop.told() => {
            let after_ms = begun.elapsed().as_millis() as u64;
            tracing::info!(why = told.by(), after_ms, "stopped before it was loaded");
            // A thread is loading, and libtorch may not be taken down around it.
            afd_ffi::process::end_at_once(Exit::Done as u8);
        }
    };
    let ended = match started {
        Ok(server) => stop.until_ended(drain, |told| server.run(told)).await,
        Err(error) => Err(error),
    };
    // Blocks, for at most the limit.
    let _ = tokio::task::spawn_blocking(move || spans.flush(FLUSH_LIMIT)).await;
    Ok(ended?)
}

fn exit_of(error: &anyhow::Error) -> Exit {
    let serve = error.downcast_ref::<ServeError>().map(ServeError::exit);
    let bench = error.downcast_ref::<BenchError>().map(BenchError::exit);
    let profile = error.downcast_ref::<ProfileError>().map(ProfileError::exit);
    let is_told = error.is::<OptionError>() || error.is::<LogError>() || error.is::<OtlpError>();
    let told = is_told.then_some(Exit::Unusable);
    serve.or(bench).or(profile).or(told).unwrap_or(Exit::Failed)
}

/// Follows the standard `OTEL_*` variables: without an endpoint among them nothing is recorded.
fn export_traces(config: &mut ServeConfig) -> Result<(), OtlpError> {
    let Some(settings) = OtlpSettings::from_vars("attention-svc", |name| std::env::var(name).ok())? else {
        return Ok(());
    };
    config.trace.sampling = settings.sampling;
    config.trace.spans = settings.start([
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        KeyValue::new("service.namespace", config.ffn.deployment.clone()),
        KeyValue::new("service.instance.id", format!("A{}-{}", config.ffn.rank, std::process::id())),
        KeyValue::new("afd.role", "attention"),
        KeyValue::new("afd.rank", i64::from(config.ffn.rank)),
    ])?;
    Ok(())
}
