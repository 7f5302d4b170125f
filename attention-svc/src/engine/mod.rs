//! The engine: one OS thread that owns the model, the KV cache's tensors and the way to the FFN. On a token's path it
//! stands between the scheduler, which says what to run, and the sampler, which chooses from the logits.
mod config;
mod ffn_port;
mod handle;
mod metrics;

pub use config::{EngineConfig, EngineConfigError};
pub use ffn_port::{FfnLoss, FfnPort, SideTensors, StepOutline};
pub use handle::{EngineHandle, EngineState};
pub use metrics::{Counter, EngineMetrics, Gauge};
