//! Measuring a running pair with the commands that operators have, and planning with what was measured.
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn, run};
use anyhow::{Context, ensure};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures::StreamExt;
use serde_json::{Value, json};

/// Longest time for one command.
const LIMIT: Duration = Duration::from_secs(120);

/// A command of ours, beside the runtime that the deployment needs.
async fn command(binary: &'static str, args: &[&str]) -> anyhow::Result<String> {
    let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
    let ran = tokio::task::spawn_blocking(move || {
        run(binary, &args.iter().map(String::as_str).collect::<Vec<_>>())
    });
    tokio::time::timeout(LIMIT, ran).await.with_context(|| format!("{binary} did not end"))??
}

async fn pair(model: &str, shards: u32) -> anyhow::Result<Deployment> {
    let ffn = Ffn::Remote { shards, replicas: 1 };
    Deployment::start(DeploymentSpec::new(fixtures::checkpoint(model), ffn)).await
}

/// Options of a load that tiny models take.
const TINY: [&str; 6] = ["--input-len", "8", "--output-len", "24", "--vocab-size", "500"];

fn numbers(value: &Value, pointer: &str) -> anyhow::Result<f64> {
    value
        .pointer(pointer)
        .and_then(Value::as_f64)
        .with_context(|| format!("no number at {pointer}: {value:#}"))
}

#[tokio::test]
async fn what_a_running_pair_shows_becomes_a_profile_that_the_planner_answers_with() -> anyhow::Result<()> {
    for (model, shards) in [("tiny-mixtral", 2), ("tiny-llama", 1)] {
        let deployment = pair(model, shards).await?;
        let folder = tempfile::tempdir()?;
        let file = |name: &str| folder.path().join(name).display().to_string();
        let (bench, links, probe, profile) =
            (file("bench.json"), file("links.json"), file("probe.json"), file("profile.toml"));

        let mut args = vec!["bench", "--layers", "--concurrency", "1,6", "--requests-per-level", "2"];
        let url = deployment.url(0, "");
        args.extend(["--url", &url, "--json", &bench]);
        args.extend(TINY);
        command("attention-svc", &args).await?;
        command("attention-svc", &["bench", "links", "--time", "20ms", "--json", &links]).await?;
        let probed =
            command("ffn-svc", &["probe", &deployment.ffn_addresses[0].to_string(), "--json"]).await?;
        std::fs::write(&probe, probed)?;

        let model = fixtures::checkpoint(model).display().to_string();
        let subject = ["--model", &model, "--context", "32"];
        let mut args = vec!["plan", "calibrate", "--hardware", "cpu-server"];
        args.extend(subject);
        args.extend(["--points", &bench, "--points", &links, "--points", &probe]);
        let calibrated = command("attention-svc", &args).await?;
        std::fs::write(&profile, &calibrated)?;
        for section in ["calibration.attention", "calibration.ffn", "calibration.exchange"] {
            ensure!(calibrated.contains(section), "no {section} in the profile:\n{calibrated}");
        }
        ensure!(calibrated.matches("measured: ").count() >= 4, "both links are measured:\n{calibrated}");

        let mut args = vec!["plan", "--hardware", &profile, "--tpot-ms", "1000", "--gpus", "3", "--json"];
        args.extend(subject);
        let plan: Value = serde_json::from_str(&command("attention-svc", &args).await?)?;
        let sentence = plan.pointer("/verdict/sentence").and_then(Value::as_str).unwrap_or_default();
        ensure!(!sentence.is_empty(), "no verdict: {plan:#}");
        println!("{model}: {sentence}");
        // The measured layers are what the plan's steps are made of: nobody's tiny pair steps in nanoseconds.
        let attention_ms = numbers(&plan, "/afd/0/parts/attention_ms")?;
        let measured: Value = serde_json::from_str(&std::fs::read_to_string(Path::new(&bench))?)?;
        let layer_us = numbers(&measured, "/layers/0/attention_us")?;
        ensure!(
            attention_ms > layer_us / 1e3,
            "{attention_ms} ms for all layers, {layer_us} us measured for one"
        );
    }
    Ok(())
}

/// Time before each of a stranger's tokens.
const TOKEN: Duration = Duration::from_millis(5);

/// A server that is not ours: it knows as much of OpenAI's API as a benchmark needs, and fails every fifth request.
async fn stranger() -> anyhow::Result<SocketAddr> {
    let asked = Arc::new(AtomicUsize::new(0));
    let models = || async { Json(json!({"data": [{"id": "strange-1"}]})) };
    let complete = move |Json(body): Json<Value>| {
        let turn = asked.fetch_add(1, Relaxed);
        async move { answer(&body, turn) }
    };
    let router = Router::new().route("/v1/models", get(models)).route("/v1/completions", post(complete));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move { axum::serve(listener, router).await });
    Ok(address)
}

fn answer(body: &Value, turn: usize) -> Response {
    if turn % 5 == 4 {
        return (axum::http::StatusCode::SERVICE_UNAVAILABLE, "out of strangeness").into_response();
    }
    let (tokens, prompt) =
        (body["max_tokens"].as_u64().unwrap_or(1), body["prompt"].as_array().map_or(0, Vec::len));
    let events = futures::stream::iter(0..tokens + 2).then(move |at| async move {
        tokio::time::sleep(TOKEN).await;
        Ok::<_, Infallible>(match at {
            at if at < tokens => Event::default().data(json!({"choices": [{"text": "?"}]}).to_string()),
            at if at == tokens => {
                let usage = json!({"prompt_tokens": prompt, "completion_tokens": tokens});
                Event::default().data(json!({"choices": [], "usage": usage}).to_string())
            }
            _ => Event::default().data("[DONE]"),
        })
    });
    Sse::new(events).into_response()
}

#[tokio::test]
async fn a_pair_is_measured_beside_any_server_that_speaks_openais_api() -> anyhow::Result<()> {
    let (deployment, stranger) = (pair("tiny-llama", 1).await?, stranger().await?);
    let (url, other) = (deployment.url(0, ""), format!("http://{stranger}/v1"));
    for (load, levels) in [
        (["--rate", "40,80"], ["/rate", "/concurrency"]),
        (["--concurrency", "1,4"], ["/concurrency", "/rate"]),
    ] {
        let mut args =
            vec!["bench", "--url", &url, "--compare", &other, "--requests-per-level", "10", "--json", "-"];
        args.extend(load);
        args.extend(TINY);
        let report: Value = serde_json::from_str(&command("attention-svc", &args).await?)?;
        let names: Vec<_> = (0..2).map(|at| report["servers"][at]["model"].clone()).collect();
        ensure!(names == ["test", "strange-1"], "{names:?}");
        for (server, at) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let level = &report["servers"][server]["levels"][at];
            ensure!(level.pointer(levels[0]).is_some_and(Value::is_number), "{level:#}");
            ensure!(level.pointer(levels[1]).is_some_and(Value::is_null), "{level:#}");
            for times in ["ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"] {
                let at = |part: &str| numbers(level, &format!("/{times}/{part}"));
                ensure!(
                    0.0 < at("p50")? && at("p50")? <= at("p90")? && at("p90")? <= at("p99")?,
                    "{level:#}"
                );
            }
            ensure!(numbers(level, "/output_tokens_per_s")? > 0.0 && level["requests"] == 10, "{level:#}");
        }
        let failed = |server: usize| {
            report["servers"][server]["levels"]
                .as_array()
                .map(|levels| levels.iter().filter_map(|level| level["failed"].as_u64()).sum::<u64>())
        };
        ensure!(failed(0) == Some(0), "{:#}", report["servers"][0]);
        ensure!(failed(1) == Some(4), "{:#}", report["servers"][1]);
        let why = report["servers"][1]["levels"][0]["first_failure"].as_str().unwrap_or_default();
        ensure!(why.contains("503") && why.contains("out of strangeness"), "{why}");
        // Every one of a stranger's tokens comes after a pause, the first one too.
        let pause_ms = TOKEN.as_secs_f64() * 1e3;
        let level = &report["servers"][1]["levels"][0];
        for times in ["/ttft_ms/p50", "/tpot_ms/p50", "/itl_ms/p50"] {
            ensure!(numbers(level, times)? >= 0.8 * pause_ms, "{times}: {level:#}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_server_that_cannot_be_measured_is_named_with_what_it_said() -> anyhow::Result<()> {
    let address = stranger().await?;
    let url = format!("http://{address}");
    let args = ["bench", "--url", &url, "--layers", "--concurrency", "1", "--requests-per-level", "1"];
    let error = command("attention-svc", &[&args[..], &TINY].concat()).await.unwrap_err().to_string();
    ensure!(error.contains(&url) && error.contains("/metrics"), "{error}");
    let nobody = ["bench", "--url", "http://127.0.0.1:1"];
    let error = command("attention-svc", &nobody).await.unwrap_err().to_string();
    ensure!(error.contains("127.0.0.1:1") && error.to_lowercase().contains("refused"), "{error}");
    Ok(())
}
