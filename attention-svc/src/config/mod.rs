//! What `attention-svc serve` is told, checked once. Nothing after this module looks at options.
//!
//! In reading order: `args` and `choices` (what can be written), then one file for each part of what comes of it: `model`,
//! `address`, `ffn`, `capacity`; `idle` names options without effect; `kv_memory` sizes the cache once the model is known.
use std::time::Duration;

use afd_common::config::file;
use afd_common::config::idle::Idle;
use afd_common::config::option::refuse;
use afd_common::config::units::Span;
use afd_common::telemetry::{LogConfig, Sampling, SpanSink};

mod address;
mod args;
mod capacity;
mod choices;
mod ffn;
mod idle;
mod kv_memory;
mod model;
#[cfg(test)]
mod tests;

pub use address::{AddressConfig, PeersConfig};
pub use afd_common::config::option::OptionError;
pub use args::ServeArgs;
pub use capacity::CapacityConfig;
pub use choices::{FfnTarget, GraphMode, LinkChoice, StageChoice};
pub use ffn::FfnConfig;
pub use kv_memory::{KvMemory, KvPlan, KvRequest};
pub use model::ModelSource;

/// Everything that `serve` is told.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// The checkpoint.
    pub model: ModelSource,
    /// Where it is reached.
    pub address: AddressConfig,
    /// The other attention ranks.
    pub peers: PeersConfig,
    /// The way to the FFN.
    pub ffn: FfnConfig,
    /// How much it takes on.
    pub capacity: CapacityConfig,
    /// How long running requests have when the process is told to end.
    pub drain_timeout: Duration,
    /// Logs.
    pub log: LogConfig,
    /// Traces.
    pub trace: TraceConfig,
    /// Options that were given and have no effect.
    pub idle: Vec<Idle>,
}

/// What is recorded, and where it goes: `spans` and `sampling` are the environment's, and `main` sets them.
#[derive(Clone, Debug, Default)]
pub struct TraceConfig {
    /// To a collector, or nowhere.
    pub spans: SpanSink,
    /// Which requests.
    pub sampling: Sampling,
    /// Share of the steps whose every hop is recorded, 0 to 1.
    pub hops_ratio: f64,
}

impl ServeConfig {
    /// Reads the `--config` file, if there is one, fills in defaults and checks everything.
    ///
    /// # Errors
    /// [`OptionError`] names the option and its value.
    pub fn new(args: ServeArgs) -> Result<Self, OptionError> {
        let args = match &args.config {
            Some(path) => file::overlay(path, &args)?,
            None => args,
        };
        let capacity = CapacityConfig::new(&args)?;
        let idle = idle::of(&args, &capacity);
        Ok(Self {
            model: ModelSource::new(&args)?,
            address: AddressConfig::new(&args)?,
            peers: PeersConfig::new(&args)?,
            ffn: FfnConfig::new(&args)?,
            capacity,
            idle,
            drain_timeout: args.drain_timeout.map_or(Duration::from_secs(30), |span| span.0),
            log: LogConfig {
                format: args.log_format.unwrap_or_default(),
                filter: args.log_level.unwrap_or_else(|| "info".into()),
            },
            trace: match args.trace_hops_ratio.unwrap_or(0.01) {
                hops_ratio @ 0.0..=1.0 => TraceConfig { hops_ratio, ..TraceConfig::default() },
                other => return refuse("--trace-hops-ratio", format!("is {other}; expected 0 to 1")),
            },
        })
    }
}

/// A time that is longer than nothing, `default` in seconds.
fn time(option: &'static str, span: Option<Span>, default: u64) -> Result<Duration, OptionError> {
    match span.map(|span| span.0) {
        Some(Duration::ZERO) => refuse(option, "is 0s; expected more than 0s"),
        given => Ok(given.unwrap_or(Duration::from_secs(default))),
    }
}
