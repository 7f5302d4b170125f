//! `kill -9` of an FFN rank at random moments of prefill and decode, ten times (a hundred times with `AFD_TEST_FULL`): no
//! request fails, and every token is one that the oracle accepts.
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn};
use anyhow::{Context, ensure};

use crate::story::{self, MODEL};

const LIMIT: Duration = Duration::from_secs(60);
/// The default of `--hop-timeout`.
const HOP_TIMEOUT: Duration = Duration::from_secs(5);

/// A long prompt, read in many chunks, and short ones that write much: together they are nearly always in both phases.
fn prompts() -> anyhow::Result<Vec<(Vec<u32>, u32)>> {
    let short = fixtures::expected(MODEL)?.prompts;
    let long: Vec<u32> =
        short.iter().flat_map(|prompt| &prompt.input_ids).copied().cycle().take(360).collect();
    let mut all = vec![(long, 12)];
    all.extend(short.into_iter().take(2).map(|prompt| (prompt.input_ids, 60)));
    Ok(all)
}

/// One answer, and the longest time that its reader waited for a piece of it after the first.
async fn answer(
    deployment: &Deployment,
    prompt: &[u32],
    num_tokens: u32,
) -> anyhow::Result<(Vec<u32>, Duration)> {
    let mut stream = deployment.stream(0, prompt, num_tokens).await?;
    let (mut ids, mut pause, mut last) = (Vec::new(), Duration::ZERO, None::<Instant>);
    while let Some(piece) = stream.message().await? {
        pause = last.map_or(pause, |last| pause.max(last.elapsed()));
        last = Some(Instant::now());
        ids.extend(piece.token_ids);
    }
    Ok((ids, pause))
}

/// All prompts at once, and the longest pause in any answer.
async fn answers(
    deployment: &Deployment,
    prompts: &[(Vec<u32>, u32)],
) -> anyhow::Result<(Vec<Vec<u32>>, Duration)> {
    let asked = prompts.iter().map(|(prompt, num_tokens)| answer(deployment, prompt, *num_tokens));
    let (answers, pauses): (Vec<_>, Vec<_>) = futures::future::try_join_all(asked).await?.into_iter().unzip();
    Ok((answers, pauses.into_iter().max().unwrap_or_default()))
}

/// What a run came to.
struct Outcome {
    kills: u32,
    failed: u32,
    replays: f64,
    longest: Duration,
    /// Of any reader, between two pieces.
    pause: Duration,
}

async fn killed_at_random(ffn: Ffn, restart_at_once: bool) -> anyhow::Result<Outcome> {
    let kills = if std::env::var_os("AFD_TEST_FULL").is_some() { 100 } else { 10 };
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), ffn).attention_args(&[
        "--max-num-batched-tokens",
        "16",
        "--no-prefix-cache",
    ]);
    let mut deployment = Deployment::start(spec).await?;
    let num_ranks = deployment.ffn.len();
    let prompts = prompts()?;
    let begun = Instant::now();
    let (expected, usual_pause) = answers(&deployment, &prompts).await?;
    let undisturbed = begun.elapsed();
    for ((prompt, _), answer) in prompts.iter().zip(&expected) {
        story::holds(prompt, answer)?;
    }

    let mut seed = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64;
    let (mut failed, mut longest, mut longest_pause) = (0, Duration::ZERO, Duration::ZERO);
    for kill in 0..kills {
        deployment.wait_in_use(0, num_ranks, LIMIT).await?;
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let moment = undisturbed.mul_f64((seed >> 33) as f64 / (1u64 << 31) as f64);
        let victim = deployment.in_use(0).await?[kill as usize % num_ranks];
        let mut process = deployment.ffn.remove(victim);
        let begun = Instant::now();
        let (answered, restarted) = tokio::join!(answers(&deployment, &prompts), async {
            tokio::time::sleep(moment).await;
            process.kill()?;
            let address = deployment.ffn_addresses[victim].to_string();
            if restart_at_once { deployment.start_ffn(victim as u32, &address).map(Some) } else { Ok(None) }
        });
        longest = longest.max(begun.elapsed());
        match answered {
            Err(error) => {
                println!("kill {kill}, F{victim} after {moment:?}: {error:#}");
                failed += 1;
            }
            Ok((answers, pause)) => {
                longest_pause = longest_pause.max(pause);
                for (at, ((prompt, _), answer)) in prompts.iter().zip(&answers).enumerate() {
                    let verdict = story::holds(prompt, answer);
                    verdict
                        .with_context(|| format!("kill {kill}, F{victim} after {moment:?}, answer {at}"))?;
                }
            }
        }
        let process = match restarted? {
            Some(process) => process,
            None => deployment.start_ffn(victim as u32, &deployment.ffn_addresses[victim].to_string())?,
        };
        deployment.ffn.insert(victim, process);
    }
    let replays = deployment.metric(0, "afd_hop_replays_total").await?;
    println!("longest pause without a kill: {} ms", usual_pause.as_millis());
    Ok(Outcome { kills, failed, replays, longest, pause: longest_pause })
}

fn judge(what: &str, outcome: &Outcome) -> anyhow::Result<()> {
    let Outcome { kills, failed, replays, longest, pause } = outcome;
    println!(
        "{what}: {kills} kills, {failed} failed requests, {replays} parts sent again, longest round {longest:.2?}, longest \
         pause of a reader {} ms",
        pause.as_millis()
    );
    ensure!(*failed == 0, "{failed} of {kills} kills failed a request");
    Ok(())
}

#[tokio::test]
async fn killing_ranks_at_random_moments_fails_no_request_with_a_replica() -> anyhow::Result<()> {
    let outcome = killed_at_random(Ffn::Remote { shards: 1, replicas: 2 }, false).await?;
    judge("with a replica", &outcome)?;
    let bound = HOP_TIMEOUT + Duration::from_millis(100);
    ensure!(outcome.pause < bound, "a reader waited {:?}, with a replica there", outcome.pause);
    Ok(())
}

#[tokio::test]
async fn killing_ranks_at_random_moments_fails_no_request_with_a_restart() -> anyhow::Result<()> {
    let outcome = killed_at_random(Ffn::Remote { shards: 2, replicas: 1 }, true).await?;
    judge("with a restart", &outcome)
}
