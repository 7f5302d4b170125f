//! Experts over shards: rows go where their experts are, wherever a file says these are, and the tokens stay the same.
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn};
use afd_tests::monolith::Monolith;
use afd_tests::oracle;
use anyhow::{Context, ensure};
use serde_json::Value;
use tch::Kind;

use crate::pair::{serves, survives};
use crate::start::{attention, refused};

fn shards(shards: u32) -> Ffn {
    Ffn::Remote { shards, replicas: 1 }
}

fn spec(name: &str, ffn: Ffn, both: &[&str]) -> DeploymentSpec {
    DeploymentSpec::new(fixtures::checkpoint(name), ffn).attention_args(both).ffn_args(both)
}

/// Samples of a metric of an attention rank, by its labels as written.
async fn metric(deployment: &Deployment, name: &str) -> anyhow::Result<BTreeMap<String, f64>> {
    let text = deployment.client().get(deployment.url(0, "/metrics")).send().await?.text().await?;
    let samples = text.lines().filter_map(|line| {
        let (labels, value) = line.strip_prefix(name)?.rsplit_once(' ')?;
        let plain = labels.is_empty() || labels.starts_with('{');
        plain.then(|| Some((labels.to_owned(), value.parse().ok()?))).flatten()
    });
    Ok(samples.collect())
}

async fn sum(deployment: &Deployment, name: &str) -> anyhow::Result<f64> {
    Ok(metric(deployment, name).await?.values().sum())
}

#[tokio::test]
async fn rows_go_only_to_the_shards_that_serve_their_experts_over_every_link() -> anyhow::Result<()> {
    for (name, link, stages) in
        [("tiny-mixtral", "shm", "1"), ("tiny-deepseek-v2", "tcp", "2"), ("tiny-deepseek-v3", "inline", "2")]
    {
        let spec = spec(name, shards(4), &["--gate", "attention"]);
        let deployment =
            Deployment::start(spec.attention_args(&["--link", link, "--stages", stages])).await?;
        serves(&deployment, name).await.with_context(|| format!("{name} over {link}"))?;
        let (rows, sent) = (
            sum(&deployment, "afd_hop_rows_total").await?,
            sum(&deployment, "afd_hop_shard_rows_total").await?,
        );
        ensure!(sent > rows && sent < 0.9 * 4.0 * rows, "{name}: {rows} rows, {sent} sent to 4 shards");
    }
    let deployment = Deployment::start(spec("tiny-mixtral", shards(2), &[])).await?;
    serves(&deployment, "tiny-mixtral").await?;
    let rows = sum(&deployment, "afd_hop_rows_total").await?;
    ensure!(sum(&deployment, "afd_hop_shard_rows_total").await? == 2.0 * rows, "the gate on the FFN: to all");
    Ok(())
}

#[tokio::test]
async fn routed_rows_are_sent_again_to_the_replica_of_their_shard() -> anyhow::Result<()> {
    let name = "tiny-deepseek-v3";
    let spec = spec(name, Ffn::Remote { shards: 2, replicas: 2 }, &["--gate", "attention"]);
    let mut deployment = Deployment::start(spec).await?;
    survives(&mut deployment, name, 2).await
}

fn write(folder: &Path, name: &str, text: &str) -> anyhow::Result<PathBuf> {
    let path = folder.join(name);
    std::fs::write(&path, text)?;
    Ok(path)
}

#[tokio::test]
async fn a_placement_with_copies_serves_with_the_gate_on_either_side() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    // Expert 3 on all shards, expert 0 on two; layer 2 all on one shard.
    let text =
        "experts = [[0, 3, 6], [0, 3, 1, 5], [2, 3, 4, 7]]\n[layers]\n2 = [[], [0, 1, 2, 3, 4, 5, 6, 7], []]";
    let file = write(folder.path(), "placement.toml", text)?;
    let file = file.to_str().context("a path in UTF-8")?;
    for gate in ["attention", "ffn"] {
        let spec = spec("tiny-mixtral", shards(3), &["--gate", gate, "--placement", file]);
        let deployment = Deployment::start(spec.attention_ranks(2)).await?;
        serves(&deployment, "tiny-mixtral").await.with_context(|| format!("gate on {gate}"))?;
    }
    Ok(())
}

#[tokio::test]
async fn another_placement_or_routing_is_refused_by_name() -> anyhow::Result<()> {
    let deployment = Deployment::start(spec("tiny-mixtral", shards(2), &[])).await?;
    let folder = tempfile::tempdir()?;
    let file = write(folder.path(), "p.json", r#"{"experts": [[1, 3, 5, 7], [0, 2, 4, 6]]}"#)?;
    let file = file.to_str().context("a path in UTF-8")?;
    for (args, field) in
        [(["--placement", file], "model.placement"), (["--routing", "balanced"], "model.routing")]
    {
        let args = [&args[..], &["--rank", "1"]].concat();
        let ffn = deployment.ffn_addresses[0].to_string();
        let process = attention(&deployment.spec.model, &ffn, &args, folder.path(), field)?;
        let (code, log) = refused(process)?;
        ensure!(code == 1 && log.contains(&format!("`{field}` differs")), "exit code {code}:\n{log}");
    }
    Ok(())
}

#[tokio::test]
async fn options_about_experts_change_nothing_on_a_dense_model_and_are_named() -> anyhow::Result<()> {
    let spec = spec("tiny-llama", shards(2), &[]).attention_args(&["--gate", "attention"]).ffn_args(&[
        "--placement",
        "/nowhere",
        "--routing",
        "balanced",
    ]);
    let deployment = Deployment::start(spec).await?;
    serves(&deployment, "tiny-llama").await?;
    let dense = "has no effect on a dense model (--model): it has no experts";
    let is_said = |log: &str, option: &str| {
        let named = format!("{option} {dense}");
        log.lines().filter(|line| line.contains("WARN") && line.contains(&named)).count() == 1
    };
    let (attention, ffn) = (deployment.attention[0].log(), deployment.ffn[0].log());
    ensure!(is_said(&attention, "--gate"), "{attention}");
    ensure!(is_said(&ffn, "--placement") && is_said(&ffn, "--routing"), "{ffn}");
    ensure!(!ffn.contains("EXPERTS ARE NOT CHOSEN"), "{ffn}");
    Ok(())
}

async fn expert_counts(deployment: &Deployment) -> anyhow::Result<Vec<Value>> {
    let mut reports = Vec::new();
    for address in &deployment.ffn_addresses {
        let url = format!("http://{address}/expert-counts");
        reports.push(deployment.client().get(url).send().await?.json().await?);
    }
    Ok(reports)
}

/// Rows of each expert, by layer.
async fn rows_by_layer(deployment: &Deployment) -> anyhow::Result<BTreeMap<String, Vec<f64>>> {
    let mut rows: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for report in expert_counts(deployment).await? {
        for (layer, of_layer) in report["layers"].as_object().context("layers")? {
            let counts = of_layer["rows"].as_object().context("rows")?.values();
            rows.entry(layer.clone()).or_default().extend(counts.filter_map(Value::as_f64));
        }
    }
    Ok(rows)
}

/// With a fixed number of stages hops are all of one size, and the cycle goes round over them. With `auto` they are not, and a
/// cycle has no memory: there each rank has so many sequences that the rows of every hop, whole or in two stages, go round
/// by themselves.
#[tokio::test]
async fn a_balanced_cycle_gives_every_expert_the_same_with_the_gate_on_either_side() -> anyhow::Result<()> {
    for (gate, stages, num_sequences) in
        [("attention", "2", 4), ("ffn", "2", 4), ("attention", "auto", 16), ("ffn", "auto", 16)]
    {
        let both = ["--gate", gate, "--routing", "balanced"];
        let spec = spec("tiny-mixtral", shards(2), &both).attention_ranks(2);
        let deployment = Deployment::start(spec.attention_args(&["--stages", stages])).await?;
        let asked = (0..num_sequences).map(|index| deployment.greedy(index % 2, &[5, 6, 7], 40));
        for answer in futures::future::join_all(asked).await {
            ensure!(answer?.len() == 40);
        }
        let warned = deployment.ffn[0].log().contains("NOT CHOSEN BY THE MODEL");
        ensure!(
            warned && deployment.attention[0].log().contains("NOT CHOSEN BY THE MODEL"),
            "not loud enough"
        );
        for (layer, counts) in rows_by_layer(&deployment).await? {
            let (most, mean) = (
                counts.iter().copied().fold(0.0, f64::max),
                counts.iter().sum::<f64>() / counts.len() as f64,
            );
            ensure!(
                counts.len() == 8 && most < 1.1 * mean,
                "gate on {gate}, --stages {stages}, layer {layer}: {counts:?}"
            );
        }
    }
    Ok(())
}

/// A copy of tiny-deepseek-v3 whose every layer of experts chooses one, and always the same: its correction is larger than
/// any score.
pub(crate) fn of_one_expert(folder: &Path, expert: usize) -> anyhow::Result<()> {
    let original = fixtures::checkpoint("tiny-deepseek-v3");
    for file in ["generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(original.join(file), folder.join(file))?;
    }
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(original.join("config.json"))?)?;
    config["num_experts_per_tok"] = 1.into();
    write(folder, "config.json", &config.to_string())?;
    let mut bytes = std::fs::read(original.join("model.safetensors"))?;
    let (header, tensors) = bytes.split_first_chunk::<8>().context("a header")?;
    let header_bytes = u64::from_le_bytes(*header) as usize;
    let header: Value = serde_json::from_slice(&tensors[..header_bytes])?;
    let corrections = header.as_object().context("tensors by name")?.iter();
    let corrections: Vec<usize> = corrections
        .filter(|(name, _)| name.ends_with("e_score_correction_bias"))
        .filter_map(|(_, tensor)| tensor["data_offsets"][0].as_u64())
        .map(|offset| 8 + header_bytes + offset as usize + 4 * expert)
        .collect();
    ensure!(corrections.len() == 3, "another fixture than this test was written for: {header}");
    for at in corrections {
        bytes[at..at + 4].copy_from_slice(&1000f32.to_le_bytes());
    }
    std::fs::write(folder.join("model.safetensors"), bytes)?;
    Ok(())
}

#[tokio::test]
async fn every_token_routed_to_one_expert_gives_the_monoliths_tokens() -> anyhow::Result<()> {
    const EXPERT: usize = 6;
    let folder = tempfile::tempdir()?;
    of_one_expert(folder.path(), EXPERT)?;
    let reference = Monolith::load(folder.path(), Kind::Float)?;
    let prompts = fixtures::expected("tiny-deepseek-v3")?.prompts;
    for gate in ["attention", "ffn"] {
        let both = ["--gate", gate, "--stages", "2"];
        let spec = DeploymentSpec::new(folder.path().to_owned(), shards(4)).attention_ranks(2);
        let deployment = Deployment::start(spec.attention_args(&both).ffn_args(&both[..2])).await?;
        let asked = prompts
            .iter()
            .enumerate()
            .map(|(index, prompt)| deployment.greedy(index % 2, &prompt.input_ids, 24));
        for (prompt, answer) in prompts.iter().zip(futures::future::join_all(asked).await) {
            let verdict = oracle::judge(&reference, &prompt.input_ids, &answer?, Kind::Float);
            verdict.with_context(|| format!("gate on {gate}, {}", prompt.id))?;
        }
        let mut chosen: BTreeMap<String, f64> = BTreeMap::new();
        for report in expert_counts(&deployment).await? {
            for of_layer in report["layers"].as_object().context("layers")?.values() {
                for (expert, rows) in of_layer["rows"].as_object().context("rows")? {
                    *chosen.entry(expert.clone()).or_default() += rows.as_f64().context("a count")?;
                }
            }
        }
        chosen.retain(|_, rows| *rows > 0.0);
        ensure!(chosen.keys().eq([&EXPERT.to_string()]), "gate on {gate}: {chosen:?}");
    }
    Ok(())
}

/// What every rank has counted, in files.
async fn saved_counts(deployment: &Deployment, folder: &Path, moment: &str) -> anyhow::Result<Vec<PathBuf>> {
    let reports = expert_counts(deployment).await?.into_iter().enumerate();
    reports
        .map(|(index, report)| write(folder, &format!("{moment}-{index}.json"), &report.to_string()))
        .collect()
}

/// What ranks counted, through `ffn-svc place`, back into a deployment that serves the same tokens. Before any request it is
/// nothing, though the warm-up has run.
#[tokio::test]
async fn a_proposed_placement_can_be_used() -> anyhow::Result<()> {
    let name = "tiny-qwen3-moe";
    let deployment = Deployment::start(spec(name, shards(2), &[])).await?;
    let folder = tempfile::tempdir()?;
    let mut options = ffn_svc::place::PlaceOptions {
        counts: Vec::new(),
        shards: 3,
        copies: 2,
        out: Some(folder.path().join("placement.json")),
    };
    options.counts = saved_counts(&deployment, folder.path(), "cold").await?;
    let said = ffn_svc::place::run(&options).err().context("counts of no request were used")?.to_string();
    ensure!(said.contains("no row was counted in any layer"), "rows of the warm-up were counted: {said}");
    serves(&deployment, name).await?;
    options.counts = saved_counts(&deployment, folder.path(), "served").await?;
    ffn_svc::place::run(&options)?;
    let file = options.out.context("it was asked for")?;
    let file = file.to_str().context("a path in UTF-8")?;
    let both = ["--gate", "attention", "--placement", file];
    serves(&Deployment::start(spec(name, shards(3), &both)).await?, name).await
}
