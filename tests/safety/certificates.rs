//! A pair under mutual TLS.
use std::time::{Duration, Instant};

use afd_tests::fixtures;
use afd_tests::harness::{Authority, Deployment, Pass};
use afd_tests::oracle;
use anyhow::ensure;
use serde_json::json;
use tonic::Code;

use crate::{HOST, MODEL, mutual, pair, text};

const LIMIT: Duration = Duration::from_secs(60);

#[tokio::test]
async fn every_link_gives_the_same_tokens_under_mutual_tls() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let spec = mutual(&Authority::new(folder.path())?)?;
    let prompt = &fixtures::expected(MODEL)?.prompts[0];
    for link in ["shm", "tcp", "inline"] {
        let deployment = Deployment::start(spec.clone().attention_args(&["--link", link])).await?;
        let found = deployment.greedy(0, &prompt.input_ids, 16).await?;
        oracle::same(&prompt.generated_ids[..16], &found)?;
        let body = json!({"prompt": prompt.input_ids, "max_tokens": 4, "ignore_eos": true});
        let (status, answer) = deployment.post(0, "/v1/completions", &body).await?;
        ensure!(status == 200, "{link}: {answer}");
    }
    Ok(())
}

#[tokio::test]
async fn whoever_shows_no_certificate_is_told_about_health_only() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let authority = Authority::new(folder.path())?;
    let deployment = Deployment::start(mutual(&authority)?).await?;
    let anonymous = Pass { ca: Some(authority.ca()), ..Pass::default() };
    let client = anonymous.http()?;
    for (path, expected) in [("/ready", 200), ("/live", 200), ("/v1/models", 401), ("/metrics", 401)] {
        let status = client.get(deployment.url(0, path)).send().await?.status();
        ensure!(status == expected, "{path}: {status}");
    }
    // The FFN port alike, whatever the call.
    let channel = anonymous.grpc(deployment.ffn_addresses[0]).await?;
    let mut stages = afd_common::proto::v1::layer_stage_service_client::LayerStageServiceClient::new(channel);
    let status = stages.describe(afd_common::proto::v1::DescribeRequest {}).await.unwrap_err();
    ensure!(status.code() == Code::Unauthenticated, "{status:?}");
    let metrics = deployment.client().get(deployment.url(0, "/metrics")).send().await?.text().await?;
    ensure!(metrics.contains("afd_unauthenticated_total 2"), "{metrics}");
    Ok(())
}

#[tokio::test]
async fn attention_without_a_certificate_ends_with_the_ffns_words() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let authority = Authority::new(folder.path())?;
    let server = authority.issue("server", &[HOST])?;
    let options = ["--tls-cert", &text(&server.certificate), "--tls-key", &text(&server.key)];
    let ca = text(&authority.ca());
    let spec = pair().ffn_args(&options).ffn_args(&["--tls-client-ca", &ca]);
    let told = async |spec| {
        Deployment::start(spec).await.err().map_or_else(String::new, |error| format!("{error:#}"))
    };
    let said = told(spec.clone().attention_args(&["--ffn-tls-ca", &ca])).await;
    ensure!(said.contains("refused: join: a client certificate is missing"), "{said}");
    let said = told(spec).await;
    ensure!(
        said.contains("refused: connecting: this port speaks TLS") && said.contains("--ffn-tls-ca"),
        "{said}"
    );
    Ok(())
}

#[tokio::test]
async fn replaced_certificates_are_taken_up_while_serving() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let (old, other) = (Authority::new(&folder.path().join("in-use"))?, folder.path().join("new"));
    let deployment = Deployment::start(mutual(&old)?).await?;
    // Another authority, and certificates of it for everybody, in place of the ones in use.
    let new = Authority::new(&other)?;
    let newcomer =
        Pass { ca: Some(new.ca()), identity: Some(new.issue("client", &["client"])?), token: None };
    new.issue("server", &[HOST])?;
    new.issue("attention", &["attention"])?;
    ensure!(newcomer.http()?.get(deployment.url(0, "/ready")).send().await.is_err());
    let (new_ca, kept) = (folder.path().join("new-ca.pem"), folder.path().join("client"));
    std::fs::copy(new.ca(), &new_ca)?;
    std::fs::create_dir(&kept)?;
    for name in ["client.pem", "client.key"] {
        std::fs::copy(other.join(name), kept.join(name))?;
    }
    for entry in std::fs::read_dir(&other)? {
        let entry = entry?;
        std::fs::rename(entry.path(), folder.path().join("in-use").join(entry.file_name()))?;
    }
    let identity =
        afd_common::net::tls::Identity { certificate: kept.join("client.pem"), key: kept.join("client.key") };
    let newcomer = Pass { ca: Some(new_ca), identity: Some(identity), token: None };
    let (client, deadline) = (newcomer.http()?, Instant::now() + LIMIT);
    let models = deployment.url(0, "/v1/models");
    while !client.get(&models).send().await.is_ok_and(|answer| answer.status() == 200) {
        ensure!(
            Instant::now() < deadline,
            "the new certificate is not used:\n{}",
            deployment.attention[0].log()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // The link that was there lives on, and what serves it is asked through a new connection.
    let body = json!({"prompt": [5, 6, 7], "max_tokens": 4});
    let answer = client.post(deployment.url(0, "/v1/completions")).json(&body).send().await?;
    ensure!(answer.status() == 200, "{}", answer.text().await?);
    Ok(())
}
