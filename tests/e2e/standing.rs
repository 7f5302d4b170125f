//! Who serves as what: two processes of one rank, and what `/ready` says while somebody is missing.
use std::time::{Duration, Instant};

use afd_common::proto::v1;
use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn, Process};
use afd_tests::oracle;
use anyhow::{Context, ensure};
use serde_json::{Value, json};

const MODEL: &str = "tiny-mixtral";
const LIMIT: Duration = Duration::from_secs(30);

async fn serves(deployment: &Deployment) -> anyhow::Result<()> {
    let expected = fixtures::expected(MODEL)?.prompts.remove(0);
    oracle::same(&expected.generated_ids, &deployment.greedy(0, &expected.input_ids, 32).await?)
}

/// Where the attention rank sends its rows.
async fn in_use(deployment: &Deployment) -> anyhow::Result<Vec<String>> {
    let info = deployment.grpc(0).await?.get_model_info(v1::GetModelInfoRequest {}).await?.into_inner();
    Ok(info.ffn_peers.into_iter().map(|peer| peer.address).collect())
}

/// Waits until `/ready` is 503 with all `parts` in its reason, and none of `not`.
async fn reason(deployment: &Deployment, parts: &[&str], not: &[&str]) -> anyhow::Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let answer = deployment.client().get(deployment.url(0, "/ready")).send().await?;
        let (status, body) = (answer.status().as_u16(), answer.json::<Value>().await?);
        let reason = body["reason"].as_str().unwrap_or_default();
        let said =
            parts.iter().all(|part| reason.contains(part)) && !not.iter().any(|part| reason.contains(part));
        if status == 503 && said {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{parts:?} is not said, but {status}: {body}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn of_two_processes_of_one_ffn_rank_the_live_one_stays_until_it_is_gone() -> anyhow::Result<()> {
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 1, replicas: 2 });
    let mut deployment = Deployment::start(spec.ffn_rank_args(1, &["--rank", "0"])).await?;
    let live = in_use(&deployment).await?;
    ensure!(live.len() == 1, "both are in use: {live:?}");
    let at = deployment.ffn_addresses.iter().position(|address| address.to_string() == live[0]);
    let at = at.context("the one in use is one of ours")?;
    let deadline = Instant::now() + LIMIT;
    while !deployment.attention[0].log().contains("give one of the two another --rank") {
        ensure!(Instant::now() < deadline, "the twin is not named:\n{}", deployment.attention[0].log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    serves(&deployment).await?;
    // The older of the two cannot follow the newer: a restarted process is newer than both.
    deployment.ffn[at].kill()?;
    deployment.ffn[1 - at].kill()?;
    let address = deployment.ffn_addresses[1 - at].to_string();
    deployment.ffn[1 - at] = deployment.start_ffn(1, &address)?;
    serves(&deployment).await?;
    ensure!(in_use(&deployment).await? == [address], "the restarted one is in use");
    Ok(())
}

#[tokio::test]
async fn ready_tells_who_is_missing_and_what_was_heard_there_last() -> anyhow::Result<()> {
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 2, replicas: 1 })
        .attention_args(&["--ffn-loss-timeout", "500ms"]);
    let mut deployment = Deployment::start(spec).await?;
    let there = deployment.ffn_addresses[1].to_string();
    deployment.ffn[1].kill()?;
    let gone = format!("{there} was up, shard 1/2, and is not there");
    reason(&deployment, &["shard 1/2 has no rank", &gone, "is up, shard 0/2"], &["shard 0/2 has no rank"])
        .await?;
    let body = json!({"prompt": "Hello", "max_tokens": 4});
    let (status, answer) = deployment.post(0, "/v1/completions", &body).await?;
    let message = answer["error"]["message"].as_str().unwrap_or_default();
    ensure!(status == 503 && message.contains("shard 1/2") && message.contains(&there), "{status}: {answer}");

    let folder = tempfile::tempdir()?;
    let in_its_place = |model: &str, shard: &str| {
        let model = fixtures::checkpoint(model).display().to_string();
        let mut words = vec!["serve", "--model", &model, "--listen", &there, "--shard", shard, "--rank", "1"];
        words.extend(["--dtype", "float32", "--threads", "1"]);
        let words = words.into_iter().map(str::to_owned).collect::<Vec<_>>();
        Process::start("ffn-svc", "F1", &words, folder.path())
    };
    let mut wrong = in_its_place("tiny-qwen3-moe", "1/2")?;
    reason(&deployment, &["shard 1/2 has no rank", &there, "refuses", "fingerprint"], &["not there"]).await?;
    wrong.kill()?;
    reason(&deployment, &["shard 1/2 has no rank", &there, "is not there"], &["fingerprint"]).await?;
    let mut wrong = in_its_place(MODEL, "0/2")?;
    reason(&deployment, &["shard 1/2 has no rank", &format!("{there} is up, shard 0/2")], &[]).await?;
    wrong.kill()?;
    deployment.ffn[1] = deployment.start_ffn(1, &there)?;
    deployment.wait_ready(0, LIMIT).await?;
    serves(&deployment).await
}
