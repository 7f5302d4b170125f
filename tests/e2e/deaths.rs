//! The death of an engine's thread ends its process: not ready, a typed error to everybody who waits for it, and the exit
//! code that says that starting it again may help. The processes are whole; only their model dies after some layers.
use std::net::SocketAddr;
use std::time::Duration;

use afd_common::process::exit::Exit;
use afd_common::proto::v1;
use afd_common::proto::v1::inference_service_client::InferenceServiceClient;
use afd_tests::fixtures;
use afd_tests::harness::{Pass, Process, greedy};
use afd_tests::oracle;
use anyhow::{Context, bail, ensure};
use serde_json::json;
use tokio::task::JoinHandle;
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::phases;
use crate::start;

const MODEL: &str = "tiny-mixtral";
const LIMIT: Duration = Duration::from_secs(30);
const WORDS: &str = "this engine was made to die";
/// Layers that a model runs before it dies: the warm-up, a prompt and some tokens of four layers each.
const FEW: &str = "60";
const SOME: &str = "300";

/// A service whose model runs so many layers.
fn mortal(
    left: &str,
    role: &str,
    more: &[&str],
    folder: &std::path::Path,
    name: &str,
) -> anyhow::Result<Process> {
    let model = fixtures::checkpoint(MODEL).display().to_string();
    let words = [left, role, "serve", "--model", &model, "--dtype", "float32", "--threads", "1"];
    let words = words.iter().chain(&["--listen", "127.0.0.1:0"]).chain(more);
    let words: Vec<String> = words.map(|word| (*word).to_owned()).collect();
    Process::start(env!("CARGO_BIN_EXE_mortal"), name, &words, folder)
}

/// Follows the health of a process until it says that it does not serve, or is gone without a word.
async fn health(address: SocketAddr) -> anyhow::Result<JoinHandle<Option<ServingStatus>>> {
    let mut client = HealthClient::new(Pass::default().grpc(address).await?);
    let watch = HealthCheckRequest { service: String::new() };
    let mut states = client.watch(watch).await?.into_inner();
    let first = states.message().await?.context("no state")?.status();
    ensure!(first == ServingStatus::Serving, "{first:?} before anything has happened");
    Ok(tokio::spawn(async move {
        while let Ok(Some(state)) = states.message().await {
            if state.status() != ServingStatus::Serving {
                return Some(state.status());
            }
        }
        None
    }))
}

fn request(max_tokens: u32) -> anyhow::Result<(v1::GenerateRequest, Vec<u32>)> {
    let expected = fixtures::expected(MODEL)?.prompts.remove(0);
    Ok((greedy(&expected.input_ids, max_tokens), expected.generated_ids))
}

/// The tokens that came, and how the stream ended.
async fn generate(
    address: SocketAddr,
    request: v1::GenerateRequest,
) -> anyhow::Result<(Vec<u32>, Result<(), Status>)> {
    let mut client = InferenceServiceClient::new(Pass::default().grpc(address).await?);
    let (mut stream, mut tokens) = (client.generate(request).await?.into_inner(), Vec::new());
    loop {
        match stream.message().await {
            Ok(Some(piece)) => tokens.extend(piece.token_ids),
            Ok(None) => return Ok((tokens, Ok(()))),
            Err(status) => return Ok((tokens, Err(status))),
        }
    }
}

/// It has ended, with the code for what may work another time, and its last line says why.
fn ended(process: &mut Process) -> anyhow::Result<()> {
    let status = process.wait(LIMIT)?;
    let log = process.log();
    ensure!(status.code() == Some(Exit::Failed as i32), "it ended with {status}:\n{log}");
    let last = log.lines().last().unwrap_or_default();
    ensure!(last.contains("died") && last.contains(WORDS), "its last line is no reason:\n{log}");
    Ok(())
}

#[tokio::test]
async fn an_ffn_rank_whose_engine_dies_ends_and_its_replica_goes_on() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let mut dying = mortal(FEW, "ffn-svc", &["--rank", "0"], folder.path(), "F0")?;
    let (first, free) = (dying.address(LIMIT)?, std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?);
    let names = format!("{first},{free}");
    let mut attention = start::attention(&fixtures::checkpoint(MODEL), &names, &[], folder.path(), "A0")?;
    let address = attention.address(LIMIT)?;
    phases::until_ready(&attention, address).await?;
    let health = health(first).await?;
    let (request, expected) = request(32)?;
    // It comes later, so that the other one is in use.
    let more = ["--listen", &free.to_string(), "--rank", "1"];
    let _replica = start::ffn(&fixtures::checkpoint(MODEL), &more, folder.path(), "F1")?;
    let is_warm = async || Ok(attention.log().contains("FFN rank is warm"));
    phases::until(&attention, "the replica is warm", is_warm).await?;
    let (tokens, end) = generate(address, request).await?;
    end.map_err(|status| anyhow::anyhow!("the request failed: {status}\n{}", attention.log()))?;
    oracle::same(&expected, &tokens)?;
    ended(&mut dying)?;
    let said = tokio::time::timeout(LIMIT, health).await??;
    ensure!(said == Some(ServingStatus::NotServing), "its health was {said:?} at last:\n{}", dying.log());
    let log = attention.log();
    let lost = log.lines().find(|line| line.contains("FFN rank lost")).unwrap_or_default();
    ensure!(
        lost.contains("F0 at") && lost.contains("died") && lost.contains(WORDS),
        "its peer was not told why:\n{log}"
    );
    Ok(())
}

#[tokio::test]
async fn a_request_ends_with_a_typed_error_when_the_only_engine_of_a_shard_dies() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let mut dying = mortal(FEW, "ffn-svc", &[], folder.path(), "F0")?;
    let first = dying.address(LIMIT)?.to_string();
    let more = ["--ffn-loss-timeout", "500ms"];
    let mut attention = start::attention(&fixtures::checkpoint(MODEL), &first, &more, folder.path(), "A0")?;
    let address = attention.address(LIMIT)?;
    phases::until_ready(&attention, address).await?;
    let (tokens, end) = generate(address, request(32)?.0).await?;
    let Err(status) = end else { bail!("all is well after {} tokens", tokens.len()) };
    ensure!(status.code() == Code::Unavailable, "{status:?}");
    ensure!(status.message().contains(WORDS), "it does not say what the rank died of: {status:?}");
    ended(&mut dying)
}

#[tokio::test]
async fn an_attention_rank_whose_engine_dies_ends_tells_everybody_and_its_ffn_serves_the_others()
-> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let mut ffn = start::ffn(&fixtures::checkpoint(MODEL), &[], folder.path(), "F0")?;
    let rank = ffn.address(LIMIT)?;
    let mut dying = mortal(SOME, "attention-svc", &["--ffn", &rank.to_string()], folder.path(), "A0")?;
    let more = ["--rank", "1"];
    let mut other =
        start::attention(&fixtures::checkpoint(MODEL), &rank.to_string(), &more, folder.path(), "A1")?;
    let (address, there) = (dying.address(LIMIT)?, other.address(LIMIT)?);
    phases::until_ready(&dying, address).await?;
    phases::until_ready(&other, there).await?;
    let health = health(address).await?;
    let (long, expected) = request(32)?;
    let events = async {
        let client = reqwest::Client::builder().no_proxy().build()?;
        let body = json!({"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": true, "stream": true});
        let url = format!("http://{address}/v1/completions");
        anyhow::Ok(client.post(url).json(&body).send().await?.text().await?)
    };
    let (events, over_grpc, served) =
        tokio::join!(events, generate(address, request(200)?.0), generate(there, long));
    let (tokens, end) = served?;
    end.map_err(|status| anyhow::anyhow!("its neighbour lost something: {status}"))?;
    oracle::same(&expected, &tokens)?;
    let Err(status) = over_grpc?.1 else { bail!("all is well") };
    ensure!(status.code() == Code::Internal && status.message().contains(WORDS), "{status:?}");
    let events = events?;
    ensure!(events.contains("\"error\"") && events.contains(WORDS), "no error is told: {events}");
    ended(&mut dying)?;
    let said = tokio::time::timeout(LIMIT, health).await??;
    ensure!(said == Some(ServingStatus::NotServing), "its health was {said:?} at last:\n{}", dying.log());
    let freed = async || Ok(phases::metric(rank, "afd_ffn_sessions").await? == 1.0);
    phases::until(&ffn, "the FFN has let go of the dead rank", freed).await
}
