//! A request that was read and checked, from either face, with what its headers say about tracing: what
//! [`Generation`](super::generation::Generation) starts from.
use std::time::Instant;

use afd_common::telemetry::TraceContext;
use http::HeaderMap;

use super::prompt::PromptSource;
use super::validate::Checked;

/// Asks for every step of the request to be recorded hop by hop.
const HOPS_HEADER: &str = "x-afd-trace-hops";

/// A request that was read and checked.
#[derive(Debug)]
pub struct Plan {
    /// Its name in answers, logs and `Abort`.
    pub request_id: String,
    /// At least one.
    pub prompts: Vec<PromptSource>,
    /// Field that prompts came in.
    pub prompt_param: &'static str,
    /// The rest.
    pub checked: Checked,
    /// When the caller stops waiting.
    pub deadline: Option<Instant>,
    /// What its headers say about tracing.
    pub trace: Incoming,
    /// What is done, as `gen_ai.operation.name`: "chat" or "text_completion".
    pub operation: &'static str,
}

/// What a request's headers say about its trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Incoming {
    /// The caller's span.
    pub parent: Option<TraceContext>,
    /// Whether the steps that serve it are to be recorded hop by hop.
    pub hops: bool,
}

impl Incoming {
    /// Reads `traceparent` and `x-afd-trace-hops: 1`. What is malformed is ignored, as the standard asks.
    pub(super) fn read(headers: &HeaderMap) -> Self {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let parent = text("traceparent").and_then(|value| value.trim().parse().ok());
        let hops = text(HOPS_HEADER).is_some_and(|value| matches!(value.trim(), "1" | "true"));
        Self { parent, hops }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_say_what_is_wanted_and_nonsense_says_nothing() {
        let of = |pairs: &[(&'static str, &str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in pairs {
                headers.insert(*name, value.parse().unwrap());
            }
            Incoming::read(&headers)
        };
        let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let read = of(&[("traceparent", parent), (HOPS_HEADER, "1")]);
        assert_eq!((read.parent.unwrap().to_string().as_str(), read.hops), (parent, true));
        assert_eq!(of(&[("traceparent", "00-zz"), (HOPS_HEADER, "0")]), Incoming::default());
        assert_eq!(of(&[]), Incoming::default());
    }
}
