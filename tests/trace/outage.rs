//! A collector that is down, refuses or hangs: nobody waits for it.
use std::net::TcpListener;
use std::time::{Duration, Instant};

use afd_common::net::{Listener, Options};
use afd_tests::fixtures;
use afd_tests::harness::Deployment;
use afd_tests::oracle;
use anyhow::ensure;
use axum::Router;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::collector::Collector;
use super::requests::{CALLER, END_LIMIT, MODEL, complete, spec};

const LIMIT: Duration = Duration::from_secs(60);

/// In a test of several threads: a collector goes on while the test waits for a process.
async fn serves_and_ends(endpoint: &str, protocol: &str) -> anyhow::Result<()> {
    let mut deployment = Deployment::start(spec(endpoint, protocol)).await?;
    complete(&deployment, CALLER.0).await?;
    let prompt = fixtures::expected(MODEL)?.prompts.remove(0);
    let num_tokens = prompt.generated_ids.len() as u32;
    oracle::same(&prompt.generated_ids, &deployment.greedy(0, &prompt.input_ids, num_tokens).await?)?;
    let begun = Instant::now();
    deployment.attention[0].signal("TERM")?;
    let status = deployment.attention[0].wait(END_LIMIT)?;
    ensure!(status.success(), "ended with {status}:\n{}", deployment.attention[0].log());
    for process in &deployment.ffn {
        process.signal("TERM")?;
    }
    for process in &mut deployment.ffn {
        let status = process.wait(END_LIMIT)?;
        ensure!(status.success(), "ended with {status}:\n{}", process.log());
    }
    println!("{protocol} to {endpoint}: ended within {:?}", begun.elapsed());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_is_not_there_delays_nothing() -> anyhow::Result<()> {
    let free = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    serves_and_ends(&format!("http://{free}"), "grpc").await?;
    serves_and_ends(&format!("http://{free}"), "http/protobuf").await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_hangs_delays_nothing() -> anyhow::Result<()> {
    // Connections are made by the system and never served.
    let deaf = TcpListener::bind("127.0.0.1:0")?;
    serves_and_ends(&format!("http://{}", deaf.local_addr()?), "grpc").await?;
    serves_and_ends(&format!("http://{}", deaf.local_addr()?), "http/protobuf").await
}

/// Longer than the answer that is waited for below takes.
const SLOWNESS: Duration = Duration::from_secs(5);

/// A collector that takes its time with every export and then refuses it: where, and the number of exports begun.
async fn refusing() -> anyhow::Result<(String, watch::Receiver<u32>, CancellationToken)> {
    let (begun, exports) = watch::channel(0);
    let refuse = move || {
        begun.send_modify(|exports| *exports += 1);
        async {
            tokio::time::sleep(SLOWNESS).await;
            axum::http::StatusCode::SERVICE_UNAVAILABLE
        }
    };
    let listener = Listener::bind(([127, 0, 0, 1], 0).into()).await?;
    let (endpoint, stop) = (format!("http://{}", listener.address()), CancellationToken::new());
    tokio::spawn(listener.serve(Router::new().fallback(refuse), None, Options::default(), stop.clone()));
    Ok((endpoint, exports, stop))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_is_slow_and_refuses_delays_no_token() -> anyhow::Result<()> {
    for protocol in ["grpc", "http/protobuf"] {
        let (endpoint, mut exports, stop) = refusing().await?;
        let deployment = Deployment::start(spec(&endpoint, protocol)).await?;
        complete(&deployment, CALLER.0).await?;
        tokio::time::timeout(LIMIT, exports.wait_for(|exports| *exports > 0)).await??;
        // The first export is under way now, and every step of this answer makes spans.
        let begun = Instant::now();
        complete(&deployment, CALLER.0).await?;
        let took = begun.elapsed();
        ensure!(took < SLOWNESS / 2, "{protocol}: an answer took {took:?}");
        let deadline = Instant::now() + LIMIT;
        loop {
            let metrics = deployment.client().get(deployment.url(0, "/metrics")).send().await?.text().await?;
            let failed =
                metrics.lines().find_map(|line| line.strip_prefix("afd_spans_total{outcome=\"failed\"} "));
            if failed.is_some_and(|count| count != "0") {
                break;
            }
            ensure!(Instant::now() < deadline, "{protocol}: refused spans are not counted:\n{metrics}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        println!("{protocol}: {took:?} while exports take {SLOWNESS:?}");
        stop.cancel();
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spans_are_sent_before_a_process_ends() -> anyhow::Result<()> {
    let collector = Collector::start().await?;
    let mut deployment = Deployment::start(spec(&collector.endpoint(), "grpc")).await?;
    complete(&deployment, CALLER.0).await?;
    deployment.attention[0].signal("TERM")?;
    deployment.attention[0].wait(END_LIMIT)?;
    let spans = collector.spans();
    let request = spans.iter().find(|span| span.name == "request" && span.trace_id == CALLER.0);
    let log = deployment.attention[0].log();
    ensure!(request.is_some(), "of {} spans the request's was lost:\n{log}", spans.len());
    Ok(())
}
