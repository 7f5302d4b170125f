//! Names of requests.
use afd_common::telemetry::TraceContext;
use http::HeaderMap;
use rand::Rng;

/// A name such as `cmpl-4f0c…`, unique for all practical purposes.
pub(super) fn new_id(prefix: &str) -> String {
    format!("{prefix}-{:032x}", rand::rng().random::<u128>())
}

/// Trace context of a request. What is malformed is ignored, as the standard asks.
pub(super) fn traceparent(headers: &HeaderMap) -> Option<String> {
    let context: TraceContext = headers.get("traceparent")?.to_str().ok()?.parse().ok()?;
    Some(context.to_string())
}
