//! A sequence's part of its request's trace: `queue`, `prefill` and `decode`, each with the sum of what its steps cost and
//! links to those steps that were recorded themselves.
use std::time::{Duration, Instant};

use afd_common::telemetry::{Span, SpanSink, TraceContext, WallClock};

use super::super::forward::ForwardTimes;
use crate::request::{SequenceTrace, Usage};

/// Links of one span: what a viewer can show.
const MAX_LINKS: usize = 64;

/// Where a recorded sequence stands.
pub(crate) struct SequenceSpans {
    trace: SequenceTrace,
    submitted: Instant,
    admitted: Option<Instant>,
    first_token: Option<Instant>,
    prefill: Phase,
    decode: Phase,
}

struct Phase {
    context: TraceContext,
    num_steps: u32,
    times: ForwardTimes,
    links: Vec<TraceContext>,
}

impl Phase {
    fn new(trace: &SequenceTrace) -> Self {
        let context = trace.request.child(&mut rand::rng());
        Self { context, num_steps: 0, times: ForwardTimes::default(), links: Vec::new() }
    }

    fn span(&self, name: &'static str, clock: &WallClock, start: Instant, end: Instant) -> Span {
        let micros = |time: Duration| time.as_micros() as i64;
        let span = Span::new(name, &self.context, clock.at(start), clock.at(end))
            .with("afd.steps", i64::from(self.num_steps))
            .with("afd.attention_us", micros(self.times.attention))
            .with("afd.dispatch_us", micros(self.times.dispatch))
            .with("afd.ffn_wait_us", micros(self.times.ffn_wait));
        self.links.iter().fold(span, Span::link)
    }
}

impl SequenceSpans {
    pub(crate) fn new(trace: SequenceTrace, submitted: Instant) -> Self {
        let (prefill, decode) = (Phase::new(&trace), Phase::new(&trace));
        Self { trace, submitted, admitted: None, first_token: None, prefill, decode }
    }

    /// Whether every step that serves it is to be recorded.
    pub(crate) fn wants_hops(&self) -> bool {
        self.trace.hops
    }

    /// The span that a step of its own would be a child of.
    pub(crate) fn phase(&self) -> TraceContext {
        if self.first_token.is_none() { self.prefill.context } else { self.decode.context }
    }

    /// It runs for the first time.
    pub(crate) fn handle_admitted(&mut self, now: Instant) {
        self.admitted.get_or_insert(now);
    }

    /// A step has served it; `recorded` is the step's own span, if it has one elsewhere.
    pub(crate) fn handle_step(&mut self, times: &ForwardTimes, recorded: Option<TraceContext>) {
        let phase = if self.first_token.is_none() { &mut self.prefill } else { &mut self.decode };
        phase.num_steps += 1;
        phase.times.add(times);
        if phase.links.len() < MAX_LINKS {
            phase.links.extend(recorded);
        }
    }

    /// A token was chosen.
    pub(crate) fn handle_token(&mut self) {
        if self.first_token.is_none() {
            self.first_token = Some(Instant::now());
        }
    }

    /// It is over. Makes the spans of the phases it has reached.
    pub(crate) fn end(self, spans: &SpanSink, usage: Usage, error: Option<&str>) {
        let (clock, end) = (WallClock::now(), Instant::now());
        let request = self.trace.request.span_id;
        let left_queue = self.admitted.unwrap_or(end);
        let queue = self.trace.request.child(&mut rand::rng());
        let close = |span: Span, is_last: bool| {
            let span = span.child_of(request);
            spans.end(match error {
                Some(what) if is_last => span.failed(what),
                _ => span,
            });
        };
        let queue = Span::new("queue", &queue, clock.at(self.submitted), clock.at(left_queue));
        close(queue, self.admitted.is_none());
        if let Some(admitted) = self.admitted {
            let prefilled = self.first_token.unwrap_or(end);
            let span = self.prefill.span("prefill", &clock, admitted, prefilled);
            let span = span
                .with("gen_ai.usage.input_tokens", i64::from(usage.prompt_tokens))
                .with("gen_ai.usage.cache_read.input_tokens", i64::from(usage.cached_tokens));
            close(span, self.first_token.is_none());
        }
        if let Some(first_token) = self.first_token {
            let span = self.decode.span("decode", &clock, first_token, end);
            close(span.with("gen_ai.usage.output_tokens", i64::from(usage.completion_tokens)), true);
        }
    }
}
