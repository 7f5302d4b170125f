//! Ranks come and go under load, and those that stay notice nothing.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn};
use afd_tests::oracle;
use anyhow::{Context, ensure};
use serde_json::{Value, json};

use crate::start::attention;
use crate::story::{self, MODEL};

const LIMIT: Duration = Duration::from_secs(30);
/// Between two tokens while ranks come and go as they are told to.
const LONGEST_STALL: Duration = Duration::from_secs(1);

/// Asks one question after the other until it is told to stop. Returns how many were answered, each with the reference's
/// own tokens, and the longest pause between two tokens.
async fn ask_on(
    deployment: &Deployment,
    rank: usize,
    stop: Arc<AtomicBool>,
) -> anyhow::Result<(u32, Duration)> {
    let expected = fixtures::expected(MODEL)?.prompts.remove(0);
    let (mut count, mut pause) = (0, Duration::ZERO);
    while !stop.load(SeqCst) {
        let mut stream = deployment.stream(rank, &expected.input_ids, 32).await?;
        let (mut ids, mut last) = (Vec::new(), Instant::now());
        while let Some(piece) = stream.message().await.with_context(|| format!("question {count}"))? {
            pause = pause.max(last.elapsed());
            last = Instant::now();
            ids.extend(piece.token_ids);
        }
        oracle::same(&expected.generated_ids, &ids)?;
        count += 1;
    }
    Ok((count, pause))
}

#[tokio::test]
async fn a_replica_joins_and_the_first_rank_leaves_under_load_without_an_error() -> anyhow::Result<()> {
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 1, replicas: 2 });
    let mut deployment = Deployment::start(spec).await?;
    // One attention and one FFN rank: the other's place is kept.
    deployment.ffn[1].signal("TERM")?;
    ensure!(deployment.ffn[1].wait(LIMIT)?.success(), "{}", deployment.ffn[1].log());
    deployment.wait_in_use(0, 1, LIMIT).await?;
    let (stop, mut old) = (Arc::new(AtomicBool::new(false)), deployment.ffn.remove(0));
    let (load, scaled) = tokio::join!(ask_on(&deployment, 0, Arc::clone(&stop)), async {
        let change = async {
            let joining = deployment.start_ffn(1, &deployment.ffn_addresses[1].to_string())?;
            deployment.wait_in_use(0, 2, LIMIT).await?;
            old.signal("TERM")?;
            let status = tokio::task::spawn_blocking(move || old.wait(LIMIT)).await??;
            ensure!(status.success(), "the rank that left ended with {status}");
            deployment.wait_in_use(0, 1, LIMIT).await?;
            // And back again.
            let returned = deployment.start_ffn(0, &deployment.ffn_addresses[0].to_string())?;
            deployment.wait_in_use(0, 2, LIMIT).await?;
            tokio::time::sleep(Duration::from_millis(300)).await;
            Ok((joining, returned))
        }
        .await;
        stop.store(true, SeqCst);
        change
    });
    let (num_answers, pause) = load?;
    let _running = scaled?;
    println!("{num_answers} answers while ranks came and went, longest pause {} ms", pause.as_millis());
    ensure!(num_answers >= 3, "{num_answers} answers are no load");
    ensure!(pause <= LONGEST_STALL, "somebody waited {pause:?} for a token");
    Ok(())
}

#[tokio::test]
async fn the_death_of_an_attention_rank_costs_its_neighbour_nothing_and_the_ffn_frees_what_it_held()
-> anyhow::Result<()> {
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 1, replicas: 1 })
        .attention_ranks(2)
        .ffn_args(&["--lease-ms", "1000"]);
    let mut deployment = Deployment::start(spec).await?;
    ensure!(deployment.ffn_metric(0, "afd_ffn_sessions").await? == 2.0);
    let doomed = deployment.stream(1, &[5, 6, 7], 400).await?;
    let mut victim = Some(deployment.attention.remove(1));
    story::goes_on(&mut deployment, async |_, num_tokens| match victim.take_if(|_| num_tokens > 50) {
        Some(mut victim) => victim.kill(),
        None => Ok(()),
    })
    .await?;
    drop(doomed);
    let deadline = Instant::now() + LIMIT;
    loop {
        let sessions = deployment.ffn_metric(0, "afd_ffn_sessions").await?;
        let links = deployment.ffn_metric(0, "afd_ffn_links{kind=\"shm\"}").await?;
        let unanswered = deployment.ffn_metric(0, "afd_ffn_hops_unanswered").await?;
        if (sessions, links, unanswered) == (1.0, 1.0, 0.0) {
            break;
        }
        ensure!(Instant::now() < deadline, "{sessions} sessions, {links} links, {unanswered} hops are left");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    ensure!(deployment.metric(0, "afd_ffn_losses_total").await? == 0.0, "the neighbour lost the FFN");
    Ok(())
}

/// A minute with `AFD_TEST_FULL`.
#[tokio::test]
async fn an_attention_rank_may_idle_while_another_serves() -> anyhow::Result<()> {
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 2, replicas: 1 })
        .attention_ranks(2)
        .ffn_args(&["--lease-ms", "500"]);
    let deployment = Deployment::start(spec).await?;
    let time = Duration::from_secs(if std::env::var_os("AFD_TEST_FULL").is_some() { 60 } else { 3 });
    let stop = Arc::new(AtomicBool::new(false));
    let (served, ()) = tokio::join!(ask_on(&deployment, 0, Arc::clone(&stop)), async {
        tokio::time::sleep(time).await;
        stop.store(true, SeqCst);
    });
    println!("{} answers in {time:?} beside an idle rank", served?.0);
    let expected = fixtures::expected(MODEL)?.prompts.remove(1);
    oracle::same(&expected.generated_ids, &deployment.greedy(1, &expected.input_ids, 32).await?)?;
    for rank in 0..2 {
        let losses = deployment.metric(rank, "afd_ffn_losses_total").await?;
        ensure!(losses == 0.0, "A{rank} lost {losses} ranks");
    }
    Ok(())
}

#[tokio::test]
async fn two_deployments_share_one_ffn_pool_and_each_gets_its_own_tokens() -> anyhow::Result<()> {
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 2, replicas: 1 });
    let deployment = Deployment::start(spec).await?;
    let ffn = deployment.ffn_addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let folder = tempfile::tempdir()?;
    // The same rank of another deployment: no twin.
    let other = ["--deployment", "other", "--rank", "0"];
    let mut other = attention(&deployment.spec.model, &ffn, &other, folder.path(), "A0-other")?;
    let url = format!("http://{}", other.address(LIMIT)?);
    let deadline = Instant::now() + LIMIT;
    while !deployment.client().get(format!("{url}/health")).send().await?.status().is_success() {
        ensure!(Instant::now() < deadline, "the other deployment is not ready:\n{}", other.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let expected = fixtures::expected(MODEL)?.prompts.remove(0);
    let stop = Arc::new(AtomicBool::new(false));
    let (served, asked) = tokio::join!(ask_on(&deployment, 0, Arc::clone(&stop)), async {
        let body = json!({
            "prompt": expected.input_ids, "max_tokens": expected.generated_ids.len(), "temperature": 0,
            "ignore_eos": true, "return_token_ids": true,
        });
        let ask = async {
            let mut answers = Vec::new();
            for _ in 0..3 {
                let answer = deployment.client().post(format!("{url}/v1/completions")).json(&body).send();
                answers.push(answer.await?.error_for_status()?.json::<Value>().await?);
            }
            anyhow::Ok(answers)
        };
        let answers = ask.await;
        stop.store(true, SeqCst);
        answers
    });
    ensure!(served?.0 > 0, "the first deployment got no answer meanwhile");
    for answer in asked? {
        let ids: Vec<u32> = serde_json::from_value(answer["choices"][0]["token_ids"].clone())?;
        oracle::same(&expected.generated_ids, &ids)?;
    }
    for rank in 0..2 {
        ensure!(deployment.ffn_metric(rank, "afd_ffn_sessions").await? == 2.0);
    }
    Ok(())
}
