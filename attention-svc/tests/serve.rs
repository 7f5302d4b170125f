//! The whole rank in this process (`--ffn local`), from the command line to the answer, against Hugging Face's own tokens.
use std::path::{Path, PathBuf};
use std::time::Duration;

use afd_common::process::stop::Told;
use attention_svc::cli::{Cli, Command};
use attention_svc::config::ServeConfig;
use attention_svc::serve::{ServeError, Server};
use clap::Parser;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures")
}

/// A served fixture.
struct Rank {
    url: String,
    http: reqwest::Client,
    stop: oneshot::Sender<()>,
    running: JoinHandle<Result<(), ServeError>>,
}

impl Rank {
    async fn start(model: &str, more: &[&str]) -> Self {
        let folder = fixtures().join("tiny").join(model);
        let folder = folder.to_str().unwrap();
        let args = ["attention-svc", "serve", "--model", folder, "--ffn", "local", "--listen", "127.0.0.1:0"];
        let args = args.iter().chain(&["--dtype", "float32", "--threads", "1"]).chain(more);
        let Command::Serve(args) = Cli::parse_from(args).command else { panic!("not serve") };
        let server = Server::start(ServeConfig::new(*args).unwrap()).await.unwrap();
        let url = format!("http://{}", server.address());
        let (stop, stopped) = oneshot::channel();
        let running = tokio::spawn(server.run(async {
            let _ = stopped.await;
            Told::Terminate
        }));
        let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(60)).build().unwrap();
        let rank = Self { url, http, stop, running };
        tokio::time::timeout(Duration::from_secs(30), async {
            while !rank.get("/health").await.0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
        .expect("not ready in time");
        rank
    }

    async fn get(&self, path: &str) -> (bool, String) {
        let answer = self.http.get(format!("{}{path}", self.url)).send().await.unwrap();
        (answer.status().is_success(), answer.text().await.unwrap())
    }

    async fn post(&self, path: &str, body: &Value) -> Value {
        let answer = self.http.post(format!("{}{path}", self.url)).json(body).send().await.unwrap();
        answer.json().await.unwrap()
    }

    /// A number of `/metrics`.
    async fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").await.1;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).expect(name);
        line.parse().unwrap()
    }

    /// Ends as SIGTERM would end it.
    async fn end(self) -> Result<(), ServeError> {
        self.stop.send(()).unwrap();
        tokio::time::timeout(Duration::from_secs(20), self.running).await.expect("drained in time").unwrap()
    }
}

fn expected(model: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixtures().join(format!("expected/{model}.json"))).unwrap())
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_fixture_answers_with_the_tokens_and_the_text_of_hugging_face() {
    for entry in std::fs::read_dir(fixtures().join("tiny")).unwrap() {
        let model = entry.unwrap().file_name().into_string().unwrap();
        let rank = Rank::start(&model, &[]).await;
        let expected = expected(&model);
        for prompt in expected["prompts"].as_array().unwrap() {
            let mut body = json!({
                "temperature": 0, "max_tokens": 32, "ignore_eos": true, "return_token_ids": true, "logprobs": 5,
            });
            let (path, by_text) = match prompt["messages"].as_array() {
                Some(messages) => {
                    body["messages"] = messages.clone().into();
                    body["logprobs"] = true.into();
                    ("/v1/chat/completions", false)
                }
                None => {
                    let by_text = prompt["add_special_tokens"] == true;
                    body["prompt"] =
                        if by_text { prompt["text"].clone() } else { prompt["input_ids"].clone() };
                    ("/v1/completions", by_text)
                }
            };
            let answer = rank.post(path, &body).await;
            let choice = &answer["choices"][0];
            let what = format!("{model}, {}: {answer}", prompt["id"]);
            assert_eq!(choice["prompt_token_ids"], prompt["input_ids"], "{what}");
            assert_eq!(choice["token_ids"], prompt["generated_ids"], "{what}");
            let text =
                if choice["text"].is_string() { &choice["text"] } else { &choice["message"]["content"] };
            assert_eq!(text, &prompt["generated_text"], "{what}");
            if by_text {
                let found = choice["logprobs"]["token_logprobs"][0].as_f64().unwrap();
                let wanted = prompt["top5_logprobs"][0][0].as_f64().unwrap();
                assert!((found - wanted).abs() < 1e-3, "{found} for {wanted}: {what}");
            }
        }
        rank.end().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_cancelled_requests_leave_no_block_behind() {
    let rank = Rank::start("tiny-llama", &["--max-queue", "2000", "--no-prefix-cache"]).await;
    for _ in 0..20 {
        let requests = (0..50).map(|i| {
            let body =
                json!({"prompt": [5, 6, 7, i], "max_tokens": 1500, "ignore_eos": true, "stream": i % 2 == 0});
            let sent = rank.http.post(format!("{}/v1/completions", rank.url)).json(&body).send();
            tokio::time::timeout(Duration::from_millis(20 + i), async {
                let mut answer = sent.await.unwrap();
                while answer.chunk().await.unwrap().is_some() {}
            })
        });
        let ended = futures::future::join_all(requests).await;
        assert!(ended.iter().all(Result::is_err), "a request was faster than its cancellation");
    }
    let quiet = async {
        while rank.metric("afd_kv_blocks_used").await > 0.0
            || rank.metric("vllm:num_requests_waiting").await > 0.0
        {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), quiet).await.expect("blocks are still held");
    let answer = rank.post("/v1/completions", &json!({"prompt": "alive", "max_tokens": 3})).await;
    assert_eq!(answer["usage"]["completion_tokens"], 3, "{answer}");
    rank.end().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_finishes_what_runs_and_refuses_what_is_new() {
    let rank = Rank::start("tiny-llama", &[]).await;
    let body = json!({"prompt": [5, 6, 7], "max_tokens": 1000, "ignore_eos": true, "stream": true, "temperature": 0});
    let request = rank.http.post(format!("{}/v1/completions", rank.url)).json(&body);
    let mut answer = request.send().await.unwrap();
    answer.chunk().await.unwrap().unwrap();
    let mut text = String::new();
    let reading = async {
        while let Some(chunk) = answer.chunk().await.unwrap() {
            text.push_str(&String::from_utf8_lossy(&chunk));
        }
    };
    let (ended, ()) = tokio::join!(rank.end(), reading);
    ended.unwrap();
    assert!(text.contains("\"finish_reason\":\"length\"") && text.ends_with("data: [DONE]\n\n"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_that_takes_too_long_ends_as_an_error_event() {
    let rank = Rank::start("tiny-llama", &["--drain-timeout", "100ms"]).await;
    let body = json!({"prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": true, "stream": true, "n": 16});
    let request = rank.http.post(format!("{}/v1/completions", rank.url)).json(&body);
    let mut answer = request.send().await.unwrap();
    answer.chunk().await.unwrap().unwrap();
    let reading = async move {
        let mut text = String::new();
        while let Some(chunk) = answer.chunk().await.unwrap() {
            text.push_str(&String::from_utf8_lossy(&chunk));
        }
        text
    };
    let (ended, text) = tokio::join!(rank.end(), reading);
    ended.unwrap();
    assert!(text.contains("event: error\n") && text.contains("shutting_down") && !text.contains("[DONE]"));
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let folder = fixtures().join("tiny/tiny-llama");
    let args = [
        "attention-svc",
        "serve",
        "--model",
        folder.to_str().unwrap(),
        "--ffn",
        "local",
        "--listen",
        &address,
    ];
    let Command::Serve(args) = Cli::parse_from(args).command else { panic!("not serve") };
    let error = Server::start(ServeConfig::new(*args).unwrap()).await.err().unwrap().to_string();
    assert!(error.contains("--listen") && error.contains(&address), "{error}");
}
