//! `ffn-svc`: the FFN role as a process.
use std::process::ExitCode;
use std::time::{Duration, Instant};

use afd_common::config;
use afd_common::config::device::DeviceError;
use afd_common::config::idle;
use afd_common::config::option::OptionError;
use afd_common::net::Listener;
use afd_common::process::address_file::{self, AddressFileError};
use afd_common::process::exit::{self, Exit};
use afd_common::process::stop::Stop;
use afd_common::spelling;
use afd_common::telemetry::{KeyValue, LogError, Metrics, OtlpError, OtlpSettings, logs};
use anyhow::anyhow;
use clap::{Parser, Subcommand};
use ffn_svc::announce::Announcing;
use ffn_svc::config::{Config, ServeOptions};
use ffn_svc::rank::{Loaded, StartError};
use ffn_svc::{place, probe, rank};

/// Time for the last spans to be sent.
const FLUSH_LIMIT: Duration = Duration::from_secs(3);
/// Threads of the control plane; the engine has its own.
const CONTROL_THREADS: usize = 2;

/// The FFN role of a disaggregated language model: experts and dense FFNs of every layer, for attention-svc
#[derive(Parser)]
#[command(name = "ffn-svc", version, max_term_width = 110, propagate_version = true, after_help = exit::help())]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve one shard of every layer's FFN
    #[command(after_help = config::after_help())]
    Serve(Box<ServeOptions>),
    /// Ask a running rank whether it is ready and what it serves, as a container's health check does
    #[command(after_help = config::after_help())]
    Probe(probe::ProbeOptions),
    /// Propose which shard should have which experts, from what running ranks counted
    #[command(after_help = exit::help())]
    Place(place::PlaceOptions),
}

fn main() -> ExitCode {
    // First: told to end in its first moments, a service ends as well as ever.
    afd_ffi::process::hold_end();
    let command = Cli::parse().command;
    if !matches!(command, Command::Serve(_)) {
        afd_ffi::process::let_end();
    }
    let outcome = match command {
        Command::Serve(options) => serve(*options),
        Command::Probe(options) => probe(options),
        Command::Place(options) => place::run(&options),
    };
    Exit::end("ffn-svc", outcome.map(|()| Exit::Done), exit_of)
}

fn exit_of(error: &anyhow::Error) -> Exit {
    let start = error.downcast_ref::<StartError>().map(StartError::exit);
    let is_told = error.is::<OptionError>()
        || error.is::<LogError>()
        || error.is::<OtlpError>()
        || error.is::<DeviceError>()
        || error.is::<AddressFileError>();
    start.or(is_told.then_some(Exit::Unusable)).unwrap_or(Exit::Failed)
}

fn serve(options: ServeOptions) -> anyhow::Result<()> {
    let config = options.resolve()?;
    // Before anything is opened or started: the process begins anew.
    let passive = afd_ffi::process::reexec_with_passive_wait();
    afd_ffi::process::keep_nccl_graphs_apart();
    logs::init(&config.log)?;
    idle::warn(&config.idle);
    if let Err(error) = passive {
        tracing::warn!(%error, "compute threads will spin while they wait");
    }
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
    let (mut stop, begun) = (Stop::new()?, Instant::now());
    // First the port: one that is taken should not cost the time of loading.
    let listener = Listener::bind(config.listen).await.map_err(|error| anyhow!("--listen {error}"))?;
    let metrics = Metrics::new();
    let for_loading = config.clone();
    let loaded = tokio::select! {
        loaded = tokio::task::spawn_blocking(move || load(&for_loading)) => loaded??,
        told = stop.told() => {
            let after_ms = begun.elapsed().as_millis() as u64;
            tracing::info!(why = told.by(), after_ms, "stopped before it was loaded");
            // A thread is loading, and libtorch may not be taken down around it.
            afd_ffi::process::end_at_once(Exit::Done as u8);
        }
    };
    let model = loaded.identity.clone();
    let server = rank::start(&config, loaded, listener, &metrics).await?;
    let address = server.address();
    if let Some(path) = &config.address_file {
        address_file::write(path, &address.to_string())?;
    }
    tracing::info!(
        %address,
        advertise = config.advertise.as_deref().unwrap_or("as it listens"),
        shard = %config.shard,
        rank = config.rank,
        model = %config.model.display(),
        architecture = model.architecture,
        fingerprint = &model.fingerprint[..12.min(model.fingerprint.len())],
        dtype = &*spelling::dtype(model.activation_dtype),
        gate = &*spelling::gate(model.gate_placement),
        shared_experts = &*spelling::shared_experts(model.shared_expert_placement),
        device = %config.device,
        load_format = %config.load_format,
        threads = config.threads,
        took_ms = begun.elapsed().as_millis() as u64,
        "ready"
    );
    let announcing = Announcing::start(&config, &server);
    let serving = stop.until_ended(config.drain, |told| {
        let asked = async {
            let told = told.await;
            // Before it drains: whoever hears of it does not come back.
            announcing.leave().await;
            told
        };
        server.run(asked, config.drain)
    });
    Ok(serving.await?)
}

/// Everything that takes long. Blocks.
fn load(config: &Config) -> anyhow::Result<Loaded> {
    // Before any tensor exists.
    config.device.load()?;
    afd_ffi::process::set_compute_threads(config.threads);
    Ok(rank::load(config)?)
}

async fn ask(options: probe::ProbeOptions) -> anyhow::Result<()> {
    println!("{}", probe::probe(&options).await?);
    Ok(())
}

fn probe(options: probe::ProbeOptions) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(ask(options))
}
