//! The gRPC face.
use std::time::Duration;

use afd_common::proto::v1;
use afd_common::proto::v1::generate_request::Prompt;
use afd_common::proto::v1::inference_service_client::InferenceServiceClient;
use tonic::transport::Channel;
use tonic::{Code, Request};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt;

use super::fake::{Script, Server, VOCAB_SIZE};
use attention_svc::api::Readiness;

async fn channel(server: &Server) -> Channel {
    Channel::from_shared(server.url("")).unwrap().connect().await.unwrap()
}

async fn client(server: &Server) -> InferenceServiceClient<Channel> {
    InferenceServiceClient::new(channel(server).await)
}

fn text(prompt: &str, max_tokens: u32) -> v1::GenerateRequest {
    v1::GenerateRequest {
        prompt: Some(Prompt::Text(prompt.into())),
        stop: Some(v1::StopConditions { max_tokens: Some(max_tokens), ..Default::default() }),
        ..Default::default()
    }
}

async fn collect(
    client: &mut InferenceServiceClient<Channel>,
    request: v1::GenerateRequest,
) -> Result<Vec<v1::GenerateResponse>, tonic::Status> {
    let mut stream = client.generate(request).await?.into_inner();
    let mut responses = Vec::new();
    while let Some(response) = stream.message().await? {
        responses.push(response);
    }
    Ok(responses)
}

#[tokio::test]
async fn both_faces_say_the_same() {
    let server = Server::start("tiny-llama").await;
    let mut client = client(&server).await;
    let prompt = "naïve 你好 🙂 words";
    let mut request = text(prompt, 30);
    request.logprobs = Some(2);
    request.prompt_logprobs = Some(1);
    let responses = collect(&mut client, request).await.unwrap();
    let said: String = responses.iter().map(|r| r.text.as_str()).collect();
    let body = serde_json::json!({"prompt": prompt, "max_tokens": 30});
    let answer = server.post("/v1/completions", &body).await.1;
    assert_eq!(answer["choices"][0]["text"], said);
    let last = responses.last().unwrap();
    assert_eq!(last.finish_reason(), v1::FinishReason::Length);
    assert_eq!(last.usage.unwrap().completion_tokens, 30);
    assert_eq!(responses.iter().map(|r| r.token_ids.len()).sum::<usize>(), 30);
    assert!(responses.iter().all(|r| r.token_ids.len() == r.logprobs.len()));
    assert_eq!(responses[0].prompt_logprobs.len() as u32, last.usage.unwrap().prompt_tokens);
    assert_eq!(responses[0].prompt_logprobs[0].chosen, None);
}

#[tokio::test]
async fn bad_fields_are_named_in_the_details() {
    let server = Server::start("tiny-llama").await;
    let mut client = client(&server).await;
    let sampling =
        |sampling: v1::SamplingParams| v1::GenerateRequest { sampling: Some(sampling), ..text("a", 1) };
    let stop = |stop: v1::StopConditions| v1::GenerateRequest { stop: Some(stop), ..text("a", 1) };
    let rows = [
        (
            "sampling.temperature",
            sampling(v1::SamplingParams { temperature: Some(f32::NAN), ..Default::default() }),
        ),
        ("sampling.top_p", sampling(v1::SamplingParams { top_p: Some(0.0), ..Default::default() })),
        ("sampling.top_k", sampling(v1::SamplingParams { top_k: Some(-2), ..Default::default() })),
        (
            "sampling.logit_bias",
            sampling(v1::SamplingParams { logit_bias: [(VOCAB_SIZE, 1.0)].into(), ..Default::default() }),
        ),
        ("stop.max_tokens", stop(v1::StopConditions { max_tokens: Some(0), ..Default::default() })),
        ("stop.max_tokens", stop(v1::StopConditions { max_tokens: Some(u32::MAX), ..Default::default() })),
        ("stop.stop", stop(v1::StopConditions { stop: vec![String::new()], ..Default::default() })),
        ("n", v1::GenerateRequest { n: Some(0), ..text("a", 1) }),
        ("logprobs", v1::GenerateRequest { logprobs: Some(21), ..text("a", 1) }),
        ("request_id", v1::GenerateRequest { request_id: "a b".into(), ..text("a", 1) }),
        ("prompt", v1::GenerateRequest { prompt: None, ..text("a", 1) }),
        ("text", text("", 1)),
        (
            "token_ids",
            v1::GenerateRequest {
                prompt: Some(Prompt::TokenIds(v1::TokenIds { ids: vec![] })),
                ..text("a", 1)
            },
        ),
    ];
    for (field, request) in rows {
        let status = collect(&mut client, request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{field}: {status:?}");
        let details = status.get_details_bad_request().expect(field);
        assert_eq!(details.field_violations[0].field, field);
        assert!(status.message().contains(field), "{status:?}");
    }
    let unknown = v1::GenerateRequest { model: "gpt-4".into(), ..text("a", 1) };
    assert_eq!(collect(&mut client, unknown).await.unwrap_err().code(), Code::NotFound);
    assert!(collect(&mut client, text("alive?", 1)).await.is_ok());
}

#[tokio::test]
async fn a_failure_after_tokens_is_a_status_of_its_own() {
    let server = Server::start("tiny-llama").await;
    let mut client = client(&server).await;
    server.engine.script(Script { fail_after: Some((2, "shard 0/1 is gone".into())), ..Script::default() });
    let mut stream = client.generate(text("one two three", 9)).await.unwrap().into_inner();
    let mut tokens = 0;
    let status = loop {
        match stream.message().await {
            Ok(Some(response)) => tokens += response.token_ids.len(),
            Ok(None) => panic!("ended as a success"),
            Err(status) => break status,
        }
    };
    assert_eq!((tokens, status.code(), status.message()), (2, Code::Unavailable, "shard 0/1 is gone"));
    assert!(status.get_details_retry_info().is_some());
}

#[tokio::test]
async fn abort_ends_a_request_by_its_name() {
    let server = Server::start("tiny-llama").await;
    server.engine.script(Script { pause: Duration::from_millis(5), ..Script::default() });
    let mut client = client(&server).await;
    let request = v1::GenerateRequest { request_id: "mine".into(), ..text("a b", 400) };
    let mut stream = client.clone().generate(request.clone()).await.unwrap().into_inner();
    stream.message().await.unwrap();
    let twin = collect(&mut client, request).await.unwrap_err();
    assert_eq!(twin.code(), Code::AlreadyExists);
    let abort = v1::AbortRequest { request_id: "mine".into() };
    assert!(client.abort(abort.clone()).await.unwrap().into_inner().aborted);
    let mut last = v1::GenerateResponse::default();
    while let Some(response) = stream.message().await.unwrap() {
        last = response;
    }
    assert_eq!(last.finish_reason(), v1::FinishReason::Cancelled);
    drop(stream);
    server.engine.idle().await;
    assert!(!client.abort(abort).await.unwrap().into_inner().aborted);
}

#[tokio::test]
async fn a_deadline_of_a_millisecond_and_a_dropped_stream_leave_nothing_running() {
    let server = Server::start("tiny-llama").await;
    server.engine.script(Script { pause: Duration::from_millis(5), ..Script::default() });
    let mut client = client(&server).await;
    let mut request = Request::new(text("a b", 400));
    request.set_timeout(Duration::from_millis(1));
    let outcome = match client.generate(request).await {
        Ok(stream) => stream.into_inner().message().await.map(|_| ()),
        Err(status) => Err(status),
    };
    assert!(matches!(outcome.unwrap_err().code(), Code::DeadlineExceeded | Code::Cancelled));
    server.engine.idle().await;
    let mut stream = client.generate(text("a b", 400)).await.unwrap().into_inner();
    stream.message().await.unwrap();
    drop(stream);
    server.engine.idle().await;
}

#[tokio::test]
async fn health_tells_live_from_ready() {
    let server = Server::start("tiny-llama").await;
    let mut health = HealthClient::new(channel(&server).await);
    let mut ask = async |service: &str| {
        let request = HealthCheckRequest { service: service.into() };
        health.check(request).await.map(|r| r.into_inner().status())
    };
    for service in ["", "ready", "live", "afd.v1.InferenceService"] {
        assert_eq!(ask(service).await.unwrap(), ServingStatus::Serving);
    }
    server.readiness.send_replace(Readiness::Waiting("FFN".into()));
    assert_eq!(ask("live").await.unwrap(), ServingStatus::Serving);
    for service in ["", "ready", "afd.v1.InferenceService"] {
        assert_eq!(ask(service).await.unwrap(), ServingStatus::NotServing);
    }
    assert_eq!(ask("other").await.unwrap_err().code(), Code::NotFound);
    let request = HealthCheckRequest { service: "ready".into() };
    let mut watched = health.watch(request).await.unwrap().into_inner();
    assert_eq!(watched.message().await.unwrap().unwrap().status(), ServingStatus::NotServing);
    server.readiness.send_replace(Readiness::Ready);
    assert_eq!(watched.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
}

#[tokio::test]
async fn tokens_and_the_model_can_be_asked_and_unknown_methods_answer_in_grpc() {
    let server = Server::start("tiny-llama").await;
    let mut client = client(&server).await;
    let request = v1::TokenizeRequest { text: "Hello 🙂".into(), add_special_tokens: Some(false) };
    let ids = client.tokenize(request).await.unwrap().into_inner().ids;
    let back = client.detokenize(v1::DetokenizeRequest { ids, skip_special_tokens: None }).await.unwrap();
    assert_eq!(back.into_inner().text, "Hello 🙂");
    let info = client.get_model_info(v1::GetModelInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.name.as_str(), info.vocab_size), ("tiny", VOCAB_SIZE));
    let mut nobody = tonic::client::Grpc::new(channel(&server).await);
    nobody.ready().await.unwrap();
    let codec = tonic_prost::ProstCodec::<v1::AbortRequest, v1::AbortResponse>::default();
    let path = http::uri::PathAndQuery::from_static("/afd.v1.NobodyService/Call");
    let status = nobody.unary(Request::new(v1::AbortRequest::default()), path, codec).await.unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented);
}

#[tokio::test]
async fn a_message_beyond_the_limit_names_the_option() {
    let server = Server::start("tiny-llama").await;
    let mut client = client(&server).await;
    let request = v1::TokenizeRequest { text: "a".repeat(9 << 20), ..Default::default() };
    let status = client.tokenize(request).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    assert!(status.message().contains("--max-body"), "{status:?}");
}

#[tokio::test]
async fn a_call_that_ffn_ranks_serve_is_told_whom_it_reached() {
    let server = Server::start("tiny-llama").await;
    let channel = channel(&server).await;
    let mut client = v1::ffn_control_service_client::FfnControlServiceClient::new(channel);
    let status = client.join(v1::JoinRequest::default()).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
    assert!(status.message().contains("attention-svc") && status.message().contains("--ffn"), "{status:?}");
}
