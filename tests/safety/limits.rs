//! What is too much for a port is refused by name, on both faces, and the server lives on.
use afd_common::proto::v1;
use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn};
use anyhow::ensure;
use serde_json::{Value, json};

use crate::MODEL;

#[tokio::test]
async fn a_body_or_a_message_beyond_the_limit_is_refused_with_the_options_name() -> anyhow::Result<()> {
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Local);
    let deployment = Deployment::start(spec.attention_args(&["--max-body", "64KiB"])).await?;
    let (fits, too_much) = ("a".repeat(20 << 10), "a".repeat(100 << 10));

    let tokenize = async |text: &str| {
        let body = json!({"model": "test", "prompt": text});
        let answer = deployment.client().post(deployment.url(0, "/tokenize")).json(&body).send().await?;
        anyhow::Ok((answer.status().as_u16(), answer.json::<Value>().await?))
    };
    ensure!(tokenize(&fits).await?.0 == 200);
    let (status, refused) = tokenize(&too_much).await?;
    let message = refused["error"]["message"].as_str().unwrap_or_default();
    ensure!(
        status == 413 && message.contains("--max-body") && message.contains("65536"),
        "{status}: {refused}"
    );
    // Without its length beforehand.
    let pieces =
        futures::stream::iter(too_much.into_bytes().chunks(1000).map(<[u8]>::to_vec).collect::<Vec<_>>());
    let pieces = futures::StreamExt::map(pieces, Ok::<_, std::io::Error>);
    let streamed = deployment.client().post(deployment.url(0, "/tokenize"));
    let streamed = streamed.body(reqwest::Body::wrap_stream(pieces)).send().await?;
    ensure!(streamed.status() == 413, "{}", streamed.status());

    let mut client = deployment.grpc(0).await?;
    let mut say = async |text: String| {
        client.tokenize(v1::TokenizeRequest { text, add_special_tokens: None }).await.map(|_| ())
    };
    ensure!(say(fits).await.is_ok());
    let refused = say("a".repeat(100 << 10)).await.expect_err("it is too long");
    let (code, message) = (refused.code(), refused.message());
    ensure!(code == tonic::Code::ResourceExhausted && message.contains("--max-body"), "{refused:?}");
    ensure!(deployment.greedy(0, &[5, 6, 7], 4).await?.len() == 4);
    Ok(())
}
