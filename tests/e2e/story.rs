//! A long text that somebody reads while things happen, and what it must come to.
use std::time::{Duration, Instant};

use afd_tests::fixtures;
use afd_tests::harness::Deployment;
use afd_tests::monolith::Monolith;
use afd_tests::oracle;
use anyhow::ensure;
use tch::Kind;

pub(crate) const MODEL: &str = "tiny-mixtral";
pub(crate) const NUM_TOKENS: u32 = 400;

/// Streams a continuation from A0, calls `happens` after every piece with the number of tokens so far, and holds the whole
/// text to the oracle. Returns the longest pause between two tokens.
pub(crate) async fn goes_on<F>(deployment: &mut Deployment, mut happens: F) -> anyhow::Result<Duration>
where
    F: AsyncFnMut(&mut Deployment, usize) -> anyhow::Result<()>,
{
    let prompt = fixtures::expected(MODEL)?.prompts.remove(0).input_ids;
    let mut stream = deployment.stream(0, &prompt, NUM_TOKENS).await?;
    let (mut emitted, mut pause, mut last) = (Vec::new(), Duration::ZERO, Instant::now());
    while let Some(piece) = stream.message().await? {
        pause = pause.max(last.elapsed());
        emitted.extend(piece.token_ids);
        happens(deployment, emitted.len()).await?;
        last = Instant::now();
    }
    ensure!(emitted.len() == NUM_TOKENS as usize, "{} tokens came", emitted.len());
    holds(&prompt, &emitted)?;
    Ok(pause)
}

/// The oracle's word on an answer.
pub(crate) fn holds(prompt: &[u32], emitted: &[u32]) -> anyhow::Result<()> {
    let reference = Monolith::load(&fixtures::checkpoint(MODEL), Kind::Float)?;
    oracle::judge(&reference, prompt, emitted, Kind::Float).map(drop)
}

/// The FFN rank that rows go to: the first that serves another hop.
pub(crate) async fn active(deployment: &Deployment) -> anyhow::Result<usize> {
    let hops = async |rank| deployment.ffn_metric(rank, "afd_ffn_batch_hops_count").await;
    let before = [hops(0).await?, hops(1).await?];
    let deadline = Instant::now() + Duration::from_secs(10);
    while Instant::now() < deadline {
        for (rank, before) in before.iter().enumerate() {
            if hops(rank).await? > *before {
                return Ok(rank);
            }
        }
    }
    anyhow::bail!("no FFN rank serves a hop")
}
