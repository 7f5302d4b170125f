//! Bad input against the real engine: what a table with an engine of straw (`attention-svc/tests/api/bad_input`) cannot
//! show. After every row the server answers the reference's tokens.
use std::time::Duration;

use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn, Pass};
use afd_tests::oracle;
use anyhow::{Context, ensure};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tonic::transport::Channel;
use tonic::{Code, Status};

const COMPLETIONS: &str = "/v1/completions";
const MODEL: &str = "tiny-llama";
const MAX_MODEL_LEN: usize = 256;
const VOCAB_SIZE: u32 = 768;

async fn pair() -> anyhow::Result<Deployment> {
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 1, replicas: 1 });
    Deployment::start(spec.attention_args(&["--max-model-len", &MAX_MODEL_LEN.to_string()])).await
}

async fn is_alive(deployment: &Deployment) -> anyhow::Result<()> {
    let prompt = &fixtures::expected(MODEL)?.prompts[0];
    let found = deployment.greedy(0, &prompt.input_ids, 4).await?;
    oracle::same(&prompt.generated_ids[..4], &found)
}

#[tokio::test]
async fn the_server_lives_on_after_every_row() -> anyhow::Result<()> {
    let deployment = pair().await?;
    let ids = vec![5u32; 100];
    let room = MAX_MODEL_LEN - ids.len();
    let rows = [
        ("whitespace", json!({"prompt": " \n\t "}), 200),
        ("empty text", json!({"prompt": ""}), 400),
        ("no prompts", json!({"prompt": []}), 400),
        ("an id out of the vocabulary", json!({"prompt": [VOCAB_SIZE]}), 400),
        ("the last id of the vocabulary", json!({"prompt": [VOCAB_SIZE - 1]}), 200),
        ("two beginnings of text", json!({"prompt": [763, 763, 5]}), 200),
        ("room - 1", json!({"prompt": ids, "max_tokens": room - 1}), 200),
        ("room", json!({"prompt": ids, "max_tokens": room}), 200),
        ("room + 1", json!({"prompt": ids, "max_tokens": room + 1}), 400),
        (
            "a prompt one shorter than the model",
            json!({"prompt": vec![5; MAX_MODEL_LEN - 1], "max_tokens": 1}),
            200,
        ),
        ("a prompt as long as the model", json!({"prompt": vec![5; MAX_MODEL_LEN], "max_tokens": 1}), 400),
        ("huge max_tokens", json!({"max_tokens": u64::MAX}), 400),
        ("temperature 1e-9", json!({"temperature": 1e-9}), 200),
        (
            "temperature 1e-9 and a cut",
            json!({"temperature": 1e-9, "top_p": 0.5, "top_k": 3, "min_p": 1}),
            200,
        ),
        ("temperature 100", json!({"temperature": 100}), 200),
        ("top_p 1e-60", json!({"top_p": 1e-60, "temperature": 1}), 200),
        ("top_k V", json!({"top_k": VOCAB_SIZE, "temperature": 1}), 200),
        ("top_k 1", json!({"top_k": 1, "temperature": 1}), 200),
        (
            "every penalty",
            json!({"repetition_penalty": 2, "presence_penalty": 2, "frequency_penalty": -2}),
            200,
        ),
        ("everything ruled out but one", json!({"logit_bias": {"5": 100}, "min_tokens": 4}), 200),
        ("seed 2^63 - 1", json!({"seed": i64::MAX, "temperature": 1}), 200),
        ("n 1000", json!({"n": 1000}), 400),
        ("1,000 stops", json!({"stop": vec!["a"; 1000]}), 400),
        ("prompt logprobs with echo", json!({"echo": true, "logprobs": 20, "prompt_logprobs": 20}), 200),
    ];
    for (what, change, expected) in rows {
        let mut body = json!({"prompt": "Hello there", "max_tokens": 4, "ignore_eos": true});
        body.as_object_mut().context("an object")?.extend(change.as_object().context("an object")?.clone());
        let (status, answer) = deployment.post(0, COMPLETIONS, &body).await?;
        ensure!(status == expected, "{what}: {status}: {answer}");
        if status == 200 && body["prompt"].is_array() {
            let wanted = body["max_tokens"].as_u64();
            ensure!(answer["usage"]["completion_tokens"].as_u64() == wanted, "{what}: {answer}");
        }
        is_alive(&deployment).await.with_context(|| format!("after {what}"))?;
    }
    Ok(())
}

#[tokio::test]
async fn a_cold_temperature_is_greedy() -> anyhow::Result<()> {
    let deployment = pair().await?;
    let prompt = &fixtures::expected(MODEL)?.prompts[0];
    let body = json!({"prompt": prompt.input_ids, "max_tokens": 16, "temperature": 1e-9, "ignore_eos": true,
        "return_token_ids": true});
    let (_, answer) = deployment.post(0, COMPLETIONS, &body).await?;
    ensure!(answer["choices"][0]["token_ids"] == json!(prompt.generated_ids[..16]), "{answer}");
    Ok(())
}

#[tokio::test]
async fn a_deadline_of_a_millisecond_and_a_client_that_never_reads() -> anyhow::Result<()> {
    let deployment = pair().await?;
    let body = json!({"prompt": [5, 6], "max_tokens": 200, "ignore_eos": true});
    for _ in 0..10 {
        let request =
            deployment.client().post(deployment.url(0, COMPLETIONS)).header("x-request-timeout-ms", "1");
        let answer = request.json(&body).send().await?;
        ensure!(answer.status() == 504, "{}", answer.text().await?);
    }
    is_alive(&deployment).await?;

    let body = json!({"prompt": [5, 6], "max_tokens": 200, "n": 32, "stream": true, "logprobs": 20,
        "ignore_eos": true})
    .to_string();
    let mut deaf = tokio::net::TcpStream::connect(deployment.attention_addresses[0]).await?;
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    deaf.write_all(head.as_bytes()).await?;
    deaf.write_all(body.as_bytes()).await?;
    is_alive(&deployment).await?;
    drop(deaf);

    // Whatever the two left behind is freed.
    let freed = async {
        loop {
            let text = deployment.client().get(deployment.url(0, "/metrics")).send().await?.text().await?;
            let value = |name: &str| -> Option<f64> {
                text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
            };
            let running = value("vllm:num_requests_running").context("no such metric")?;
            if running == 0.0 {
                return anyhow::Ok(());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), freed).await.context("sequences run on")??;
    is_alive(&deployment).await
}

#[tokio::test]
async fn bodies_that_are_no_requests() -> anyhow::Result<()> {
    let deployment = pair().await?;
    let bodies: [Vec<u8>; 6] = [
        b"{\"prompt\": \"a\", \"max_tokens\": 1, \"max_tokens\": 100}".to_vec(),
        b"{".to_vec(),
        b"{\"prompt\": \"a\", \"temperature\": NaN}".to_vec(),
        b"{\"prompt\": \"\xff\xfe\"}".to_vec(),
        format!("{{\"prompt\": {}", "[".repeat(10_000)).into_bytes(),
        format!("{{\"x\": {}1{}}}", "{\"a\":".repeat(10_000), "}".repeat(10_000)).into_bytes(),
    ];
    for body in bodies {
        let shown = String::from_utf8_lossy(&body[..body.len().min(60)]).into_owned();
        let answer = deployment.client().post(deployment.url(0, COMPLETIONS)).body(body).send().await?;
        let (status, answer) = (answer.status(), answer.json::<Value>().await?);
        ensure!(status == 400 && answer["error"]["message"].is_string(), "{shown}: {status}: {answer}");
        is_alive(&deployment).await.with_context(|| format!("after {shown}"))?;
    }
    Ok(())
}

/// Sends bytes as the body of a gRPC call: the status that comes back.
async fn call(channel: Channel, path: &str, body: &[u8]) -> anyhow::Result<Status> {
    let request =
        axum::http::Request::post(path).header("content-type", "application/grpc").header("te", "trailers");
    let body = tonic::body::Body::new(axum::body::Body::from(body.to_vec()));
    let answer = tower::ServiceExt::oneshot(channel, request.body(body)?).await?;
    let status = Status::from_header_map(answer.headers());
    status.context("no status is in the headers")
}

#[tokio::test]
async fn grpc_messages_that_cannot_be_read_are_their_callers_fault_on_both_sides() -> anyhow::Result<()> {
    let deployment = pair().await?;
    let pass = Pass::default();
    for (address, paths) in [
        (
            deployment.attention_addresses[0],
            &[
                "/afd.v1.InferenceService/Generate",
                "/afd.v1.InferenceService/Tokenize",
                "/afd.v1.MembershipService/Announce",
                "/grpc.health.v1.Health/Check",
            ][..],
        ),
        (
            deployment.ffn_addresses[0],
            &[
                "/afd.v1.FfnControlService/Join",
                "/afd.v1.FfnControlService/Steps",
                "/afd.v1.LayerStageService/RunStage",
                "/grpc.health.v1.Health/Check",
            ],
        ),
    ] {
        for path in paths {
            for (what, body, code, words) in [
                (
                    "no protobuf",
                    &b"\0\0\0\0\x04\xff\xff\xff\xff"[..],
                    Code::InvalidArgument,
                    "no message of this call",
                ),
                (
                    "a message cut off",
                    b"\0\0\0\0\x09\x0a\x03ab",
                    Code::InvalidArgument,
                    "5 bytes of it are missing",
                ),
                ("a head cut off", b"\0\0\0", Code::InvalidArgument, "3 of 5 bytes came"),
                ("another protocol", b"{\"prompt\": \"a\"}", Code::InvalidArgument, "no gRPC message"),
                ("far too long", b"\0\x7f\xff\xff\xff", Code::ResourceExhausted, "too large"),
            ] {
                let status = call(pass.grpc(address).await?, path, body).await?;
                ensure!(
                    status.code() == code && status.message().contains(words),
                    "{path}: {what}: {status:?}"
                );
            }
        }
        let unary = paths.last().context("some path")?;
        let status = call(pass.grpc(address).await?, unary, b"").await?;
        ensure!(
            status.code() == Code::InvalidArgument && status.message().contains("has no message"),
            "{status:?}"
        );
    }
    is_alive(&deployment).await
}
