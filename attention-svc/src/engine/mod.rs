//! The engine: one OS thread that owns the model, the KV cache's tensors and the way to the FFN. On a token's path it
//! stands between the scheduler, which says what to run, and the sampler, which chooses from the logits.
//!
//! In reading order: `handle` (what the API holds) → `thread` (birth and death) → `run` (the loop) → `warm_up` (what
//! runs before anybody is served) → `readiness` (whether the FFN is there) → `step` → `decode` (steps that a device
//! runs whole) or `forward` (the layers, over the seams `attention_port` and `ffn_port`) → `choose` (logits to tokens
//! to events) → `ends` (of sequences). Beside them, `trace` and `profile` record what is wanted of it.
mod active;
mod attention_port;
mod cached_attention;
mod choose;
mod config;
mod decode;
mod ends;
mod ffn_port;
mod forward;
mod handle;
mod metrics;
mod profile;
mod readiness;
mod run;
mod step;
#[cfg(test)]
mod tests;
mod thread;
mod trace;
mod warm_up;

pub use attention_port::{
    AttentionError, AttentionPort, DecodeEnd, DecodeLaunch, DecodeStage, DecodeTurn, EagerReason,
};
pub use cached_attention::CachedAttention;
pub use config::{EngineConfig, EngineConfigError};
pub use ffn_port::{DeviceTimes, Ending, FfnLoss, FfnPort, HopRecord, SideTensors, StepOutline};
pub use forward::{DeviceChoice, StageOutput};
pub use handle::{EngineHandle, EngineState};
pub use metrics::{Counter, EngineMetrics, Gauge};
pub use profile::{ProfiledStep, Recorded};
pub use thread::{EngineDeath, EngineStartError, spawn};
pub use trace::{AttendRecord, EngineTracing, Work};
