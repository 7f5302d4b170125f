//! SIGTERM, idle and in the middle of an answer: within the drain limit, with exit code 0 and without a panic, on either side.
use std::time::{Duration, Instant};

use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn, Process};
use anyhow::ensure;
use tonic::Code;

use crate::experts::of_one_expert;
use crate::story::{self, MODEL, NUM_TOKENS};

/// For what ought to take a moment.
const LIMIT: Duration = Duration::from_secs(30);

async fn start(attention: &[&str], ffn: &[&str]) -> anyhow::Result<Deployment> {
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 1, replicas: 1 });
    Deployment::start(spec.attention_args(attention).ffn_args(ffn)).await
}

/// It was asked to end: it does, and well.
async fn ends_well(mut process: Process, limit: Duration) -> anyhow::Result<()> {
    tokio::task::spawn_blocking(move || {
        let status = process.wait(limit)?;
        let log = process.log();
        ensure!(status.code() == Some(0) && !log.contains("panicked"), "ended with {status}:\n{log}");
        Ok(())
    })
    .await?
}

async fn terminated(process: Process, limit: Duration) -> anyhow::Result<()> {
    process.signal("TERM")?;
    ends_well(process, limit).await
}

#[tokio::test]
async fn sigterm_ends_an_idle_pair_in_either_order() -> anyhow::Result<()> {
    for attention_first in [true, false] {
        let mut deployment = start(&[], &[]).await?;
        let (attention, ffn) = (deployment.attention.remove(0), deployment.ffn.remove(0));
        let order = if attention_first { [attention, ffn] } else { [ffn, attention] };
        for process in order {
            terminated(process, LIMIT).await?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn an_answer_under_way_is_finished_when_attention_is_terminated() -> anyhow::Result<()> {
    let mut deployment = start(&[], &[]).await?;
    let mut ending = None;
    story::goes_on(&mut deployment, async |deployment, num_tokens| {
        if num_tokens >= 20 && ending.is_none() {
            deployment.attention[0].signal("TERM")?;
            ending = Some(deployment.attention.remove(0));
        }
        Ok(())
    })
    .await?;
    ends_well(ending.expect("it was told in mid-stream"), LIMIT).await?;
    terminated(deployment.ffn.remove(0), LIMIT).await
}

/// With the gate on attention no row of the layers of experts goes to the first shard: it takes part in the dense layer and waits
/// for a last one that never comes.
#[tokio::test]
async fn an_idle_ffn_rank_ends_at_once_though_the_last_layers_of_every_step_passed_it_by()
-> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    // Of 16, so the second shard's.
    of_one_expert(folder.path(), 12)?;
    let gate = ["--gate", "attention"];
    let spec = DeploymentSpec::new(folder.path().to_owned(), Ffn::Remote { shards: 2, replicas: 1 });
    let spec = spec.attention_args(&gate).ffn_args(&gate).ffn_args(&["--drain-timeout", "10min"]);
    let mut deployment = Deployment::start(spec).await?;
    let rows = async |shard: u32| {
        deployment.metric(0, &format!("afd_hop_shard_rows_total{{shard=\"{shard}\"}}")).await
    };
    let warm_up = [rows(0).await?, rows(1).await?];
    // Ends with a step that no later one was foreseen behind: nothing of that is withdrawn either.
    ensure!(deployment.greedy(0, &[5, 6, 7], 20).await?.len() == 20);
    ensure!(deployment.greedy(0, &[5, 6, 7], 1).await?.len() == 1);
    let (passed_by, served) = (rows(0).await? - warm_up[0], rows(1).await? - warm_up[1]);
    ensure!(passed_by > 0.0 && served == 4.0 * passed_by, "rows of one layer in four: {passed_by}, {served}");
    for ffn in [deployment.ffn.remove(0), deployment.ffn.remove(0)] {
        terminated(ffn, LIMIT).await?;
    }
    terminated(deployment.attention.remove(0), LIMIT).await
}

/// Hops that an FFN rank has served.
async fn hops(deployment: &Deployment, rank: usize) -> anyhow::Result<f64> {
    deployment.ffn_metric(rank, "afd_ffn_hops_total").await
}

/// Asks for one token, which takes one step of four layers, and calls `happens` with the FFN rank that was the first of two to
/// serve a hop of it. Returns that rank, and how the answer ended where it did not end well.
async fn in_the_middle_of_a_step(
    deployment: &mut Deployment,
    happens: impl AsyncFnOnce(&mut Deployment, usize) -> anyhow::Result<()>,
) -> anyhow::Result<(usize, Option<Code>)> {
    let before = [hops(deployment, 0).await?, hops(deployment, 1).await?];
    let mut stream = deployment.stream(0, &[5, 6, 7], 1).await?;
    let deadline = Instant::now() + LIMIT;
    let first = loop {
        ensure!(Instant::now() < deadline, "nobody serves a hop");
        if hops(deployment, 0).await? > before[0] {
            break 0;
        }
        if hops(deployment, 1).await? > before[1] {
            break 1;
        }
    };
    happens(deployment, first).await?;
    loop {
        match stream.message().await {
            Ok(Some(_)) => {}
            Ok(None) => return Ok((first, None)),
            Err(status) => return Ok((first, Some(status.code()))),
        }
    }
}

/// The step that was given up is over for those that are still there, though they never had its last layer.
#[tokio::test]
async fn an_idle_ffn_rank_ends_at_once_though_the_last_step_was_given_up() -> anyhow::Result<()> {
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 2, replicas: 1 })
        .attention_args(&["--ffn-loss-timeout", "300ms"])
        .ffn_args(&["--drain-timeout", "10min", "--inject-delay", "150ms"]);
    let mut deployment = Deployment::start(spec).await?;
    let kill_other = async |deployment: &mut Deployment, rank: usize| deployment.ffn[1 - rank].kill();
    let (rank, ended) = in_the_middle_of_a_step(&mut deployment, kill_other).await?;
    ensure!(ended == Some(Code::Unavailable), "the other shard was not missed: {ended:?}");
    terminated(deployment.ffn.remove(rank), LIMIT).await
}

/// The replica has the rest of the step, and the rank that leaves hears of no later one.
#[tokio::test]
async fn an_idle_ffn_rank_ends_at_once_though_a_replica_took_over_in_the_middle_of_the_last_step()
-> anyhow::Result<()> {
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 1, replicas: 2 })
        .ffn_args(&["--drain-timeout", "10min", "--inject-delay", "150ms"]);
    let mut deployment = Deployment::start(spec).await?;
    deployment.wait_in_use(0, 2, LIMIT).await?;
    let deadline = Instant::now() + LIMIT;
    while deployment.metric(0, "afd_ffn_cold").await? > 0.0 {
        ensure!(Instant::now() < deadline, "the replica does not become warm");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let before = [hops(&deployment, 0).await?, hops(&deployment, 1).await?];
    let drain = async |deployment: &mut Deployment, rank: usize| deployment.ffn[rank].signal("TERM");
    let (rank, ended) = in_the_middle_of_a_step(&mut deployment, drain).await?;
    ensure!(ended.is_none(), "the answer ended with {ended:?}");
    let taken_over = hops(&deployment, 1 - rank).await? - before[1 - rank];
    ensure!((1.0..4.0).contains(&taken_over), "the replica had {taken_over} of four layers");
    ends_well(deployment.ffn.remove(rank), LIMIT).await
}

/// Said in the log before `limit`.
async fn says(process: &Process, what: &str) -> anyhow::Result<()> {
    let deadline = Instant::now() + LIMIT;
    while !process.log().contains(what) {
        ensure!(Instant::now() < deadline, "`{what}` is not said:\n{}", process.log());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

#[tokio::test]
async fn told_to_end_twice_either_side_says_how_long_it_still_has_and_finishes() -> anyhow::Result<()> {
    let mut deployment =
        start(&["--drain-timeout", "50s"], &["--drain-timeout", "50s", "--inject-delay", "2ms"]).await?;
    let prompt = fixtures::expected(MODEL)?.prompts.remove(0).input_ids;
    let mut stream = deployment.stream(0, &prompt, NUM_TOKENS).await?;
    ensure!(stream.message().await?.is_some(), "no token");
    let ending = [deployment.ffn.remove(0), deployment.attention.remove(0)];
    for process in &ending {
        process.signal("TERM")?;
        says(process, "stopping why=").await?;
        process.signal("INT")?;
        says(process, "told to end again, which changes nothing").await?;
        ensure!(process.log().contains("why=\"SIGINT\" left="), "{}", process.log());
    }
    let mut tokens = 1;
    while let Some(piece) = stream.message().await? {
        tokens += piece.token_ids.len();
    }
    ensure!(tokens == NUM_TOKENS as usize, "{tokens} tokens came");
    for process in ending {
        ends_well(process, LIMIT).await?;
    }
    Ok(())
}

/// Nothing is as patient as it was told to be towards an FFN when its own time is up.
#[tokio::test]
async fn attention_ends_within_its_drain_limit_though_a_step_waits_for_a_lost_ffn_rank() -> anyhow::Result<()>
{
    for signal in ["KILL", "STOP"] {
        let patient = ["--drain-timeout", "1s", "--ffn-loss-timeout", "5min", "--hop-timeout", "2min"];
        let mut deployment = start(&patient, &["--inject-delay", "5ms"]).await?;
        let prompt = fixtures::expected(MODEL)?.prompts.remove(0).input_ids;
        let mut stream = deployment.stream(0, &prompt, NUM_TOKENS).await?;
        ensure!(stream.message().await?.is_some(), "no token");
        let ffn = deployment.ffn.remove(0);
        ffn.signal(signal)?;
        let attention = deployment.attention.remove(0);
        attention.signal("TERM")?;
        ends_well(attention, LIMIT).await?;
        let status = loop {
            match stream.message().await {
                Ok(Some(_)) => {}
                Ok(None) => anyhow::bail!("SIG{signal}: the answer ended as if all were well"),
                Err(status) => break status,
            }
        };
        ensure!(status.code() == Code::Unavailable, "SIG{signal}: ended with {status:?}");
    }
    Ok(())
}

/// Whoever asks while the only rank of a shard drains would keep it from ever being done.
#[tokio::test]
async fn the_only_ffn_rank_is_asked_nothing_new_while_it_drains_and_ends_when_what_ran_is_finished()
-> anyhow::Result<()> {
    let mut deployment =
        start(&["--ffn-loss-timeout", "500ms"], &["--drain-timeout", "120s", "--inject-delay", "2ms"])
            .await?;
    let prompt = fixtures::expected(MODEL)?.prompts.remove(0).input_ids;
    let mut running = deployment.stream(0, &prompt, NUM_TOKENS).await?;
    ensure!(running.message().await?.is_some(), "no token");
    let ffn = deployment.ffn.remove(0);
    ffn.signal("TERM")?;
    let reason = loop {
        let ready = deployment.client().get(deployment.url(0, "/ready")).send().await?;
        if ready.status() == 503 {
            break ready.text().await?;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    ensure!(reason.contains("about to stop"), "{reason}");
    let mut late = deployment.stream(0, &prompt, NUM_TOKENS).await?;
    let status = late.message().await.err();
    let is_told = |status: &tonic::Status| {
        status.code() == Code::Unavailable && status.message().contains("--ffn-loss-timeout")
    };
    ensure!(status.as_ref().is_some_and(is_told), "who came later was answered with {status:?}");
    let mut tokens = 1;
    while let Some(piece) = running.message().await? {
        tokens += piece.token_ids.len();
    }
    ensure!(tokens == NUM_TOKENS as usize, "what ran ended after {tokens} tokens");
    ends_well(ffn, LIMIT).await?;
    ensure!(deployment.metric(0, "afd_ffn_losses_total").await? == 0.0, "a rank that left counts as lost");
    ensure!(!deployment.attention[0].log().contains("FFN rank lost"), "{}", deployment.attention[0].log());
    terminated(deployment.attention.remove(0), LIMIT).await
}

#[tokio::test]
async fn the_only_ffn_rank_ends_within_its_drain_limit_though_an_answer_is_under_way() -> anyhow::Result<()> {
    // Slow enough that the answer takes longer than the drain may.
    let mut deployment =
        start(&["--ffn-loss-timeout", "500ms"], &["--drain-timeout", "1s", "--inject-delay", "5ms"]).await?;
    let prompt = fixtures::expected(MODEL)?.prompts.remove(0).input_ids;
    let mut stream = deployment.stream(0, &prompt, NUM_TOKENS).await?;
    let (mut pieces, mut ending) = (0, None);
    let status = loop {
        match stream.message().await {
            Ok(Some(_)) => pieces += 1,
            Ok(None) => anyhow::bail!("the answer ended as if all were well, after {pieces} pieces"),
            Err(status) => break status,
        }
        if pieces == 20 {
            let ffn = deployment.ffn.remove(0);
            ffn.signal("TERM")?;
            ending = Some(tokio::spawn(ends_well(ffn, Duration::from_secs(1) + LIMIT / 3)));
        }
    };
    ensure!(status.code() == Code::Unavailable, "ended with {status:?}");
    ending.expect("it was told in mid-stream").await??;
    terminated(deployment.attention.remove(0), LIMIT).await
}
