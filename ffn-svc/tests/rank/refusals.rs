//! What is wrong is refused by name, and harms nobody else.
use afd_common::frame::FrameHeader;
use afd_common::proto::v1;
use afd_common::proto::v1::ffn_control_service_client::FfnControlServiceClient;
use afd_common::proto::v1::inference_service_client::InferenceServiceClient;
use afd_common::proto::v1::layer_stage_service_client::LayerStageServiceClient;
use afd_common::proto::v1::membership_service_client::MembershipServiceClient;
use ffn_svc::config::ServeOptions;
use tch::{Device, Kind, Tensor};
use tokio_stream::StreamExt;
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::support::{Attention, Golden, Rank, assert_close, options};

fn ones(rows: i64, columns: i64) -> Tensor {
    Tensor::ones([rows, columns], (Kind::Float, Device::Cpu))
}

fn plan(step_id: u64, tokens: u32) -> v1::StepPlan {
    v1::StepPlan {
        step_id,
        padded_tokens: vec![tokens],
        phase: v1::Phase::Decode.into(),
        ..Default::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_join_that_does_not_fit_is_refused_with_both_values() {
    type Change = fn(&mut v1::JoinRequest);
    let rank = Rank::start(options("tiny-llama")).await;
    let own = rank.describe().await.model.unwrap();
    let cases: [(Change, Code, &str, String); 5] = [
        (
            |r| r.model.as_mut().unwrap().fingerprint = "0".repeat(64),
            Code::FailedPrecondition,
            "model.fingerprint",
            own.fingerprint.clone(),
        ),
        (
            |r| r.model.as_mut().unwrap().hidden_size = 65,
            Code::FailedPrecondition,
            "model.hidden_size",
            "64".into(),
        ),
        (|r| r.shard_count = 2, Code::FailedPrecondition, "shard_count", "1".into()),
        (|r| r.protocol_major = 2, Code::FailedPrecondition, "protocol_major", "1".into()),
        (|r| r.max_stages = 0, Code::InvalidArgument, "max_stages", "0".into()),
    ];
    for (change, code, field, value) in cases {
        let mut request = rank.join_request(0).await;
        change(&mut request);
        let status = Attention::join_as(&rank, request).await.err().expect(field);
        assert_eq!(status.code(), code, "{status:?}");
        assert!(
            status.message().contains(field) && status.message().contains(&value),
            "{}",
            status.message()
        );
        let info = status.get_details_error_info().expect("a typed detail");
        assert_eq!(info.metadata["field"], field);
    }
    Attention::join(&rank, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_rank_twice_is_refused_and_the_same_process_again_is_not() {
    let rank = Rank::start(options("tiny-llama")).await;
    let mut first = Attention::join(&rank, 3).await;
    let mut request = rank.join_request(3).await;
    request.identity.as_mut().unwrap().incarnation = 2;
    let status = Attention::join_as(&rank, request.clone()).await.err().unwrap();
    assert_eq!(status.code(), Code::AlreadyExists);
    let message = status.message();
    assert!(
        message.contains("A3 of `test` is live as incarnation 1") && message.contains("incarnation 2"),
        "{message}"
    );

    let again = Attention::join(&rank, 3).await;
    let replaced = first.refusal().await;
    assert_eq!(replaced.code(), Code::Aborted);
    assert!(replaced.message().contains("newer session"), "{}", replaced.message());
    drop((first, again));
    // Once its stream is gone the place is free for a newer process; the lease would end it at the latest.
    let mut joined = Attention::join_as(&rank, request.clone()).await;
    while joined.is_err() {
        tokio::task::yield_now().await;
        joined = Attention::join_as(&rank, request.clone()).await;
    }
    let late = Attention::join_as(&rank, rank.join_request(3).await).await.err().unwrap();
    assert!(late.message().contains("incarnation 1"), "{}", late.message());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_join_token_is_asked_for() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "sesame\n").unwrap();
    let path = Some(file.path().to_owned());
    let mut request = Rank::start(options("tiny-llama")).await.join_request(0).await;
    let rank = Rank::start(ServeOptions { join_token_file: path, ..options("tiny-llama") }).await;
    let status = Attention::join_as(&rank, request.clone()).await.err().unwrap();
    assert_eq!(status.code(), Code::Unauthenticated);
    request.join_token = "sesame".into();
    Attention::join_as(&rank, request).await.unwrap();
    let mut control = FfnControlServiceClient::new(rank.channel().await);
    let drain = control.drain(v1::DrainRequest { timeout_ms: 1 }).await.unwrap_err();
    assert_eq!(drain.code(), Code::Unauthenticated);

    // What no session guards wants the token too, as everybody presents one.
    let mut stages = LayerStageServiceClient::new(rank.channel().await);
    let status = stages.describe(v1::DescribeRequest {}).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
    let mut request = tonic::Request::new(v1::DescribeRequest {});
    request.metadata_mut().insert("authorization", "Bearer sesame".parse().unwrap());
    assert_eq!(stages.describe(request).await.unwrap().into_inner().max_rows, 64);
}

#[tokio::test(flavor = "multi_thread")]
async fn links_are_granted_as_agreed_and_attached_once() {
    let rank = Rank::start(options("tiny-llama")).await;
    let mut attention = Attention::join(&rank, 0).await;
    for (kind, part) in [(v1::LinkKind::Loopback, "loopback"), (v1::LinkKind::Nccl, "nccl")] {
        let status = attention.grant(kind).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains(part) && status.message().contains("tcp"), "{status:?}");
    }
    let wrong = |credits, max_rows| v1::LinkRequest {
        kind: v1::LinkKind::Tcp.into(),
        credits,
        max_rows,
        ..Default::default()
    };
    let newer = v1::LinkRequest { kind: 17, ..wrong(1, 1) };
    for (link, field) in [
        (wrong(0, 1), "links.credits"),
        (wrong(5, 1), "links.credits"),
        (wrong(1, 65), "links.max_rows"),
        (newer, "`links.kind`: 17 (not known here); agreed were tcp"),
    ] {
        let session_id = attention.joined.session_id.clone();
        let request = v1::OpenLinksRequest { session_id, links: vec![link] };
        let status = attention.control.open_links(request).await.unwrap_err();
        assert!(status.message().contains(field), "{status:?}");
    }
    let nobody = v1::OpenLinksRequest { session_id: "nobody".into(), links: vec![wrong(1, 1)] };
    assert_eq!(attention.control.open_links(nobody).await.unwrap_err().code(), Code::NotFound);

    let grant = attention.grant(v1::LinkKind::Tcp).await.unwrap();
    let wrong_kind = attention.attach(&grant, v1::LinkKind::Inline).await.err().unwrap();
    assert!(wrong_kind.to_string().contains("another kind"), "{wrong_kind}");
    let _link = attention.attach(&grant, v1::LinkKind::Tcp).await.unwrap();
    assert!(attention.attach(&grant, v1::LinkKind::Tcp).await.is_err(), "a grant works once");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_asks_for_more_than_its_part_leaves_room_for_others() {
    let rank = Rank::start(options("tiny-llama")).await;
    let (mut greedy, mut other) = (Attention::join(&rank, 0).await, Attention::join(&rank, 1).await);
    for _ in 0..16 {
        greedy.grant(v1::LinkKind::Tcp).await.unwrap();
    }
    let status = greedy.grant(v1::LinkKind::Tcp).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().contains("16 links of this session"), "{status:?}");
    let _link = other.open(v1::LinkKind::Tcp).await;
    // Joins that nothing comes of are of one host here.
    let mut control = FfnControlServiceClient::new(rank.channel().await);
    for n in 2..66 {
        control.join(rank.join_request(n).await).await.unwrap();
    }
    let status = control.join(rank.join_request(66).await).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().contains("64 sessions of 127.0.0.1"), "{status:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frame_that_cannot_be_right_ends_its_stream_with_a_reason() {
    let rank = Rank::start(options("tiny-llama")).await;
    let mut attention = Attention::join(&rank, 0).await;
    for junk in [&b"junk"[..], &[0; 64], b""] {
        let grant = attention.grant(v1::LinkKind::Inline).await.unwrap();
        let attach = v1::StreamAttach { link_id: grant.link_id, secret: grant.secret };
        let first = v1::StreamStagesRequest { attach: Some(attach), ..Default::default() };
        let second = v1::StreamStagesRequest { attach: None, frame: junk.to_vec().into() };
        let requests = tokio_stream::iter([first, second]).chain(tokio_stream::pending());
        let mut client = LayerStageServiceClient::new(rank.channel().await);
        let mut answers = client.stream_stages(requests).await.unwrap().into_inner();
        let attached = answers.message().await.unwrap().unwrap();
        assert!(attached.frame.is_empty());
        let status = loop {
            match answers.message().await {
                // The farewell of the link.
                Ok(Some(_)) => {}
                Ok(None) => panic!("{junk:?} ends it as if all were well"),
                Err(status) => break status,
            }
        };
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        assert!(status.message().starts_with("frame: "), "{status:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_plan_ends_its_own_session_only() {
    let (rank, golden) = (Rank::start(options("tiny-llama")).await, Golden::load("tiny-llama"));
    let mut good = Attention::join(&rank, 0).await;
    let mut good_link = good.open(v1::LinkKind::Tcp).await;
    for (index, (plans, reason)) in [
        (vec![plan(1, 65)], "PLAN_TOKENS"),
        (vec![plan(5, 1), plan(5, 1)], "PLAN_REPEATED"),
        (vec![plan(5, 1), plan(4, 1)], "PLAN_BACKWARDS"),
        (vec![v1::StepPlan { padded_tokens: vec![1; 3], ..plan(1, 1) }], "PLAN_STAGES"),
    ]
    .into_iter()
    .enumerate()
    {
        let mut bad = Attention::join(&rank, 1 + index as u32).await;
        let mut bad_link = bad.open(v1::LinkKind::Tcp).await;
        for plan in plans {
            bad.plan(plan).await;
        }
        let status: Status = bad.refusal().await;
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        assert_eq!(status.get_details_error_info().unwrap().reason, reason);
        let end = bad_link.end().await;
        assert!(end.to_string().contains("refused"), "{end}");
        let gone = bad.grant(v1::LinkKind::Tcp).await.unwrap_err();
        assert_eq!(gone.code(), Code::NotFound);
    }
    good.plan(plan(1, 16)).await;
    good.plan(v1::StepPlan { revision: 1, ..plan(1, 32) }).await;
    good.say(v1::steps_request::Message::Cancel(v1::CancelStep { step_id: 1 })).await;
    good.plan(plan(900, 32)).await;
    let hop = FrameHeader::key(900, 0, 0);
    good_link.dispatch(hop, &golden.get("layers.0.ffn_in"));
    assert_close(&good_link.combine(hop).await, &golden.get("layers.0.ffn_out"), "the other session");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_hop_is_answered_with_its_fault_and_the_link_lives_on() {
    let (rank, golden) = (Rank::start(options("tiny-mixtral")).await, Golden::load("tiny-mixtral"));
    let mut attention = Attention::join(&rank, 0).await;
    let mut link = attention.open(v1::LinkKind::Tcp).await;
    link.dispatch(FrameHeader::key(1, 4, 0), &ones(1, 64));
    let (code, text) = link.error().await;
    assert_eq!(
        (code, text.as_str()),
        (Code::InvalidArgument, "layer 4 is out of range: the model has 4 layers")
    );
    link.dispatch(FrameHeader::key(1, 0, 0), &ones(1, 63));
    assert_eq!(link.error().await.1, "rows have 63 columns, expected the hidden size 64");
    let hop = FrameHeader::key(1, 1, 0);
    link.dispatch(hop, &golden.get("layers.1.ffn_in"));
    assert_close(&link.combine(hop).await, &golden.get("layers.1.ffn_out"), "after two errors");

    let mut stages = LayerStageServiceClient::new(rank.channel().await);
    let rows = v1::Tensor { dtype: v1::Dtype::F32.into(), shape: vec![1, 64], data: vec![0; 256] };
    let request = |layer, tensor: &v1::Tensor| v1::RunStageRequest {
        layer,
        hidden_states: Some(tensor.clone()),
        side_tensors: Vec::new(),
    };
    let status = stages.run_stage(request(9, &rows)).await.unwrap_err();
    assert!(status.message().contains("layer 9 is out of range"), "{status:?}");
    let bf16 = v1::Tensor { dtype: v1::Dtype::Bf16.into(), data: vec![0; 128], ..rows.clone() };
    let status = stages.run_stage(request(0, &bf16)).await.unwrap_err();
    assert!(status.message().contains("bfloat16, expected the activation dtype float32"), "{status:?}");
    let newer = v1::Tensor { dtype: 17, ..rows.clone() };
    let status = stages.run_stage(request(0, &newer)).await.unwrap_err();
    assert!(status.message().contains("its dtype is 17 (not known here)"), "{status:?}");
    let many = v1::Tensor { shape: vec![65, 64], data: vec![0; 65 * 256], ..rows };
    let status = stages.run_stage(request(0, &many)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_for_attention_ranks_fails_at_once_and_says_whom_to_ask() {
    let rank = Rank::start(options("tiny-llama")).await;
    let mut inference = InferenceServiceClient::new(rank.channel().await);
    let generate = inference.generate(v1::GenerateRequest::default()).await.err().unwrap();
    let tokenize = inference.tokenize(v1::TokenizeRequest::default()).await.err().unwrap();
    let mut membership = MembershipServiceClient::new(rank.channel().await);
    let list = membership.list_peers(v1::ListPeersRequest {}).await.err().unwrap();
    let announce = membership.announce(v1::AnnounceRequest::default()).await.err().unwrap();
    for status in [generate, tokenize, list, announce] {
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert_eq!(status.get_details_error_info().expect("no detail").reason, "WRONG_ROLE");
        let message = status.message();
        assert!(message.contains("ffn-svc") && message.contains("attention-svc"), "{message}");
    }
}
