//! Numbers of the engine. Its thread only adds to atomics.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use afd_common::link::book::LinkBook;
use afd_common::telemetry::metrics::{
    Histogram, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, ReadKind, SECONDS,
};
use afd_common::telemetry::{MetricError, Metrics};

use super::HopError;

const ROWS: [f64; 13] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0, 16384.0];
const HOPS: [f64; 7] = [1.0, 2.0, 3.0, 4.0, 8.0, 16.0, 32.0];

/// See the module's head. Clones share the numbers.
#[derive(Clone, Debug)]
pub struct EngineMetrics {
    /// Hops served.
    pub hops: IntCounter,
    /// Rows served.
    pub rows: IntCounter,
    /// Hops answered with an error, by reason.
    pub refused: IntCounterVec,
    /// Hops that began without a plan.
    pub unplanned: IntCounter,
    /// Rows of a batch.
    pub batch_rows: Histogram,
    /// Hops of a batch.
    pub batch_hops: Histogram,
    /// Attention ranks of a batch.
    pub batch_ranks: Histogram,
    /// Whether hops wait for company at present.
    pub boarding: IntGauge,
    /// Ranks that missed the others at a layer.
    pub stragglers: IntCounter,
    /// From a hop's arrival to its batch.
    pub queue_seconds: Histogram,
    /// Computing a batch.
    pub compute_seconds: Histogram,
    /// Handing a result to its link.
    pub send_seconds: Histogram,
    /// Time spent computing and sending, microseconds; its rate is the busy ratio.
    pub busy_us: Arc<AtomicU64>,
    /// Time spent with nothing to run while some step was under way, microseconds: this side's bubble.
    pub idle_us: Arc<AtomicU64>,
    /// Hops that wait or are being computed.
    pub unanswered: IntGauge,
    /// Links in use, by kind.
    pub links: IntGaugeVec,
    /// What went over them.
    pub book: Arc<LinkBook>,
    /// Steps of links that a stream drives, by how they were run (or that they were lost) and why not by a graph.
    pub stream_steps: IntCounterVec,
    /// From a step's plan to its end on the device.
    pub stream_step_seconds: Histogram,
}

impl EngineMetrics {
    /// Makes them in `metrics`.
    ///
    /// # Errors
    /// When a name is taken there.
    pub fn new(metrics: &Metrics) -> Result<Self, MetricError> {
        let seconds = |name: &str, help: &str| metrics.histogram(name, help, &SECONDS);
        let time = |name: &str, help: &str| {
            let us = Arc::<AtomicU64>::default();
            let read = Arc::clone(&us);
            let seconds = move || read.load(Relaxed) as f64 / 1e6;
            metrics.read_one_when_asked(ReadKind::Counter, name, help, seconds).map(|()| us)
        };
        let help = "Time spent computing and sending; its rate is the busy ratio.";
        let busy_us = time("afd_ffn_busy_seconds_total", help)?;
        let help = "Time with nothing to run while a step was under way: the FFN's bubble.";
        let idle_us = time("afd_ffn_idle_seconds_total", help)?;
        let book = Arc::<LinkBook>::default();
        LinkBook::show(&book, metrics)?;
        let refused = metrics.counters(
            "afd_ffn_hops_refused_total",
            "Hops answered with an error, by reason.",
            &["reason"],
        )?;
        // There from the start, so that their first increase is one.
        for reason in HopError::REASONS {
            refused.with_label_values(&[reason]);
        }
        Ok(Self {
            hops: metrics.counter("afd_ffn_hops_total", "Hops served.")?,
            rows: metrics.counter("afd_ffn_rows_total", "Rows served.")?,
            refused,
            unplanned: metrics.counter("afd_ffn_hops_unplanned_total", "Hops that began without a plan.")?,
            batch_rows: metrics.histogram("afd_ffn_batch_rows", "Rows of a batch.", &ROWS)?,
            batch_hops: metrics.histogram(
                "afd_ffn_batch_hops",
                "Hops of a batch, from all attention ranks.",
                &HOPS,
            )?,
            batch_ranks: metrics.histogram("afd_ffn_batch_ranks", "Attention ranks of a batch.", &HOPS)?,
            boarding: metrics.gauge(
                "afd_ffn_boarding",
                "1 while hops wait for those of other attention ranks (--board-ms): this rank is the bottleneck.",
            )?,
            stragglers: metrics.counter(
                "afd_ffn_stragglers_total",
                "Attention ranks that missed the others at a layer and went on alone for that step.",
            )?,
            queue_seconds: seconds("afd_ffn_queue_seconds", "From a hop's arrival to its batch.")?,
            compute_seconds: seconds("afd_ffn_compute_seconds", "Computing a batch.")?,
            send_seconds: seconds("afd_ffn_send_seconds", "Handing a result to its link.")?,
            busy_us,
            idle_us,
            book,
            unanswered: metrics.gauge("afd_ffn_hops_unanswered", "Hops that wait or are being computed.")?,
            links: metrics.gauges("afd_ffn_links", "Links in use, by kind.", &["kind"])?,
            stream_steps: metrics.counters(
                "afd_ffn_stream_steps_total",
                "Steps of links that a stream drives, by how they were run (replayed, captured, eager, lost) and why eagerly.",
                &["mode", "reason"],
            )?,
            stream_step_seconds: seconds(
                "afd_ffn_stream_step_seconds",
                "From a step's plan to its end, on links that a stream drives.",
            )?,
        })
    }
}
