//! From a [`Config`] to a running FFN rank: load the shard, start the engine, serve.
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use afd_common::config::choices::LoadFormat;
use afd_common::config::device::DeviceChoice;
use afd_common::config::idle;
use afd_common::config::model::{ConfigError, FfnConfig, ModelConfig};
use afd_common::config::option::OptionError;
use afd_common::identity::{ExpertRules, Sides, model_identity};
use afd_common::ids::LayerIdx;
use afd_common::link::features;
use afd_common::net::Listener;
use afd_common::placement::{Placement, PlacementFile};
use afd_common::process::exit::Exit;
use afd_common::proto::v1;
use afd_common::routing::Routing;
use afd_common::telemetry::metrics::{ReadKind, Sample};
use afd_common::telemetry::{MetricError, Metrics};
use afd_common::weights::{WeightError, Weights};
use afd_gpu::{Device, GpuError, nccl};

use crate::config::Config;
use crate::device::{DeviceModel, DeviceStage};
use crate::engine::{self, EngineHandle, EngineMetrics, EngineOptions};
use crate::model::{AboutShard, FfnModel, FfnModelError, LayerSpec};
use crate::serve::{ServeError, Server};
use crate::service::Health;
use crate::session::handshake::Offer;
use crate::session::sessions::Settings;

/// A granted link must be attached within this time.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a rank cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The checkpoint's configuration is refused.
    #[error("--model {folder}: {source}")]
    ModelConfig {
        /// Which checkpoint.
        folder: String,
        /// Why.
        source: ConfigError,
    },
    /// The checkpoint's tensors cannot be had.
    #[error("--model {folder}: {source}")]
    Weights {
        /// Which checkpoint.
        folder: String,
        /// Why.
        source: WeightError,
    },
    /// The placement of experts cannot be used.
    #[error("--placement {file}: {what}")]
    Placement {
        /// Which file.
        file: String,
        /// What is wrong with it, by the names in it.
        what: String,
    },
    /// An option does not go with the checkpoint.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// This shard cannot be built from the checkpoint.
    #[error("--model {folder}, --shard {index}/{count}: {source}")]
    Model {
        /// Which checkpoint.
        folder: String,
        /// Of the shard.
        index: u32,
        /// Of the shard.
        count: u32,
        /// Why.
        source: Box<FfnModelError>,
    },
    /// The model cannot be split into so many parts.
    #[error(
        "--shard {index}/{count}: no layer of {folder} can be split into more than {most} parts, so that this shard or \
         another would own nothing"
    )]
    Empty {
        /// Which checkpoint.
        folder: String,
        /// Of the shard.
        index: u32,
        /// Of the shard.
        count: u32,
        /// What would do.
        most: usize,
    },
    /// The GPU cannot be used.
    #[error("--device {device}: {source}")]
    Device {
        /// As asked for.
        device: DeviceChoice,
        /// Why.
        source: GpuError,
    },
    /// A metric's name is taken: a mistake of this software.
    #[error(transparent)]
    Metric(#[from] MetricError),
    /// The system has no thread for the engine.
    #[error("starting the engine thread: {0}")]
    Thread(#[from] std::io::Error),
    /// It cannot be served.
    #[error(transparent)]
    Serve(#[from] ServeError),
}

impl StartError {
    /// How the process ends with it.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Model { source, .. } => source.exit(),
            Self::ModelConfig { .. }
            | Self::Weights { .. }
            | Self::Placement { .. }
            | Self::Option(_)
            | Self::Empty { .. }
            | Self::Serve(ServeError::RowsTooLarge { .. }) => Exit::Unusable,
            Self::Device { .. } | Self::Metric(_) | Self::Thread(_) | Self::Serve(_) => Exit::Failed,
        }
    }
}

/// A shard of every layer, where it is computed.
pub enum ShardModel {
    /// On the processor.
    Cpu(FfnModel),
    /// On a GPU.
    Device(DeviceStage),
}

impl ShardModel {
    /// What is true of it wherever it is computed.
    pub fn about(&self) -> &AboutShard {
        match self {
            Self::Cpu(model) => model.about(),
            Self::Device(stage) => stage.model().about(),
        }
    }
}

/// A shard in memory, and what peers compare.
pub struct Loaded {
    /// The shard.
    pub model: ShardModel,
    /// What peers compare.
    pub identity: v1::ModelIdentity,
    /// Who chooses experts.
    pub routing: Routing,
}

/// Loads this rank's shard. Blocks, for as long as reading it takes.
///
/// # Errors
/// [`StartError`] names the option, the file and the tensor.
pub fn load(config: &Config) -> Result<Loaded, StartError> {
    let folder = config.model.display().to_string();
    let model_config = ModelConfig::load(&config.model)
        .map_err(|source| StartError::ModelConfig { folder: folder.clone(), source })?;
    let (index, count) = (config.shard.index(), config.shard.count());
    config.sides.check(&model_config, &config.model)?;
    let experts = expert_rules(config, &model_config)?;
    let most = most_shards(&model_config, experts.sides);
    if count as usize > most {
        return Err(StartError::Empty { folder, index, count, most });
    }
    let rows = config.dtype.resolve(model_config.dtype);
    let weights = match config.load_format {
        LoadFormat::Auto => Weights::open(&config.model, &model_config, rows.kind())
            .map_err(|source| StartError::Weights { folder: folder.clone(), source })?,
        LoadFormat::Dummy => Weights::dummy(&model_config, rows.kind(), config.seed),
    };
    let placed =
        experts.placement.clone().unwrap_or_else(|| Arc::new(Placement::contiguous(&model_config, count)));
    let failed = |source: FfnModelError| {
        let folder = config.model.display().to_string();
        StartError::Model { folder, index, count, source: Box::new(source) }
    };
    let weights = weights.on(config.device.torch()).map_err(|source| failed(source.into()))?;
    let model = match config.device {
        DeviceChoice::Cpu => {
            FfnModel::load_placed(&model_config, &weights, config.shard, experts.sides, &placed)
                .map(ShardModel::Cpu)
        }
        DeviceChoice::Cuda(ordinal) => {
            let device = Device::open(ordinal)
                .map_err(|source| StartError::Device { device: config.device, source })?;
            DeviceModel::load_placed(
                &model_config,
                &weights,
                config.shard,
                experts.sides,
                &placed,
                Some(&device),
            )
            .and_then(|model| DeviceStage::new(model, &device))
            .map(ShardModel::Device)
        }
    }
    .map_err(failed)?;
    let bare = |spec: &&LayerSpec| spec.num_experts > 0 && spec.local_experts.is_empty();
    let num_bare = model.about().specs().iter().filter(bare).count();
    if num_bare > 0 {
        tracing::warn!(
            layers = num_bare,
            "--shard {index}/{count}: this shard owns no routed expert of these layers"
        );
    }
    let identity = model_identity(&model_config, weights.fingerprint(), rows, &experts);
    Ok(Loaded { model, identity, routing: experts.routing })
}

fn expert_rules(config: &Config, model: &ModelConfig) -> Result<ExpertRules, StartError> {
    if !model.has_experts() {
        idle::warn(&config.idle_on_dense);
        return Ok(ExpertRules::default());
    }
    let read = |path: &PathBuf| {
        let failed = |what: String| StartError::Placement { file: path.display().to_string(), what };
        let file = PlacementFile::read(path).map_err(failed)?;
        let placed = file.placement(model, Some(config.shard.count()));
        placed.map(Arc::new).map_err(|error| failed(error.to_string()))
    };
    let placement = config.placement.as_ref().map(read).transpose()?;
    Ok(ExpertRules { sides: config.sides, routing: config.routing, placement })
}

/// Parts into which some layer can be split: its experts, or a dense FFN's or shared experts' intermediate size.
fn most_shards(config: &ModelConfig, sides: Sides) -> usize {
    let parts = config.layers.iter().map(|layer| match layer {
        FfnConfig::Dense(dense) => dense.intermediate_size,
        FfnConfig::Moe(moe) if sides.shared_on_attention() => moe.num_experts,
        FfnConfig::Moe(moe) => moe.num_experts.max(moe.shared_intermediate_size),
    });
    parts.max().unwrap_or(1)
}

/// Starts the engine on a loaded shard and serves it on `listener`.
///
/// # Errors
/// [`StartError`].
pub async fn start(
    config: &Config,
    loaded: Loaded,
    listener: Listener,
    metrics: &Metrics,
) -> Result<Server, StartError> {
    start_with(config, loaded, listener, metrics, spawn).await
}

fn spawn(model: ShardModel, options: EngineOptions) -> std::io::Result<EngineHandle> {
    match model {
        ShardModel::Cpu(model) => engine::spawn(model, options),
        ShardModel::Device(stage) => engine::spawn(stage, options),
    }
}

/// The same with an engine of the caller's, who may put something of its own around the model.
///
/// # Errors
/// As of [`start`].
pub async fn start_with(
    config: &Config,
    loaded: Loaded,
    listener: Listener,
    metrics: &Metrics,
    spawn: impl FnOnce(ShardModel, EngineOptions) -> std::io::Result<EngineHandle>,
) -> Result<Server, StartError> {
    let Loaded { model, identity, routing } = loaded;
    count_experts(metrics, model.about())?;
    let options = EngineOptions {
        max_rows: config.max_tokens_per_stage,
        max_batch_rows: config.max_tokens_per_stage,
        metrics: EngineMetrics::new(metrics)?,
        inject_delay: config.inject_delay,
        board: config.board,
        routing,
    };
    if routing == Routing::Balanced {
        tracing::warn!("{}", Routing::WARNING);
    }
    if !config.inject_delay.is_zero() {
        tracing::warn!(delay = ?config.inject_delay, "this rank is slowed down on purpose (--inject-delay)");
    }
    config.spans.count(metrics)?;
    let mut link_kinds = vec![v1::LinkKind::Shm, v1::LinkKind::Tcp, v1::LinkKind::Inline];
    // The cycle of `--routing balanced` is made on the host.
    if matches!(model, ShardModel::Device(_)) && routing == Routing::Model {
        if nccl::version().is_ok() {
            link_kinds.insert(0, v1::LinkKind::Nccl);
        }
        link_kinds.insert(0, v1::LinkKind::CudaIpc);
    }
    let engine = spawn(model, options)?;
    let incarnation = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
    let settings = Settings {
        identity: v1::Identity {
            deployment: config.deployment.clone(),
            role: v1::Role::Ffn.into(),
            rank: config.rank,
            incarnation,
        },
        offer: Offer {
            model: identity,
            shard_count: config.shard.count(),
            link_kinds,
            max_stages: config.max_stages,
            max_tokens_per_stage: config.max_tokens_per_stage,
            features: std::iter::once("profile".into()).chain(features::offered()).collect(),
            join_token: config.join_token.clone(),
        },
        lease: config.lease,
        attach_timeout: ATTACH_TIMEOUT,
        spans: config.spans.clone(),
    };
    Ok(Server::start(listener, engine, settings, metrics, Health::default(), config.access.clone()).await?)
}

/// How unevenly rows fall on this shard's experts: per layer the busiest expert's rows over the mean.
fn count_experts(metrics: &Metrics, about: &AboutShard) -> Result<(), MetricError> {
    let (counts, num_layers) = (Arc::clone(about.expert_counts()), about.specs().len());
    let imbalance = move |layer: u16| {
        let rows: Vec<u64> = counts.of_layer(LayerIdx(layer)).into_iter().map(|(_, rows)| rows).collect();
        let (most, sum) = (rows.iter().copied().max()?, rows.iter().sum::<u64>());
        (sum > 0).then(|| Sample::of(layer, most as f64 * rows.len() as f64 / sum as f64))
    };
    let help = "Rows of the busiest local expert over the mean of all local experts, since the start.";
    metrics.read_when_asked(ReadKind::Gauge, "afd_ffn_expert_imbalance", help, &["layer"], move || {
        (0..num_layers as u16).filter_map(&imbalance).collect()
    })
}
