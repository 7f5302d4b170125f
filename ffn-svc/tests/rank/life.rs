//! Leases, drains, deaths, and what health and metrics say meanwhile.
use std::time::Duration;

use afd_common::config::units::Millis;
use afd_common::frame::FrameHeader;
use afd_common::ids::LayerIdx;
use afd_common::net::{Access, Listener};
use afd_common::proto::v1;
use afd_common::proto::v1::steps_response::Message;
use afd_common::telemetry::{Metrics, SpanSink};
use ffn_svc::config::ServeOptions;
use ffn_svc::engine::{self, EngineMetrics, EngineOptions, StageModel, StageSpec};
use ffn_svc::model::Side;
use ffn_svc::serve::{ServeError, Server};
use ffn_svc::service::Health;
use ffn_svc::session::handshake::Offer;
use ffn_svc::session::sessions::Settings;
use tch::{Device, Kind, Tensor};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::support::{Attention, Golden, Rank, assert_close, options};

async fn http(rank: &Rank, method: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(rank.address).await.unwrap();
    let request =
        format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn http_and_health_answer_on_the_same_port() {
    let rank = Rank::start(options("tiny-mixtral")).await;
    for (path, part) in [
        ("/health", "\"status\":\"ready\""),
        ("/live", "ready"),
        ("/version", "\"protocol\":\"1."),
        ("/metrics", "afd_ffn_sessions 0"),
    ] {
        let answer = http(&rank, "GET", path).await;
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains(part), "{path}: {answer}");
    }
    let refused = http(&rank, "POST", "/v1/chat/completions").await;
    assert!(refused.starts_with("HTTP/1.1 400") && refused.contains("attention-svc"), "{refused}");
    assert!(http(&rank, "GET", "/nothing").await.starts_with("HTTP/1.1 404"));
    let mut health = HealthClient::new(rank.channel().await);
    for service in ["", "live", "ready", "afd.v1.FfnControlService", "afd.v1.LayerStageService"] {
        let status = health.check(HealthCheckRequest { service: service.into() }).await.unwrap().into_inner();
        assert_eq!(status.status(), ServingStatus::Serving, "{service}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn silence_beyond_the_lease_ends_a_session_and_its_links() {
    let rank = Rank::start(ServeOptions {
        lease_ms: Some(Millis(Duration::from_millis(200))),
        ..options("tiny-llama")
    })
    .await;
    let mut silent = Attention::join(&rank, 0).await;
    let mut link = silent.open(v1::LinkKind::Tcp).await;
    let end = link.end().await;
    assert!(end.to_string().contains("its lease"), "{end}");
    let status = silent.refusal().await;
    assert_eq!(status.code(), Code::Aborted);
    assert!(status.message().contains("200 ms"), "{}", status.message());
    let mut request = rank.join_request(0).await;
    request.identity.as_mut().unwrap().incarnation = 9;
    Attention::join_as(&rank, request).await.expect("the place is free");
}

#[tokio::test(flavor = "multi_thread")]
async fn heartbeats_keep_a_lease_and_tell_how_far_the_rank_is() {
    let rank = Rank::start(ServeOptions {
        lease_ms: Some(Millis(Duration::from_millis(300))),
        ..options("tiny-llama")
    })
    .await;
    let golden = Golden::load("tiny-llama");
    let mut attention = Attention::join(&rank, 0).await;
    let mut link = attention.open(v1::LinkKind::Tcp).await;
    let hop = FrameHeader::key(4, 2, 0);
    link.dispatch(hop, &golden.get("layers.2.ffn_in"));
    assert_close(&link.combine(hop).await, &golden.get("layers.2.ffn_out"), "layer 2");
    // Twelve beats of a third of a lease: four leases.
    for _ in 0..12 {
        let beat = |message| match message {
            Message::Heartbeat(beat) => Some(beat),
            _ => None,
        };
        let heard = attention.hear(beat).await.unwrap().unwrap();
        attention.say(v1::steps_request::Message::Heartbeat(v1::Heartbeat::default())).await;
        if heard.last_step_id != 0 {
            assert_eq!((heard.last_step_id, heard.last_layer), (4, 2));
        }
    }
    let hop = FrameHeader::key(5, 2, 0);
    link.dispatch(hop, &golden.get("layers.2.ffn_in"));
    let _ = link.combine(hop).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn draining_tells_every_session_and_ends_well() {
    let mut rank = Rank::start(options("tiny-llama")).await;
    let golden = Golden::load("tiny-llama");
    let mut attention = Attention::join(&rank, 0).await;
    let mut link = attention.open(v1::LinkKind::Tcp).await;
    attention
        .plan(v1::StepPlan {
            step_id: 1,
            padded_tokens: vec![16],
            phase: v1::Phase::Prefill.into(),
            ..Default::default()
        })
        .await;
    let first = FrameHeader::key(1, 0, 0);
    link.dispatch(first, &golden.get("layers.0.ffn_in"));
    let _ = link.combine(first).await;
    rank.ask_to_stop();
    let draining = |message| match message {
        Message::Draining(draining) => Some(draining.remaining_ms),
        _ => None,
    };
    let remaining_ms = attention.hear(draining).await.unwrap().expect("it says so");
    assert!(remaining_ms > 1000, "{remaining_ms}");
    assert!(http(&rank, "GET", "/health").await.contains("draining"));
    assert!(http(&rank, "GET", "/live").await.starts_with("HTTP/1.1 200"));
    let mut newcomer = rank.join_request(1).await;
    newcomer.identity.as_mut().unwrap().rank = 1;
    let refused = Attention::join_as(&rank, newcomer).await.err().unwrap();
    assert_eq!(refused.code(), Code::Unavailable);
    // The step that is under way is served to its end.
    for layer in 1..4 {
        let hop = FrameHeader::key(1, layer, 0);
        link.dispatch(hop, &golden.get(&format!("layers.{layer}.ffn_in")));
        assert_close(&link.combine(hop).await, &golden.get(&format!("layers.{layer}.ffn_out")), "draining");
    }
    assert_eq!(attention.report().await.num_hops, 4);
    rank.ended().await.expect("a drain is no failure");
    assert!(link.end().await.to_string().contains("stopping"));
}

/// A model that does not survive its first row.
struct Mortal;

impl StageModel for Mortal {
    fn spec(&self) -> StageSpec {
        StageSpec::dense(2, 1)
    }

    fn forward(&mut self, _: LayerIdx, _: &Tensor, _: &Side) -> Result<Tensor, String> {
        panic!("out of order")
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_death_of_the_engine_ends_the_rank_with_an_error_and_tells_its_peers() {
    let config = options("tiny-llama").resolve().unwrap();
    let (listener, metrics) = (Listener::bind(config.listen).await.unwrap(), Metrics::new());
    let options = EngineOptions {
        max_rows: 64,
        max_batch_rows: 64,
        metrics: EngineMetrics::new(&metrics).unwrap(),
        inject_delay: Duration::ZERO,
        board: Duration::ZERO,
        routing: Default::default(),
    };
    let settings = Settings {
        identity: v1::Identity::default(),
        offer: Offer {
            model: v1::ModelIdentity { hidden_size: 2, ..Default::default() },
            shard_count: 1,
            link_kinds: vec![v1::LinkKind::Tcp],
            max_stages: 2,
            max_tokens_per_stage: 64,
            features: Vec::new(),
            join_token: None,
        },
        lease: Duration::from_secs(5),
        attach_timeout: Duration::from_secs(5),
        spans: SpanSink::off(),
    };
    let engine = engine::spawn(Mortal, options).unwrap();
    let server = Server::start(listener, engine, settings, &metrics, Health::default(), Access::default())
        .await
        .unwrap();
    let rank = Rank::run(server, metrics, &config);
    let mut attention = Attention::join(&rank, 0).await;
    let mut link = attention.open(v1::LinkKind::Tcp).await;
    link.dispatch(FrameHeader::key(1, 0, 0), &Tensor::ones([1, 2], (Kind::Float, Device::Cpu)));
    let end = link.end().await.to_string();
    assert!(end.contains("died") && end.contains("out of order"), "its link says `{end}`");
    let status = attention.refusal().await;
    assert!(status.message().contains("out of order"), "{status:?}");
    match rank.ended().await {
        Err(ServeError::EngineDied(what)) => assert!(what.contains("out of order"), "{what}"),
        other => panic!("{other:?}"),
    }
}
