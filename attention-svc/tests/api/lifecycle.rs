//! Requests that end otherwise than well: disconnects, deadlines, failures, full queues, shutdown.
use std::time::Duration;

use attention_svc::api::Readiness;
use futures::StreamExt;
use serde_json::json;

use super::fake::{Script, Server, events};

const COMPLETIONS: &str = "/v1/completions";

fn slow() -> Script {
    Script { pause: Duration::from_millis(5), ..Script::default() }
}

#[tokio::test]
async fn a_client_that_goes_away_ends_its_sequences() {
    let server = Server::start("tiny-llama").await;
    server.engine.script(slow());
    for stream in [true, false] {
        let body = json!({"prompt": "a b c", "max_tokens": 400, "n": 3, "stream": stream});
        let request = server.http.post(server.url(COMPLETIONS)).body(body.to_string());
        if stream {
            let mut bytes = request.send().await.unwrap().bytes_stream();
            bytes.next().await.unwrap().unwrap();
            assert_eq!(server.engine.running(), 3);
            drop(bytes);
        } else {
            let _ = tokio::time::timeout(Duration::from_millis(50), request.send()).await;
        }
        server.engine.idle().await;
    }
    assert_eq!(server.engine.aborted.load(std::sync::atomic::Ordering::SeqCst), 6);
    server.engine.script(Script::default());
    assert_eq!(server.post(COMPLETIONS, &json!({"prompt": "a"})).await.0, 200);
}

#[tokio::test]
async fn sequences_of_a_client_that_went_away_are_counted_and_those_of_a_failed_request_are_not() {
    let server = Server::start("tiny-llama").await;
    let fail_after = Some((3, "gone".to_owned()));
    server.engine.script(Script { fail_after, ..Script::default() });
    let body = json!({"prompt": "a b c", "max_tokens": 400, "n": 2});
    assert_eq!(server.post(COMPLETIONS, &body).await.0, 503);
    server.engine.script(Script { max_running: Some(1), ..slow() });
    assert_eq!(server.post(COMPLETIONS, &body).await.0, 429);
    server.engine.idle().await;
    server.engine.script(slow());
    let body = json!({"prompt": "a b c", "max_tokens": 400, "n": 3, "stream": true});
    let mut bytes =
        server.http.post(server.url(COMPLETIONS)).body(body.to_string()).send().await.unwrap().bytes_stream();
    bytes.next().await.unwrap().unwrap();
    drop(bytes);
    server.engine.idle().await;
    let (_, metrics) = server.get("/metrics").await;
    let metrics = metrics.as_str().unwrap();
    for line in [
        "vllm:request_success_total{finished_reason=\"cancelled\"} 3\n",
        "vllm:e2e_request_latency_seconds_count 3\n",
    ] {
        assert!(metrics.contains(line), "{line}{metrics}");
    }
}

#[tokio::test]
async fn a_failure_after_tokens_is_an_error_event_and_never_a_success() {
    let server = Server::start("tiny-llama").await;
    server.engine.script(Script { fail_after: Some((3, "shard 0/1 is gone".into())), ..Script::default() });
    let body = json!({"prompt": "one two three four", "max_tokens": 9, "stream": true});
    let answer = server.http.post(server.url(COMPLETIONS)).body(body.to_string()).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let text = answer.text().await.unwrap();
    assert!(text.contains("event: error\n") && !text.contains("[DONE]"), "{text}");
    let events = events(&text);
    let last = events.last().unwrap();
    assert_eq!(last["error"]["code"], "ffn_unavailable");
    assert!(events.iter().all(|e| e["choices"][0]["finish_reason"].is_null()));
    // Without a stream, and before the first token, it has its HTTP code and a hint.
    for fail_after in [0, 3] {
        server.engine.script(Script { fail_after: Some((fail_after, "gone".into())), ..Script::default() });
        for stream in [fail_after == 0, false] {
            let body = json!({"prompt": "one two three four", "max_tokens": 9, "stream": stream});
            let answer =
                server.http.post(server.url(COMPLETIONS)).body(body.to_string()).send().await.unwrap();
            assert_eq!(
                (answer.status().as_u16(), &answer.headers()["retry-after"]),
                (503, &"1".parse().unwrap())
            );
        }
    }
}

#[tokio::test]
async fn a_stop_text_aborts_the_engine() {
    let server = Server::start("tiny-llama").await;
    server.engine.script(slow());
    let body = json!({"prompt": "one STOPPING here", "stop": "STOPPING", "max_tokens": 400});
    let (status, answer) = server.post(COMPLETIONS, &body).await;
    assert_eq!((status, &answer["choices"][0]["finish_reason"]), (200, &json!("stop")));
    assert_eq!(answer["choices"][0]["text"], "one ");
    assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() < 20);
    server.engine.idle().await;
}

#[tokio::test]
async fn a_stop_text_leaves_usage_right() {
    let server = Server::start("tiny-llama").await;
    server.engine.script(Script { cached_tokens: 2, ..slow() });
    let body = json!({"prompt": "one STOPPING here", "stop": "STOPPING", "max_tokens": 400});
    let (_, answer) = server.post(COMPLETIONS, &body).await;
    let usage = &answer["usage"];
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 2, "{answer}");
    let with_usage = json!({"prompt": "one STOPPING here", "stop": "STOPPING", "max_tokens": 400,
        "stream_options": {"include_usage": true}, "stream": true});
    let events = server.stream(COMPLETIONS, &with_usage).await;
    assert_eq!(&events[events.len() - 2]["usage"], usage, "{events:?}");
    let last_choice = &events[events.len() - 3]["choices"][0];
    assert_eq!(last_choice["finish_reason"], "stop", "{events:?}");
}

#[tokio::test]
async fn an_engine_that_says_no_last_word_is_an_internal_error() {
    let server = Server::start("tiny-llama").await;
    for after in [0, 3] {
        server.engine.script(Script { drop_after: Some(after), ..Script::default() });
        let mut body = json!({"prompt": "one two three four", "max_tokens": 9});
        let (status, answer) = server.post(COMPLETIONS, &body).await;
        assert_eq!((status, &answer["error"]["type"]), (500, &json!("server_error")), "{answer}");
        if after > 0 {
            body["stream"] = true.into();
            let answer =
                server.http.post(server.url(COMPLETIONS)).body(body.to_string()).send().await.unwrap();
            let text = answer.text().await.unwrap();
            assert!(text.contains("event: error\n") && !text.contains("[DONE]"), "{text}");
        }
    }
}

#[tokio::test]
async fn a_full_queue_is_429_with_a_hint_and_leaves_nothing_behind() {
    let server = Server::start("tiny-llama").await;
    server.engine.script(Script { max_running: Some(2), ..slow() });
    let body = json!({"prompt": "a", "n": 5, "max_tokens": 400}).to_string();
    let answer = server.http.post(server.url(COMPLETIONS)).body(body).send().await.unwrap();
    assert_eq!((answer.status().as_u16(), &answer.headers()["retry-after"]), (429, &"1".parse().unwrap()));
    server.engine.idle().await;
}

#[tokio::test]
async fn a_deadline_ends_the_request() {
    let server = Server::start("tiny-llama").await;
    server.engine.script(slow());
    let post = |ms: &str| {
        let body = json!({"prompt": "a", "max_tokens": 400}).to_string();
        server.http.post(server.url(COMPLETIONS)).header("x-request-timeout-ms", ms).body(body).send()
    };
    for ms in ["1", "40"] {
        assert_eq!(post(ms).await.unwrap().status(), 504);
        server.engine.idle().await;
    }
    assert_eq!(post("soon").await.unwrap().status(), 400);
}

#[tokio::test]
async fn live_and_ready_are_kept_apart() {
    let server = Server::start("tiny-llama").await;
    assert_eq!((server.get("/health").await.0, server.get("/live").await.0), (200, 200));
    server.readiness.send_replace(Readiness::Waiting("shard 1/2 has no rank".into()));
    let (status, answer) = server.get("/health").await;
    assert_eq!((status, &answer["reason"]), (503, &json!("shard 1/2 has no rank")));
    assert_eq!(server.get("/live").await.0, 200);
    server.readiness.send_replace(Readiness::Draining);
    let (status, answer) = server.post(COMPLETIONS, &json!({"prompt": "a"})).await;
    assert_eq!((status, &answer["error"]["code"]), (503, &json!("shutting_down")));
    server.readiness.send_replace(Readiness::Dead("panic".into()));
    assert_eq!((server.get("/health").await.0, server.get("/live").await.0), (503, 503));
}

#[tokio::test]
async fn a_client_that_never_reads_harms_nobody() {
    use tokio::io::AsyncWriteExt;
    let server = Server::start("tiny-llama").await;
    let body =
        json!({"prompt": "a b c", "max_tokens": 500, "n": 100, "stream": true, "logprobs": 20}).to_string();
    let mut deaf = tokio::net::TcpStream::connect(server.address).await.unwrap();
    let head = format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    deaf.write_all(head.as_bytes()).await.unwrap();
    deaf.write_all(body.as_bytes()).await.unwrap();
    // Its sequences run to their end all the same, and others are served meanwhile.
    assert_eq!(server.post(COMPLETIONS, &json!({"prompt": "a"})).await.0, 200);
    server.engine.idle().await;
    drop(deaf);
}
