//! Plans go one step ahead, and a timeline of both sides can be had from a running pair.
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn, output};
use afd_tests::oracle;
use anyhow::{Context, ensure};
use serde_json::{Value, json};

const MODEL: &str = "tiny-mixtral";

#[tokio::test]
async fn most_steps_of_a_long_answer_were_told_one_step_ahead() -> anyhow::Result<()> {
    are_told_ahead(pair()).await
}

/// Every request is recorded, and no step of it.
#[tokio::test]
async fn and_so_they_are_while_requests_are_traced() -> anyhow::Result<()> {
    let nobody = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let traced = pair().env("OTEL_EXPORTER_OTLP_ENDPOINT", &format!("http://{nobody}"));
    are_told_ahead(traced.attention_args(&["--trace-hops-ratio", "0"])).await
}

fn pair() -> DeploymentSpec {
    DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 2, replicas: 1 })
}

async fn are_told_ahead(spec: DeploymentSpec) -> anyhow::Result<()> {
    let deployment = Deployment::start(spec).await?;
    let expected = fixtures::expected(MODEL)?;
    // One after the other: after each the step that was told ahead does not come.
    for prompt in &expected.prompts[..3] {
        let answer = deployment.greedy(0, &prompt.input_ids, prompt.generated_ids.len() as u32).await?;
        oracle::same(&prompt.generated_ids, &answer)?;
    }
    // All at once: batches grow and shrink, so some steps come otherwise than told.
    let asked = expected
        .prompts
        .iter()
        .map(|prompt| deployment.greedy(0, &prompt.input_ids, prompt.generated_ids.len() as u32));
    for (prompt, answer) in expected.prompts.iter().zip(futures::future::join_all(asked).await) {
        oracle::same(&prompt.generated_ids, &answer?)?;
    }
    let attention = |name| deployment.metric(0, name);
    let (ahead, steps) = (attention("afd_plans_ahead_total").await?, attention("afd_steps_total").await?);
    println!("{ahead} of {steps} steps came as told one step ahead");
    ensure!(ahead > 0.5 * steps, "only {ahead} of {steps} steps came as told");
    ensure!(attention("afd_ffn_losses_total").await? == 0.0, "a plan ended a session");
    let unplanned = deployment.ffn_metric(0, "afd_ffn_hops_unplanned_total").await?;
    println!("{unplanned} hops of shard 0 ran before their plan was there");
    Ok(())
}

#[tokio::test]
async fn a_profile_shows_every_rank_layer_and_stage_of_the_steps_asked_for() -> anyhow::Result<()> {
    let deployment = Deployment::start(pair().attention_args(&["--stages", "2"])).await?;
    let prompts = fixtures::expected(MODEL)?.prompts;
    let load = async {
        let asked = prompts[..4].iter().map(|prompt| deployment.greedy(0, &prompt.input_ids, 200));
        futures::future::join_all(asked).await.into_iter().collect::<anyhow::Result<Vec<_>>>()
    };
    let ask = |steps: usize, timeout_s: u64| {
        let wanted = json!({"steps": steps, "timeout_s": timeout_s});
        deployment.client().post(deployment.url(0, "/profile")).json(&wanted).send()
    };
    let profile = ask(10, 30);
    let (answer, _) = tokio::join!(profile, load);
    let timeline: Value = answer?.error_for_status()?.json().await?;
    if let Some(folder) = std::env::var_os("AFD_TEST_PROFILE") {
        std::fs::write(std::path::Path::new(&folder).join("profile.json"), timeline.to_string())?;
    }
    let events = timeline["traceEvents"].as_array().context("events")?;
    let names = |prefix: &str| -> Vec<&Value> {
        events
            .iter()
            .filter(|event| event["name"].as_str().is_some_and(|name| name.starts_with(prefix)))
            .collect()
    };
    let steps: BTreeSet<u64> =
        names("step ").iter().filter_map(|event| event["args"]["step"].as_u64()).collect();
    ensure!(steps.len() == 10, "steps {steps:?}");
    // How long it waited for the FFN, and how much of the FFN's time another stage's attention hid.
    let mut hidden_us = 0;
    for step in names("step ") {
        let (waited, hidden) = (&step["args"]["ffn_wait_us"], &step["args"]["ffn_hidden_us"]);
        let lasted = step["dur"].as_f64().context("dur")?;
        ensure!(waited.as_f64().is_some_and(|waited| waited > 0.0 && waited <= lasted), "{step}");
        hidden_us += hidden.as_u64().with_context(|| step.to_string())?;
    }
    ensure!(hidden_us > 0, "two stages, and nothing was hidden");
    let processes: BTreeSet<&str> =
        names("process_name").iter().filter_map(|event| event["args"]["name"].as_str()).collect();
    ensure!(processes.len() == 3, "A0, F0 and F1: {processes:?}");
    // Hops of both shards, timed by both sides; where a step came unforeseen its plan may be behind its first hops.
    let (hops, computed) = (names("L").len(), names("compute L").len());
    println!("{hops} hops, {computed} of them timed by the FFN");
    ensure!(
        hops >= 10 * 4 * 2 && computed <= hops && 4 * computed >= 3 * hops,
        "{hops} hops, {computed} timed"
    );
    for layer in 0..4 {
        ensure!(!names(&format!("attention L{layer}")).is_empty(), "no attention of layer {layer}");
    }
    let refused = ask(0, 1).await?;
    ensure!(refused.status() == 400, "{}", refused.status());
    let nothing = ask(5, 1).await?;
    ensure!(nothing.status() == 504 && nothing.text().await?.contains("did not run"));
    Ok(())
}

#[tokio::test]
async fn who_asks_for_a_profile_while_another_is_under_way_is_told_so_and_takes_nothing_from_it()
-> anyhow::Result<()> {
    let deployment = Deployment::start(pair()).await?;
    let ask = |steps: usize, timeout_s: u64| {
        let wanted = json!({"steps": steps, "timeout_s": timeout_s});
        Box::pin(deployment.client().post(deployment.url(0, "/profile")).json(&wanted).send())
    };
    // Nothing runs: whichever comes first is under way for as long as its caller waits.
    let (refused, _, under_way) = futures::future::select_all([ask(1000, 600), ask(1000, 600)]).await;
    let refused = refused?;
    ensure!(refused.status() == 409, "{}", refused.status());
    let error: Value = refused.json().await?;
    ensure!(error["error"]["code"] == "profile_under_way", "{error}");

    let (url, folder) = (deployment.url(0, ""), tempfile::tempdir()?);
    let out = folder.path().join("profile.json").display().to_string();
    let command = move || output("attention-svc", &["profile", "--url", &url, "--out", &out]);
    let output = tokio::task::spawn_blocking(command).await??;
    let said = String::from_utf8(output.stderr)?;
    let words = ["409", "another profile is under way: 1000 steps for 127.0.0.1:", "it ends within"];
    ensure!(words.iter().all(|word| said.contains(word)), "{said}");
    ensure!(output.status.code() == Some(1) && !folder.path().join("profile.json").exists(), "{said}");

    // The one under way is over once its caller is gone, and the next one is as good as ever.
    drop(under_way);
    let prompt = &fixtures::expected(MODEL)?.prompts[0];
    let begun = Instant::now();
    loop {
        let (answer, load) = tokio::join!(ask(5, 30), deployment.greedy(0, &prompt.input_ids, 60));
        load?;
        let answer = answer?;
        if answer.status() == 200 {
            return Ok(());
        }
        ensure!(answer.status() == 409 && begun.elapsed() < Duration::from_secs(30), "{}", answer.status());
    }
}
