//! attention-svc: reads its command line and does what it says.
use std::process::ExitCode;
use std::time::Duration;

use afd_common::telemetry::{KeyValue, OtlpError, OtlpSettings};
use attention_svc::cli::{Cli, Command};
use attention_svc::config::{ServeArgs, ServeConfig};
use attention_svc::serve::Server;
use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};

/// The command line was wrong.
const USAGE: u8 = 2;
/// It was right, and it did not work.
const FAILURE: u8 = 1;
/// Time for the last spans to be sent.
const FLUSH_LIMIT: Duration = Duration::from_secs(3);

fn main() -> ExitCode {
    // Before anything else: libgomp reads its waiting policy before main.
    if let Err(error) = afd_ffi::process::reexec_with_passive_wait() {
        eprintln!("attention-svc: going on with busy waiting, which is slow: {error}");
    }
    let command = Cli::parse().command;
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(FAILURE, error),
    };
    let code = match command {
        Command::Serve(args) => runtime.block_on(serve(*args)),
        Command::Bench(args) => match runtime.block_on(attention_svc::bench::run(*args)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(FAILURE, error),
        },
        Command::Doctor(args) => runtime
            .block_on(attention_svc::doctor::run(*args))
            .unwrap_or_else(|error| fail(FAILURE, format!("{error:#}"))),
        Command::Probe(args) => match runtime.block_on(attention_svc::probe::run(*args)) {
            Ok(sentence) => {
                println!("{sentence}");
                ExitCode::SUCCESS
            }
            Err(error) => fail(FAILURE, format!("{error:#}")),
        },
        Command::Profile(args) => match runtime.block_on(attention_svc::profile::run(args)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(FAILURE, error),
        },
        Command::Plan(args) => {
            attention_svc::plan::cli::run(*args).unwrap_or_else(|error| fail(FAILURE, format!("{error:#}")))
        }
    };
    // What still blocks a thread (a tokenizer on a huge text) must not keep the process.
    runtime.shutdown_background();
    code
}

async fn serve(args: ServeArgs) -> ExitCode {
    let mut config = match ServeConfig::new(args) {
        Ok(config) => config,
        Err(error) => return fail(USAGE, error),
    };
    if let Err(error) = afd_common::telemetry::logs::init(&config.log) {
        return fail(USAGE, error);
    }
    if let Err(error) = export_traces(&mut config) {
        return fail(USAGE, error);
    }
    let spans = config.trace.spans.clone();
    let stop = match stop_signal() {
        Ok(stop) => stop,
        Err(error) => return fail(FAILURE, error),
    };
    let ended = match Server::start(config).await {
        Ok(server) => server.run(stop).await,
        Err(error) => Err(error),
    };
    // Blocks, for at most the limit.
    let _ = tokio::task::spawn_blocking(move || spans.flush(FLUSH_LIMIT)).await;
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(if error.is_usage() { USAGE } else { FAILURE }, error),
    }
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

/// Resolves when the process is told to end.
fn stop_signal() -> std::io::Result<impl Future<Output = ()>> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

fn fail(code: u8, error: impl std::fmt::Display) -> ExitCode {
    eprintln!("attention-svc: {error}");
    ExitCode::from(code)
}
