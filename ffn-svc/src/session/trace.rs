//! What this rank did for the hops of a recorded step, as spans: `serve` with `queue`, `compute` and `send`. Each is a
//! child of the hop's own span, which the attention rank makes: its id follows from the step's context and the hop's key.
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use afd_common::ids::Shard;
use afd_common::telemetry::{Span, SpanKind, SpanSink};

use crate::engine::{HopTimes, TracedStep};

/// Makes the spans of a step.
pub(super) fn end_spans(spans: &SpanSink, shard: Shard, step: &TracedStep) {
    for hop in &step.hops {
        end_hop(spans, shard.index(), step, hop);
    }
}

fn end_hop(spans: &SpanSink, shard: u32, step: &TracedStep, hop: &HopTimes) {
    let rng = &mut rand::rng();
    let parent = step.trace.hop(hop.key, shard);
    let own = parent.child(rng);
    let at = |span: Span| {
        span.with("afd.layer", i64::from(hop.key.layer.0))
            .with("afd.stage", i64::from(hop.key.stage.0))
            .with("afd.shard", i64::from(shard))
    };
    for (name, from_us, to_us) in [
        ("queue", hop.arrived_us, hop.started_us),
        ("compute", hop.started_us, hop.finished_us),
        ("send", hop.finished_us, hop.sent_us),
    ] {
        let span = Span::new(name, &own.child(rng), time(from_us), time(to_us));
        spans.end(at(span).child_of(own.span_id));
    }
    let micros = |from: u64, to: u64| to.saturating_sub(from) as i64;
    // The shard is part of the name: the slow one is to be seen without opening anything.
    let name = format!("serve shard {shard}");
    let span = Span::new(name, &own, time(hop.arrived_us), time(hop.sent_us));
    let span = at(span)
        .child_of_remote(parent.span_id)
        .kind(SpanKind::Server)
        .with("afd.step", hop.key.step.0 as i64)
        .with("afd.rows", i64::from(hop.rows))
        .with("afd.batch.rows", i64::from(hop.batch_rows))
        .with("afd.batch.hops", i64::from(hop.batch_hops))
        .with("afd.link.epoch", hop.epoch.0 as i64)
        .with("afd.queue_us", micros(hop.arrived_us, hop.started_us))
        .with("afd.compute_us", micros(hop.started_us, hop.finished_us))
        .with("afd.send_us", micros(hop.finished_us, hop.sent_us));
    spans.end(span);
}

fn time(us: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_micros(us)
}
