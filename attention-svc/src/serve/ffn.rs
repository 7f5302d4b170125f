//! The way to the FFN as the options say: ranks of its own behind `--ffn`, or an engine in this process.
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use afd_common::config::device::DeviceChoice;
use afd_common::config::option::refuse;
use afd_common::ids::Shard;
use afd_common::link::LinkKind;
use afd_common::proto::v1;
use afd_common::routing::Routing;
use afd_common::telemetry::Metrics;
use ffn_svc::device::DeviceModel;
use ffn_svc::engine::{EngineHandle as FfnEngine, EngineMetrics as FfnEngineMetrics, EngineOptions};
use ffn_svc::model::FfnModel;
use ffn_svc::session::in_process::InProcess;
use tokio_util::sync::CancellationToken;

use super::ServeError;
use super::model::Loaded;
use crate::api::{FfnPeers, FfnRanks, Reason, ServedBy};
use crate::config::{FfnConfig, FfnTarget, ServeConfig};
use crate::device::LocalFfn;
use crate::membership::announced::Announced;
use crate::remote_ffn::connect::{self, Way};
use crate::remote_ffn::directory::{Directory, DirectoryError};
use crate::remote_ffn::peer::Peer;
use crate::remote_ffn::session::{ControlSettings, StreamSettings};
use crate::remote_ffn::settings::PortSettings;
use crate::remote_ffn::streams::StreamPlace;

/// Added to the hop timeout per outstanding row, so that a long prefill is not taken for a death.
const HOP_TIMEOUT_PER_ROW: Duration = Duration::from_millis(5);
/// For what runs beside the engine to end after it.
const FAREWELL: Duration = Duration::from_secs(5);

/// What runs beside the engine.
pub(super) enum Running {
    Local {
        engine: Box<FfnEngine>,
        /// Makes the FFN's spans until the attention engine is gone.
        traces: Option<tokio::task::JoinHandle<InProcess>>,
    },
    /// On the engine's thread.
    OnDevice,
    Remote {
        directory: Arc<Directory>,
        task: tokio::task::JoinHandle<()>,
        stop: CancellationToken,
        join_timeout: Duration,
    },
}

/// Opens the way; ranks join `by` in the background.
pub(super) async fn open(
    config: &ServeConfig,
    loaded: &Loaded,
    by: &ServedBy,
) -> Result<(Way, Running), ServeError> {
    let port = port_settings(config, loaded);
    let max_rows = u32::try_from(config.capacity.max_num_batched_tokens).unwrap_or(u32::MAX);
    match &config.ffn.target {
        FfnTarget::Local if let Some(gpu) = &loaded.gpu => {
            if loaded.experts.routing == Routing::Balanced {
                let what = "is balanced, which needs an FFN engine: --device cpu, or FFN ranks";
                return Ok(refuse("--routing", what)?);
            }
            let sides = loaded.experts.sides;
            let model =
                DeviceModel::load(&loaded.config, &loaded.weights, Shard::WHOLE, sides, Some(gpu.device()))?;
            let port = LocalFfn::new(gpu.device(), gpu.stream(), model)?;
            Ok((connect::on_thread(Box::new(port)), Running::OnDevice))
        }
        FfnTarget::Local => {
            let engine = local_engine(loaded, max_rows)?;
            let credits = config.capacity.stages.max_stages as u32;
            let spans = &config.trace.spans;
            let (way, traces) = connect::in_process(&engine, port, credits, max_rows, spans)
                .map_err(|e| ServeError::LocalEngine(e.to_string()))?;
            Ok((way, Running::Local { engine: Box::new(engine), traces }))
        }
        FfnTarget::Remote(names) => {
            let control = control_settings(config, loaded, by, max_rows);
            let (way, directory) = connect::remote(names.clone(), control, port);
            let stop = CancellationToken::new();
            let task = tokio::spawn(Arc::clone(&directory).run(stop.clone()));
            let join_timeout = config.ffn.join_timeout;
            Ok((way, Running::Remote { directory, task, stop, join_timeout }))
        }
    }
}

fn port_settings(config: &ServeConfig, loaded: &Loaded) -> PortSettings {
    PortSettings {
        hidden_size: u32::try_from(loaded.config.hidden_size).unwrap_or(u32::MAX),
        rows: loaded.rows,
        rank: config.ffn.rank,
        hop_timeout: config.ffn.hop_timeout,
        hop_timeout_per_row: HOP_TIMEOUT_PER_ROW,
        warmup_timeout: config.ffn.warmup_timeout,
        loss_timeout: config.ffn.loss_timeout,
        model: Arc::new(loaded.config.clone()),
        experts: loaded.experts.clone(),
        place: loaded.gpu.as_ref().map(|gpu| StreamPlace {
            device: gpu.device().clone(),
            stream: Arc::clone(gpu.stream()),
            num_layers: u16::try_from(loaded.config.num_layers()).unwrap_or(u16::MAX),
            patience: config.ffn.hop_timeout,
        }),
    }
}

fn control_settings(config: &ServeConfig, loaded: &Loaded, by: &ServedBy, max_rows: u32) -> ControlSettings {
    ControlSettings {
        identity: by.identity.clone(),
        model: loaded.identity.clone(),
        link_kinds: by.link_kinds.clone(),
        stream: loaded.gpu.as_ref().map(|gpu| StreamSettings {
            device: gpu.device().clone(),
            hidden_size: loaded.config.hidden_size,
            rows: loaded.rows,
            patience: config.ffn.hop_timeout,
        }),
        max_stages: config.capacity.stages.max_stages as u32,
        max_tokens_per_stage: max_rows,
        max_row_bytes: loaded.max_row_bytes(loaded.experts.sides.gate),
        join_token: config.ffn.join_token.clone(),
        tls: config.ffn.tls.clone(),
        link_timeout: config.ffn.link_timeout,
    }
}

fn local_engine(loaded: &Loaded, max_rows: u32) -> Result<FfnEngine, ServeError> {
    // One shard has every expert, whatever a placement says. Attention and FFN work in turn, on the same threads.
    let model = FfnModel::load(&loaded.config, &loaded.weights, Shard::WHOLE, loaded.experts.sides)?
        .on_crew(Arc::clone(loaded.attention.crew()));
    let routing = loaded.experts.routing;
    // Its numbers are not shown: in this mode there is no FFN rank to look at.
    let metrics = FfnEngineMetrics::new(&Metrics::new())?;
    let options = EngineOptions {
        max_rows,
        max_batch_rows: max_rows,
        metrics,
        inject_delay: Duration::ZERO,
        board: Duration::ZERO,
        routing,
    };
    ffn_svc::engine::spawn(model, options).map_err(|error| ServeError::LocalEngine(error.to_string()))
}

/// This process, as FFN ranks and others get to know it.
pub(super) fn served_by(config: &FfnConfig, device: DeviceChoice) -> ServedBy {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let identity = v1::Identity {
        deployment: config.deployment.clone(),
        role: v1::Role::Attention.into(),
        rank: config.rank,
        incarnation: u64::try_from(since_epoch.as_nanos()).unwrap_or(u64::MAX),
    };
    let link_kinds = match config.target {
        FfnTarget::Local => vec![LinkKind::Loopback],
        FfnTarget::Remote(_) => config.link.kinds(device != DeviceChoice::Cpu),
    };
    ServedBy { identity, link_kinds }
}

impl Running {
    /// Waits until every shard has a rank.
    pub(super) async fn wait_joined(&self) -> Result<(), DirectoryError> {
        match self {
            Self::Local { .. } | Self::OnDevice => Ok(()),
            Self::Remote { directory, join_timeout, .. } => directory.wait_ready(*join_timeout).await,
        }
    }

    /// Where FFN ranks announce themselves, if they may.
    pub(super) fn announced(&self) -> Option<Arc<Announced>> {
        match self {
            Self::Remote { directory, .. } => Some(Arc::clone(directory.announced())),
            Self::Local { .. } | Self::OnDevice => None,
        }
    }

    /// Tells the names, of `--ffn` or announced, whose ranks are in use.
    pub(super) fn used_names(&self) -> Box<dyn Fn() -> BTreeSet<String> + Send + Sync> {
        match self {
            Self::Local { .. } | Self::OnDevice => Box::new(BTreeSet::new),
            Self::Remote { directory, .. } => {
                let directory = Arc::clone(directory);
                Box::new(move || directory.used_names())
            }
        }
    }

    /// Tells how many shards the ranks in use have; 0 before the first has joined.
    pub(super) fn shard_count(&self) -> Box<dyn Fn() -> u32 + Send + Sync> {
        match self {
            Self::Local { .. } | Self::OnDevice => Box::new(|| 1),
            Self::Remote { directory, .. } => {
                let directory = Arc::clone(directory);
                Box::new(move || directory.shard_count())
            }
        }
    }

    /// Lists the ranks.
    pub(super) fn peers(&self) -> FfnPeers {
        match self {
            Self::Local { .. } | Self::OnDevice => Arc::new(|| FfnRanks {
                in_use: vec![peer("in this process".into(), Shard::WHOLE, LinkKind::Loopback)],
                absent: Vec::new(),
            }),
            Self::Remote { directory, .. } => {
                let directory = Arc::clone(directory);
                Arc::new(move || {
                    let up = |(address, rank): (std::net::SocketAddr, Peer)| {
                        let (shard, link) = rank.in_use()?;
                        Some(peer(address.to_string(), shard, link))
                    };
                    let absence = |(address, why)| v1::FfnAbsence { address, why };
                    FfnRanks {
                        in_use: directory.peers().into_iter().filter_map(up).collect(),
                        absent: directory.absent().into_iter().map(absence).collect(),
                    }
                })
            }
        }
    }

    /// Says in a sentence how every rank stands.
    pub(super) fn describe(&self) -> Reason {
        match self {
            Self::Local { .. } | Self::OnDevice => Reason::from("the FFN in this process is not ready"),
            Self::Remote { directory, .. } => {
                let directory = Arc::clone(directory);
                Reason::new(move || directory.describe())
            }
        }
    }

    /// Ends it, after the engine that used it.
    pub(super) async fn stop(self) {
        match self {
            Self::OnDevice => {}
            Self::Local { engine, traces } => {
                // Its thread is about to see that nobody is there; joining it may block for a batch.
                let stopped = tokio::task::spawn_blocking(move || drop(engine)).await;
                if let Err(error) = stopped {
                    tracing::error!(%error, "stopping the FFN engine failed");
                }
                let Some(traces) = traces else { return };
                match tokio::time::timeout(FAREWELL, traces).await {
                    Ok(Ok(traces)) => traces.end_spans(),
                    _ => tracing::warn!("the last spans of the FFN were not made"),
                }
            }
            Self::Remote { task, stop, .. } => {
                stop.cancel();
                if tokio::time::timeout(FAREWELL, task).await.is_err() {
                    tracing::warn!("the FFN control tasks did not end in time");
                }
            }
        }
    }
}

fn peer(address: String, shard: Shard, link: LinkKind) -> v1::FfnPeer {
    let shard = v1::ShardSpec { index: shard.index(), count: shard.count() };
    v1::FfnPeer { address, shard: Some(shard), link: link.to_string() }
}
