//! Who serves as what: two processes of one rank, and what `/ready` says while somebody is missing.
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn};
use afd_tests::oracle;
use anyhow::ensure;
use serde_json::{Value, json};

use crate::start;

const MODEL: &str = "tiny-mixtral";
const LIMIT: Duration = Duration::from_secs(30);

async fn serves(deployment: &Deployment) -> anyhow::Result<()> {
    let expected = fixtures::expected(MODEL)?.prompts.remove(0);
    oracle::same(&expected.generated_ids, &deployment.greedy(0, &expected.input_ids, 32).await?)
}

/// Waits until `/ready` is 503 with all `parts` in its reason, and none of `not`.
async fn reason(deployment: &Deployment, parts: &[&str], not: &[&str]) -> anyhow::Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let answer = deployment.client().get(deployment.url(0, "/ready")).send().await?;
        let (status, body) = (answer.status().as_u16(), answer.json::<Value>().await?);
        let reason = body["reason"].as_str().unwrap_or_default();
        let said =
            parts.iter().all(|part| reason.contains(part)) && !not.iter().any(|part| reason.contains(part));
        if status == 503 && said {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{parts:?} is not said, but {status}: {body}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn of_two_processes_of_one_ffn_rank_the_live_one_stays_until_it_is_gone() -> anyhow::Result<()> {
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 1, replicas: 2 });
    let mut deployment = Deployment::start(spec.ffn_rank_args(1, &["--rank", "0"])).await?;
    let [at] = deployment.in_use(0).await?[..] else { anyhow::bail!("both are in use, or none") };
    let deadline = Instant::now() + LIMIT;
    while !deployment.attention[0].log().contains("give one of the two another --rank") {
        ensure!(Instant::now() < deadline, "the twin is not named:\n{}", deployment.attention[0].log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    serves(&deployment).await?;
    // The older of the two cannot follow the newer: a restarted process is newer than both.
    deployment.ffn[at].kill()?;
    deployment.ffn[1 - at].kill()?;
    let address = deployment.ffn_addresses[1 - at].to_string();
    deployment.ffn[1 - at] = deployment.start_ffn(1, &address)?;
    serves(&deployment).await?;
    ensure!(deployment.in_use(0).await? == [1 - at], "the restarted one is in use");
    Ok(())
}

#[tokio::test]
async fn ready_tells_who_is_missing_and_what_was_heard_there_last() -> anyhow::Result<()> {
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 2, replicas: 1 })
        .attention_args(&["--ffn-loss-timeout", "500ms"]);
    let mut deployment = Deployment::start(spec).await?;
    let there = deployment.ffn_addresses[1].to_string();
    deployment.ffn[1].kill()?;
    let gone = format!("{there} was up, shard 1/2, and is not there");
    reason(&deployment, &["shard 1/2 has no rank", &gone, "is up, shard 0/2"], &["shard 0/2 has no rank"])
        .await?;
    let body = json!({"prompt": "Hello", "max_tokens": 4});
    let (status, answer) = deployment.post(0, "/v1/completions", &body).await?;
    let message = answer["error"]["message"].as_str().unwrap_or_default();
    ensure!(status == 503 && message.contains("shard 1/2") && message.contains(&there), "{status}: {answer}");
    ensure!(message.matches("500 ms").count() == 1, "how long it waited is not said once: {answer}");

    let folder = tempfile::tempdir()?;
    let in_its_place = |model: &str, shard: &str| {
        let more = ["--listen", &there, "--shard", shard, "--rank", "1"];
        start::ffn(&fixtures::checkpoint(model), &more, folder.path(), "F1")
    };
    let mut wrong = in_its_place("tiny-qwen3-moe", "1/2")?;
    reason(&deployment, &["shard 1/2 has no rank", &there, "refuses", "fingerprint"], &["not there"]).await?;
    wrong.kill()?;
    reason(&deployment, &["shard 1/2 has no rank", &there, "is not there"], &["fingerprint"]).await?;
    let mut wrong = in_its_place(MODEL, "0/2")?;
    reason(&deployment, &["shard 1/2 has no rank", &format!("{there} is up, shard 0/2")], &[]).await?;
    wrong.kill()?;
    deployment.ffn[1] = deployment.start_ffn(1, &there)?;
    deployment.wait_ready(0, LIMIT).await?;
    let log = deployment.attention[0].log();
    // In plain words, whichever notices first: the control stream, or the link.
    let words = ["the connection broke", "closed the connection without a word"];
    ensure!(words.iter().any(|words| log.contains(words)) && !log.contains("h2 protocol"), "{log}");
    serves(&deployment).await
}

/// Of a lease that is short enough for a test and long enough for two busy cores.
const LEASE: Duration = Duration::from_millis(1500);

fn leased(replicas: u32) -> DeploymentSpec {
    let lease_ms = LEASE.as_millis().to_string();
    DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 1, replicas })
        .ffn_args(&["--lease-ms", &lease_ms])
}

#[tokio::test]
async fn a_rank_stopped_while_nothing_is_asked_is_missed_within_its_lease_and_comes_back_by_itself()
-> anyhow::Result<()> {
    let mut deployment = Deployment::start(leased(1)).await?;
    let there = deployment.ffn_addresses[0].to_string();
    for _ in 0..2 {
        deployment.ffn[0].signal("STOP")?;
        let begun = Instant::now();
        let parts =
            ["shard 0/1 has no rank, for ", &there, "was up, shard 0/1", "said nothing for", "--lease-ms"];
        reason(&deployment, &parts, &["is up"]).await?;
        let noticed = begun.elapsed();
        println!("a stopped rank was missed after {} ms, its lease is {LEASE:?}", noticed.as_millis());
        // From its last word on, which was up to a third of the lease before; and a moment.
        ensure!(noticed < LEASE + Duration::from_secs(1), "it was missed after {noticed:?}");
        let grpc = deployment.attention_addresses[0];
        let channel = deployment.spec.pass.grpc(grpc).await?;
        let mut health = tonic_health::pb::health_client::HealthClient::new(channel);
        let service = tonic_health::pb::HealthCheckRequest { service: "ready".into() };
        let status = health.check(service).await?.into_inner().status;
        ensure!(status == 2, "gRPC health says {status}");
        deployment.ffn[0].signal("CONT")?;
        deployment.wait_ready(0, LIMIT).await?;
        serves(&deployment).await?;
    }
    Ok(())
}

/// Three attention ranks ask one FFN rank at once: whoever comes last waits for two others at every layer, and longer than
/// the time in which something has to move.
#[tokio::test]
async fn a_rank_that_serves_others_first_is_not_lost() -> anyhow::Result<()> {
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 1, replicas: 1 })
        .attention_ranks(3)
        .ffn_args(&["--inject-delay", "600ms"])
        .attention_args(&["--hop-timeout", "1s", "--stages", "1"]);
    let deployment = Deployment::start(spec).await?;
    let expected = fixtures::expected(MODEL)?.prompts.remove(0);
    let asked = (0..3).map(|rank| deployment.greedy(rank, &expected.input_ids, 2));
    for answer in futures::future::join_all(asked).await {
        oracle::same(&expected.generated_ids[..2], &answer?)?;
    }
    for rank in 0..3 {
        let losses = deployment.metric(rank, "afd_ffn_losses_total").await?;
        ensure!(losses == 0.0, "attention rank {rank} lost the FFN rank {losses} times");
    }
    Ok(())
}

#[tokio::test]
async fn with_a_replica_nobody_is_missed_when_a_rank_is_stopped() -> anyhow::Result<()> {
    let deployment = Deployment::start(leased(2)).await?;
    deployment.wait_in_use(0, 2, LIMIT).await?;
    for stopped in 0..2 {
        deployment.ffn[stopped].signal("STOP")?;
        let deadline = Instant::now() + LIMIT;
        while deployment.in_use(0).await?.len() != 1 {
            let answer = deployment.client().get(deployment.url(0, "/ready")).send().await?;
            ensure!(answer.status() == 200, "not ready with a replica there: {}", answer.text().await?);
            ensure!(Instant::now() < deadline, "nobody misses it:\n{}", deployment.attention[0].log());
        }
        ensure!(deployment.in_use(0).await? == [1 - stopped], "the other one is in use");
        serves(&deployment).await?;
        deployment.ffn[stopped].signal("CONT")?;
        deployment.wait_in_use(0, 2, LIMIT).await?;
    }
    serves(&deployment).await
}

/// The load of a machine is no loss: twice as many busy threads as cores, and a pair with nothing to do.
#[tokio::test]
async fn a_busy_machine_is_no_lost_rank() -> anyhow::Result<()> {
    let deployment = Deployment::start(leased(1)).await?;
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        for _ in 0..2 * cores {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        std::thread::sleep(4 * LEASE);
        done.store(true, Ordering::Relaxed);
    });
    let losses = deployment.metric(0, "afd_ffn_losses_total").await?;
    ensure!(losses == 0.0, "{losses} ranks were given up:\n{}", deployment.attention[0].log());
    serves(&deployment).await
}
