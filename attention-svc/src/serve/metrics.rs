//! Numbers that engine, links and port keep as plain atomics, under their names in Prometheus.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use afd_common::link::book::LinkBook;
use afd_common::net::{NetCounts, NetStats};
use afd_common::proto::v1;
use afd_common::telemetry::metrics::ReadKind::{self, Counter, Gauge};
use afd_common::telemetry::metrics::{SECONDS, Sample};
use afd_common::telemetry::{MetricError, Metrics};

use crate::api::FfnPeers;
use crate::engine::{Counter as Count, EagerReason, EngineMetrics};
use crate::remote_ffn::stats::FfnStats;

/// A number of the engine's without labels: its name and help, and how it is read.
type Row = (ReadKind, &'static str, &'static str, fn(&EngineMetrics) -> f64);

/// Those of the engine's numbers that have no labels.
const ENGINE: [Row; 18] = [
    (Gauge, "vllm:num_requests_running", "Sequences that hold KV blocks.", |m| m.running.get() as f64),
    (Gauge, "vllm:num_requests_waiting", "Sequences that wait for KV blocks.", |m| m.waiting.get() as f64),
    (Gauge, "vllm:kv_cache_usage_perc", "Part of the KV blocks in use, 0 to 1.", |m| {
        m.kv_blocks_used.get() as f64 / (m.kv_blocks_total.get() as f64).max(1.0)
    }),
    (Gauge, "afd_kv_blocks_used", "KV blocks in use.", |m| m.kv_blocks_used.get() as f64),
    (Gauge, "afd_kv_blocks", "KV blocks there are.", |m| m.kv_blocks_total.get() as f64),
    (Gauge, "afd_ffn_ready", "1 while every FFN shard has a warm rank.", |m| m.ffn_ready.get() as f64),
    (Counter, "vllm:num_preemptions_total", "Times a sequence gave up its blocks.", |m| {
        count(&m.preemptions)
    }),
    (Counter, "vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache.", |m| {
        count(&m.prefix_queries)
    }),
    (Counter, "vllm:prefix_cache_hits_total", "Tokens found in the prefix cache.", |m| count(&m.prefix_hits)),
    (Counter, "afd_steps_total", "Steps begun.", |m| count(&m.steps)),
    (Counter, "afd_steps_failed_total", "Steps given up.", |m| count(&m.steps_failed)),
    (Counter, "afd_tokens_prefilled_total", "Prompt tokens computed.", |m| count(&m.tokens_prefilled)),
    (Counter, "afd_tokens_generated_total", "Tokens chosen.", |m| count(&m.tokens_generated)),
    (Counter, "afd_tokens_chosen_on_device_total", "Tokens chosen on a GPU, where the logits are.", |m| {
        count(&m.tokens_chosen_on_device)
    }),
    (Counter, "afd_graph_replays_total", "Decode steps that were one graph.", |m| count(&m.graph_replays)),
    (Counter, "afd_decode_steps_total", "Decode steps that a GPU ran from end to end.", |m| {
        count(&m.decode_steps)
    }),
    (Counter, "afd_decode_gaps_total", "Those of them that followed another at once.", |m| {
        count(&m.decode_gaps)
    }),
    (
        Counter,
        "afd_ffn_hidden_seconds_total",
        "Time that hops were under way while attention computed something else; two at once count twice.",
        |m| seconds(&m.ffn_hidden_us),
    ),
];

fn count(counter: &Count) -> f64 {
    counter.get() as f64
}

fn seconds(us: &Count) -> f64 {
    us.get() as f64 / 1e6
}

/// The engine's.
pub(super) fn engine(metrics: &Metrics, engine: &Arc<EngineMetrics>) -> Result<(), MetricError> {
    for (kind, name, help, read) in ENGINE {
        let engine = Arc::clone(engine);
        metrics.read_one_when_asked(kind, name, help, move || read(&engine))?;
    }
    let by = |label: &str, name: &str, help: &str, read: fn(&EngineMetrics) -> Vec<Sample>| {
        let engine = Arc::clone(engine);
        metrics.read_when_asked(Counter, name, help, &[label], move || read(&engine))
    };
    let help = "Time of these: device, from launch to end there; host, scheduling to telling, beside it or not; idle, in \
                which the device has nothing to do between two of them, by its own clock.";
    by("where", "afd_decode_step_seconds_total", help, |m| {
        vec![
            Sample::of("device", seconds(&m.decode_device_us)),
            Sample::of("host", seconds(&m.decode_host_us)),
            Sample::of("idle", seconds(&m.decode_idle_us)),
        ]
    })?;
    let help = "Decode steps on a GPU that were not one graph, by why.";
    by("reason", "afd_graph_eager_steps_total", help, |m| {
        let reasons = EagerReason::ALL.iter().zip(&m.eager_steps);
        reasons.map(|(reason, steps)| Sample::of(reason.label(), count(steps))).collect()
    })?;
    let help = "Steps by their number of stages.";
    by("stages", "afd_steps_by_stages_total", help, |m| {
        m.stages.iter().zip(1..).map(|(steps, stages): (_, u32)| Sample::of(stages, count(steps))).collect()
    })?;
    let help = "Where the engine's time went; ffn_wait is the bubble, step all of it.";
    by("part", "afd_engine_seconds_total", help, |m| {
        vec![
            Sample::of("schedule", seconds(&m.schedule_us)),
            Sample::of("attention", seconds(&m.attention_us)),
            Sample::of("dispatch", seconds(&m.dispatch_us)),
            Sample::of("ffn_wait", seconds(&m.ffn_wait_us)),
            Sample::of("sample", seconds(&m.sample_us)),
            Sample::of("step", seconds(&m.step_us)),
        ]
    })
}

/// The way to the FFN. To be called before the engine starts: links that are up earlier count no latencies.
pub(super) fn ffn(metrics: &Metrics, stats: &Arc<FfnStats>, peers: FfnPeers) -> Result<(), MetricError> {
    let show = |name: &str, help: &str, scale: f64, read: fn(&FfnStats) -> &AtomicU64| {
        let stats = Arc::clone(stats);
        metrics.read_one_when_asked(Counter, name, help, move || read(&stats).load(Relaxed) as f64 * scale)
    };
    show("afd_hops_total", "Hops dispatched.", 1.0, |s| &s.hops)?;
    show("afd_hop_rows_total", "Rows of these.", 1.0, |s| &s.rows)?;
    show("afd_hop_wait_seconds_total", "Time the engine waited for combines.", 1e-6, |s| &s.wait_us)?;
    show("afd_ffn_losses_total", "FFN ranks lost.", 1.0, |s| &s.losses)?;
    show("afd_hop_replays_total", "Parts of hops sent again.", 1.0, |s| &s.replays)?;
    show("afd_plans_ahead_total", "Steps that came as told one step ahead.", 1.0, |s| &s.plans_ahead)?;
    show("afd_plans_dropped_total", "Plans that did not fit a queue.", 1.0, |s| &s.plans_dropped)?;
    let sent = Arc::clone(stats);
    let help = "Rows sent to each shard: fewer than all with the gate on attention.";
    metrics.read_when_asked(Counter, "afd_hop_shard_rows_total", help, &["shard"], move || {
        let rows = sent.shard_rows().into_iter().enumerate();
        rows.map(|(shard, rows)| Sample::of(shard, rows as f64)).collect()
    })?;
    let help = "From a hop's sending to one shard's answer, by kind of link.";
    let hop_seconds = metrics.histograms("afd_hop_seconds", help, &["kind"], &SECONDS)?;
    // Registered twice it would have been refused above.
    let _ = stats.hop_seconds.set(hop_seconds);
    LinkBook::show(&stats.links, metrics)?;
    let dropped = Arc::clone(stats);
    let help = "Answers that were not used, by why.";
    metrics.read_when_asked(Counter, "afd_frames_dropped_total", help, &["reason"], move || {
        [("unknown", &dropped.dropped_unknown), ("stale", &dropped.dropped_stale)]
            .map(|(reason, count)| Sample::of(reason, count.load(Relaxed) as f64))
            .into()
    })?;
    let late = Arc::clone(stats);
    let help = "FFN ranks that joined late and are being warmed up.";
    metrics.read_one_when_asked(Gauge, "afd_ffn_cold", help, move || late.cold.load(Relaxed) as f64)?;
    let (help, labels) = ("1 for every FFN rank in use.", ["address", "shard", "kind"]);
    metrics.read_when_asked(Gauge, "afd_ffn_peer", help, &labels, move || {
        let sample = |peer: v1::FfnPeer| {
            let shard = peer.shard.map_or_else(String::new, |s| format!("{}/{}", s.index, s.count));
            Sample { labels: vec![peer.address, shard, peer.link], value: 1.0 }
        };
        peers().in_use.into_iter().map(sample).collect()
    })
}

/// The listening port.
pub(super) fn port(metrics: &Metrics, stats: &Arc<NetStats>) -> Result<(), MetricError> {
    stats.count_access(metrics)?;
    let show = |kind, name: &str, help: &str, read: fn(NetCounts) -> u64| {
        let stats = Arc::clone(stats);
        metrics.read_one_when_asked(kind, name, help, move || read(stats.counts()) as f64)
    };
    show(Gauge, "afd_connections_open", "Connections that are open.", |counts| counts.open)?;
    show(Counter, "afd_connections_total", "Connections served.", |counts| counts.accepted)?;
    let help = "Connections closed at once because there were too many.";
    show(Counter, "afd_connections_refused_total", help, |counts| counts.refused)
}
