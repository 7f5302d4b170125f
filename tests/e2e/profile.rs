//! A timeline of both sides can be had from a running pair.
use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn, output};
use anyhow::{Context, ensure};
use serde_json::{Value, json};

const MODEL: &str = "tiny-mixtral";

fn pair() -> DeploymentSpec {
    DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 2, replicas: 1 })
}

/// Runs `attention-svc profile` to its end: its exit code, and what it printed on either stream.
async fn profile(url: String, out: &Path, more: &'static [&str]) -> anyhow::Result<(Option<i32>, String)> {
    let out = out.display().to_string();
    let command =
        move || output("attention-svc", &[&["profile", "--url", &url, "--out", &out], more].concat());
    let output = tokio::task::spawn_blocking(command).await??;
    Ok((output.status.code(), String::from_utf8([output.stdout, output.stderr].concat())?))
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
        std::fs::write(Path::new(&folder).join("profile.json"), timeline.to_string())?;
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
    ensure!(timeline["otherData"] == json!({"steps": 10, "fewer": null}), "{}", timeline["otherData"]);
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

    let folder = tempfile::tempdir()?;
    let out = folder.path().join("profile.json");
    let (code, said) = profile(deployment.url(0, ""), &out, &[]).await?;
    let words = ["409", "another profile is under way: 1000 steps for 127.0.0.1:", "it ends within"];
    ensure!(words.iter().all(|word| said.contains(word)), "{said}");
    ensure!(code == Some(1) && !out.exists(), "{said}");

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

#[tokio::test]
async fn every_refusal_is_an_error_object_in_both_roles() -> anyhow::Result<()> {
    let deployment = Deployment::start(pair()).await?;
    let [attention, ffn] = [deployment.url(0, ""), format!("http://{}", deployment.ffn_addresses[0])];
    let field = ("invalid_request_error", "invalid_value");
    for (method, url, path, body, status, (family, code), param) in [
        ("POST", &attention, "/profile", r#"{"steps": 0, "timeout_s": 1}"#, 400, field, json!("steps")),
        ("POST", &attention, "/profile", r#"{"steps": 1}"#, 400, field, json!("timeout_s")),
        ("POST", &attention, "/profile", r#"{"steps": 1, "timeout_s": 1, "x": 1}"#, 400, field, json!("x")),
        ("POST", &attention, "/profile", "steps=1", 400, (field.0, "invalid_body"), Value::Null),
        ("POST", &attention, "/profile", "", 400, (field.0, "invalid_body"), Value::Null),
        ("GET", &attention, "/profile", "", 405, (field.0, "method_not_allowed"), Value::Null),
        ("GET", &attention, "/profiles", "", 404, (field.0, "unknown_url"), Value::Null),
        ("POST", &ffn, "/live", "", 405, (field.0, "method_not_allowed"), Value::Null),
        ("DELETE", &ffn, "/metrics", "", 405, (field.0, "method_not_allowed"), Value::Null),
        ("GET", &ffn, "/profile", "", 404, (field.0, "unknown_url"), Value::Null),
        ("POST", &ffn, "/afd.v1.FfnControlService/Join", "{}", 415, (field.0, "grpc_only"), Value::Null),
        ("POST", &ffn, "/v1/completions", "{}", 400, (field.0, "wrong_role"), Value::Null),
    ] {
        let request = deployment.client().request(method.parse()?, format!("{url}{path}")).body(body);
        let answer = request.send().await?;
        let (found, text) = (answer.status(), answer.text().await?);
        let error: Value =
            serde_json::from_str(&text).with_context(|| format!("{method} {path}: {text:?}"))?;
        let error = &error["error"];
        ensure!(found == status, "{method} {path} {body}: {found} {error}");
        ensure!(error["type"] == family && error["code"] == code && error["param"] == param, "{error}");
        ensure!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{error}");
    }
    Ok(())
}

#[tokio::test]
async fn steps_that_came_in_time_are_written_and_counted_and_none_is_an_error() -> anyhow::Result<()> {
    // Four layers: a step takes 20 ms.
    let deployment = Deployment::start(pair().ffn_args(&["--inject-delay", "5ms"])).await?;
    let folder = tempfile::tempdir()?;
    let out = folder.path().join("profile.json");
    let few = &["--steps", "1000", "--timeout", "1s"];
    let (code, said) = profile(deployment.url(0, ""), &out, few).await?;
    ensure!(code == Some(1) && said.contains("504 Gateway Timeout: no step ran within 1.0 s"), "{said}");
    ensure!(!out.exists(), "nothing was recorded, and written");

    let prompt = &fixtures::expected(MODEL)?.prompts[0];
    let mut load = deployment.stream(0, &prompt.input_ids, 400).await?;
    load.message().await?.context("a stream without a message")?;
    let (code, said) = profile(deployment.url(0, ""), &out, few).await?;
    let timeline: Value = serde_json::from_str(&std::fs::read_to_string(&out).context(said.clone())?)?;
    let (came, fewer) = (timeline["otherData"]["steps"].as_u64(), timeline["otherData"]["fewer"].as_str());
    let came = came.filter(|came| (1..1000).contains(came)).with_context(|| said.clone())?;
    ensure!(fewer == Some(&format!("{came} of 1000 steps ran within 1.0 s")), "{fewer:?}");
    ensure!(code == Some(0) && said.starts_with(&format!("{}: ", fewer.unwrap_or_default())), "{said}");
    let events = timeline["traceEvents"].as_array().context("events")?;
    let is_step = |event: &&Value| event["name"].as_str().is_some_and(|name| name.starts_with("step "));
    ensure!(events.iter().filter(is_step).count() as u64 == came, "{said}");
    ensure!(events.iter().any(|event| event["name"] == "compute L0"), "no time of the FFN's");
    // Standard output has the timeline and nothing else.
    let url = deployment.url(0, "");
    let words = move || output("attention-svc", &["profile", "--url", &url, "--steps", "2", "--out", "-"]);
    let printed = tokio::task::spawn_blocking(words).await??;
    let said = String::from_utf8(printed.stderr)?;
    let timeline: Value = serde_json::from_slice(&printed.stdout).context(said.clone())?;
    ensure!(timeline["otherData"]["steps"] == 2 && said.starts_with("2 steps: "), "{said}");
    Ok(())
}

#[tokio::test]
async fn a_file_that_cannot_be_written_is_known_before_the_rank_is_asked() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    // Nobody is there, which would be said otherwise.
    let nobody = "http://127.0.0.1:1".to_owned();
    let out = folder.path().join("nowhere").join("profile.json");
    let (code, said) = profile(nobody.clone(), &out, &[]).await?;
    ensure!(code == Some(2) && said.contains(&format!("--out {}: ", out.display())), "{code:?}: {said}");
    let (code, said) = profile(nobody, &folder.path().join("profile.json"), &[]).await?;
    ensure!(code == Some(1) && said.contains("127.0.0.1:1"), "{code:?}: {said}");
    ensure!(std::fs::read_dir(folder.path())?.count() == 0, "something is left behind");
    Ok(())
}
