//! Answers in the shapes that OpenAI's clients expect, streaming and not.
use serde_json::{Value, json};

use super::fake::Server;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const MODELS: [&str; 3] = ["tiny-llama", "tiny-mixtral", "tiny-deepseek-v3"];

/// Text of every choice of a stream, and its finish reasons.
fn put_together(events: &[Value], text_of: fn(&Value) -> &Value) -> Vec<(String, Value)> {
    assert_eq!(events.last(), Some(&json!("[DONE]")));
    let mut choices: Vec<(String, Value)> = Vec::new();
    for choice in events.iter().filter_map(|e| e["choices"].as_array()).flatten() {
        let index = choice["index"].as_u64().unwrap() as usize;
        choices.resize(choices.len().max(index + 1), (String::new(), Value::Null));
        assert_eq!(choices[index].1, Value::Null, "text after the finish reason");
        choices[index].0.push_str(text_of(choice).as_str().unwrap_or(""));
        choices[index].1 = choice["finish_reason"].clone();
    }
    choices
}

fn whole(answer: &Value, text_of: fn(&Value) -> &Value) -> Vec<(String, Value)> {
    let choices = answer["choices"].as_array().unwrap();
    choices.iter().map(|c| (text_of(c).as_str().unwrap().to_owned(), c["finish_reason"].clone())).collect()
}

#[tokio::test]
async fn streams_equal_the_unary_answer_byte_for_byte() {
    for model in MODELS {
        let server = Server::start(model).await;
        for prompt in ["👩‍👩‍👧‍👦 naïve 你好，世界 🙂 STOPPING here", "plain words", "ქართული 한국어"]
        {
            for extra in [
                json!({}),
                json!({"stop": ["STOPPING", "words"]}),
                json!({"stop": "🙂"}),
                json!({"stop": ["ING he"], "include_stop_str_in_output": true}),
                json!({"n": 3, "temperature": 1}),
                json!({"max_tokens": 3}),
                json!({"echo": true}),
                json!({"logprobs": 2}),
                json!({"skip_special_tokens": false, "max_tokens": 7}),
                json!({"min_tokens": 60, "stop": "o"}),
            ] {
                let mut body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 80});
                body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
                let (status, answer) = server.post(COMPLETIONS, &body).await;
                assert_eq!(status, 200, "{answer}");
                let events = server.stream(COMPLETIONS, &body).await;
                assert_eq!(
                    put_together(&events, |c| &c["text"]),
                    whole(&answer, |c| &c["text"]),
                    "{model}: {body}"
                );
            }
        }
        let body =
            json!({"messages": [{"role": "user", "content": "你好 🙂 abc"}], "max_tokens": 50, "n": 2});
        let (status, answer) = server.post(CHAT, &body).await;
        assert_eq!(status, 200, "{answer}");
        let events = server.stream(CHAT, &body).await;
        let unary = whole(&answer, |c| &c["message"]["content"]);
        assert_eq!(put_together(&events, |c| &c["delta"]["content"]), unary, "{model}");
    }
}

#[tokio::test]
async fn a_completion_has_openais_shape() {
    let server = Server::start("tiny-llama").await;
    let body =
        json!({"model": "tiny", "prompt": ["One two", "Three"], "n": 2, "max_tokens": 3, "logprobs": 2});
    let (status, answer) = server.post(COMPLETIONS, &body).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!((&answer["object"], &answer["model"]), (&json!("text_completion"), &json!("tiny")));
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
    assert!(answer["created"].as_u64().unwrap() > 1_600_000_000);
    assert_eq!(answer["system_fingerprint"], "fp_0123456789ab");
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.iter().map(|c| c["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3]);
    let logprobs = &choices[0]["logprobs"];
    for field in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[field].as_array().unwrap().len(), 3, "{field}: {logprobs}");
    }
    assert!(logprobs["top_logprobs"][0].as_object().unwrap().len() >= 2);
    let prompts = server.post("/tokenize", &json!({"prompt": "One two"})).await.1["count"].as_u64().unwrap()
        + server.post("/tokenize", &json!({"prompt": "Three"})).await.1["count"].as_u64().unwrap();
    let usage = &answer["usage"];
    assert_eq!(usage["prompt_tokens"].as_u64(), Some(prompts));
    assert_eq!(usage["completion_tokens"], 12);
    assert_eq!(usage["total_tokens"].as_u64(), Some(prompts + 12));
}

#[tokio::test]
async fn echo_shows_the_prompt_and_its_logprobs() {
    let server = Server::start("tiny-llama").await;
    let body = json!({"prompt": [70, 71, 72], "echo": true, "logprobs": 1, "max_tokens": 2, "return_token_ids": true});
    let choice = server.post(COMPLETIONS, &body).await.1["choices"][0].clone();
    let prompt = server.post("/detokenize", &json!({"tokens": [70, 71, 72]})).await.1["prompt"].clone();
    assert!(choice["text"].as_str().unwrap().starts_with(prompt.as_str().unwrap()));
    assert_eq!(choice["logprobs"]["tokens"].as_array().unwrap().len(), 5);
    assert_eq!(choice["logprobs"]["token_logprobs"][0], Value::Null);
    assert_eq!(choice["logprobs"]["token_logprobs"][1], -0.25);
    assert_eq!(choice["token_ids"], json!([70, 71]));
    assert_eq!(choice["prompt_token_ids"], json!([70, 71, 72]));
    assert_eq!(choice.get("prompt_logprobs"), None);
    let body = json!({"prompt": [70, 71], "prompt_logprobs": 2, "max_tokens": 1});
    let known = server.post(COMPLETIONS, &body).await.1["choices"][0]["prompt_logprobs"].clone();
    assert_eq!((&known[0], &known[1]["71"]["rank"]), (&Value::Null, &json!(1)));
}

#[tokio::test]
async fn a_chat_has_openais_shape() {
    let server = Server::start("tiny-llama").await;
    let body = json!({
        "model": "tiny", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "max_completion_tokens": 5, "logprobs": true, "top_logprobs": 2,
    });
    let (status, answer) = server.post(CHAT, &body).await;
    assert_eq!((status, &answer["object"]), (200, &json!("chat.completion")), "{answer}");
    let choice = &answer["choices"][0];
    assert_eq!(
        (&choice["message"]["role"], &choice["finish_reason"]),
        (&json!("assistant"), &json!("length"))
    );
    let content = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 5);
    assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 2);
    assert!(content[0]["token"].is_string() && content[0]["bytes"].is_array());

    let mut streaming = body.clone();
    streaming["stream_options"] = json!({"include_usage": true});
    let events = server.stream(CHAT, &streaming).await;
    assert_eq!(events[0]["object"], "chat.completion.chunk");
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert!(events[..events.len() - 2].iter().all(|e| e["usage"].is_null() && e["id"] == events[0]["id"]));
    let last = &events[events.len() - 2];
    assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &answer["usage"]));
    let tokens: usize =
        events.iter().filter_map(|e| e["choices"][0]["logprobs"]["content"].as_array()).map(Vec::len).sum();
    assert_eq!(tokens, 5);
}

#[tokio::test]
async fn what_is_served_can_be_asked() {
    let server = Server::start("tiny-llama").await;
    let (_, list) = server.get("/v1/models").await;
    assert_eq!((&list["object"], &list["data"][0]["id"]), (&json!("list"), &json!("tiny")));
    assert_eq!(server.get("/v1/models/tiny").await.1["object"], "model");
    assert_eq!(server.get("/v1/models/other").await.0, 404);
    assert!(server.get("/version").await.1["version"].is_string());
    let text = "Hello 🙂";
    let (_, tokens) = server.post("/tokenize", &json!({"prompt": text, "add_special_tokens": false})).await;
    let (_, back) = server.post("/detokenize", &json!({"tokens": tokens["tokens"]})).await;
    assert_eq!(back["prompt"], text);
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}]});
    assert!(server.post("/tokenize", &chat).await.1["count"].as_u64().unwrap() > 5);
    assert_eq!(server.post("/detokenize", &json!({"tokens": [9999]})).await.1["error"]["param"], "tokens");
    assert_eq!(server.post("/tokenize", &json!({})).await.1["error"]["param"], "prompt");
    let metrics = server.get("/metrics").await.1;
    assert!(metrics.as_str().unwrap().contains("vllm:request_success_total") || metrics.is_string());
}

#[tokio::test]
async fn stop_tokens_end_the_text_and_are_not_shown() {
    let server = Server::start("tiny-llama").await;
    let body = json!({"prompt": [70, 71, 72, 73], "stop_token_ids": [72], "max_tokens": 20, "return_token_ids": true});
    let choice = server.post(COMPLETIONS, &body).await.1["choices"][0].clone();
    assert_eq!((&choice["finish_reason"], &choice["token_ids"]), (&json!("stop"), &json!([70, 71, 72])));
    let text = server.post("/detokenize", &json!({"tokens": [70, 71]})).await.1["prompt"].clone();
    assert_eq!(choice["text"], text);
    // The model's own end tokens, unless they are to be ignored.
    let body = json!({"prompt": [70, 764, 72], "max_tokens": 6, "return_token_ids": true});
    assert_eq!(server.post(COMPLETIONS, &body).await.1["choices"][0]["token_ids"], json!([70, 764]));
    let mut ignoring = body.clone();
    ignoring["ignore_eos"] = true.into();
    let choice = server.post(COMPLETIONS, &ignoring).await.1["choices"][0].clone();
    assert_eq!(
        (&choice["finish_reason"], choice["token_ids"].as_array().unwrap().len()),
        (&json!("length"), 6)
    );
}
