//! A recorded step as spans: `schedule`, one `attention` per layer and stage (and one `shared experts`, where they are
//! attention's), one `hop` per layer, stage and shard with
//! its `dispatch` and `combine`, `sample`, and `record`, the making of all these spans. Together they cover the step
//! without a gap. What the FFN did meanwhile are children of the same hops, made by the FFN: both sides derive a hop's
//! span id from its key.
use std::time::{Duration, Instant};

use afd_common::ids::{HopKey, LayerIdx};
use afd_common::telemetry::{Span, SpanId, SpanKind, SpanSink, TraceContext, WallClock};
use rand::Rng;

use super::super::ffn_port::{HopRecord, StepOutline};
use super::super::forward::ForwardTimes;
use super::{EngineTracing, SequenceSpans};

/// What of a layer attention computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Attention, from the answers to the layer before to the rows that go out.
    Attention,
    /// Shared experts that are placed on attention, while those rows are out.
    SharedExperts,
}

impl Work {
    /// As spans and timelines name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Attention => "attention",
            Self::SharedExperts => "shared experts",
        }
    }
}

/// When attention computed something of a layer of a stage.
#[derive(Clone, Copy, Debug)]
pub struct AttendRecord {
    /// What.
    pub work: Work,
    /// Of which rows.
    pub hop: HopKey,
    /// When it began.
    pub begun: Instant,
    /// When it was computed.
    pub ended: Instant,
}

/// A step that is being recorded.
pub(crate) struct StepTrace {
    /// The step's own span.
    pub(crate) context: TraceContext,
    /// The phase of the request that is alone in the step.
    parent: Option<SpanId>,
    /// The phases of those that share it.
    links: Vec<TraceContext>,
}

impl StepTrace {
    /// What a request that shares the step links to; a child needs no link.
    pub(crate) fn to_link(&self) -> Option<TraceContext> {
        self.parent.is_none().then_some(self.context)
    }
}

/// Chooses the steps to record and makes spans of them.
pub(crate) struct StepRecorder {
    pub(crate) spans: SpanSink,
    hops_ratio: f64,
    /// Whether the next step is drawn. Known one step ahead, as plans are: a recorded step's plan says so.
    next_drawn: bool,
    /// Of the step under way. Kept from step to step, so that nothing grows while a step runs.
    pub(crate) attends: Vec<AttendRecord>,
}

impl StepRecorder {
    pub(crate) fn new(tracing: EngineTracing, num_layers: u16, max_stages: usize) -> Self {
        let most = if tracing.spans.is_on() { 2 * usize::from(num_layers) * max_stages } else { 0 };
        let EngineTracing { spans, hops_ratio } = tracing;
        Self { spans, hops_ratio, next_drawn: draw(hops_ratio), attends: Vec::with_capacity(most) }
    }

    /// Whether the step that serves these sequences is recorded: on the wish of one of them, or by the draw. A step that
    /// serves no recorded request never is.
    pub(crate) fn begin<'a>(
        &mut self,
        num_sequences: usize,
        recorded: impl Iterator<Item = &'a SequenceSpans> + Clone,
    ) -> Option<StepTrace> {
        recorded.clone().next()?;
        let drawn = std::mem::replace(&mut self.next_drawn, draw(self.hops_ratio));
        if !drawn && !recorded.clone().any(SequenceSpans::wants_hops) {
            return None;
        }
        self.attends.clear();
        let mut phases = recorded.map(SequenceSpans::phase);
        let rng = &mut rand::rng();
        if num_sequences == 1
            && let Some(phase) = phases.next()
        {
            return Some(StepTrace {
                context: phase.child(rng),
                parent: Some(phase.span_id),
                links: Vec::new(),
            });
        }
        Some(StepTrace { context: TraceContext::root(rng, true), parent: None, links: phases.collect() })
    }

    /// Whether the next step will be recorded if it serves the same sequences, of which these are recorded.
    pub(crate) fn will_record<'a>(&self, mut recorded: impl Iterator<Item = &'a SequenceSpans>) -> bool {
        recorded.any(|spans| self.next_drawn || spans.wants_hops())
    }

    /// Makes the spans of a step that began at `begun` and is over now but for this, which is part of what the step costs.
    pub(crate) fn end(
        &self,
        trace: &StepTrace,
        outline: &StepOutline,
        begun: Instant,
        times: &ForwardTimes,
        hops: &[HopRecord],
        error: Option<&str>,
    ) {
        let (clock, end) = (WallClock::now(), Instant::now());
        let part = |name: &'static str, from: Instant, to: Instant| {
            let context = trace.context.child(&mut rand::rng());
            Span::new(name, &context, clock.at(from), clock.at(to)).child_of(trace.context.span_id)
        };
        let first = self.attends.first().map_or(end, |attend| attend.begun);
        self.spans.end(part("schedule", begun, first));
        for attend in &self.attends {
            let from = match attend.work {
                Work::Attention => landed(hops, attend.hop).unwrap_or(attend.begun),
                Work::SharedExperts => attend.begun,
            };
            self.spans.end(at(part(attend.work.name(), from, attend.ended), attend.hop));
        }
        hops.iter().for_each(|hop| self.end_hop(trace, hop, &clock, end));
        // The last answers are in: what is left of the step is logits, sampling and telling.
        if let Some(last) = hops.iter().filter_map(|hop| hop.combined).max().filter(|_| error.is_none()) {
            self.spans.end(part("sample", last, end));
        }
        let recorded = Instant::now();
        self.spans.end(part("record", end, recorded));
        let micros = |time: Duration| time.as_micros() as i64;
        let mut span = Span::new("step", &trace.context, clock.at(begun), clock.at(recorded))
            .with("afd.step", outline.step.0 as i64)
            .with("afd.phase", format!("{:?}", outline.phase).to_lowercase())
            .with("afd.stages", outline.stage_rows.len() as i64)
            .with("afd.rows", outline.stage_rows.iter().sum::<usize>() as i64)
            .with("afd.sequences", trace.links.len().max(1) as i64)
            .with("afd.attention_us", micros(times.attention))
            .with("afd.dispatch_us", micros(times.dispatch))
            .with("afd.ffn_wait_us", micros(times.ffn_wait))
            .with("afd.ffn_hidden_us", micros(times.ffn_hidden));
        if let Some((shard, time)) = slowest_shard(hops) {
            span =
                span.with("afd.slowest_shard", i64::from(shard)).with("afd.slowest_shard_us", micros(time));
        }
        if let Some(parent) = trace.parent {
            span = span.child_of(parent);
        }
        span = trace.links.iter().fold(span, Span::link);
        self.spans.end(match error {
            Some(what) => span.failed(what),
            None => span,
        });
    }

    fn end_hop(&self, trace: &StepTrace, hop: &HopRecord, clock: &WallClock, step_end: Instant) {
        let context = trace.context.hop(hop.key, hop.shard);
        let child = |name: &'static str, from: Instant, to: Instant| {
            let own = context.child(&mut rand::rng());
            let span = Span::new(name, &own, clock.at(from), clock.at(to));
            at(span, hop.key).with("afd.shard", i64::from(hop.shard)).child_of(context.span_id)
        };
        self.spans.end(child("dispatch", hop.begun, hop.sent));
        // From the sending on the answer is due. How long attention waited for it with nothing else to do is less.
        let waited =
            |begun: Instant| hop.arrived.map_or(Duration::ZERO, |to| to.saturating_duration_since(begun));
        let wait_us = hop.combine_begun.map_or(Duration::ZERO, waited).as_micros() as i64;
        if let Some(arrived) = hop.arrived {
            self.spans.end(child("combine", hop.sent, arrived).with("afd.wait_us", wait_us));
        }
        // The shard is part of the name: the slow one is to be seen without opening anything.
        let name = format!("hop shard {}", hop.shard);
        let span = Span::new(name, &context, clock.at(hop.begun), clock.at(hop.arrived.unwrap_or(step_end)));
        let span = at(span, hop.key)
            .child_of(trace.context.span_id)
            .kind(SpanKind::Client)
            .with("afd.shard", i64::from(hop.shard))
            .with("afd.rows", i64::from(hop.rows))
            .with("afd.link.kind", hop.link.to_string())
            .with("afd.link.epoch", hop.epoch.0 as i64)
            .with("afd.send_us", (hop.sent - hop.begun).as_micros() as i64)
            .with("afd.wait_us", wait_us)
            .with("afd.replayed", hop.sends > 1);
        self.spans.end(if hop.arrived.is_some() { span } else { span.failed("no answer came") });
    }
}

fn draw(ratio: f64) -> bool {
    ratio > 0.0 && rand::rng().random::<f64>() < ratio
}

/// When the answers to the layer before had all come: attention's work on this layer begins with adding them up.
fn landed(hops: &[HopRecord], hop: HopKey) -> Option<Instant> {
    let before = HopKey { layer: LayerIdx(hop.layer.0.checked_sub(1)?), ..hop };
    hops.iter().find(|record| record.key == before)?.combined
}

fn at(span: Span, hop: HopKey) -> Span {
    span.with("afd.layer", i64::from(hop.layer.0)).with("afd.stage", i64::from(hop.stage.0))
}

/// The shard whose answers took longest, all hops together, and how long.
fn slowest_shard(hops: &[HopRecord]) -> Option<(u32, Duration)> {
    let num_shards = hops.iter().map(|hop| hop.shard).max()? + 1;
    let time = |shard| {
        let of_shard = hops.iter().filter(|hop| hop.shard == shard);
        of_shard.filter_map(|hop| Some(hop.arrived? - hop.begun)).sum::<Duration>()
    };
    (0..num_shards).map(|shard| (shard, time(shard))).max_by_key(|(_, time)| *time)
}
