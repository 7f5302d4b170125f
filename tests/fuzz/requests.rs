//! Bodies of HTTP requests, from the router down to the engine, which here takes nothing: whatever is wrong must have been
//! found before.
use std::sync::Arc;

use afd_common::proto::v1;
use afd_common::telemetry::Metrics;
use afd_tests::fixtures;
use attention_svc::api::validate::{ModelLimits, SamplingDefaults};
use attention_svc::api::{
    self, Api, ApiLimits, ApiParts, Engine, FfnRanks, Readiness, RequestTracing, ServedBy, ServedModel,
};
use attention_svc::membership::peers::{PeerSettings, Peers};
use attention_svc::request::{SequenceError, SequenceId, SequenceRequest};
use attention_svc::text::{Text, TokenizerFile};
use axum::Router;
use axum::body::{Body, to_bytes};
use serde_json::{Value, json};
use tokio::sync::watch;
use tower::ServiceExt;

use crate::driver::fuzz;

const VOCAB_SIZE: u32 = 832;
const MAX_MODEL_LEN: u32 = 512;

/// Takes nothing, but looks at everything.
struct Full;

impl Engine for Full {
    fn submit(&self, request: SequenceRequest) -> Result<SequenceId, SequenceError> {
        assert!(!request.prompt.is_empty() && request.prompt.iter().all(|id| *id < VOCAB_SIZE));
        let whole = request.prompt.len() as u64 + u64::from(request.stop.max_tokens);
        assert!(whole <= u64::from(MAX_MODEL_LEN), "{whole} tokens");
        assert!(request.stop.min_tokens <= request.stop.max_tokens);
        Err(SequenceError::QueueFull { waiting: 1 })
    }

    fn abort(&self, _: SequenceId) {}
}

fn router() -> anyhow::Result<Router> {
    let limits = ModelLimits {
        vocab_size: VOCAB_SIZE,
        max_model_len: MAX_MODEL_LEN,
        eos_token_ids: vec![764],
        defaults: SamplingDefaults::default(),
    };
    let api = Api::new(ApiParts {
        engine: Arc::new(Full),
        by: ServedBy::default(),
        model: ServedModel { name: "tiny".into(), limits, identity: v1::ModelIdentity::default() },
        text: Text::load(&fixtures::checkpoint("tiny-llama"), TokenizerFile::Required)?,
        limits: ApiLimits::default(),
        readiness: watch::channel(Readiness::Ready).1,
        ffn_peers: Arc::new(FfnRanks::default),
        peers: Arc::new(Peers::new(PeerSettings::default())),
        metrics: Metrics::new(),
        tracing: RequestTracing::default(),
    })?;
    Ok(api::router(api, tonic::service::Routes::default(), Router::new())?)
}

const PATHS: [&str; 4] = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"];

#[test]
fn a_body_is_answered_and_never_with_a_mistake_of_ours() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let router = runtime.block_on(async { router() })?;
    let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi \u{1f600}", "name": "a"}]);
    let everything = json!({"model": "tiny", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3,
        "min_p": 0.1, "n": 2, "stop": ["a", "b"], "seed": 7, "logit_bias": {"5": -3.5}, "stream": true,
        "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5, "min_tokens": 1, "ignore_eos": true,
        "stop_token_ids": [4], "stream_options": {"include_usage": true}, "prompt_logprobs": 2});
    let with = |more: Value| {
        let mut body = everything.clone();
        if let (Some(body), Value::Object(more)) = (body.as_object_mut(), more) {
            body.extend(more);
        }
        body.to_string()
    };
    // The first byte chooses the path.
    let seeds = [
        ("0", with(json!({"prompt": "Hello there", "logprobs": 2, "echo": true}))),
        ("0", with(json!({"prompt": [[5, 6], [7]]}))),
        ("0", json!({"prompt": ["a", "b"]}).to_string()),
        ("1", with(json!({"messages": messages, "logprobs": true, "top_logprobs": 2}))),
        (
            "1",
            json!({"messages": messages, "max_completion_tokens": 3, "chat_template_kwargs": {"x": [1]}})
                .to_string(),
        ),
        ("2", json!({"prompt": "a", "add_special_tokens": false}).to_string()),
        ("2", json!({"messages": messages}).to_string()),
        ("3", json!({"tokens": [5, 6, 7]}).to_string()),
    ];
    let seeds = seeds.into_iter().map(|(path, body)| [path, &body].concat().into_bytes()).collect();
    let words = [
        "{\"a\":",
        "[",
        "]",
        "}",
        "\"prompt\":",
        "\"messages\":",
        "null",
        "1e308",
        "-1",
        "18446744073709551616",
        "\\ud800",
        "\u{0}",
    ];
    fuzz("body", seeds, &words, |input| {
        let (first, body) = input.split_first().map_or((0, &input[..0]), |(first, body)| (*first, body));
        let path = PATHS[usize::from(first) % PATHS.len()];
        let request = axum::http::Request::post(path).body(Body::from(body.to_vec())).expect("a request");
        let (status, answer) = runtime.block_on(async {
            let answer = router.clone().oneshot(request).await.expect("routers do not fail");
            let status = answer.status().as_u16();
            (status, to_bytes(answer.into_body(), 16 << 20).await.expect("a body"))
        });
        let answer: Value = serde_json::from_slice(&answer).expect("every answer is JSON");
        assert!(matches!(status, 200 | 400 | 404 | 429), "{status}: {answer}");
        if status == 200 {
            return format!("{path} 200");
        }
        let message = answer["error"]["message"].as_str().expect("every refusal says why");
        // Values of the caller's in it would make everything look new.
        format!(
            "{path} {status} {} {}",
            answer["error"]["param"],
            message.split(['`', '"', ',']).next().unwrap_or("")
        )
    })
}
