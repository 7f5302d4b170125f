//! Bearer tokens, on both faces of the API.
use std::time::{Duration, Instant};

use afd_common::proto::v1;
use afd_tests::harness::{Deployment, Pass};
use anyhow::ensure;
use serde_json::Value;
use tonic::Code;

use crate::{pair, text};

const LIMIT: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_token_opens_both_faces_and_a_new_one_needs_no_restart() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let (tokens, join) = (folder.path().join("tokens"), folder.path().join("join"));
    std::fs::write(&tokens, "# two of them\nfirst-token\nsecond-token\n")?;
    std::fs::write(&join, "join-token\n")?;
    let pass = |token: &str| Pass { token: Some(token.to_owned()), ..Pass::default() };
    let spec = pair()
        .attention_args(&["--api-token-file", &text(&tokens), "--join-token-file", &text(&join)])
        .ffn_args(&["--join-token-file", &text(&join)])
        .pass(pass("first-token"));
    let deployment = Deployment::start(spec).await?;
    let models = deployment.url(0, "/v1/models");
    let status =
        async |pass: Pass, url: &str| anyhow::Ok(pass.http()?.get(url).send().await?.status().as_u16());
    for (pass, expected) in [
        (pass("first-token"), 200),
        (pass("second-token"), 200),
        (pass("first-toke"), 401),
        (Pass::default(), 401),
    ] {
        ensure!(status(pass.clone(), &models).await? == expected, "{pass:?}");
        let request = pass.show(v1::GetModelInfoRequest {});
        let answered = deployment.grpc(0).await?.get_model_info(request).await;
        let code = answered.err().map_or(Code::Ok, |status| status.code());
        ensure!(code == if expected == 200 { Code::Ok } else { Code::Unauthenticated }, "{pass:?}: {code:?}");
    }
    let refused = Pass::default().http()?.get(&models).send().await?;
    ensure!(refused.headers()["www-authenticate"] == "Bearer");
    let error: Value = refused.json().await?;
    ensure!(error["error"]["code"] == "invalid_api_key", "{error}");
    ensure!(status(Pass::default(), &deployment.url(0, "/ready")).await? == 200);
    ensure!(status(Pass::default(), &deployment.url(0, "/metrics")).await? == 401);
    ensure!(deployment.greedy(0, &[5, 6, 7], 4).await?.len() == 4);

    std::fs::write(&tokens, "third-token\n")?;
    let deadline = Instant::now() + LIMIT;
    while status(pass("third-token"), &models).await? != 200 {
        ensure!(Instant::now() < deadline, "the new token is not taken up");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    ensure!(status(pass("first-token"), &models).await? == 401, "the old one is not forgotten");
    Ok(())
}
