//! What the engine counts, as plain atomics: the engine's thread writes, the API renders.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::EagerReason;

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds.
    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Relaxed);
    }

    /// Adds a time, microseconds.
    pub fn add_time(&self, time: Duration) {
        self.add(time.as_micros() as u64);
    }

    /// Replaces a total that is kept elsewhere.
    pub fn set(&self, total: u64) {
        self.0.store(total, Relaxed);
    }

    /// Now.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// A number that goes up and down.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    /// Replaces it.
    pub fn set(&self, value: usize) {
        self.0.store(value as u64, Relaxed);
    }

    /// Now.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// One engine's numbers. Times are sums in microseconds; divide by `steps` for a mean.
#[derive(Debug, Default)]
pub struct EngineMetrics {
    /// Sequences that hold KV blocks.
    pub running: Gauge,
    /// Sequences that hold none yet, or gave theirs up.
    pub waiting: Gauge,
    /// KV blocks in use; zero when nothing runs.
    pub kv_blocks_used: Gauge,
    /// All KV blocks.
    pub kv_blocks_total: Gauge,
    /// 1 while every FFN shard has a warm rank, else 0.
    pub ffn_ready: Gauge,
    /// Steps begun.
    pub steps: Counter,
    /// Steps given up because the FFN was lost or an error occurred.
    pub steps_failed: Counter,
    /// Decode steps that a device ran from end to end.
    pub decode_steps: Counter,
    /// From their launch, or from the end of the step ahead where they were launched before it, to their end there.
    pub decode_device_us: Counter,
    /// What the host does for them: scheduling, the plan, the launch, choosing and committing, beside the device or not.
    pub decode_host_us: Counter,
    /// How long the device had nothing to do between two of them, by its own clock.
    pub decode_idle_us: Counter,
    /// Of how many that is.
    pub decode_gaps: Counter,
    /// Decode steps that were one graph.
    pub graph_replays: Counter,
    /// Decode steps on a device that were not, by reason, in the order of [`EagerReason::ALL`].
    pub eager_steps: [Counter; EagerReason::ALL.len()],
    /// Tokens computed that were not chosen in the step before: prompts and recomputation.
    pub tokens_prefilled: Counter,
    /// Tokens chosen.
    pub tokens_generated: Counter,
    /// Those of them that a device chose.
    pub tokens_chosen_on_device: Counter,
    /// Times a sequence gave up its blocks.
    pub preemptions: Counter,
    /// Tokens looked up in the prefix cache.
    pub prefix_queries: Counter,
    /// Tokens found there.
    pub prefix_hits: Counter,
    /// Scheduling and building batches.
    pub schedule_us: Counter,
    /// Embedding, attention and head; shared experts, where attention has them.
    pub attention_us: Counter,
    /// Sending rows to the FFN.
    pub dispatch_us: Counter,
    /// Waiting for the FFN with nothing else to do: the bubble.
    pub ffn_wait_us: Counter,
    /// Hops under way while attention computed something else: what stages hide.
    pub ffn_hidden_us: Counter,
    /// Steps by their number of stages.
    pub stages: [Counter; 4],
    /// Sampling and telling.
    pub sample_us: Counter,
    /// Whole steps.
    pub step_us: Counter,
    /// Sequences that ended with a stop token.
    pub finished_stop: Counter,
    /// Sequences that ended at their `max_tokens`.
    pub finished_length: Counter,
    /// Sequences whose caller went away.
    pub finished_cancelled: Counter,
    /// Sequences that failed.
    pub failed: Counter,
}

impl EngineMetrics {
    pub(super) fn note_stages(&self, num_stages: usize) {
        if let Some(count) = num_stages.checked_sub(1).and_then(|at| self.stages.get(at)) {
            count.add(1);
        }
    }

    /// A decode step is over that a device ran for so long, and that followed another with so long between them.
    pub(super) fn note_on_device(&self, on_device: Duration, idle: Option<Duration>) {
        self.decode_steps.add(1);
        self.decode_device_us.add_time(on_device);
        if let Some(idle) = idle {
            self.decode_gaps.add(1);
            self.decode_idle_us.add_time(idle);
        }
    }

    pub(super) fn note_eager(&self, reason: EagerReason) {
        let place = EagerReason::ALL.iter().position(|one| *one == reason);
        if let Some(count) = place.and_then(|place| self.eager_steps.get(place)) {
            count.add(1);
        }
    }
}
