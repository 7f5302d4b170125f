//! What can be seen of a process: structured logs ([`logs`]), metrics ([`metrics`]) and the trace context that ties the
//! work of both roles to a request ([`trace_context`]). Nothing here is global but the log subscriber, which `main`
//! installs once.
pub mod logs;
pub mod metrics;
pub mod request_id;
pub mod trace_context;

pub use logs::{LogConfig, LogError, LogFormat};
pub use metrics::{MetricError, Metrics};
pub use request_id::RequestId;
pub use trace_context::{SpanId, TraceContext, TraceId};
