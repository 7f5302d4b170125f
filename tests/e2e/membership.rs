//! Who is there is found out while it runs: an FFN rank that nobody listed joins by announcing itself, and any attention
//! rank is an address for all of them.
use std::time::{Duration, Instant};

use afd_common::proto::v1;
use afd_common::proto::v1::membership_service_client::MembershipServiceClient;
use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn, Process};
use afd_tests::oracle;
use anyhow::{Context, ensure};
use futures::future::try_join_all;
use serde_json::{Value, json};

use crate::story::{self, MODEL};

const LIMIT: Duration = Duration::from_secs(30);
const ONE: Ffn = Ffn::Remote { shards: 1, replicas: 1 };

async fn num_ffn_peers(deployment: &Deployment) -> anyhow::Result<usize> {
    let info = deployment.grpc(0).await?.get_model_info(v1::GetModelInfoRequest {}).await?.into_inner();
    Ok(info.ffn_peers.len())
}

/// Waits for something that has no event of its own.
async fn until(what: &str, mut is_so: impl AsyncFnMut() -> anyhow::Result<bool>) -> anyhow::Result<()> {
    let deadline = Instant::now() + LIMIT;
    while !is_so().await? {
        ensure!(Instant::now() < deadline, "it did not come about in {LIMIT:?}: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

#[tokio::test]
async fn an_ffn_rank_that_announces_itself_joins_takes_over_and_leaves() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let token = folder.path().join("join");
    std::fs::write(&token, "sesame\n")?;
    let token = token.display().to_string();
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), ONE)
        .attention_args(&["--join-token-file", &token])
        .ffn_args(&["--join-token-file", &token]);
    let mut deployment = Deployment::start(spec).await?;
    let attention = deployment.attention_addresses[0].to_string();
    let model = deployment.spec.model.display().to_string();
    let words =
        ["serve", "--model", &model, "--listen", "127.0.0.1:0", "--dtype", "float32", "--threads", "1"];
    let more = ["--rank", "1", "--join-token-file", &token, "--announce", &attention];
    let words: Vec<_> = words.iter().chain(&more).map(|word| (*word).to_owned()).collect();
    let mut announced = Process::start("ffn-svc", "F1", &words, folder.path())?;
    until("the rank that announces itself is in use", async || Ok(num_ffn_peers(&deployment).await? == 2))
        .await?;
    deployment.ffn[0].kill()?;
    story::goes_on(&mut deployment, async |_, _| Ok(())).await?;

    // Nobody without the token is heard, and the operator hears once of whoever tries on.
    let mut stranger = MembershipServiceClient::connect(format!("http://{attention}")).await?;
    for token in ["Bearer open", "Bearer sesam", "sesame"] {
        let mut request = tonic::Request::new(v1::AnnounceRequest::default());
        request.metadata_mut().insert("authorization", token.parse()?);
        let refused = stranger.announce(request).await.err().context("it was heard")?;
        ensure!(refused.code() == tonic::Code::Unauthenticated, "{refused:?}");
    }
    let log = deployment.attention[0].log();
    let told: Vec<_> = log.lines().filter(|line| line.contains("refused a membership call")).collect();
    let words =
        ["WARN", "from=127.0.0.1", "call=\"announce\"", "`authorization` is wrong", "--join-token-file"];
    ensure!(told.len() == 1 && words.iter().all(|word| told[0].contains(word)), "{told:#?}");

    announced.signal("TERM")?;
    ensure!(announced.wait(LIMIT)?.success(), "{}", announced.log());
    until("the rank has left", async || Ok(num_ffn_peers(&deployment).await? == 0)).await?;
    let log = deployment.attention[0].log();
    ensure!(log.contains("an FFN rank leaves"), "it was not told:\n{log}");
    Ok(())
}

#[tokio::test]
async fn what_does_not_fit_is_not_announced_and_one_caller_keeps_nobody_out() -> anyhow::Result<()> {
    let deployment = Deployment::start(DeploymentSpec::new(fixtures::checkpoint(MODEL), ONE)).await?;
    let attention = deployment.attention_addresses[0].to_string();
    let mut client = MembershipServiceClient::connect(format!("http://{attention}")).await?;
    let fingerprint = client.list_peers(v1::ListPeersRequest {}).await?.into_inner().fingerprint;
    let request = |address: &str, count: u32| v1::AnnounceRequest {
        identity: Some(v1::Identity {
            deployment: "default".into(),
            role: v1::Role::Ffn.into(),
            rank: 50,
            incarnation: 1,
        }),
        address: address.into(),
        shard: Some(v1::ShardSpec { index: 0, count }),
        fingerprint: fingerprint.clone(),
    };
    let long = format!("{}:1", "x".repeat(5000));
    for (request, code, words) in [
        (
            request("127.0.0.1:7", 2),
            tonic::Code::FailedPrecondition,
            ["`shard.count`", "the caller has 2", "have 1"],
        ),
        (request(&long, 1), tonic::Code::InvalidArgument, ["`address`", "5002 characters", "at most 259"]),
    ] {
        let refused = client.announce(request).await.err().context("it was taken")?;
        ensure!(refused.code() == code, "{refused:?}");
        ensure!(words.iter().all(|word| refused.message().contains(word)), "{refused:?}");
    }

    // As many as everybody together may announce, by one caller.
    for n in 0..1024 {
        client.announce(request(&format!("127.0.1.1:{}", 20_000 + n), 1)).await?;
    }
    let folder = tempfile::tempdir()?;
    let model = deployment.spec.model.display().to_string();
    let words =
        ["serve", "--model", &model, "--listen", "127.0.0.1:0", "--dtype", "float32", "--threads", "1"];
    let words: Vec<_> = words
        .iter()
        .chain(&["--rank", "1", "--announce", &attention])
        .map(|word| (*word).to_owned())
        .collect();
    let _joining = Process::start("ffn-svc", "F1", &words, folder.path())?;
    until("the rank that announces itself is in use", async || Ok(num_ffn_peers(&deployment).await? == 2))
        .await
}

#[tokio::test]
async fn any_attention_rank_is_an_address_for_all() -> anyhow::Result<()> {
    // Slow enough that requests meet.
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), ONE).ffn_args(&["--inject-delay", "1ms"]);
    let mut deployment = Deployment::start(spec).await?;
    let folder = tempfile::tempdir()?;
    let (model, ffn) = (deployment.spec.model.display().to_string(), deployment.ffn_addresses[0].to_string());
    let other = deployment.attention_addresses[0].to_string();
    let words = ["serve", "--model", &model, "--listen", "127.0.0.1:0", "--served-model-name", "test"];
    let more = ["--rank", "1", "--ffn", &ffn, "--peers", &other, "--dtype", "float32", "--threads", "1"];
    let words: Vec<_> = words.iter().chain(&more).map(|word| (*word).to_owned()).collect();
    let mut front = Process::start("attention-svc", "A1", &words, folder.path())?;
    let address = front.address(LIMIT)?;
    // From here on A1 is the only one that is asked.
    deployment.attention_addresses.push(address);
    deployment.attention.push(front);
    deployment.wait_ready(1, LIMIT).await?;
    until("A1 knows of A0", async || {
        Ok(deployment.attention[1].log().contains("requests may be forwarded to this attention rank"))
    })
    .await?;

    let mut doomed = deployment.attention.remove(0);
    let expected = fixtures::expected(MODEL)?.prompts.remove(0);
    let body = json!({"prompt": expected.input_ids, "max_tokens": 32, "temperature": 0, "ignore_eos": true,
        "return_token_ids": true});
    let ask = async || {
        let answer =
            deployment.client().post(deployment.url(1, "/v1/completions")).json(&body).send().await?;
        let was_forwarded = answer.headers().contains_key("x-afd-forwarded");
        let answer = answer.json::<Value>().await?;
        ensure!(answer["choices"][0]["token_ids"] == json!(expected.generated_ids), "{answer}");
        anyhow::Ok(was_forwarded)
    };
    let forwarded = try_join_all((0..8).map(|_| ask())).await?;
    let num_forwarded = forwarded.iter().filter(|was_forwarded| **was_forwarded).count();
    println!("{num_forwarded} of 8 requests were served by the other rank");
    ensure!((2..=6).contains(&num_forwarded), "{num_forwarded} of 8 were forwarded");

    // Streams too, over gRPC with its trailers; and a client that goes away is gone there as well.
    let streams = (0..4).map(|_| deployment.greedy(1, &expected.input_ids, 32));
    for ids in try_join_all(streams).await? {
        oracle::same(&expected.generated_ids, &ids)?;
    }
    let long = try_join_all((0..2).map(|_| deployment.stream(1, &expected.input_ids, 400))).await?;
    until("both ranks serve a stream", async || {
        let running = async |rank| deployment.metric(rank, "vllm:num_requests_running").await;
        Ok(running(0).await? == 1.0 && running(1).await? == 1.0)
    })
    .await?;
    drop(long);
    until("both streams have ended", async || {
        let running = async |rank| deployment.metric(rank, "vllm:num_requests_running").await;
        Ok(running(0).await? == 0.0 && running(1).await? == 0.0)
    })
    .await?;

    // And a peer that dies costs nothing but its own requests.
    doomed.kill()?;
    for _ in 0..3 {
        try_join_all((0..4).map(|_| ask())).await?;
    }
    Ok(())
}
