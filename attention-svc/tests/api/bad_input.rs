//! Bad input: one row each, on one server that must live on.
use std::time::Duration;

use afd_common::net::{BodyTimes, Options};
use serde_json::{Value, json};

use super::fake::{MAX_MODEL_LEN, Server, VOCAB_SIZE};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// `Err(param)` is a 400 that names the field; `Ok` a 200.
type Row = (&'static str, Value, Result<(), &'static str>);

async fn check(server: &Server, path: &str, base: Value, rows: Vec<Row>) {
    for (what, change, expected) in rows {
        let mut body = base.clone();
        body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let (status, answer) = server.post(path, &body).await;
        match expected {
            Ok(()) => assert_eq!(status, 200, "{what}: {answer}"),
            Err(param) => {
                assert_eq!(status, 400, "{what}: {answer}");
                let error = &answer["error"];
                assert_eq!(error["param"], param, "{what}: {answer}");
                assert_eq!(error["type"], "invalid_request_error", "{what}");
                assert!(error["message"].as_str().unwrap().contains(param), "{what}: {answer}");
                assert!(error["code"].is_string(), "{what}");
            }
        }
        let (status, answer) = server.post(COMPLETIONS, &json!({"prompt": "alive?", "max_tokens": 1})).await;
        assert_eq!(status, 200, "after {what}: {answer}");
    }
}

#[tokio::test]
async fn a_prompt_whose_length_says_that_it_is_too_long_is_not_tokenized() {
    let server = Server::start("tiny-llama").await;
    let (long, short) = ("so long a text ".repeat(400_000), "so long a text ".repeat(200));
    for (text, at_least) in [(long, true), (short, false)] {
        let chat = json!({"messages": [{"role": "user", "content": text}]});
        for (path, body) in [(COMPLETIONS, json!({"prompt": text})), (CHAT, chat)] {
            let (status, answer) = server.post(path, &body).await;
            let message = answer["error"]["message"].as_str().unwrap();
            assert_eq!((status, message.contains("is too long: at least ")), (400, at_least), "{message}");
            assert!(message.contains("tokens, at most 511 (the model's length is 512"), "{message}");
        }
    }
}

#[tokio::test]
async fn every_bad_field_of_a_completion_is_named() {
    let server = Server::start("tiny-llama").await;
    let long: Vec<u32> = vec![5; MAX_MODEL_LEN as usize];
    let ids: Vec<u32> = vec![5; 100];
    let room = MAX_MODEL_LEN - 100;
    let rows: Vec<Row> = vec![
        ("no prompt", json!({"prompt": null}), Err("prompt")),
        ("empty text", json!({"prompt": ""}), Err("prompt")),
        ("no prompts", json!({"prompt": []}), Err("prompt")),
        ("an empty one among prompts", json!({"prompt": ["a", ""]}), Err("prompt")),
        ("empty ids", json!({"prompt": [[]]}), Err("prompt")),
        ("mixed prompts", json!({"prompt": ["a", [1]]}), Err("prompt")),
        ("a number", json!({"prompt": 7}), Err("prompt")),
        ("whitespace", json!({"prompt": " \n\t "}), Ok(())),
        ("the last id", json!({"prompt": [VOCAB_SIZE - 1, 5]}), Ok(())),
        ("an id out of the vocabulary", json!({"prompt": [1, VOCAB_SIZE]}), Err("prompt")),
        ("a negative id", json!({"prompt": [1, -1]}), Err("prompt")),
        ("an id that is no whole number", json!({"prompt": [1, 2.5]}), Err("prompt")),
        ("a prompt of the model's length", json!({"prompt": long}), Err("prompt")),
        ("a prompt one shorter", json!({"prompt": long[1..], "max_tokens": 1}), Ok(())),
        ("300 prompts", json!({"prompt": vec!["a"; 300]}), Err("prompt")),
        ("two beginnings of text", json!({"prompt": "<|begin_of_text|><|begin_of_text|>a"}), Ok(())),
        ("two beginnings of text, as ids", json!({"prompt": [763, 763, 5]}), Ok(())),
        ("max_tokens 0", json!({"max_tokens": 0}), Err("max_tokens")),
        ("max_tokens -1", json!({"max_tokens": -1}), Err("max_tokens")),
        ("max_tokens 1.5", json!({"max_tokens": 1.5}), Err("max_tokens")),
        ("huge max_tokens", json!({"max_tokens": 1_000_000_000_000u64}), Err("max_tokens")),
        ("room - 1", json!({"prompt": ids, "max_tokens": room - 1}), Ok(())),
        ("room", json!({"prompt": ids, "max_tokens": room}), Ok(())),
        ("room + 1", json!({"prompt": ids, "max_tokens": room + 1}), Err("max_tokens")),
        ("min_tokens above max_tokens", json!({"min_tokens": 5, "max_tokens": 4}), Err("min_tokens")),
        ("temperature -1", json!({"temperature": -1}), Err("temperature")),
        ("temperature 1e-9", json!({"temperature": 1e-9}), Ok(())),
        ("temperature 101", json!({"temperature": 101}), Err("temperature")),
        ("temperature as text", json!({"temperature": "0"}), Err("temperature")),
        ("temperature true", json!({"temperature": true}), Err("temperature")),
        ("top_p 0", json!({"top_p": 0}), Err("top_p")),
        ("top_p 1.5", json!({"top_p": 1.5}), Err("top_p")),
        ("top_p 1e-60", json!({"top_p": 1e-60}), Ok(())),
        ("top_k -1", json!({"top_k": -1}), Ok(())),
        ("top_k 0", json!({"top_k": 0}), Ok(())),
        ("top_k -2", json!({"top_k": -2}), Err("top_k")),
        ("top_k V", json!({"top_k": VOCAB_SIZE}), Ok(())),
        ("top_k V+1", json!({"top_k": VOCAB_SIZE + 1}), Err("top_k")),
        ("top_k 2.5", json!({"top_k": 2.5}), Err("top_k")),
        ("min_p 1.1", json!({"min_p": 1.1}), Err("min_p")),
        ("repetition_penalty 0", json!({"repetition_penalty": 0}), Err("repetition_penalty")),
        ("presence_penalty 3", json!({"presence_penalty": 3}), Err("presence_penalty")),
        ("frequency_penalty -3", json!({"frequency_penalty": -3}), Err("frequency_penalty")),
        ("n 0", json!({"n": 0}), Err("n")),
        ("n 1000", json!({"n": 1000}), Err("n")),
        ("stop empty", json!({"stop": ""}), Err("stop")),
        ("stop with an empty one", json!({"stop": ["a", ""]}), Err("stop")),
        ("1,000 stops", json!({"stop": vec!["a"; 1000]}), Err("stop")),
        ("a long stop", json!({"stop": "a".repeat(5000)}), Err("stop")),
        ("stop 5", json!({"stop": 5}), Err("stop")),
        ("stop token out of the vocabulary", json!({"stop_token_ids": [VOCAB_SIZE]}), Err("stop_token_ids")),
        ("seed -1", json!({"seed": -1}), Err("seed")),
        ("seed 2^63 - 1", json!({"seed": i64::MAX}), Ok(())),
        ("seed 2^63", json!({"seed": 1u64 << 63}), Err("seed")),
        ("seed 1e30", json!({"seed": 1e30}), Err("seed")),
        ("logit_bias out of the vocabulary", json!({"logit_bias": {"832": 1}}), Err("logit_bias")),
        ("logit_bias by name", json!({"logit_bias": {"a": 1}}), Err("logit_bias")),
        ("logit_bias 101", json!({"logit_bias": {"5": 101}}), Err("logit_bias")),
        ("logit_bias as list", json!({"logit_bias": [1]}), Err("logit_bias")),
        ("logprobs 21", json!({"logprobs": 21}), Err("logprobs")),
        ("logprobs true", json!({"logprobs": true}), Err("logprobs")),
        ("prompt_logprobs -1", json!({"prompt_logprobs": -1}), Err("prompt_logprobs")),
        ("stream as text", json!({"stream": "yes"}), Err("stream")),
        ("stream_options alone", json!({"stream_options": {}}), Err("stream_options")),
        (
            "an unknown stream option",
            json!({"stream": true, "stream_options": {"x": 1}}),
            Err("stream_options.x"),
        ),
        ("best_of 2", json!({"best_of": 2}), Err("best_of")),
        ("suffix", json!({"suffix": "x"}), Err("suffix")),
        ("response_format", json!({"response_format": {"type": "json_object"}}), Err("response_format")),
        ("an unknown field", json!({"temprature": 1}), Err("temprature")),
        ("model 5", json!({"model": 5}), Err("model")),
        (
            "harmless fields",
            json!({"user": "u", "best_of": 1, "suffix": null, "response_format": {"type": "text"}, "store": true}),
            Ok(()),
        ),
        ("nulls", json!({"temperature": null, "stop": null, "logit_bias": null, "n": null}), Ok(())),
    ];
    check(&server, COMPLETIONS, json!({"model": "tiny", "prompt": "Hello there", "max_tokens": 4}), rows)
        .await;
}

#[tokio::test]
async fn every_bad_field_of_a_chat_is_named() {
    let server = Server::start("tiny-llama").await;
    let message = |message: Value| json!({"messages": [message]});
    let rows: Vec<Row> = vec![
        ("no messages", json!({"messages": null}), Err("messages")),
        ("empty messages", json!({"messages": []}), Err("messages")),
        ("messages as text", json!({"messages": "hi"}), Err("messages")),
        ("a message as text", json!({"messages": ["hi"]}), Err("messages[0]")),
        ("no role", message(json!({"content": "a"})), Err("messages[0].role")),
        ("unknown role", message(json!({"role": "wizard", "content": "a"})), Err("messages[0].role")),
        ("tool role", message(json!({"role": "tool", "content": "a"})), Err("messages[0].role")),
        ("null content", message(json!({"role": "user", "content": null})), Err("messages[0].content")),
        ("no content", message(json!({"role": "user"})), Err("messages[0].content")),
        ("content 5", message(json!({"role": "user", "content": 5})), Err("messages[0].content")),
        ("empty parts", message(json!({"role": "user", "content": []})), Err("messages[0].content")),
        (
            "an image",
            message(json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})),
            Err("messages[0].content[0]"),
        ),
        ("parts", message(json!({"role": "user", "content": [{"type": "text", "text": "a"}]})), Ok(())),
        (
            "an unknown message field",
            message(json!({"role": "user", "content": "a", "x": 1})),
            Err("messages[0].x"),
        ),
        ("empty content", message(json!({"role": "user", "content": ""})), Ok(())),
        ("developer", message(json!({"role": "developer", "content": "a"})), Ok(())),
        ("tools", json!({"tools": [{"type": "function"}]}), Err("tools")),
        ("no tools", json!({"tools": [], "tool_choice": "none"}), Ok(())),
        ("top_logprobs without logprobs", json!({"top_logprobs": 2}), Err("top_logprobs")),
        ("top_logprobs 21", json!({"logprobs": true, "top_logprobs": 21}), Err("top_logprobs")),
        ("max_completion_tokens 0", json!({"max_completion_tokens": 0}), Err("max_completion_tokens")),
        ("two limits", json!({"max_completion_tokens": 3, "max_tokens": 4}), Err("max_tokens")),
        ("reasoning", json!({"reasoning_effort": "high"}), Err("reasoning_effort")),
        ("n 1000", json!({"n": 1000}), Err("n")),
    ];
    let base = json!({"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]});
    check(&server, CHAT, base, rows).await;
}

#[tokio::test]
async fn a_template_refuses_in_its_own_words() {
    let server = Server::start("tiny-mixtral").await;
    let body = json!({"messages": [{"role": "system", "content": "a"}]});
    let (status, answer) = server.post(CHAT, &body).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("messages")), "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap().contains("Conversation roles must alternate"));
}

#[tokio::test]
async fn bodies_that_are_no_requests_are_refused() {
    let server = Server::start("tiny-llama").await;
    let cases: Vec<(Vec<u8>, Option<&str>)> = vec![
        (b"".to_vec(), None),
        (b"{".to_vec(), None),
        (b"[]".to_vec(), None),
        (b"{\"prompt\": \"a\", \"temperature\": NaN}".to_vec(), Some("temperature")),
        (b"{\"prompt\": \"a\", \"top_p\": Infinity}".to_vec(), Some("top_p")),
        (b"{\"prompt\": \"\xff\xfe\"}".to_vec(), None),
        (b"{\"prompt\": \"\\ud83d\"}".to_vec(), None),
        (format!("{{\"prompt\": {}", "[".repeat(10_000)).into_bytes(), None),
        (format!("{{\"x\": {}{}}}", "{\"a\":".repeat(10_000), "}".repeat(10_000)).into_bytes(), None),
    ];
    for (body, param) in cases {
        let shown = String::from_utf8_lossy(&body[..body.len().min(60)]).into_owned();
        let (status, answer) = server.post_text(COMPLETIONS, body).await;
        assert_eq!(status, 400, "{shown}: {answer}");
        assert_eq!(answer["error"]["param"], json!(param), "{shown}: {answer}");
    }
    assert_eq!(server.get("/v1/models").await.0, 200);
}

#[tokio::test]
async fn a_body_of_100_mb_is_refused_before_it_is_read() {
    let server = Server::start("tiny-llama").await;
    let body = vec![b' '; 100 << 20];
    let (status, answer) = server.post_text(COMPLETIONS, body.clone()).await;
    assert_eq!((status, &answer["error"]["code"]), (413, &json!("body_too_large")));
    assert_eq!(answer["error"]["param"], "body");
    assert!(answer["error"]["message"].as_str().unwrap().contains("--max-body"), "{answer}");
    // The same without a length announced.
    let chunks = body.chunks(1 << 20).map(|c| Ok::<_, std::io::Error>(c.to_vec())).collect::<Vec<_>>();
    let chunked = reqwest::Body::wrap_stream(futures::stream::iter(chunks));
    assert_eq!(server.post_text(COMPLETIONS, chunked).await.0, 413);
    assert_eq!(server.get("/health").await.0, 200);
}

#[tokio::test]
async fn a_compressed_body_is_told_from_a_broken_one() {
    let server = Server::start("tiny-llama").await;
    let post = |encoding: &str, body: Vec<u8>| {
        server.http.post(server.url(COMPLETIONS)).header("content-encoding", encoding).body(body).send()
    };
    for encoding in ["gzip", "br, gzip"] {
        let answer = post(encoding, b"\x1f\x8b\x08\0".to_vec()).await.unwrap();
        let (status, answer): (u16, Value) = (answer.status().as_u16(), answer.json().await.unwrap());
        assert_eq!((status, &answer["error"]["code"]), (415, &json!("unsupported_content_encoding")));
        assert_eq!(answer["error"]["param"], "content-encoding");
        assert!(answer["error"]["message"].as_str().unwrap().contains(encoding), "{answer}");
    }
    let plain = json!({"prompt": "alive?", "max_tokens": 1}).to_string().into_bytes();
    assert_eq!(post("identity", plain).await.unwrap().status(), 200);
}

#[tokio::test]
async fn what_a_caller_wrote_does_not_come_back_whole() {
    let server = Server::start("tiny-llama").await;
    let long = "x".repeat(1 << 20);
    let with = |field: &str, value: Value| json!({"prompt": "a", field: value});
    for (path, body) in [
        (COMPLETIONS, with(&long, json!(1))),
        (COMPLETIONS, with("model", json!(long))),
        (COMPLETIONS, with("temperature", json!(long))),
        (COMPLETIONS, with("logit_bias", json!({long.clone(): 1}))),
        (COMPLETIONS, with("logit_bias", json!({"5": long}))),
        (COMPLETIONS, with("stream_options", json!({long.clone(): 1}))),
        (CHAT, json!({"messages": [{"role": long, "content": "a"}]})),
        (CHAT, json!({"messages": [{"role": "user", "content": "a", long.clone(): 1}]})),
        ("/v1/no/such/path", json!({})),
    ] {
        let path = if path == COMPLETIONS || path == CHAT {
            path.into()
        } else {
            format!("{path}/{}", &long[..4000])
        };
        let (status, answer) = server.post(&path, &body).await;
        assert!(matches!(status, 400 | 404), "{status}");
        let said = answer.to_string();
        assert!(said.len() < 500 && said.contains("error"), "{} bytes: {:.600}", said.len(), said);
    }
    let (_, answer) = server.post(COMPLETIONS, &with("max_tokens", json!(1_000_000_000_000u64))).await;
    assert!(answer["error"]["message"].as_str().unwrap().ends_with("got 1000000000000"), "{answer}");
}

#[tokio::test]
async fn half_a_body_is_answered_with_408_and_keeps_nobody_waiting() {
    let half = |pause: Duration| {
        let pieces = futures::stream::unfold(0, move |n| async move {
            if n > 0 {
                tokio::time::sleep(pause).await;
            }
            Some((Ok::<_, std::io::Error>(if n == 0 { "{" } else { " " }), n + 1))
        });
        reqwest::Body::wrap_stream(pieces)
    };
    let (short, minute) = (Duration::from_millis(200), Duration::from_secs(60));
    // One that stops, and one that never does: each breaks one limit and is far from the other, however slow this machine is.
    for (pause, idle, whole) in [(10 * minute, short, minute), (short / 20, minute, short)] {
        let body = BodyTimes { idle, whole };
        let server = Server::start_with("tiny-llama", Options { body, ..Options::default() }).await;
        let (status, answer) = server.post_text(COMPLETIONS, half(pause)).await;
        assert_eq!((status, &answer["error"]["code"]), (408, &json!("body_timeout")), "{answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains("200 ms") && message.contains("--body-timeout"), "{message}");
        assert_eq!(server.post(COMPLETIONS, &json!({"prompt": "alive?", "max_tokens": 1})).await.0, 200);
    }
}

#[tokio::test]
async fn unknown_names_are_404() {
    let server = Server::start("tiny-llama").await;
    for (path, extra) in [
        (COMPLETIONS, json!({"prompt": "a"})),
        (CHAT, json!({"messages": [{"role": "user", "content": "a"}]})),
    ] {
        let mut body = extra;
        body["model"] = "gpt-4".into();
        let (status, answer) = server.post(path, &body).await;
        assert_eq!((status, &answer["error"]["code"]), (404, &json!("model_not_found")), "{answer}");
        assert_eq!(answer["error"]["param"], "model");
    }
    let (status, answer) = server.post("/v1/embeddings", &json!({})).await;
    assert_eq!((status, &answer["error"]["code"]), (404, &json!("unknown_url")));
    let (status, answer) = server.get(COMPLETIONS).await;
    assert_eq!((status, &answer["error"]["code"]), (405, &json!("method_not_allowed")));
}

#[tokio::test]
async fn every_route_refuses_with_an_error_object() {
    let server = Server::start("tiny-llama").await;
    for (method, path, expected, code) in [
        ("GET", COMPLETIONS, 405, "method_not_allowed"),
        ("DELETE", CHAT, 405, "method_not_allowed"),
        ("PUT", "/tokenize", 405, "method_not_allowed"),
        ("GET", "/detokenize", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1/models/tiny", 405, "method_not_allowed"),
        ("POST", "/live", 405, "method_not_allowed"),
        ("POST", "/ready", 405, "method_not_allowed"),
        ("POST", "/v2/health/ready", 405, "method_not_allowed"),
        ("POST", "/version", 405, "method_not_allowed"),
        ("PATCH", "/metrics", 405, "method_not_allowed"),
        ("GET", "/", 404, "unknown_url"),
        ("OPTIONS", "/v1/nothing", 404, "unknown_url"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/models/%ff", 400, "invalid_body"),
        ("POST", "/afd.v1.LayerStageService/Describe", 404, "wrong_role"),
        ("GET", "/afd.v1.InferenceService/Generate", 415, "grpc_only"),
        ("POST", "/grpc.health.v1.Health/Check", 415, "grpc_only"),
    ] {
        let answer = server.http.request(method.parse().unwrap(), server.url(path)).send().await.unwrap();
        let (status, text) = (answer.status(), answer.text().await.unwrap());
        let error: Value =
            serde_json::from_str(&text).unwrap_or_else(|_| panic!("{method} {path}: {status} {text:?}"));
        assert_eq!(
            (status.as_u16(), &error["error"]["code"]),
            (expected, &json!(code)),
            "{method} {path}: {error}"
        );
        assert!(error["error"]["message"].is_string() && error["error"]["type"].is_string(), "{error}");
    }
}
