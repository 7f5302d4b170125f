//! The whole tree of a request through two shards, of requests that share steps, and of one with a slow shard.
use std::collections::BTreeMap;
use std::time::Duration;

use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn};
use anyhow::ensure;
use serde_json::json;

use super::collector::Collector;
use super::tree::{Seen, Trace};

pub(crate) const MODEL: &str = "tiny-mixtral";
/// Layers of that model.
pub(crate) const LAYERS: usize = 4;
pub(crate) const SHARDS: usize = 2;
pub(crate) const TOKENS: usize = 24;
pub(crate) const CALLER: (&str, &str) = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7");
/// Part of a span's time that its children must cover.
const COVERED: f64 = 0.95;
/// Time for a process that was told to end.
pub(crate) const END_LIMIT: Duration = Duration::from_secs(15);

/// What is different where the FFN is elsewhere.
pub(crate) struct Sides {
    pub(crate) shards: usize,
    /// Whose the FFN's spans are.
    pub(crate) ffn: &'static str,
    pub(crate) links: &'static [&'static str],
}

pub(crate) const PAIR: Sides = Sides { shards: SHARDS, ffn: "ffn-svc", links: &["shm", "tcp", "inline"] };
const MONOLITH: Sides = Sides { shards: 1, ffn: "attention-svc", links: &["loopback"] };

pub(crate) fn spec(endpoint: &str, protocol: &str) -> DeploymentSpec {
    spec_of(Ffn::Remote { shards: SHARDS as u32, replicas: 1 }, endpoint, protocol)
}

fn spec_of(ffn: Ffn, endpoint: &str, protocol: &str) -> DeploymentSpec {
    DeploymentSpec::new(fixtures::checkpoint(MODEL), ffn)
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        .env("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
}

/// One completion over HTTP as part of the caller's trace, every step recorded.
pub(crate) async fn complete(deployment: &Deployment, trace_id: &str) -> anyhow::Result<()> {
    let prompt = fixtures::expected(MODEL)?.prompts.remove(0).input_ids;
    let body = json!({"model": "test", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": true});
    let answer = deployment
        .client()
        .post(deployment.url(0, "/v1/completions"))
        .header("traceparent", format!("00-{trace_id}-{}-01", CALLER.1))
        .header("x-afd-trace-hops", "1")
        .json(&body)
        .send()
        .await?;
    ensure!(answer.status() == 200, "{}: {}", answer.status(), answer.text().await?);
    Ok(())
}

/// Spans that both sides make for [`complete`]: every span of every step, and those of the request.
pub(crate) fn is_complete(trace: &Trace) -> bool {
    is_complete_over(trace, PAIR.shards)
}

fn is_complete_over(trace: &Trace, shards: usize) -> bool {
    let hops = TOKENS * LAYERS * shards;
    let served = |shard: usize| trace.named(&format!("serve shard {shard}")).count();
    trace.named("request").count() == 1
        && trace.named("step").count() == TOKENS
        && (0..shards).map(served).sum::<usize>() == hops
        && ["dispatch", "combine", "compute", "send"].iter().all(|name| trace.named(name).count() == hops)
}

/// The tree of [`complete`], from the caller's span to the FFN's experts.
pub(crate) fn check(trace: &Trace, sides: &Sides) -> anyhow::Result<()> {
    trace.is_whole(Some(CALLER.1))?;
    let request = trace.only("request")?;
    ensure!(request.parent.as_deref() == Some(CALLER.1), "the request is no child of its caller");
    ensure!(request.service == "attention-svc");
    for (key, value) in [
        ("gen_ai.operation.name", "text_completion"),
        ("gen_ai.request.model", "test"),
        ("gen_ai.request.max_tokens", "24"),
        ("gen_ai.usage.output_tokens", "24"),
    ] {
        ensure!(request.tag(key)? == value, "{key} is {}", request.tag(key)?);
    }
    ensure!(request.number("gen_ai.usage.input_tokens")? > 0.0);
    ensure!(request.tag("gen_ai.response.finish_reasons")?.contains("length"));

    let phases = ["tokenize", "queue", "prefill", "decode"];
    let children: Vec<_> = trace.children(request).map(|span| span.name.as_str()).collect();
    ensure!(
        children.len() == phases.len() && phases.iter().all(|phase| children.contains(phase)),
        "{children:?}"
    );
    let steps_of = |phase: &Seen| trace.children(phase).filter(|span| span.name == "step").count();
    let decode = trace.named("decode").next().map_or(0, steps_of);
    let prefill = trace.named("prefill").next().map_or(0, steps_of);
    ensure!((prefill, decode) == (1, TOKENS - 1), "{prefill} and {decode} steps");

    for step in trace.named("step") {
        check_step(trace, step, sides)?;
    }
    Ok(())
}

fn check_step(trace: &Trace, step: &Seen, sides: &Sides) -> anyhow::Result<()> {
    let count = |name: &str| trace.children(step).filter(|span| span.name == name).count();
    let counts = ["schedule", "attention", "sample", "record"].map(count);
    ensure!(counts == [1, LAYERS, 1, 1], "{counts:?}:\n{}", trace.drawn());
    let mut places = BTreeMap::new();
    for hop in trace.children(step).filter(|span| span.name.starts_with("hop")) {
        let place = (hop.tag("afd.layer")?, hop.tag("afd.stage")?, hop.tag("afd.shard")?);
        ensure!(places.insert(place, ()).is_none(), "{place:?} occurs twice");
        ensure!(hop.name == format!("hop shard {}", hop.tag("afd.shard")?) && hop.service == "attention-svc");
        ensure!(hop.tag("afd.replayed")? == "false" && hop.number("afd.rows")? >= 1.0);
        ensure!(sides.links.contains(&hop.tag("afd.link.kind")?), "by {}", hop.tag("afd.link.kind")?);
        let parts: Vec<_> = trace.children(hop).collect();
        let mut names: Vec<_> = parts.iter().map(|span| span.name.as_str()).collect();
        names.sort_unstable();
        ensure!(names == ["combine", "dispatch", &format!("serve shard {}", place.2)], "{names:?}");
        let serve = parts.iter().find(|span| span.name.starts_with("serve")).expect("it was counted");
        ensure!(serve.service == sides.ffn, "served by {}", serve.service);
        ensure!(serve.tag("afd.layer")? == place.0 && serve.tag("afd.rows")? == hop.tag("afd.rows")?);
        ensure!(serve.tag("afd.link.epoch")? == hop.tag("afd.link.epoch")?, "another epoch");
        let mut names: Vec<_> = trace.children(serve).map(|span| span.name.as_str()).collect();
        names.sort_unstable();
        ensure!(names == ["compute", "queue", "send"], "{names:?}");
        let sum = ["afd.queue_us", "afd.compute_us", "afd.send_us"].map(|key| serve.number(key));
        let sum: f64 = sum.into_iter().sum::<anyhow::Result<f64>>()?;
        ensure!((sum - serve.duration_us() as f64).abs() <= 2.0, "{sum} µs of {}", serve.duration_us());
    }
    ensure!(places.len() == LAYERS * sides.shards, "hops at {:?}", places.keys());
    Ok(())
}

/// Children sum to their parents, over all spans of a kind together: what is lost between them is nobody's time.
pub(crate) fn check_coverage(trace: &Trace) -> anyhow::Result<()> {
    for kind in ["request", "prefill", "decode", "step", "hop", "serve"] {
        let spans: Vec<_> = trace.0.iter().filter(|span| span.name.split(' ').next() == Some(kind)).collect();
        let whole: f64 = spans.iter().map(|span| span.duration_us() as f64).sum();
        let covered: f64 = spans.iter().map(|span| trace.covered(span) * span.duration_us() as f64).sum();
        println!(
            "{kind}: {} spans, {:.2} ms, {:.1} % covered",
            spans.len(),
            whole / 1e3,
            100.0 * covered / whole
        );
        ensure!(
            covered >= COVERED * whole,
            "children of {kind} cover {covered} of {whole} µs:\n{}",
            trace.drawn()
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_one_trace_over_both_services() -> anyhow::Result<()> {
    for protocol in ["grpc", "http/protobuf"] {
        let collector = Collector::start().await?;
        let deployment = Deployment::start(spec(&collector.endpoint(), protocol)).await?;
        complete(&deployment, CALLER.0).await?;
        check(&collector.trace(CALLER.0, is_complete).await?, &PAIR)?;
        covers(&deployment, &collector, is_complete).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shared_experts_on_attention_are_spans_of_their_steps() -> anyhow::Result<()> {
    // Its first layer is dense.
    const MIXTURES: usize = LAYERS - 1;
    let collector = Collector::start().await?;
    let spec = DeploymentSpec {
        model: fixtures::checkpoint("tiny-deepseek-v2"),
        ..spec(&collector.endpoint(), "grpc")
    };
    let sides = ["--shared-experts", "attention"];
    let deployment = Deployment::start(spec.attention_args(&sides).ffn_args(&sides)).await?;
    complete(&deployment, CALLER.0).await?;
    let shared = |trace: &Trace| trace.named("shared experts").count();
    let all_there = |trace: &Trace| is_complete(trace) && shared(trace) == TOKENS * MIXTURES;
    let trace = collector.trace(CALLER.0, all_there).await?;
    check(&trace, &PAIR)?;
    for step in trace.named("step") {
        let spans: Vec<_> = trace.children(step).filter(|span| span.name == "shared experts").collect();
        let mut layers: Vec<_> =
            spans.iter().map(|span| span.tag("afd.layer")).collect::<anyhow::Result<_>>()?;
        layers.sort_unstable();
        ensure!(layers == ["1", "2", "3"], "{layers:?}:\n{}", trace.drawn());
    }
    covers(&deployment, &collector, all_there).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_monolith_s_steps_have_the_spans_of_both_sides() -> anyhow::Result<()> {
    let collector = Collector::start().await?;
    let mut deployment = Deployment::start(spec_of(Ffn::Local, &collector.endpoint(), "grpc")).await?;
    complete(&deployment, CALLER.0).await?;
    // Some wait for the end of the process: the last step's are to be among them.
    deployment.attention[0].signal("TERM")?;
    deployment.attention[0].wait(END_LIMIT)?;
    let trace = collector.trace(CALLER.0, |trace| is_complete_over(trace, MONOLITH.shards)).await?;
    check(&trace, &MONOLITH)
}

/// The spans leave no gap. Other processes of a busy machine may tear one, so the best of some requests counts.
async fn covers(
    deployment: &Deployment,
    collector: &Collector,
    is_complete: impl Fn(&Trace) -> bool,
) -> anyhow::Result<()> {
    let mut outcome = Ok(());
    for attempt in 1..=5 {
        let trace_id = format!("{attempt:032x}");
        complete(deployment, &trace_id).await?;
        outcome = check_coverage(&collector.trace(&trace_id, &is_complete).await?);
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_share_steps_and_the_steps_link_to_each_other() -> anyhow::Result<()> {
    let collector = Collector::start().await?;
    let spec = spec(&collector.endpoint(), "grpc").attention_args(&["--trace-hops-ratio", "1"]);
    let mut deployment = Deployment::start(spec).await?;
    let prompt = fixtures::expected(MODEL)?.prompts.remove(0).input_ids;
    let both =
        futures::future::join(deployment.greedy(0, &prompt, 60), deployment.greedy(0, &prompt, 60)).await;
    ensure!(both.0? == both.1?);
    // What still waits is sent before the process ends.
    deployment.attention[0].signal("TERM")?;
    deployment.attention[0].wait(END_LIMIT)?;
    let all = collector.spans();
    let shared: Vec<_> = all.iter().filter(|span| span.name == "step" && span.links.len() == 2).collect();
    ensure!(!shared.is_empty(), "no step served both requests");
    let mut linked_back = 0;
    for step in shared {
        ensure!(step.parent.is_none() && step.tag("afd.sequences")? == "2");
        for (trace_id, span_id) in &step.links {
            let phase = all.iter().find(|span| (&span.trace_id, &span.span_id) == (trace_id, span_id));
            let Some(phase) = phase else { continue };
            ensure!(["prefill", "decode"].contains(&phase.name.as_str()) && *trace_id != step.trace_id);
            linked_back += usize::from(phase.links.contains(&(step.trace_id.clone(), step.span_id.clone())));
        }
    }
    ensure!(linked_back > 0, "no request links to a step that it shared");
    Ok(())
}

/// The shard whose spans are longest.
pub(crate) fn slowest(trace: &Trace, kind: &str) -> Option<(usize, u64)> {
    let time = |shard: usize| trace.named(&format!("{kind} shard {shard}")).map(Seen::duration_us).sum();
    (0..SHARDS).map(|shard| (shard, time(shard))).max_by_key(|(_, time)| *time)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trace_names_the_slow_shard() -> anyhow::Result<()> {
    for slow in 0..SHARDS {
        let collector = Collector::start().await?;
        let spec = spec(&collector.endpoint(), "grpc").ffn_rank_args(slow as u32, &["--inject-delay", "5ms"]);
        let deployment = Deployment::start(spec).await?;
        complete(&deployment, CALLER.0).await?;
        let trace = collector.trace(CALLER.0, is_complete).await?;
        for kind in ["hop", "serve"] {
            ensure!(
                slowest(&trace, kind).map(|(shard, _)| shard) == Some(slow),
                "{kind}:\n{}",
                trace.drawn()
            );
        }
        // A busy machine may hold the other shard up for longer, in a step or two.
        let named =
            trace.named("step").filter(|step| step.tag("afd.slowest_shard").ok() == Some(&slow.to_string()));
        let (named, steps) = (named.count(), trace.named("step").count());
        ensure!(4 * named >= 3 * steps, "{named} of {steps} steps name shard {slow}:\n{}", trace.drawn());
    }
    Ok(())
}
