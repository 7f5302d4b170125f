//! Metrics of requests, under the names that dashboards for other servers know where the meaning is the same.
use std::time::{Duration, Instant};

use afd_common::telemetry::metrics::{Histogram, IntCounter, IntCounterVec, SECONDS};
use afd_common::telemetry::{MetricError, Metrics};

use crate::request::Usage;

/// Counters and histograms of requests.
pub(super) struct ApiMetrics {
    finished: IntCounterVec,
    failed: IntCounterVec,
    pub(super) rejected: IntCounter,
    forwarded: IntCounterVec,
    prompt_tokens: IntCounter,
    generation_tokens: IntCounter,
    time_to_first_token: Histogram,
    inter_token: Histogram,
    end_to_end: Histogram,
}

impl ApiMetrics {
    pub(super) fn register(metrics: &Metrics) -> Result<Self, MetricError> {
        let counts = Self {
            finished: metrics.counters(
                "vllm:request_success_total",
                "Sequences that ended well, by why.",
                &["finished_reason"],
            )?,
            failed: metrics.counters(
                "afd_requests_failed_total",
                "Requests that failed while running, by how.",
                &["code"],
            )?,
            rejected: metrics
                .counter("afd_requests_rejected_total", "Sequences that the engine did not take.")?,
            forwarded: metrics.counters(
                "afd_requests_forwarded_total",
                "Requests forwarded to other attention ranks that were answered, cancelled by their clients, redone here, lost in \
                 mid-answer, or cut at the end of this rank's drain.",
                &["outcome"],
            )?,
            prompt_tokens: metrics
                .counter("vllm:prompt_tokens_total", "Prompt tokens of finished sequences.")?,
            generation_tokens: metrics
                .counter("vllm:generation_tokens_total", "Tokens of finished sequences.")?,
            time_to_first_token: metrics.histogram(
                "vllm:time_to_first_token_seconds",
                "From the request to its first token.",
                &SECONDS,
            )?,
            inter_token: metrics.histogram(
                "vllm:inter_token_latency_seconds",
                "Between tokens of a sequence.",
                &SECONDS,
            )?,
            end_to_end: metrics.histogram(
                "vllm:e2e_request_latency_seconds",
                "From the request to its end.",
                &SECONDS,
            )?,
        };
        // There from the start, so that their first increase is one.
        for reason in ["stop", "length", "cancelled"] {
            counts.finished.with_label_values(&[reason]);
        }
        for code in ["internal_error", "ffn_unavailable", "deadline_exceeded", "shutting_down", "peer_lost"] {
            counts.failed.with_label_values(&[code]);
        }
        for outcome in ["answered", "cancelled", "redone", "lost", "cut"] {
            counts.forwarded.with_label_values(&[outcome]);
        }
        Ok(counts)
    }

    /// A sequence ended well.
    pub(super) fn finished(&self, reason: &str) {
        self.finished.with_label_values(&[reason]).inc();
    }

    /// A running request failed.
    pub(super) fn failed(&self, code: &str) {
        self.failed.with_label_values(&[code]).inc();
    }

    /// A request that was forwarded has ended, or is served here; once for each.
    pub(super) fn forwarded(&self, outcome: &str) {
        self.forwarded.with_label_values(&[outcome]).inc();
    }

    /// A token came so long after the last one, or after the request when it is the first.
    pub(super) fn token(&self, since: Duration, last: Option<Instant>) {
        let histogram = if last.is_some() { &self.inter_token } else { &self.time_to_first_token };
        histogram.observe(since.as_secs_f64());
    }

    /// What a finished sequence cost.
    pub(super) fn usage(&self, usage: Usage, elapsed: Duration) {
        self.prompt_tokens.inc_by(usage.prompt_tokens.into());
        self.generation_tokens.inc_by(usage.completion_tokens.into());
        self.end_to_end.observe(elapsed.as_secs_f64());
    }
}
