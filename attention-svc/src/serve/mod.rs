//! A running attention rank, put together from its configuration: model, way to the FFN, engine, API, one port.
//!
//! `Server::start` builds everything and serves; `Server::run` waits for the end, whatever its cause, and drains.
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use afd_common::config::device::DeviceError;
use afd_common::net::{Drained, Listener, NetError, Options};
use afd_common::process::address_file::{self, AddressFileError};
use afd_common::process::exit::Exit;
use afd_common::process::stop::Told;
use afd_common::proto::v1;
use afd_common::telemetry::{MetricError, Metrics};
use afd_gpu::GpuError;
use ffn_svc::model::FfnModelError;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

mod ffn;
mod metrics;
mod model;
mod readiness;
mod routes;

use crate::api::Readiness;
use crate::config::{OptionError, PeersConfig, ServeConfig};
use crate::engine::{self, AttentionPort, CachedAttention, EngineDeath, EngineHandle, EngineStartError};
use crate::membership::peers::{PeerSettings, Peers};
use crate::model::{ModelError, NoKernels};
use crate::remote_ffn::directory::DirectoryError;
use crate::request::SequenceError;
use crate::text::TextError;
use afd_common::config::model::ConfigError;
use afd_common::weights::WeightError;

/// Time for answers on their way when everything else has ended.
const FAREWELL: Duration = Duration::from_secs(1);

/// Why a rank does not start, or ends by itself. Each is one line that names what to change.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// An option.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// The port.
    #[error("--listen {0}")]
    Net(#[from] NetError),
    /// `--address-file`
    #[error(transparent)]
    AddressFile(#[from] AddressFileError),
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device's driver.
    #[error("--device: {0}")]
    Gpu(#[from] GpuError),
    /// The model as the device's kernels take it.
    #[error("--device: {0}")]
    Kernels(#[from] NoKernels),
    /// The checkpoint's configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The checkpoint's tensors.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// The attention half of the model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The tokenizer or the chat template.
    #[error(transparent)]
    Text(#[from] TextError),
    /// `generation_config.json`
    #[error("{0}")]
    Generation(String),
    /// One of these, and which checkpoint it is about.
    #[error("--model {folder}: {source}")]
    Checkpoint {
        /// As given.
        folder: String,
        /// What is wrong with it.
        source: Box<Self>,
    },
    /// `--placement`
    #[error("--placement {path}: {what}")]
    Placement {
        /// Which file.
        path: String,
        /// What is wrong with it, by the names in it.
        what: String,
    },
    /// The FFN half of the model, in this process.
    #[error("--ffn local: {0}")]
    LocalFfn(#[from] FfnModelError),
    /// Its engine, in this process.
    #[error("--ffn local: {0}")]
    LocalEngine(String),
    /// FFN ranks did not come, or refused.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// The engine's sizes.
    #[error(transparent)]
    EngineStart(#[from] EngineStartError),
    /// The engine died.
    #[error(transparent)]
    EngineDied(#[from] EngineDeath),
    /// Two metrics of one name: a mistake of this software.
    #[error(transparent)]
    Metric(#[from] MetricError),
    /// Broken descriptors: a mistake of the build.
    #[error("reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// A task of this process panicked.
    #[error("internal error: {0}")]
    Task(#[from] tokio::task::JoinError),
}

impl ServeError {
    /// With the checkpoint's folder, where that is what it is about.
    fn of(self, folder: &Path) -> Self {
        match self {
            // Of an option, and not of the checkpoint.
            Self::Model(ModelError::CacheMemory { .. } | ModelError::Threads(_)) => self,
            Self::Config(_) | Self::Weights(_) | Self::Model(_) | Self::Text(_) | Self::Generation(_) => {
                Self::Checkpoint { folder: folder.display().to_string(), source: Box::new(self) }
            }
            other => other,
        }
    }

    /// How the process ends with it.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Option(_)
            | Self::AddressFile(_)
            | Self::Device(_)
            | Self::Config(_)
            | Self::Weights(_)
            | Self::Text(_)
            | Self::Generation(_)
            | Self::Placement { .. }
            | Self::EngineStart(EngineStartError::Config(_)) => Exit::Unusable,
            Self::Checkpoint { source, .. } => source.exit(),
            Self::Model(error) => error.exit(),
            Self::LocalFfn(error) => error.exit(),
            Self::Net(_)
            | Self::Gpu(_)
            | Self::Kernels(_)
            | Self::LocalEngine(_)
            | Self::Directory(_)
            | Self::EngineStart(EngineStartError::Thread(_))
            | Self::EngineDied(_)
            | Self::Metric(_)
            | Self::Reflection(_)
            | Self::Task(_) => Exit::Failed,
        }
    }
}

/// A rank that is being served.
pub struct Server {
    address: SocketAddr,
    engine: EngineHandle,
    engine_thread: JoinHandle<Result<(), EngineDeath>>,
    ffn: ffn::Running,
    peers: Arc<Peers>,
    readiness: watch::Sender<Readiness>,
    readiness_task: tokio::task::JoinHandle<()>,
    port: tokio::task::JoinHandle<Drained>,
    stop_port: CancellationToken,
    drain_timeout: Duration,
}

impl Server {
    /// Takes the port, loads the model and serves. FFN ranks may come later: until they have, the rank is not ready.
    ///
    /// # Errors
    /// [`ServeError`]; nothing is left running then.
    pub async fn start(config: ServeConfig) -> Result<Self, ServeError> {
        Self::start_around(config, |attention| attention).await
    }

    /// The same with something of the caller's around the attention half of the model.
    ///
    /// # Errors
    /// As of [`start`](Self::start).
    pub async fn start_around<A: AttentionPort + 'static>(
        config: ServeConfig,
        around: impl FnOnce(CachedAttention) -> A,
    ) -> Result<Self, ServeError> {
        let begun = Instant::now();
        let listener = Listener::bind(config.address.listen).await?;
        let address = listener.address();
        let metrics = Metrics::new();

        let loaded = load(&config).await?;
        let by = ffn::served_by(&config.ffn, config.model.device);
        let (way, ffn) = ffn::open(&config, &loaded, &by).await?;
        let engine_config = loaded.engine_config(&config);
        let engine_metrics = Arc::default();
        let stats = Arc::clone(&way.stats);
        metrics::ffn(&metrics, &stats, ffn.peers())?;
        let (engine, engine_thread) =
            engine::spawn(engine_config, around(loaded.attention), way.port, way.bell, engine_metrics)?;
        metrics::engine(&metrics, engine.metrics())?;
        metrics::port(&metrics, &listener.stats())?;
        config.trace.spans.count(&metrics)?;

        let readiness = watch::Sender::new(Readiness::Waiting(ffn.describe()));
        let peers = Arc::new(peers(&config, by.identity.clone(), loaded.identity.fingerprint));
        let router = routes::Parts {
            config: &config,
            engine: &engine,
            stats: &stats,
            ffn: &ffn,
            peers: &peers,
            readiness: &readiness,
            metrics,
            by,
            model: loaded.served,
            text: loaded.text,
        }
        .into_router()?;
        let stop_port = CancellationToken::new();
        if !peers.is_empty() {
            tokio::spawn(Arc::clone(&peers).run(stop_port.clone()));
        }
        config.address.access.warn(address);
        let port = tokio::spawn(listener.serve(router, None, port_options(&config), stop_port.clone()));
        let readiness_task = readiness::follow(readiness.clone(), &engine, &stats, ffn.describe());
        let shown = config.address.advertise.clone().unwrap_or_else(|| address.to_string());
        if let Some(path) = &config.address.file {
            address_file::write(path, &shown)?;
        }
        tracing::info!(address = shown, took_ms = begun.elapsed().as_millis() as u64, "listening");
        Ok(Self {
            address,
            engine,
            engine_thread,
            ffn,
            peers,
            readiness,
            readiness_task,
            port,
            stop_port,
            drain_timeout: config.drain_timeout,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop`, then finishes what runs within the drain limit; or until the engine dies or the FFN does
    /// not come.
    ///
    /// # Errors
    /// [`ServeError`] when it ended by itself.
    pub async fn run(self, stop: impl Future<Output = Told>) -> Result<(), ServeError> {
        let has_joined = AtomicBool::new(false);
        let joined = async {
            match self.ffn.wait_joined().await {
                Ok(()) => {
                    has_joined.store(true, Relaxed);
                    std::future::pending().await
                }
                Err(error) => error,
            }
        };
        let ended: Result<Told, ServeError> = tokio::select! {
            told = stop => Ok(told),
            reason = self.engine.died() => Err(EngineDeath(reason).into()),
            error = joined => Err(error.into()),
        };
        self.readiness_task.abort();
        // Over before anything changes that it would tell of as a drain that somebody asked for.
        let _ = self.readiness_task.await;
        self.readiness.send_replace(match &ended {
            Ok(_) => Readiness::Draining,
            Err(error) => Readiness::Dead(error.to_string()),
        });
        let begun = Instant::now();
        // Requests that wait for FFN ranks which were never there would wait in vain.
        let patience =
            if ended.is_ok() && has_joined.load(Relaxed) { self.drain_timeout } else { Duration::ZERO };
        if let Ok(told) = &ended {
            let engine = self.engine.metrics();
            let (running, waiting) = (engine.running.get(), engine.waiting.get());
            tracing::info!(why = told.by(), running, waiting, limit = ?patience, "stopping");
        }
        if let Err(ServeError::Directory(missing)) = &ended {
            self.engine.fail_all(SequenceError::FfnUnavailable(missing.to_string()));
        }
        let deadline = Instant::now() + patience;
        self.engine.drain(deadline);
        let thread = self.engine_thread;
        let engine_end = tokio::task::spawn_blocking(move || thread.join()).await?;
        // What other ranks serve for this one runs too.
        let forwarded = self.peers.close(deadline).await;
        if forwarded > 0 {
            tracing::warn!(
                forwarded,
                "requests that other attention ranks serve for this one did not end in time"
            );
        }
        self.stop_port.cancel();
        let drained = self.port.await?;
        self.ffn.stop().await;
        if drained.cut > 0 {
            tracing::warn!(connections = drained.cut, "connections were cut");
        }
        tracing::info!(took_ms = begun.elapsed().as_millis() as u64, "stopped");
        match (ended, engine_end) {
            (Err(error), _) => Err(error),
            (Ok(_), Ok(end)) => Ok(end?),
            (Ok(_), Err(_)) => Err(EngineDeath("its thread panicked".into()).into()),
        }
    }
}

async fn load(config: &ServeConfig) -> Result<model::Loaded, ServeError> {
    let (source, capacity, ffn) = (config.model.clone(), config.capacity.clone(), config.ffn.clone());
    let load = move || {
        // Before anything of libtorch is used.
        source.device.load()?;
        afd_ffi::process::set_compute_threads(capacity.threads);
        model::load(&source, &capacity, &ffn).map_err(|error| error.of(&source.folder))
    };
    tokio::task::spawn_blocking(load).await?
}

fn port_options(config: &ServeConfig) -> Options {
    let access = config.address.access.clone();
    let mut options = Options { drain: FAREWELL, access, ..Options::default() };
    options.body.whole = config.capacity.body_timeout;
    options.body.idle = options.body.idle.min(options.body.whole);
    options
}

/// The other attention ranks, as the options name them.
fn peers(config: &ServeConfig, identity: v1::Identity, fingerprint: String) -> Peers {
    let token = format!("Bearer {}", config.ffn.join_token);
    // One that no header can carry is shown to nobody, and whoever asks for one says so.
    let token = token.parse().ok().filter(|_| !config.ffn.join_token.is_empty());
    let PeersConfig { names, tls, timeout } = config.peers.clone();
    Peers::new(PeerSettings { names, tls, token, timeout, identity, fingerprint })
}
