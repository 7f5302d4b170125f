//! Shared experts on attention: the reference's tokens whatever the gate, the shards and the stages; who may not ask for it,
//! and who must ask for the same.
use std::collections::BTreeMap;
use std::time::Duration;

use afd_common::proto::v1;
use afd_common::proto::v1::layer_stage_service_client::LayerStageServiceClient;
use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn};
use anyhow::{Context, ensure};
use serde_json::{Value, json};

use crate::pair::{serves, survives};
use crate::start::{attention, ffn, refused};

const ON_ATTENTION: [&str; 2] = ["--shared-experts", "attention"];
const LIMIT: Duration = Duration::from_secs(60);

fn spec(name: &str, ffn: Ffn, both: &[&str]) -> DeploymentSpec {
    let both = [&ON_ATTENTION[..], both].concat();
    DeploymentSpec::new(fixtures::checkpoint(name), ffn).attention_args(&both).ffn_args(&both)
}

fn shards(shards: u32) -> Ffn {
    Ffn::Remote { shards, replicas: 1 }
}

#[tokio::test]
async fn every_family_with_shared_experts_gives_its_tokens() -> anyhow::Result<()> {
    for name in ["tiny-deepseek-v2", "tiny-deepseek-v2-group", "tiny-deepseek-v3"] {
        for (num_shards, gate, link, stages) in [
            (1, "ffn", "shm", "1"),
            (2, "ffn", "tcp", "4"),
            (3, "attention", "shm", "2"),
            (1, "attention", "inline", "3"),
        ] {
            let spec = spec(name, shards(num_shards), &["--gate", gate]);
            let spec = spec.attention_args(&["--link", link, "--stages", stages, "--stage-min-prefill", "2"]);
            let deployment = Deployment::start(spec.attention_ranks(2)).await?;
            let what = || format!("{name}: {num_shards} shards, gate on {gate}, {stages} stages over {link}");
            serves(&deployment, name).await.with_context(what)?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_killed_ffn_rank_changes_no_token() -> anyhow::Result<()> {
    let name = "tiny-deepseek-v3";
    for gate in ["ffn", "attention"] {
        let spec = spec(name, Ffn::Remote { shards: 2, replicas: 2 }, &["--gate", gate]);
        let mut deployment = Deployment::start(spec.attention_args(&["--stages", "2"])).await?;
        deployment.wait_in_use(0, 4, LIMIT).await?;
        survives(&mut deployment, name, 2).await.with_context(|| format!("gate on {gate}"))?;
    }
    Ok(())
}

/// What a rank says of its layers, and what it returns for a row of each: with attention's part it is the whole.
#[tokio::test]
async fn an_ffn_rank_describes_and_returns_its_layers_without_them() -> anyhow::Result<()> {
    let name = "tiny-deepseek-v2";
    let with = Deployment::start(DeploymentSpec::new(fixtures::checkpoint(name), shards(1))).await?;
    let without = Deployment::start(spec(name, shards(1), &[])).await?;
    let mut said = BTreeMap::new();
    for (what, deployment) in [("with", &with), ("without", &without)] {
        let url = format!("http://{}", deployment.ffn_addresses[0]);
        let mut client = LayerStageServiceClient::connect(url).await?;
        let description = client.describe(v1::DescribeRequest {}).await?.into_inner();
        let model = description.model.context("a model")?;
        let layers: Vec<_> = description.layers.iter().map(v1::LayerSpec::shared_experts).collect();
        let rows: Vec<u8> = (0..64).flat_map(|i| ((i % 7) as f32 - 3.0).to_le_bytes()).collect();
        let hidden_states = v1::Tensor { dtype: v1::Dtype::F32.into(), shape: vec![1, 64], data: rows };
        let request =
            v1::RunStageRequest { layer: 1, hidden_states: Some(hidden_states), side_tensors: vec![] };
        let answer = client.run_stage(request).await?.into_inner().hidden_states.context("rows")?;
        said.insert(what, (model.shared_expert_placement(), layers, answer.data));
    }
    let (with, without) = (&said["with"], &said["without"]);
    use v1::SharedExpertPlacement::{Attention, Ffn, Unspecified};
    ensure!(with.0 == Ffn && with.1[..2] == [Unspecified, Ffn], "{:?}", with.1);
    ensure!(without.0 == Attention && without.1[..2] == [Unspecified, Attention], "{:?}", without.1);
    ensure!(with.2 != without.2, "the layer's output is the same with shared experts and without");
    Ok(())
}

#[tokio::test]
async fn sides_that_differ_are_refused_by_name() -> anyhow::Result<()> {
    let deployment = Deployment::start(spec("tiny-deepseek-v2", shards(1), &[])).await?;
    let (folder, address) = (tempfile::tempdir()?, deployment.ffn_addresses[0].to_string());
    let process = attention(&deployment.spec.model, &address, &["--rank", "1"], folder.path(), "A1")?;
    let (code, log) = refused(process)?;
    let words = ["`model.shared_expert_placement` differs", "has ffn", "has attention", "--shared-experts"];
    ensure!(code == 1 && words.iter().all(|word| log.contains(word)), "exit code {code}:\n{log}");
    Ok(())
}

#[tokio::test]
async fn a_model_without_shared_experts_refuses_the_option() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    for name in ["tiny-mixtral", "tiny-llama"] {
        let model = fixtures::checkpoint(name);
        let roles = [
            attention(&model, "127.0.0.1:1", &ON_ATTENTION, folder.path(), &format!("A-{name}"))?,
            ffn(&model, &ON_ATTENTION, folder.path(), &format!("F-{name}"))?,
        ];
        for process in roles {
            let (code, log) = refused(process)?;
            let last = log.lines().last().unwrap_or_default();
            let words = ["--shared-experts is attention", name, "ForCausalLM", "has no shared experts"];
            ensure!(code == 2 && words.iter().all(|word| last.contains(word)), "exit code {code}:\n{log}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_timeline_shows_them_beside_the_hops_that_they_hide() -> anyhow::Result<()> {
    let deployment = Deployment::start(spec("tiny-deepseek-v2", shards(1), &[])).await?;
    let prompt = &fixtures::expected("tiny-deepseek-v2")?.prompts[0];
    let wanted = json!({"steps": 5, "timeout_s": 30});
    let profile = deployment.client().post(deployment.url(0, "/profile")).json(&wanted).send();
    let (answer, load) = tokio::join!(profile, deployment.greedy(0, &prompt.input_ids, 60));
    load?;
    let timeline: Value = answer?.error_for_status()?.json().await?;
    let events = timeline["traceEvents"].as_array().context("events")?;
    let named = |name: &str| events.iter().filter(|event| event["name"] == name).collect::<Vec<_>>();
    // The first layer is dense.
    ensure!(named("shared experts L0 s0").is_empty(), "shared experts of a dense layer");
    let (shared, hops) = (named("shared experts L1 s0"), named("L1"));
    ensure!(shared.len() == 5 && hops.len() == 5, "{} of 5 steps, {} hops", shared.len(), hops.len());
    for shared in shared {
        let begun = |event: &Value| event["ts"].as_f64();
        let hop = hops.iter().find(|hop| hop["args"]["step"] == shared["args"]["step"]).context("its hop")?;
        ensure!(begun(shared) >= begun(hop), "begun before the rows were sent: {shared}, {hop}");
        ensure!(
            named("engine").is_empty() && shared["tid"] == named("attention L1 s0")[0]["tid"],
            "{shared}"
        );
    }
    Ok(())
}
