//! Turning text into tokens and back is not the engine's work.
use std::path::PathBuf;

use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn};
use anyhow::{Context, ensure};
use serde_json::json;

/// Long enough to take a good part of a second, even optimised.
const WORDS: usize = 400_000;
/// The kernel's unit of processor time, ms.
const TICK_MS: u64 = 10;

/// Processor time of a process's threads, ms: of those that are named so, and of all.
fn times(process: u32, name: &str) -> anyhow::Result<(u64, u64)> {
    let (mut named, mut all) = (0, 0);
    for entry in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let folder: PathBuf = entry?.path();
        // A thread may end while it is looked at.
        let Ok(stat) = std::fs::read_to_string(folder.join("stat")) else { continue };
        let (head, rest) = stat.rsplit_once(") ").context("no name in a thread's stat")?;
        let fields: Vec<&str> = rest.split(' ').collect();
        let spent = (fields[11].parse::<u64>()? + fields[12].parse::<u64>()?) * TICK_MS;
        all += spent;
        if head.ends_with(&format!("({name}")) {
            named += spent;
        }
    }
    Ok((named, all))
}

#[tokio::test]
async fn tokenizing_and_detokenizing_take_no_time_of_the_engines_thread() -> anyhow::Result<()> {
    let spec = DeploymentSpec::new(fixtures::checkpoint("tiny-llama"), Ffn::Local);
    let deployment = Deployment::start(spec).await?;
    let process = deployment.attention[0].id();
    ensure!(deployment.greedy(0, &[1, 2, 3], 300).await?.len() == 300);
    let (engine, all) = times(process, "engine")?;
    ensure!(engine > 0, "no thread named `engine` has done anything");

    let text = "zebra ".repeat(WORDS);
    let (status, answer) = deployment.post(0, "/tokenize", &json!({"prompt": text})).await?;
    let ids = answer["tokens"].as_array().with_context(|| format!("{status}: no tokens"))?;
    ensure!(ids.len() > WORDS, "only {} tokens", ids.len());
    let (status, answer) = deployment.post(0, "/detokenize", &json!({"tokens": ids})).await?;
    let back = answer["prompt"].as_str().with_context(|| format!("{status}: no text"))?;
    ensure!(back.ends_with("zebra zebra "), "{:?}", &back[back.len().saturating_sub(40)..]);
    // A prompt that is refused for its length was tokenized first.
    let body = json!({"prompt": text, "max_tokens": 1});
    let (status, answer) = deployment.post(0, "/v1/completions", &body).await?;
    ensure!(status == 400, "{status}: {answer}");

    let (engine_after, all_after) = times(process, "engine")?;
    let (engine, all) = (engine_after - engine, all_after - all);
    println!("{all} ms of all threads, {engine} ms of the engine's");
    ensure!(all >= 300, "{all} ms show nothing: a longer text is needed");
    ensure!(engine <= 2 * TICK_MS, "the engine's thread took {engine} ms of {all} ms");
    Ok(())
}
