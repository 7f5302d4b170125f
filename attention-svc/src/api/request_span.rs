//! A request's own span: once the request is over, however it ended, what it was and what it cost, under the names of
//! OpenTelemetry's conventions for generative models. The engine adds the children `queue`, `prefill` and `decode`.
use std::time::Instant;

use afd_common::telemetry::{
    Array, KeyValue, Sampling, Span, SpanId, SpanKind, SpanSink, StringValue, TraceContext, Value, WallClock,
};

use super::error::ApiError;
use super::plan::{Incoming, Plan};
use super::validate::Checked;
use crate::request::{SequenceTrace, Usage};

/// Where spans of requests go, and which requests make some.
#[derive(Clone, Debug, Default)]
pub struct RequestTracing {
    /// To a collector, or nowhere.
    pub spans: SpanSink,
    /// Which requests.
    pub sampling: Sampling,
}

/// The span of a request that is recorded; it ends when this is dropped.
pub(super) struct RequestSpan {
    spans: SpanSink,
    context: TraceContext,
    parent: Option<SpanId>,
    hops: bool,
    begun: Instant,
    tokenized: Option<Instant>,
    attributes: Vec<KeyValue>,
    usage: Usage,
    reasons: Vec<StringValue>,
    num_running: usize,
    error: Option<(&'static str, String)>,
}

impl RequestSpan {
    /// `None` when the request is not recorded.
    pub(super) fn begin(tracing: &RequestTracing, plan: &Plan, model: &str, begun: Instant) -> Option<Self> {
        if !tracing.spans.is_on() {
            return None;
        }
        let Incoming { parent, hops } = plan.trace;
        let context = tracing.sampling.begin(parent.as_ref(), &mut rand::rng());
        context.sampled.then(|| Self {
            spans: tracing.spans.clone(),
            context,
            parent: parent.map(|parent| parent.span_id),
            hops,
            begun,
            tokenized: None,
            attributes: attributes(plan, model),
            usage: Usage::default(),
            reasons: Vec::new(),
            num_running: 0,
            error: None,
        })
    }

    /// What the request's sequences carry.
    pub(super) fn of_sequence(&self) -> SequenceTrace {
        SequenceTrace { request: self.context, hops: self.hops }
    }

    pub(super) fn handle_tokenized(&mut self) {
        self.tokenized = Some(Instant::now());
    }

    pub(super) fn handle_submitted(&mut self) {
        self.num_running += 1;
    }

    /// A sequence ended well. Of a prompt that is continued several times only the first continuation counts it.
    pub(super) fn handle_finished(&mut self, reason: &'static str, usage: Usage, is_first_of_prompt: bool) {
        self.num_running = self.num_running.saturating_sub(1);
        self.reasons.push(reason.into());
        self.usage.completion_tokens += usage.completion_tokens;
        if is_first_of_prompt {
            self.usage.prompt_tokens += usage.prompt_tokens;
            self.usage.cached_tokens += usage.cached_tokens;
        }
    }

    /// The request failed. The first failure is kept.
    pub(super) fn handle_failed(&mut self, error: &ApiError) {
        self.error.get_or_insert_with(|| (error.code(), error.to_string()));
    }
}

impl Drop for RequestSpan {
    fn drop(&mut self) {
        let (clock, end) = (WallClock::now(), Instant::now());
        if let Some(tokenized) = self.tokenized {
            let context = self.context.child(&mut rand::rng());
            let span = Span::new("tokenize", &context, clock.at(self.begun), clock.at(tokenized));
            self.spans.end(span.child_of(self.context.span_id));
        }
        let mut span = Span::new("request", &self.context, clock.at(self.begun), clock.at(end))
            .kind(SpanKind::Server)
            .with_all(std::mem::take(&mut self.attributes))
            .with("gen_ai.usage.input_tokens", i64::from(self.usage.prompt_tokens))
            .with("gen_ai.usage.output_tokens", i64::from(self.usage.completion_tokens))
            .with("gen_ai.usage.cache_read.input_tokens", i64::from(self.usage.cached_tokens))
            .with(
                "gen_ai.response.finish_reasons",
                Value::Array(Array::String(std::mem::take(&mut self.reasons))),
            );
        if let Some(parent) = self.parent {
            span = span.child_of_remote(parent);
        }
        span = match self.error.take() {
            Some((code, what)) => span.with("error.type", code).failed(what),
            None if self.num_running > 0 => span.with("error.type", "client_gone"),
            None => span,
        };
        self.spans.end(span);
    }
}

fn attributes(plan: &Plan, model: &str) -> Vec<KeyValue> {
    let Checked { sampling, n, .. } = &plan.checked;
    let mut attributes = vec![
        KeyValue::new("gen_ai.operation.name", plan.operation),
        KeyValue::new("gen_ai.provider.name", "afd"),
        KeyValue::new("gen_ai.request.model", model.to_owned()),
        KeyValue::new("gen_ai.response.model", model.to_owned()),
        KeyValue::new("gen_ai.response.id", plan.request_id.clone()),
        KeyValue::new("gen_ai.request.choice.count", *n as i64),
        KeyValue::new("gen_ai.request.temperature", f64::from(sampling.temperature)),
        KeyValue::new("gen_ai.request.top_p", f64::from(sampling.top_p)),
    ];
    let mut some = |key: &'static str, value: Option<i64>| {
        attributes.extend(value.map(|value| KeyValue::new(key, value)));
    };
    some("gen_ai.request.top_k", sampling.top_k.map(i64::from));
    some("gen_ai.request.seed", sampling.seed.map(|seed| seed as i64));
    some("gen_ai.request.max_tokens", plan.checked.max_tokens().map(i64::from));
    attributes
}
