//! The face of the attention role: OpenAI's HTTP API and `InferenceService` over gRPC, on one port and one engine.
//!
//! A request's way: a face reads it ([`openai`], [`grpc`]) → [`validate`] checks it, purely → [`generation`] tokenizes
//! the prompts, submits the sequences to the [`engine`] and turns their events into text → the face writes it.
//! [`error`] is the one place that knows HTTP codes and gRPC statuses. Nothing here schedules or computes.
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use afd_common::link::LinkKind;
use afd_common::proto::v1;
use afd_common::telemetry::{MetricError, Metrics};
use tokio::sync::watch;

pub(crate) mod body;
pub mod engine;
pub mod error;
mod forward;
pub mod generation;
pub mod grpc;
mod ids;
pub(crate) mod json;
mod metrics;
pub mod openai;
pub mod plan;
pub mod prompt;
pub mod readiness;
pub mod request_span;
mod router;
mod running;
mod strict_json;
mod tokenizing;
pub mod validate;

pub use engine::Engine;
pub use readiness::{Readiness, Reason};
pub use request_span::RequestTracing;
pub use router::router;

use crate::membership::peers::Peers;
use crate::text::Text;
use metrics::ApiMetrics;
use running::Running;
use tokenizing::Tokenizing;
use validate::{ModelLimits, SamplingDefaults};

/// What is served, as both faces tell it.
#[derive(Clone, Debug)]
pub struct ServedModel {
    /// Name that requests use.
    pub name: String,
    /// What requests may ask for.
    pub limits: ModelLimits,
    /// What peers compare; its fingerprint is OpenAI's `system_fingerprint`.
    pub identity: v1::ModelIdentity,
}

impl ServedModel {
    /// Puts together what `config.json`, `generation_config.json` and the options say.
    ///
    /// # Errors
    /// A sentence that names the file and the field.
    pub fn new(
        folder: &Path,
        name: String,
        config: &afd_common::config::model::ModelConfig,
        max_model_len: usize,
        identity: v1::ModelIdentity,
    ) -> Result<Self, String> {
        let limits = ModelLimits {
            vocab_size: u32::try_from(config.vocab_size).map_err(|e| format!("vocab_size: {e}"))?,
            max_model_len: u32::try_from(max_model_len).map_err(|e| format!("max_model_len: {e}"))?,
            eos_token_ids: config.eos_token_ids.clone(),
            defaults: SamplingDefaults::load(folder)?,
        };
        Ok(Self { name, limits, identity })
    }
}

/// Who serves, for those who look from outside.
#[derive(Clone, Debug, Default)]
pub struct ServedBy {
    /// This process.
    pub identity: v1::Identity,
    /// What FFN ranks are asked for, the best first.
    pub link_kinds: Vec<LinkKind>,
}

/// Limits that protect the process.
#[derive(Clone, Copy, Debug)]
pub struct ApiLimits {
    /// Largest body of a request, bytes.
    pub max_body_bytes: usize,
}

impl Default for ApiLimits {
    fn default() -> Self {
        Self { max_body_bytes: 8 << 20 }
    }
}

/// FFN ranks as the way to them knows them.
#[derive(Clone, Debug, Default)]
pub struct FfnRanks {
    /// Work is sent to them.
    pub in_use: Vec<v1::FfnPeer>,
    /// They are looked for in vain.
    pub absent: Vec<v1::FfnAbsence>,
}

/// Lists the FFN ranks, as they are now.
pub type FfnPeers = Arc<dyn Fn() -> FfnRanks + Send + Sync>;

/// State of both faces; shared by every request.
pub struct Api {
    engine: Arc<dyn Engine>,
    model: ServedModel,
    by: ServedBy,
    text: Arc<Text>,
    limits: ApiLimits,
    readiness: watch::Receiver<Readiness>,
    ffn_peers: FfnPeers,
    peers: Arc<Peers>,
    running: Running,
    tokenizing: Tokenizing,
    counts: ApiMetrics,
    metrics: Metrics,
    tracing: RequestTracing,
    /// Seconds since the Unix epoch.
    started: u64,
}

/// What an [`Api`] is built from.
pub struct ApiParts {
    /// Where sequences run.
    pub engine: Arc<dyn Engine>,
    /// What is served.
    pub model: ServedModel,
    /// By whom.
    pub by: ServedBy,
    /// Tokenizer and chat template.
    pub text: Text,
    /// Bounds.
    pub limits: ApiLimits,
    /// Whether requests can be answered; the process writes it.
    pub readiness: watch::Receiver<Readiness>,
    /// Lists the FFN ranks.
    pub ffn_peers: FfnPeers,
    /// The other attention ranks.
    pub peers: Arc<Peers>,
    /// Metrics of the process; `/metrics` shows all of them.
    pub metrics: Metrics,
    /// Which requests are recorded, and where their spans go.
    pub tracing: RequestTracing,
}

impl Api {
    /// Puts the parts together.
    ///
    /// # Errors
    /// When a metric of the same name is registered already.
    pub fn new(parts: ApiParts) -> Result<Arc<Self>, MetricError> {
        let counts = ApiMetrics::register(&parts.metrics)?;
        Ok(Arc::new(Self {
            engine: parts.engine,
            model: parts.model,
            by: parts.by,
            text: Arc::new(parts.text),
            limits: parts.limits,
            readiness: parts.readiness,
            ffn_peers: parts.ffn_peers,
            peers: parts.peers,
            running: Running::default(),
            tokenizing: Tokenizing::new(),
            counts,
            metrics: parts.metrics,
            tracing: parts.tracing,
            started: unix_seconds(),
        }))
    }

    /// Refuses a model that is not served; an absent name means the one that is.
    fn check_model(&self, asked: Option<&str>) -> Result<(), error::ApiError> {
        match asked {
            Some(name) if name != self.model.name => Err(error::ApiError::ModelNotFound {
                asked: name.to_owned(),
                served: self.model.name.clone(),
            }),
            _ => Ok(()),
        }
    }
}

fn unix_seconds() -> u64 {
    unix_time().as_secs()
}

fn unix_time() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
