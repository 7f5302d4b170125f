//! `ffn-svc`: the FFN role as a process.
use std::process::ExitCode;
use std::time::Duration;

use afd_common::net::Listener;
use afd_common::telemetry::{KeyValue, Metrics, OtlpError, OtlpSettings, logs};
use anyhow::Context;
use clap::{Parser, Subcommand};
use ffn_svc::announce::Announcing;
use ffn_svc::config::{Config, ConfigError, ServeOptions};
use ffn_svc::{place, probe, rank};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Time for the last spans to be sent.
const FLUSH_LIMIT: Duration = Duration::from_secs(3);
/// Threads of the control plane; the engine has its own.
const CONTROL_THREADS: usize = 2;

/// The FFN role of attention-FFN disaggregated inference: holds the experts, serves attention-svc.
#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serves one shard of a model's FFNs
    Serve(Box<ServeOptions>),
    /// Asks a running rank whether it is ready and what it serves
    Probe(probe::ProbeOptions),
    /// Proposes which shard should have which experts, from what running ranks counted
    Place(place::PlaceOptions),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Serve(options) => serve(*options),
        Command::Probe(options) => probe(options),
        Command::Place(options) => place::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ffn-svc: {}", one_line(&error));
            // Another command line would have helped: the code that clap ends with too.
            if error.is::<ConfigError>() || error.is::<OtlpError>() {
                ExitCode::from(2)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

/// The error and its causes, without those that it has told already.
fn one_line(error: &anyhow::Error) -> String {
    error
        .chain()
        .map(ToString::to_string)
        .reduce(|line, cause| if line.contains(&cause) { line } else { format!("{line}: {cause}") })
        .unwrap_or_default()
}

fn serve(options: ServeOptions) -> anyhow::Result<()> {
    let config = options.resolve()?;
    // Before anything is opened or started: the process begins anew.
    let passive = afd_ffi::process::reexec_with_passive_wait();
    logs::init(&config.log).context("--log-level")?;
    if let Err(error) = passive {
        tracing::warn!(%error, "compute threads will spin while they wait");
    }
    // Before any tensor exists.
    config.device.load()?;
    afd_ffi::process::set_compute_threads(config.threads);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(CONTROL_THREADS)
        .thread_name("control")
        .enable_all()
        .build()?;
    let result = runtime.block_on(async {
        let config = export_traces(config)?;
        let spans = config.spans.clone();
        let result = run(config).await;
        // Blocks, for at most the limit.
        let _ = tokio::task::spawn_blocking(move || spans.flush(FLUSH_LIMIT)).await;
        result
    });
    // Nothing that is left may hold up the end.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

/// Follows the standard `OTEL_*` variables: without an endpoint among them nothing is recorded.
fn export_traces(mut config: Config) -> Result<Config, OtlpError> {
    if let Some(settings) = OtlpSettings::from_vars("ffn-svc", |name| std::env::var(name).ok())? {
        config.spans = settings.start([
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
            KeyValue::new("service.namespace", config.deployment.clone()),
            KeyValue::new("service.instance.id", format!("F{}-{}", config.rank, std::process::id())),
            KeyValue::new("afd.role", "ffn"),
            KeyValue::new("afd.rank", i64::from(config.rank)),
            KeyValue::new("afd.shard", i64::from(config.shard.index())),
        ])?;
    }
    Ok(config)
}

async fn run(config: Config) -> anyhow::Result<()> {
    let mut stop = Stop::new()?;
    // First the port: one that is taken should not cost the time of loading.
    let listener = Listener::bind(config.listen).await.context("--listen")?;
    let metrics = Metrics::new();
    let for_loading = config.clone();
    let loaded = tokio::select! {
        loaded = tokio::task::spawn_blocking(move || rank::load(&for_loading)) => loaded??,
        () = stop.asked() => return Ok(()),
    };
    let server = rank::start(&config, loaded, listener, &metrics).await?;
    let address = server.address();
    if let Some(path) = &config.address_file {
        rank::write_address(path, address).with_context(|| format!("--address-file {}", path.display()))?;
    }
    tracing::info!(
        %address, advertise = config.advertise.as_deref().unwrap_or("as it listens"), shard = %config.shard,
        rank = config.rank, threads = config.threads, "ready"
    );
    let announcing = Announcing::start(&config, &server);
    let asked = async {
        stop.asked().await;
        // Before it drains: whoever hears of it does not come back.
        announcing.leave().await;
    };
    server.run(asked, config.drain).await?;
    tracing::info!("stopped");
    Ok(())
}

async fn ask(options: probe::ProbeOptions) -> anyhow::Result<()> {
    println!("{}", probe::probe(&options).await?);
    Ok(())
}

fn probe(options: probe::ProbeOptions) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(ask(options))
}

/// SIGTERM, or Ctrl-C.
struct Stop {
    terminate: Signal,
    interrupt: Signal,
}

impl Stop {
    fn new() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn asked(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
