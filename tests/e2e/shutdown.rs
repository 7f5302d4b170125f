//! SIGTERM, idle and in the middle of an answer: within the drain limit, with exit code 0 and without a panic, on either side.
use std::time::{Duration, Instant};

use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn, Process};
use anyhow::ensure;
use tonic::Code;

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
