//! Numbers that engine, links and port keep as plain atomics, under their names in Prometheus.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use afd_common::link::book::LinkBook;
use afd_common::net::NetStats;
use afd_common::telemetry::metrics::{ReadKind, SECONDS, Sample};
use afd_common::telemetry::{MetricError, Metrics};

use crate::api::FfnPeers;
use crate::engine::{Counter as Count, EagerReason, EngineMetrics};
use crate::remote_ffn::stats::FfnStats;

fn one(value: f64) -> Vec<Sample> {
    vec![Sample { labels: Vec::new(), value }]
}

/// Reads one of the engine's numbers.
type Read = fn(&EngineMetrics) -> u64;

/// The engine's.
pub(super) fn engine(metrics: &Metrics, engine: &Arc<EngineMetrics>) -> Result<(), MetricError> {
    let show = |kind, name: &str, help: &str, read: fn(&EngineMetrics) -> f64| {
        let engine = Arc::clone(engine);
        metrics.read_when_asked(kind, name, help, &[], move || one(read(&engine)))
    };
    use ReadKind::{Counter, Gauge};
    show(Gauge, "vllm:num_requests_running", "Sequences that hold KV blocks.", |m| m.running.get() as f64)?;
    show(Gauge, "vllm:num_requests_waiting", "Sequences that wait for KV blocks.", |m| {
        m.waiting.get() as f64
    })?;
    show(Gauge, "vllm:kv_cache_usage_perc", "Part of the KV blocks in use, 0 to 1.", |m| {
        m.kv_blocks_used.get() as f64 / (m.kv_blocks_total.get() as f64).max(1.0)
    })?;
    show(Gauge, "afd_kv_blocks_used", "KV blocks in use.", |m| m.kv_blocks_used.get() as f64)?;
    show(Gauge, "afd_kv_blocks", "KV blocks there are.", |m| m.kv_blocks_total.get() as f64)?;
    show(Gauge, "afd_ffn_ready", "1 while every FFN shard has a warm rank.", |m| m.ffn_ready.get() as f64)?;
    show(Counter, "vllm:num_preemptions_total", "Times a sequence gave up its blocks.", |m| {
        m.preemptions.get() as f64
    })?;
    show(Counter, "vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache.", |m| {
        m.prefix_queries.get() as f64
    })?;
    show(Counter, "vllm:prefix_cache_hits_total", "Tokens found in the prefix cache.", |m| {
        m.prefix_hits.get() as f64
    })?;
    show(Counter, "afd_steps_total", "Steps begun.", |m| m.steps.get() as f64)?;
    show(Counter, "afd_steps_failed_total", "Steps given up.", |m| m.steps_failed.get() as f64)?;
    show(Counter, "afd_tokens_prefilled_total", "Prompt tokens computed.", |m| {
        m.tokens_prefilled.get() as f64
    })?;
    show(Counter, "afd_tokens_generated_total", "Tokens chosen.", |m| m.tokens_generated.get() as f64)?;
    show(
        Counter,
        "afd_tokens_chosen_on_device_total",
        "Tokens chosen on a GPU, where the logits are.",
        |m| m.tokens_chosen_on_device.get() as f64,
    )?;
    show(Counter, "afd_graph_replays_total", "Decode steps that were one graph.", |m| {
        m.graph_replays.get() as f64
    })?;
    let help = "Decode steps that a GPU ran from end to end.";
    show(Counter, "afd_decode_steps_total", help, |m| m.decode_steps.get() as f64)?;
    let help = "Those of them that followed another at once.";
    show(Counter, "afd_decode_gaps_total", help, |m| m.decode_gaps.get() as f64)?;
    let decodes = Arc::clone(engine);
    let help = "Time of these: device, from launch to end there; host, scheduling to telling, beside it or not; idle, in \
                which the device has nothing to do between two of them, by its own clock.";
    metrics.read_when_asked(Counter, "afd_decode_step_seconds_total", help, &["where"], move || {
        let sample =
            |place: &str, us: &Count| Sample { labels: vec![place.into()], value: us.get() as f64 / 1e6 };
        vec![
            sample("device", &decodes.decode_device_us),
            sample("host", &decodes.decode_host_us),
            sample("idle", &decodes.decode_idle_us),
        ]
    })?;
    let eager = Arc::clone(engine);
    let help = "Decode steps on a GPU that were not one graph, by why.";
    metrics.read_when_asked(Counter, "afd_graph_eager_steps_total", help, &["reason"], move || {
        let counts = EagerReason::ALL.iter().zip(&eager.eager_steps);
        let sample = |(reason, count): (&EagerReason, &Count)| Sample {
            labels: vec![reason.label().into()],
            value: count.get() as f64,
        };
        counts.map(sample).collect()
    })?;
    show(
        Counter,
        "afd_ffn_hidden_seconds_total",
        "Time that hops were under way while attention computed something else; two at once count twice.",
        |m| m.ffn_hidden_us.get() as f64 / 1e6,
    )?;
    let stages = Arc::clone(engine);
    let help = "Steps by their number of stages.";
    metrics.read_when_asked(Counter, "afd_steps_by_stages_total", help, &["stages"], move || {
        let counts = stages.stages.iter().enumerate();
        counts
            .map(|(at, count)| Sample { labels: vec![(at + 1).to_string()], value: count.get() as f64 })
            .collect()
    })?;
    let times: [(&str, Read); 6] = [
        ("schedule", |m| m.schedule_us.get()),
        ("attention", |m| m.attention_us.get()),
        ("dispatch", |m| m.dispatch_us.get()),
        ("ffn_wait", |m| m.ffn_wait_us.get()),
        ("sample", |m| m.sample_us.get()),
        ("step", |m| m.step_us.get()),
    ];
    let engine = Arc::clone(engine);
    let help = "Where the engine's time went; ffn_wait is the bubble, step all of it.";
    metrics.read_when_asked(Counter, "afd_engine_seconds_total", help, &["part"], move || {
        let sample = |(part, read): &(&str, Read)| Sample {
            labels: vec![(*part).to_owned()],
            value: read(&engine) as f64 / 1e6,
        };
        times.iter().map(sample).collect()
    })
}

/// The way to the FFN. To be called before the engine starts: links that are up earlier count no latencies.
pub(super) fn ffn(metrics: &Metrics, stats: &Arc<FfnStats>, peers: FfnPeers) -> Result<(), MetricError> {
    let show = |name: &str, help: &str, scale: f64, read: fn(&FfnStats) -> &AtomicU64| {
        let stats = Arc::clone(stats);
        let read = move || one(read(&stats).load(Relaxed) as f64 * scale);
        metrics.read_when_asked(ReadKind::Counter, name, help, &[], read)
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
    metrics.read_when_asked(ReadKind::Counter, "afd_hop_shard_rows_total", help, &["shard"], move || {
        let rows = sent.shard_rows().into_iter().enumerate();
        rows.map(|(shard, rows)| Sample { labels: vec![shard.to_string()], value: rows as f64 }).collect()
    })?;
    let help = "From a hop's sending to one shard's answer, by kind of link.";
    let hop_seconds = metrics.histograms("afd_hop_seconds", help, &["kind"], &SECONDS)?;
    // Registered twice it would have been refused above.
    let _ = stats.hop_seconds.set(hop_seconds);
    LinkBook::show(&stats.links, metrics)?;
    let dropped = Arc::clone(stats);
    let help = "Answers that were not used, by why.";
    metrics.read_when_asked(ReadKind::Counter, "afd_frames_dropped_total", help, &["reason"], move || {
        [("unknown", &dropped.dropped_unknown), ("stale", &dropped.dropped_stale)]
            .map(|(reason, count)| Sample { labels: vec![reason.into()], value: count.load(Relaxed) as f64 })
            .into()
    })?;
    let late = Arc::clone(stats);
    let help = "FFN ranks that joined late and are being warmed up.";
    metrics.read_when_asked(ReadKind::Gauge, "afd_ffn_cold", help, &[], move || {
        one(late.cold.load(Relaxed) as f64)
    })?;
    let labels = ["address", "shard", "kind"];
    metrics.read_when_asked(
        ReadKind::Gauge,
        "afd_ffn_peer",
        "1 for every FFN rank in use.",
        &labels,
        move || {
            let sample = |peer: afd_common::proto::v1::FfnPeer| {
                let shard = peer.shard.map_or_else(String::new, |s| format!("{}/{}", s.index, s.count));
                Sample { labels: vec![peer.address, shard, peer.link], value: 1.0 }
            };
            peers().in_use.into_iter().map(sample).collect()
        },
    )
}

/// The listening port.
pub(super) fn port(metrics: &Metrics, stats: &Arc<NetStats>) -> Result<(), MetricError> {
    stats.count_access(metrics)?;
    let (open, accepted, refused) = (Arc::clone(stats), Arc::clone(stats), Arc::clone(stats));
    let help = "Connections that are open.";
    metrics.read_when_asked(ReadKind::Gauge, "afd_connections_open", help, &[], move || {
        one(open.counts().open as f64)
    })?;
    let help = "Connections served.";
    metrics.read_when_asked(ReadKind::Counter, "afd_connections_total", help, &[], move || {
        one(accepted.counts().accepted as f64)
    })?;
    let help = "Connections closed at once because there were too many.";
    metrics.read_when_asked(ReadKind::Counter, "afd_connections_refused_total", help, &[], move || {
        one(refused.counts().refused as f64)
    })
}
