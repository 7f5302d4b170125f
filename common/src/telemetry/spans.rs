//! Finished spans on their way out. A span is made after the fact, with ids and times of the caller's choosing, so that
//! both roles can agree on ids without a message and nothing is held while the work it tells of goes on.
//!
//! [`SpanSink::end`] never waits: it hands the span to a bounded queue, behind which a thread of its own sends batches.
//! What does not fit is dropped and counted.
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime};

pub use opentelemetry::trace::SpanKind;
use opentelemetry::trace::{self, Link, SpanContext, Status, TraceFlags, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue, Value};
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, SpanData, SpanEvents, SpanExporter, SpanLinks, SpanProcessor,
};

use super::metrics::{MetricError, Metrics, ReadKind, Sample};
use super::{SpanId, TraceContext};

/// Spans that may wait: what full detail of some dozen steps makes.
const MAX_QUEUED: usize = 16 << 10;
/// Spans of one message to the collector.
const MAX_BATCH: usize = 1024;
/// How long a span waits for company.
const BATCH_DELAY: Duration = Duration::from_millis(500);

/// Something that happened, from when to when.
#[derive(Clone, Debug)]
pub struct Span(SpanData);

impl Span {
    /// A root, until [`child_of`](Self::child_of) says otherwise. `context` is the span's own. An end before the start is
    /// taken for the start: clocks of two machines may disagree.
    pub fn new(name: impl Into<String>, context: &TraceContext, start: SystemTime, end: SystemTime) -> Self {
        Self(SpanData {
            span_context: foreign(context, false),
            parent_span_id: trace::SpanId::INVALID,
            parent_span_is_remote: false,
            span_kind: SpanKind::Internal,
            name: name.into().into(),
            start_time: start,
            end_time: end.max(start),
            attributes: Vec::new(),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: InstrumentationScope::default(),
        })
    }

    /// A child of a span of this process.
    pub fn child_of(mut self, parent: SpanId) -> Self {
        self.0.parent_span_id = trace::SpanId::from(parent.get());
        self
    }

    /// A child of a span of another process.
    pub fn child_of_remote(mut self, parent: SpanId) -> Self {
        self.0.parent_span_is_remote = true;
        self.child_of(parent)
    }

    /// Which end of a call it is; without this call it is neither.
    pub fn kind(mut self, kind: SpanKind) -> Self {
        self.0.span_kind = kind;
        self
    }

    /// Adds an attribute.
    pub fn with(mut self, key: &'static str, value: impl Into<Value>) -> Self {
        self.0.attributes.push(KeyValue::new(key, value));
        self
    }

    /// Adds attributes.
    pub fn with_all(mut self, attributes: impl IntoIterator<Item = KeyValue>) -> Self {
        self.0.attributes.extend(attributes);
        self
    }

    /// Points to a span that had to do with this one.
    pub fn link(mut self, to: &TraceContext) -> Self {
        self.0.links.links.push(Link::new(foreign(to, true), Vec::new(), 0));
        self
    }

    /// Says that it failed, and why.
    pub fn failed(mut self, what: impl Into<String>) -> Self {
        self.0.status = Status::error(what.into());
        self
    }
}

fn foreign(context: &TraceContext, remote: bool) -> SpanContext {
    let flags = if context.sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
    let (trace_id, span_id) = (context.trace_id.get().into(), context.span_id.get().into());
    SpanContext::new(trace_id, span_id, flags, remote, TraceState::NONE)
}

/// Instants as times of day, by one look at both clocks. To be made anew for every batch of conversions, so that a clock
/// that is set does not tear later spans apart.
#[derive(Clone, Copy, Debug)]
pub struct WallClock {
    now: Instant,
    time: SystemTime,
}

impl WallClock {
    /// Looks at both clocks.
    pub fn now() -> Self {
        Self { now: Instant::now(), time: SystemTime::now() }
    }

    /// When that was.
    pub fn at(&self, instant: Instant) -> SystemTime {
        match self.now.checked_duration_since(instant) {
            Some(ago) => self.time - ago,
            None => self.time + (instant - self.now),
        }
    }
}

/// Counters of what became of spans.
#[derive(Debug, Default)]
struct Counts {
    /// Handed to the queue.
    queued: AtomicU64,
    /// Taken out of it again, whatever came of them.
    taken: AtomicU64,
    exported: AtomicU64,
    failed: AtomicU64,
    dropped: AtomicU64,
}

/// Where finished spans go: nowhere, or to a collector. Clones share the queue.
#[derive(Clone, Default)]
pub struct SpanSink(Option<Arc<Pipeline>>);

struct Pipeline {
    processor: BatchSpanProcessor,
    counts: Arc<Counts>,
}

impl SpanSink {
    /// Keeps nothing.
    pub fn off() -> Self {
        Self::default()
    }

    /// Sends batches through `exporter`, on a thread of its own.
    pub fn new(exporter: impl SpanExporter + 'static) -> Self {
        let counts = Arc::<Counts>::default();
        let exporter = Counted { exporter, counts: Arc::clone(&counts) };
        let config = BatchConfigBuilder::default()
            .with_max_queue_size(MAX_QUEUED)
            .with_max_export_batch_size(MAX_BATCH)
            .with_scheduled_delay(BATCH_DELAY)
            .build();
        let processor = BatchSpanProcessor::builder(exporter).with_batch_config(config).build();
        Self(Some(Arc::new(Pipeline { processor, counts })))
    }

    /// Whether anybody wants spans. Nothing needs to be recorded while this is false.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Sends a span on its way. Never waits; an unsampled one goes nowhere.
    pub fn end(&self, span: Span) {
        let Some(Pipeline { processor, counts }) = self.0.as_deref() else { return };
        if !span.0.span_context.is_sampled() {
            return;
        }
        let waiting = counts.queued.load(Relaxed).saturating_sub(counts.taken.load(Relaxed));
        // The processor holds as much again while it sends a batch; what it would drop without a word is dropped here.
        if waiting >= MAX_QUEUED as u64 {
            counts.dropped.fetch_add(1, Relaxed);
            return;
        }
        counts.queued.fetch_add(1, Relaxed);
        processor.on_end(span.0);
    }

    /// Sends what waits, for at most `limit`, and ends the thread. Blocks; later spans go nowhere.
    pub fn flush(&self, limit: Duration) {
        let Some(pipeline) = self.0.as_deref() else { return };
        if let Err(error) = pipeline.processor.shutdown_with_timeout(limit) {
            tracing::warn!(%error, "the last spans were not sent");
        }
    }

    /// Shows what became of spans.
    ///
    /// # Errors
    /// When the names are taken.
    pub fn count(&self, metrics: &Metrics) -> Result<(), MetricError> {
        let counts = self.0.as_ref().map(|pipeline| Arc::clone(&pipeline.counts)).unwrap_or_default();
        let help = "Spans by what became of them: exported, failed (the collector did not take them), dropped (the queue was full).";
        metrics.read_when_asked(ReadKind::Counter, "afd_spans_total", help, &["outcome"], move || {
            [("exported", &counts.exported), ("failed", &counts.failed), ("dropped", &counts.dropped)]
                .map(|(outcome, count)| Sample::of(outcome, count.load(Relaxed) as f64))
                .into()
        })
    }
}

impl fmt::Debug for SpanSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpanSink").field("is_on", &self.is_on()).finish()
    }
}

/// Counts what goes through an exporter, and says once that it stands still and once that it goes on.
#[derive(Debug)]
struct Counted<E> {
    exporter: E,
    counts: Arc<Counts>,
}

impl<E: SpanExporter> SpanExporter for Counted<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let num_spans = batch.len() as u64;
        self.counts.taken.fetch_add(num_spans, Relaxed);
        let outcome = self.exporter.export(batch).await;
        match &outcome {
            Ok(()) => {
                self.counts.exported.fetch_add(num_spans, Relaxed);
            }
            Err(error) => {
                let failed = self.counts.failed.fetch_add(num_spans, Relaxed);
                if failed == 0 {
                    tracing::warn!(%error, "spans cannot be sent (further failures are only counted)");
                }
            }
        }
        outcome
    }

    fn shutdown_with_timeout(&self, limit: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(limit)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    #[derive(Clone, Debug, Default)]
    struct Kept(Arc<Mutex<Vec<SpanData>>>);

    impl SpanExporter for Kept {
        async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
            self.0.lock().unwrap().extend(batch);
            Ok(())
        }
    }

    /// Takes its first batch only when it is told to.
    #[derive(Debug)]
    struct Stuck(Mutex<Receiver<()>>);

    impl SpanExporter for Stuck {
        async fn export(&self, _: Vec<SpanData>) -> OTelSdkResult {
            let _ = self.0.lock().unwrap().recv_timeout(Duration::from_secs(20));
            Ok(())
        }
    }

    fn context(sampled: bool) -> TraceContext {
        TraceContext::root(&mut rand::rng(), sampled)
    }

    fn span(context: &TraceContext) -> Span {
        let now = SystemTime::now();
        Span::new("work", context, now, now + Duration::from_millis(3))
    }

    #[test]
    fn a_span_keeps_its_ids_times_and_links_and_an_unsampled_one_goes_nowhere() {
        let kept = Kept::default();
        let sink = SpanSink::new(kept.clone());
        let (own, other, unsampled) = (context(true), context(true), context(false));
        sink.end(span(&unsampled));
        sink.end(
            span(&own)
                .child_of_remote(other.span_id)
                .link(&other)
                .with("afd.rows", 3)
                .kind(SpanKind::Server)
                .failed("no"),
        );
        sink.flush(Duration::from_secs(10));
        let spans = kept.0.lock().unwrap();
        let [sent] = &spans[..] else { panic!("{spans:?}") };
        assert_eq!(sent.span_context.trace_id().to_string(), own.trace_id.to_string());
        assert_eq!(sent.span_context.span_id().to_string(), own.span_id.to_string());
        assert_eq!(sent.parent_span_id.to_string(), other.span_id.to_string());
        assert_eq!(sent.links[0].span_context.trace_id().to_string(), other.trace_id.to_string());
        assert_eq!(sent.end_time.duration_since(sent.start_time).unwrap(), Duration::from_millis(3));
        assert!(matches!(sent.status, Status::Error { .. }) && sent.attributes.len() == 1);
    }

    #[test]
    fn a_collector_that_stands_still_costs_spans_and_no_time() {
        let (release, receiver) = channel();
        let sink = SpanSink::new(Stuck(Mutex::new(receiver)));
        let metrics = Metrics::new();
        sink.count(&metrics).unwrap();
        let own = context(true);
        let mut longest = Duration::ZERO;
        for _ in 0..3 * MAX_QUEUED {
            let begun = Instant::now();
            sink.end(span(&own));
            longest = longest.max(begun.elapsed());
        }
        assert!(longest < Duration::from_secs(2), "waited {longest:?}");
        let text = metrics.render().unwrap();
        let dropped =
            text.lines().find_map(|line| line.strip_prefix("afd_spans_total{outcome=\"dropped\"} "));
        assert!(dropped.unwrap().parse::<u64>().unwrap() > 0, "{text}");
        let begun = Instant::now();
        sink.flush(Duration::from_millis(200));
        assert!(begun.elapsed() < Duration::from_secs(5), "the flush is bounded");
        drop(release);
    }

    #[test]
    fn instants_become_times_of_day() {
        let clock = WallClock::now();
        let later = clock.now + Duration::from_secs(2);
        assert_eq!(clock.at(later).duration_since(clock.at(clock.now)).unwrap(), Duration::from_secs(2));
        if let Some(earlier) = clock.now.checked_sub(Duration::from_millis(5)) {
            assert_eq!(clock.time.duration_since(clock.at(earlier)).unwrap(), Duration::from_millis(5));
        }
    }
}
