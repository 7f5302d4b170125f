//! Attention ranks that forward to each other (`--peers`), when the one that serves a request is lost.
use std::path::Path;
use std::time::{Duration, Instant};

use afd_common::proto::v1::GenerateResponse;
use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn, Process};
use anyhow::{Context, anyhow, ensure};
use reqwest::Response;
use serde_json::{Value, json};
use tonic::{Code, Status, Streaming};

use crate::story::{self, MODEL};

const LIMIT: Duration = Duration::from_secs(30);
const TIMEOUT: Duration = Duration::from_secs(2);
/// Header of an answer that another rank made.
const FORWARDED: &str = "x-afd-forwarded";

async fn pair(folder: &Path) -> anyhow::Result<(Deployment, Process)> {
    pair_with(folder, "3ms", &[]).await
}

/// A0 by itself, with an FFN so slow that streams last, and A1, which forwards to it and is the one that is asked.
async fn pair_with(folder: &Path, delay: &str, args: &[&str]) -> anyhow::Result<(Deployment, Process)> {
    let ffn = Ffn::Remote { shards: 1, replicas: 1 };
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), ffn).ffn_args(&["--inject-delay", delay]);
    let mut deployment = Deployment::start(spec).await?;
    let (model, ffn) = (deployment.spec.model.display().to_string(), deployment.ffn_addresses[0].to_string());
    let other = deployment.attention_addresses[0].to_string();
    let words = ["serve", "--model", &model, "--listen", "127.0.0.1:0", "--served-model-name", "test"];
    let more = ["--rank", "1", "--ffn", &ffn, "--peers", &other, "--dtype", "float32", "--threads", "1"];
    let words = words.iter().chain(&more).chain(&["--peer-timeout", "2s"]).chain(args);
    let words: Vec<_> = words.map(|word| (*word).to_owned()).collect();
    let mut front = Process::start("attention-svc", "A1", &words, folder)?;
    deployment.attention_addresses.push(front.address(LIMIT)?);
    deployment.attention.push(front);
    deployment.wait_ready(1, LIMIT).await?;
    let deadline = Instant::now() + LIMIT;
    while !deployment.attention[1].log().contains("requests may be forwarded to this attention rank") {
        ensure!(Instant::now() < deadline, "A1 does not know of A0:\n{}", deployment.attention[1].log());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let other = deployment.attention.remove(0);
    Ok((deployment, other))
}

async fn ask(deployment: &Deployment, max_tokens: u32, stream: bool) -> anyhow::Result<Response> {
    let prompt = fixtures::expected(MODEL)?.prompts.remove(0).input_ids;
    let body = json!({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true,
        "stream": stream, "return_token_ids": true});
    let answer = deployment.client().post(deployment.url(1, "/v1/completions")).json(&body).send().await?;
    Ok(answer.error_for_status()?)
}

/// All of a stream of events.
async fn whole(mut stream: Response) -> anyhow::Result<String> {
    let mut text = String::new();
    while let Some(bytes) = stream.chunk().await.context("the stream broke off")? {
        text.push_str(std::str::from_utf8(&bytes)?);
    }
    Ok(text)
}

/// The tokens of a stream of events that ends well.
async fn tokens(stream: Response) -> anyhow::Result<Vec<u32>> {
    let text = whole(stream).await?;
    let (events, _) =
        text.trim_end().rsplit_once("data: [DONE]").with_context(|| format!("no end: {text}"))?;
    let mut tokens = Vec::new();
    for data in events.lines().filter_map(|line| line.strip_prefix("data: ")) {
        let event: Value = serde_json::from_str(data)?;
        let ids = event["choices"][0]["token_ids"].as_array().into_iter().flatten();
        tokens.extend(ids.filter_map(Value::as_u64).map(|id| id as u32));
    }
    Ok(tokens)
}

/// The rest of a stream of events: the last one's kind and data.
async fn last_event(stream: Response) -> anyhow::Result<(String, Value)> {
    let text = whole(stream).await?;
    let last = text.trim_end().rsplit("\n\n").next().unwrap_or_default();
    let (kind, data) = last.split_once('\n').with_context(|| format!("no kind: {last:?}"))?;
    Ok((kind.to_owned(), serde_json::from_str(data.trim_start_matches("data: "))?))
}

/// What a stream of messages ends with.
async fn status(mut messages: Streaming<GenerateResponse>) -> anyhow::Result<Status> {
    loop {
        match messages.message().await {
            Ok(message) => drop(message.context("the stream ended well")?),
            Err(status) => return Ok(status),
        }
    }
}

/// Waits until a number of a rank is this one: what is counted at the end of a connection has no other sign.
async fn until(deployment: &Deployment, rank: usize, name: &str, wanted: f64) -> anyhow::Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let found = deployment.metric(rank, name).await?;
        if found == wanted {
            return Ok(());
        }
        ensure!(found < wanted && Instant::now() < deadline, "{name} is {found}, not {wanted}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Of a request that A1, busy with another one, forwards to A0, and whose client does `leave`: how it is counted by A1, as
/// `outcome` of what it forwarded, and by A0, as a sequence that ended for `reason`; each once, and by nobody else.
async fn is_counted_once(
    leave: impl AsyncFnOnce(&Deployment, &[u32]) -> anyhow::Result<()>,
    outcome: &str,
    reason: &str,
) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let (deployment, _other) = pair_with(folder.path(), "10ms", &[]).await?;
    let forwarded = |outcome: &str| format!("afd_requests_forwarded_total{{outcome=\"{outcome}\"}}");
    let ended = |reason: &str| format!("vllm:request_success_total{{finished_reason=\"{reason}\"}}");
    let prompt = fixtures::expected(MODEL)?.prompts.remove(0).input_ids;
    let _here = deployment.stream(1, &prompt, 400).await?;
    leave(&deployment, &prompt).await?;
    until(&deployment, 1, &forwarded(outcome), 1.0).await?;
    until(&deployment, 0, &ended(reason), 1.0).await?;
    for other in ["answered", "cancelled", "redone"].into_iter().filter(|other| *other != outcome) {
        let found = deployment.metric(1, &forwarded(other)).await?;
        ensure!(found == 0.0, "{other} is counted too");
    }
    for (rank, name) in [(1, ended(reason)), (0, forwarded(outcome))] {
        let found = deployment.metric(rank, &name).await?;
        ensure!(found == 0.0, "{name} of A{rank} is {found}");
    }
    Ok(())
}

#[tokio::test]
async fn a_forwarded_request_whose_client_leaves_is_counted_once_by_each_rank() -> anyhow::Result<()> {
    let events = async |deployment: &Deployment, _: &[u32]| {
        let events = ask(deployment, 400, true).await?;
        ensure!(events.headers()[FORWARDED] == "0");
        Ok(())
    };
    is_counted_once(events, "cancelled", "cancelled").await.context("events")?;
    let messages = async |deployment: &Deployment, prompt: &[u32]| {
        let mut messages = deployment.stream(1, prompt, 400).await?;
        messages.message().await?.context("a stream without a message").map(drop)
    };
    is_counted_once(messages, "cancelled", "cancelled").await.context("messages")?;
    // It has no answer yet.
    let unary = async |deployment: &Deployment, prompt: &[u32]| {
        let body = json!({"prompt": prompt, "max_tokens": 400, "temperature": 0, "ignore_eos": true});
        let unary = deployment.client().post(deployment.url(1, "/v1/completions")).json(&body).send();
        let unary = tokio::spawn(unary);
        until(deployment, 0, "vllm:num_requests_running", 1.0).await?;
        unary.abort();
        Ok(())
    };
    is_counted_once(unary, "cancelled", "cancelled").await.context("unary")?;
    // It is read to its end, as a client reads that leaves once it has it all.
    let whole = async |deployment: &Deployment, _: &[u32]| {
        let mut whole = ask(deployment, 8, true).await?;
        ensure!(whole.headers()[FORWARDED] == "0");
        while let Some(bytes) = whole.chunk().await? {
            if bytes.ends_with(b"data: [DONE]\n\n") {
                break;
            }
        }
        Ok(())
    };
    is_counted_once(whole, "answered", "length").await.context("whole")
}

/// What follows when A0 is lost by `lose`: `why` is what is said of it.
async fn is_lost(lose: impl FnOnce(&mut Process) -> anyhow::Result<()>, why: &str) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let (deployment, mut doomed) = pair(folder.path()).await?;
    let name = format!("A0 at {}", deployment.attention_addresses[0]);
    let expected = fixtures::expected(MODEL)?.prompts.remove(0);
    // Every second one is forwarded.
    let _here = deployment.stream(1, &expected.input_ids, 400).await?;
    let events = ask(&deployment, 400, true).await?;
    ensure!(events.headers()[FORWARDED] == "0");
    let _here_too = deployment.stream(1, &expected.input_ids, 400).await?;
    let mut messages = deployment.stream(1, &expected.input_ids, 400).await?;
    messages.message().await?.context("a stream without a message")?;

    lose(&mut doomed)?;
    let begun = Instant::now();
    // As long as A1 does not know, what it forwards gets no answer there, and one here.
    let redone = async {
        let _here = deployment.stream(1, &expected.input_ids, 400).await?;
        ask(&deployment, 32, false).await?.json::<Value>().await.context("no answer")
    };
    let all = async { tokio::try_join!(last_event(events), status(messages), redone) };
    let (event, status, redone) = tokio::time::timeout(LIMIT, all)
        .await
        .unwrap_or_else(|_| Err(anyhow!("no end within {LIMIT:?}")))
        .with_context(|| deployment.attention[0].log())?;
    let took = begun.elapsed();
    println!("{event:?}\n{status:?}\nafter {took:?}");
    let error = &event.1["error"];
    ensure!(event.0 == "event: error" && error["code"] == "peer_lost", "{event:?}");
    ensure!(status.code() == Code::Unavailable, "{status:?}");
    for said in [error["message"].as_str().unwrap_or_default(), status.message()] {
        ensure!(said.contains(&name) && said.contains(why), "{said}");
    }
    ensure!(redone["choices"][0]["token_ids"] == json!(expected.generated_ids), "{redone}");
    ensure!(took < TIMEOUT + Duration::from_secs(10), "noticed only after {took:?}");

    ensure!(deployment.metric(1, "afd_requests_forwarded_total{outcome=\"lost\"}").await? == 2.0);
    let log = deployment.attention[0].log();
    let warnings: Vec<&str> =
        log.lines().filter(|line| line.contains("WARN") && line.contains("A0 at")).collect();
    ensure!(warnings.len() == 1, "{warnings:#?}");
    Ok(())
}

#[tokio::test]
async fn an_answer_that_a_killed_rank_had_begun_ends_with_an_error_that_names_it() -> anyhow::Result<()> {
    is_lost(Process::kill, "the connection broke").await
}

#[tokio::test]
async fn a_stopped_rank_is_lost_after_the_peer_timeout_and_what_it_had_not_answered_is_redone_here()
-> anyhow::Result<()> {
    is_lost(|doomed| doomed.signal("STOP"), "it said nothing for 2.0 s (--peer-timeout)").await
}

#[tokio::test]
async fn a_rank_that_stands_still_for_less_than_the_peer_timeout_costs_nothing() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let (deployment, other) = pair(folder.path()).await?;
    let expected = fixtures::expected(MODEL)?.prompts.remove(0);
    let _here = deployment.stream(1, &expected.input_ids, 400).await?;
    let forwarded = ask(&deployment, 32, true).await?;
    ensure!(forwarded.headers()[FORWARDED] == "0");
    other.signal("STOP")?;
    tokio::time::sleep(TIMEOUT / 4).await;
    other.signal("CONT")?;
    ensure!(tokens(forwarded).await? == expected.generated_ids);
    Ok(())
}

#[tokio::test]
async fn a_rank_that_is_told_to_end_passes_on_what_another_one_serves_for_it() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let (mut deployment, _other) = pair(folder.path()).await?;
    let expected = fixtures::expected(MODEL)?.prompts.remove(0);
    let here = deployment.stream(1, &expected.input_ids, 400).await?;
    let forwarded = ask(&deployment, 400, true).await?;
    ensure!(forwarded.headers()[FORWARDED] == "0");
    // It has nothing to do itself.
    drop(here);
    deployment.attention[0].signal("TERM")?;
    story::holds(&expected.input_ids, &tokens(forwarded).await?)?;
    ensure!(deployment.attention[0].wait(LIMIT)?.success(), "{}", deployment.attention[0].log());
    Ok(())
}

#[tokio::test]
async fn what_is_not_finished_at_the_end_of_the_drain_ends_alike_here_and_elsewhere() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let (mut deployment, _other) = pair_with(folder.path(), "10ms", &["--drain-timeout", "1s"]).await?;
    let prompt = fixtures::expected(MODEL)?.prompts.remove(0).input_ids;
    // Every second one is forwarded.
    let (mut events, mut messages) = (Vec::new(), Vec::new());
    for rank in ["", "0"] {
        let asked = ask(&deployment, 400, true).await?;
        ensure!(asked.headers().get(FORWARDED).map_or("", |value| value.to_str().unwrap_or("?")) == rank);
        events.push(asked);
    }
    for _ in 0..2 {
        let mut stream = deployment.stream(1, &prompt, 400).await?;
        stream.message().await?.context("a stream without a message")?;
        messages.push(stream);
    }
    let unary = tokio::spawn({
        let body = json!({"prompt": prompt, "max_tokens": 400, "temperature": 0, "ignore_eos": true});
        let url = deployment.url(1, "/v1/completions");
        let (here, there) =
            (deployment.client().post(&url).json(&body), deployment.client().post(&url).json(&body));
        async move { tokio::try_join!(here.send(), there.send()) }
    });
    let deadline = Instant::now() + LIMIT;
    while deployment.metric(1, "vllm:num_requests_running").await? < 3.0 {
        ensure!(Instant::now() < deadline, "{}", deployment.attention[0].log());
    }
    deployment.attention[0].signal("TERM")?;
    for stream in events {
        let (kind, data) = last_event(stream).await?;
        ensure!(kind == "event: error" && data["error"]["code"] == "shutting_down", "{kind} {data}");
    }
    let mut ends = Vec::new();
    for stream in messages {
        ends.push(status(stream).await?);
    }
    let alike = |end: &Status| (end.code(), end.message().to_owned(), end.details().to_vec());
    ensure!(ends[0].code() == Code::Unavailable && alike(&ends[0]) == alike(&ends[1]), "{ends:?}");
    let (here, there) = unary.await??;
    for answer in [here, there] {
        ensure!(answer.status() == 503, "{}", answer.status());
        let error: Value = answer.json().await?;
        ensure!(error["error"]["code"] == "shutting_down", "{error}");
    }
    ensure!(deployment.attention[0].wait(LIMIT)?.success(), "{}", deployment.attention[0].log());
    Ok(())
}
