//! A collector that is down, refuses or hangs: nobody waits for it.
use std::net::TcpListener;
use std::time::Instant;

use afd_tests::fixtures;
use afd_tests::harness::Deployment;
use afd_tests::oracle;
use anyhow::ensure;

use super::collector::Collector;
use super::requests::{CALLER, END_LIMIT, MODEL, complete, spec};

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
