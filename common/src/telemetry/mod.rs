//! What can be seen of a process: structured logs ([`logs`]), metrics ([`metrics`]), the trace context that ties the work
//! of both roles to a request ([`trace_context`]), and spans ([`spans`]) on their way to a collector ([`otlp`]). Nothing
//! here is global but the log subscriber, which `main` installs once.
pub mod logs;
pub mod metrics;
pub mod otlp;
pub mod request_id;
pub mod spans;
pub mod trace_context;

pub use logs::{LogConfig, LogError, LogFormat};
pub use metrics::{MetricError, Metrics};
pub use opentelemetry::{Array, KeyValue, StringValue, Value};
pub use otlp::{OtlpError, OtlpSettings, Sampling};
pub use request_id::RequestId;
pub use spans::{Span, SpanKind, SpanSink, WallClock};
pub use trace_context::{SpanId, TraceContext, TraceId};
