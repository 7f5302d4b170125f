//! An FFN rank holds no request state, so losing one loses nothing: the text goes on, and it is the same text.
use std::time::Duration;

use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn};
use afd_tests::oracle;

use crate::story::{self, MODEL, NUM_TOKENS};

const LIMIT: Duration = Duration::from_secs(30);

const HOP_TIMEOUT: Duration = Duration::from_secs(2);
/// With a replica nobody waits longer than for the deadline of a hop and a moment; debug builds on two busy cores take a
/// longer moment than the 100 ms that are the goal.
const LONGEST_MOMENT: Duration = Duration::from_secs(2);

/// The pause of a client whose hop was sent to a replica.
fn is_bearable(what: &str, pause: Duration, deadline: Duration) -> anyhow::Result<()> {
    let over = pause.saturating_sub(deadline);
    println!(
        "{what}: longest pause {} ms, {} ms more than the hop's deadline (goal: 100)",
        pause.as_millis(),
        over.as_millis()
    );
    anyhow::ensure!(over < LONGEST_MOMENT, "{what}: a pause of {pause:?} with a deadline of {deadline:?}");
    Ok(())
}

/// Streams a long continuation, lets `mishap` happen after some tokens, and holds the whole text to the oracle.
/// Returns the longest pause between two tokens and how many ranks the attention rank has lost.
async fn goes_on_after<F>(ffn: Ffn, after_tokens: usize, mishap: F) -> anyhow::Result<(Duration, u64)>
where
    F: AsyncFnOnce(&mut Deployment) -> anyhow::Result<()>,
{
    let timeout = format!("{}ms", HOP_TIMEOUT.as_millis());
    let spec =
        DeploymentSpec::new(fixtures::checkpoint(MODEL), ffn).attention_args(&["--hop-timeout", &timeout]);
    let mut deployment = Deployment::start(spec).await?;
    let mut mishap = Some(mishap);
    let pause = story::goes_on(&mut deployment, async |deployment, num_tokens| {
        match mishap.take_if(|_| num_tokens >= after_tokens) {
            Some(mishap) => mishap(deployment).await,
            None => Ok(()),
        }
    })
    .await?;
    anyhow::ensure!(mishap.is_none(), "the text ended before anything happened");
    Ok((pause, deployment.metric(0, "afd_ffn_losses_total").await? as u64))
}

#[tokio::test]
async fn decode_survives_kill_and_restart_of_the_only_ffn_rank() -> anyhow::Result<()> {
    goes_on_after(Ffn::Remote { shards: 1, replicas: 1 }, 20, async |deployment| {
        deployment.ffn[0].kill()?;
        let address = deployment.ffn_addresses[0].to_string();
        deployment.ffn[0] = deployment.start_ffn(0, &address)?;
        Ok(())
    })
    .await?;
    Ok(())
}

#[tokio::test]
async fn decode_moves_to_the_replica_when_a_shard_is_killed() -> anyhow::Result<()> {
    let (pause, losses) = goes_on_after(Ffn::Remote { shards: 2, replicas: 2 }, 20, async |deployment| {
        deployment.ffn[0].kill()
    })
    .await?;
    anyhow::ensure!(losses == 1, "{losses} ranks were lost: the replica that took over among them?");
    // Its link breaks at once: there is no deadline to wait for.
    is_bearable("killed", pause, Duration::ZERO)
}

/// Over memory that both processes map as over a socket: what a process that was stopped still writes when it wakes goes
/// to a link that nobody listens to any more.
#[tokio::test]
async fn a_rank_that_stops_answering_and_wakes_later_harms_nobody() -> anyhow::Result<()> {
    for link in ["shm", "tcp"] {
        let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 1, replicas: 2 })
            .attention_args(&["--hop-timeout", &format!("{}ms", HOP_TIMEOUT.as_millis()), "--link", link])
            // Slow enough that a rank is stopped in the middle of a hop.
            .ffn_args(&["--inject-delay", "1ms", "--lease-ms", "1500"]);
        let mut deployment = Deployment::start(spec).await?;
        deployment.wait_in_use(0, 2, LIMIT).await?;
        let (mut stopped, mut awake) = (None, false);
        let pause = story::goes_on(&mut deployment, async |deployment, num_tokens| {
            match stopped {
                None if num_tokens >= 20 => {
                    let active = story::active(deployment).await?;
                    deployment.ffn[active].signal("STOP")?;
                    stopped = Some(active);
                }
                Some(stopped) if num_tokens >= 120 && !awake => {
                    deployment.ffn[stopped].signal("CONT")?;
                    awake = true;
                }
                _ => {}
            }
            Ok(())
        })
        .await?;
        anyhow::ensure!(awake, "the text ended before the stopped rank woke");
        is_bearable(&format!("stopped, over {link}"), pause, HOP_TIMEOUT)?;
        let losses = deployment.metric(0, "afd_ffn_losses_total").await?;
        anyhow::ensure!(losses == 1.0, "{link}: {losses} ranks were lost");
        // And it is of use again.
        deployment.wait_in_use(0, 2, LIMIT).await?;
        let expected = fixtures::expected(MODEL)?.prompts.remove(0);
        oracle::same(&expected.generated_ids, &deployment.greedy(0, &expected.input_ids, 32).await?)?;
    }
    Ok(())
}

#[tokio::test]
async fn decode_moves_to_the_replica_when_a_shard_drains() -> anyhow::Result<()> {
    goes_on_after(Ffn::Remote { shards: 1, replicas: 2 }, 20, async |deployment| {
        deployment.ffn[0].signal("TERM")
    })
    .await?;
    Ok(())
}

#[tokio::test]
async fn a_request_ends_as_unavailable_when_no_ffn_comes_back() -> anyhow::Result<()> {
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 1, replicas: 1 })
        .attention_args(&["--ffn-loss-timeout", "1s"]);
    let mut deployment = Deployment::start(spec).await?;
    let prompt = fixtures::expected(MODEL)?.prompts.remove(0).input_ids;
    let mut stream = deployment.stream(0, &prompt, NUM_TOKENS).await?;
    let mut pieces = 0;
    let status = loop {
        match stream.message().await {
            Ok(Some(_)) => pieces += 1,
            Ok(None) => anyhow::bail!("the stream ended as if all were well, after {pieces} pieces"),
            Err(status) => break status,
        }
        if pieces == 20 {
            deployment.ffn[0].kill()?;
        }
    };
    anyhow::ensure!(status.code() == tonic::Code::Unavailable, "ended with {status:?}");
    // The service lives on, says that it is not ready, and serves again by itself once an FFN is back.
    let health = deployment.client().get(deployment.url(0, "/health")).send().await?;
    anyhow::ensure!(health.status() == 503, "not ready was answered with {}", health.status());
    let address = deployment.ffn_addresses[0].to_string();
    deployment.ffn[0] = deployment.start_ffn(0, &address)?;
    deployment.wait_ready(0, Duration::from_secs(30)).await?;
    let expected = fixtures::expected(MODEL)?.prompts.remove(0);
    oracle::same(&expected.generated_ids, &deployment.greedy(0, &expected.input_ids, 32).await?)
}
