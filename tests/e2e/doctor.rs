//! `attention-svc doctor` on real deployments: a healthy one, and one fault at a time.
use std::time::Duration;

use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn, output};
use anyhow::{Context, ensure};
use serde_json::Value;

use crate::start::{attention as attention_beside, ffn as beside};

const START_LIMIT: Duration = Duration::from_secs(60);

/// Whether all is well, the kinds of fault with their sentences, and the whole report.
async fn doctor(
    attention: &[String],
    ffn: &[String],
) -> anyhow::Result<(bool, Vec<(String, String)>, Value)> {
    let (attention, ffn) = (attention.join(","), ffn.join(","));
    let ran = tokio::task::spawn_blocking(move || {
        let mut args = vec!["doctor", "--attention", &attention, "--timeout", "20s", "--json", "-"];
        if !ffn.is_empty() {
            args.extend(["--ffn", &ffn]);
        }
        output("attention-svc", &args)
    });
    let output = ran.await??;
    let printed = String::from_utf8(output.stdout)?;
    let report: Value = serde_json::from_str(&printed).with_context(|| printed.clone())?;
    let text = |finding: &Value, field: &str| finding[field].as_str().unwrap_or_default().to_owned();
    let findings = report["findings"].as_array().context("no findings")?;
    let findings = findings.iter().map(|f| (text(f, "fault"), text(f, "sentence"))).collect();
    ensure!(output.status.success() == (report["healthy"] == true), "{:?} after {report:#}", output.status);
    Ok((output.status.success(), findings, report))
}

fn addresses(all: &[std::net::SocketAddr]) -> Vec<String> {
    all.iter().map(ToString::to_string).collect()
}

/// Exactly these kinds of fault, and the words in the first one's sentence.
fn has(findings: &[(String, String)], faults: &[&str], words: &[&str]) -> anyhow::Result<()> {
    let found: Vec<&str> = findings.iter().map(|(fault, _)| fault.as_str()).collect();
    ensure!(found == faults, "{findings:#?}");
    for word in words {
        ensure!(findings[0].1.contains(word), "{word:?} is not in {:?}", findings[0].1);
    }
    Ok(())
}

#[tokio::test]
async fn a_healthy_pair_is_healthy_and_each_fault_is_named() -> anyhow::Result<()> {
    let spec =
        DeploymentSpec::new(fixtures::checkpoint("tiny-mixtral"), Ffn::Remote { shards: 2, replicas: 1 });
    let mut deployment = Deployment::start(spec).await?;
    let (attention, ffn) = (addresses(&deployment.attention_addresses), addresses(&deployment.ffn_addresses));

    // The FFN ranks are those that attention uses, and those that are given.
    for given in [vec![], ffn.clone()] {
        let (healthy, findings, report) = doctor(&attention, &given).await?;
        ensure!(healthy && findings.is_empty(), "{findings:#?}");
        ensure!(report["ranks"].as_array().is_some_and(|ranks| ranks.len() == 3), "{report:#}");
        let edge = &report["ranks"][1]["found"]["edge"];
        let positive = |field: &str| edge[field].as_f64().is_some_and(|value| value > 0.0);
        ensure!(positive("latency_us") && positive("bandwidth_bytes_per_s"), "{report:#}");
        ensure!(
            report["ranks"][1]["found"]["links"] == serde_json::json!(["shm", "tcp", "inline"]),
            "{report:#}"
        );
    }

    // Wrong roles, both ways.
    let by_name = format!("localhost:{}", deployment.ffn_addresses[0].port());
    let (_, findings, _) = doctor(&[attention[0].clone(), by_name.clone()], &ffn).await?;
    has(&findings, &["wrong-role"], &[&by_name, "F0, an FFN rank", "--ffn"])?;
    let by_name = format!("localhost:{}", deployment.attention_addresses[0].port());
    let (_, findings, _) = doctor(&[by_name], &[ffn.clone(), attention.clone()].concat()).await?;
    has(&findings, &["wrong-role"], &[&attention[0], "A0, an attention rank", "--attention"])?;

    // Nobody there.
    let (_, findings, _) = doctor(&attention, &[ffn.clone(), vec!["127.0.0.1:1".into()]].concat()).await?;
    has(&findings, &["unreachable"], &["127.0.0.1:1", "refused"])?;

    let folder = tempfile::tempdir()?;
    // A second process that says it is F0.
    let mut twin = beside(
        &fixtures::checkpoint("tiny-mixtral"),
        &["--shard", "0/2", "--rank", "0"],
        folder.path(),
        "F0",
    )?;
    let twin_address = twin.address(START_LIMIT)?.to_string();
    let (_, findings, _) = doctor(&attention, &[ffn.clone(), vec![twin_address.clone()]].concat()).await?;
    has(&findings, &["twin-rank"], &[&twin_address, "F0 of deployment default"])?;
    drop(twin);

    // Another model.
    let mut other =
        beside(&fixtures::checkpoint("tiny-olmoe"), &["--shard", "0/2", "--rank", "5"], folder.path(), "F5")?;
    let other_address = other.address(START_LIMIT)?.to_string();
    let (_, findings, _) = doctor(&attention, &[ffn.clone(), vec![other_address.clone()]].concat()).await?;
    has(&findings, &["model"], &[&other_address, "`model.architecture` is OlmoeForCausalLM there"])?;
    drop(other);

    // A shard that nobody serves any more: its address is silent, and attention is not ready.
    deployment.ffn[1].kill()?;
    deployment.wait_in_use(0, 1, START_LIMIT).await?;
    let (_, findings, _) = doctor(&attention, &ffn).await?;
    has(&findings, &["unreachable", "not-ready"], &[&ffn[1], "refused"])?;
    let (why, because) = ("shard 1/2 has no rank, for ", format!("; absent: {}", ffn[1]));
    ensure!(findings[1].1.contains(why) && findings[1].1.ends_with(&because), "{findings:#?}");
    // Nobody was asked about it: attention's own words are all there is.
    let (_, findings, _) = doctor(&attention, &[]).await?;
    has(&findings, &["not-ready"], &[why, &format!("{} was up, shard 1/2", ffn[1])])
}

#[tokio::test]
async fn a_replica_that_is_down_or_stopped_is_named_while_the_other_one_serves() -> anyhow::Result<()> {
    let spec =
        DeploymentSpec::new(fixtures::checkpoint("tiny-mixtral"), Ffn::Remote { shards: 2, replicas: 2 })
            .ffn_args(&["--lease-ms", "1000"]);
    let mut deployment = Deployment::start(spec).await?;
    deployment.wait_in_use(0, 4, START_LIMIT).await?;
    let (attention, ffn) = (addresses(&deployment.attention_addresses), addresses(&deployment.ffn_addresses));
    let (healthy, findings, _) = doctor(&attention, &[]).await?;
    ensure!(healthy, "{findings:#?}");

    deployment.ffn[0].signal("TERM")?;
    ensure!(deployment.ffn[0].wait(START_LIMIT)?.success());
    deployment.wait_in_use(0, 3, START_LIMIT).await?;
    let (healthy, findings, _) = doctor(&attention, &[]).await?;
    has(&findings, &["absent"], &["A0 at", &format!("{} was up", ffn[0]), "--ffn"])?;
    ensure!(!healthy, "it exits as if all were well");

    deployment.ffn[3].signal("STOP")?;
    deployment.wait_in_use(0, 2, START_LIMIT).await?;
    let (_, findings, _) = doctor(&attention, &[]).await?;
    has(&findings, &["absent", "absent"], &[])?;
    for gone in [&ffn[0], &ffn[3]] {
        let is_named = findings.iter().any(|(_, sentence)| sentence.contains(&format!("{gone} was up")));
        ensure!(is_named, "{gone} is not named: {findings:#?}");
    }
    deployment.ffn[3].signal("CONT")
}

#[tokio::test]
async fn peers_that_cannot_be_used_are_named_each_with_its_reason() -> anyhow::Result<()> {
    let model = fixtures::checkpoint("tiny-mixtral");
    let deployment =
        Deployment::start(DeploymentSpec::new(model.clone(), Ffn::Remote { shards: 1, replicas: 1 })).await?;
    let (other, ffn) =
        (deployment.attention_addresses[0].to_string(), deployment.ffn_addresses[0].to_string());
    let folder = tempfile::tempdir()?;
    let peers = format!("{ffn},127.0.0.1:1,{other}");
    let words = ["--rank", "1", "--deployment", "another", "--peers", &peers];
    let mut front = attention_beside(&model, "local", &words, folder.path(), "A1")?;
    let address = front.address(START_LIMIT)?.to_string();
    let deadline = std::time::Instant::now() + START_LIMIT;
    // It asks before it is ready, and an answer may be on its way still.
    let findings = loop {
        let (healthy, findings, _) = doctor(std::slice::from_ref(&address), &[]).await?;
        ensure!(!healthy || std::time::Instant::now() < deadline, "it exits as if all were well");
        if findings.iter().filter(|(fault, _)| fault == "peer-absent").count() == 3 {
            break findings;
        }
        ensure!(std::time::Instant::now() < deadline, "{findings:#?}");
    };
    for (peer, why) in [
        (&ffn, "it is an FFN rank: it belongs into --ffn"),
        (&"127.0.0.1:1".to_owned(), "refused"),
        (&other, "`identity.deployment` of A0 there is default, and another here"),
    ] {
        let words = format!("A1 at {address} forwards nothing to {peer}, which its --peers names: ");
        let is_told =
            |(_, sentence): &(String, String)| sentence.starts_with(&words) && sentence.contains(why);
        ensure!(findings.iter().any(is_told), "{peer} is not named: {findings:#?}");
    }
    let log = front.log();
    let warned = |peer: &str| {
        log.lines()
            .filter(|line| line.contains("WARN") && line.contains(peer) && line.contains("--peers"))
            .count()
    };
    ensure!(warned(&ffn) == 1 && warned(&other) == 1 && warned("127.0.0.1:1 ") == 0, "{log}");
    Ok(())
}
