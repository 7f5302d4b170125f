//! What `Join` agrees to, and what it refuses, field by field.
use super::*;

fn model() -> v1::ModelIdentity {
    v1::ModelIdentity {
        fingerprint: "aa11".into(),
        architecture: "MixtralForCausalLM".into(),
        hidden_size: 64,
        num_layers: 4,
        activation_dtype: v1::Dtype::F32.into(),
        gate_placement: v1::GatePlacement::Ffn.into(),
        placement: String::new(),
        routing: v1::Routing::Model.into(),
        shared_expert_placement: v1::SharedExpertPlacement::Ffn.into(),
    }
}

fn offer() -> Offer {
    Offer {
        model: model(),
        shard_count: 2,
        link_kinds: vec![v1::LinkKind::Tcp, v1::LinkKind::Inline],
        max_stages: 2,
        max_tokens_per_stage: 512,
        features: vec!["profile".into()],
        join_token: JoinToken::new(" sesame\n"),
    }
}

fn request() -> v1::JoinRequest {
    v1::JoinRequest {
        protocol_major: PROTOCOL_MAJOR,
        protocol_minor: 7,
        identity: Some(v1::Identity {
            deployment: "d".into(),
            role: v1::Role::Attention.into(),
            rank: 0,
            incarnation: 1,
        }),
        model: Some(model()),
        shard_count: 2,
        link_kinds: vec![v1::LinkKind::Inline.into(), 999, v1::LinkKind::Tcp.into()],
        max_stages: 4,
        max_tokens_per_stage: 100,
        features: vec!["telepathy".into(), "profile".into()],
        join_token: "sesame".into(),
    }
}

fn refusal(change: impl FnOnce(&mut v1::JoinRequest)) -> String {
    let mut request = request();
    change(&mut request);
    agree(&offer(), &request).expect_err("must be refused").to_string()
}

#[test]
fn equals_join_and_everything_else_is_negotiated() {
    let agreement = agree(&offer(), &request()).unwrap();
    assert_eq!(
        agreement,
        Agreement {
            protocol_minor: PROTOCOL_MINOR,
            link_kinds: vec![v1::LinkKind::Inline, v1::LinkKind::Tcp],
            max_stages: 2,
            max_tokens_per_stage: 100,
            features: vec!["profile".into()],
        }
    );
}

#[test]
fn roles_on_different_devices_agree_on_the_links_of_the_host() {
    use v1::LinkKind::{CudaIpc, Inline, Nccl, Shm, Tcp};
    let (on_gpu, on_cpu) = (vec![CudaIpc, Nccl, Shm, Tcp, Inline], vec![Shm, Tcp, Inline]);
    for (callers, ours) in [(&on_gpu, &on_cpu), (&on_cpu, &on_gpu)] {
        let link_kinds = callers.iter().map(|kind| (*kind).into()).collect();
        let offer = Offer { link_kinds: ours.clone(), ..offer() };
        let agreement = agree(&offer, &v1::JoinRequest { link_kinds, ..request() }).unwrap();
        assert_eq!(agreement.link_kinds, on_cpu);
    }
}

#[test]
fn what_a_caller_repeats_is_answered_once() {
    let link_kinds: Vec<i32> =
        (0..5000).map(|n| if n % 2 == 0 { 4711 } else { v1::LinkKind::Tcp.into() }).collect();
    let features = vec!["profile".to_owned(); 5000];
    let agreement =
        agree(&offer(), &v1::JoinRequest { link_kinds: link_kinds.clone(), features, ..request() });
    let agreement = agreement.unwrap();
    assert_eq!((agreement.link_kinds, agreement.features), (vec![v1::LinkKind::Tcp], vec!["profile".into()]));
    let refused = |r: &mut v1::JoinRequest| r.link_kinds = vec![v1::LinkKind::Nccl.into(); 5000];
    assert!(refusal(refused).contains("the caller has nccl, this FFN rank"), "{}", refusal(refused));
}

#[test]
fn a_caller_that_knows_no_shard_count_yet_takes_ours() {
    assert!(agree(&offer(), &v1::JoinRequest { shard_count: 0, ..request() }).is_ok());
}

#[test]
fn what_must_be_equal_is_refused_by_name_with_both_values() {
    type Change = fn(&mut v1::JoinRequest);
    fn model(request: &mut v1::JoinRequest) -> &mut v1::ModelIdentity {
        request.model.as_mut().unwrap()
    }
    let cases: [(Change, [&str; 4]); 17] = [
        (|r| r.protocol_major = 9, ["protocol_major", "9", "1", "update"]),
        (|r| model(r).placement = "00ff".into(), ["model.placement", "00ff", "contiguous", "--placement"]),
        (
            |r| model(r).routing = v1::Routing::Balanced.into(),
            ["model.routing", "has balanced", "has model", "--routing"],
        ),
        (|r| model(r).fingerprint = "bb22".into(), ["model.fingerprint", "bb22", "aa11", "--model"]),
        (
            |r| model(r).architecture = "LlamaForCausalLM".into(),
            ["model.architecture", "LlamaForCausalLM", "MixtralForCausalLM", "--model"],
        ),
        (|r| model(r).hidden_size = 65, ["model.hidden_size", "65", "64", "--model"]),
        (|r| model(r).num_layers = 5, ["model.num_layers", "5", "4", "--model"]),
        (
            |r| model(r).activation_dtype = v1::Dtype::Bf16.into(),
            ["model.activation_dtype", "has bfloat16", "has float32", "--dtype"],
        ),
        (
            |r| model(r).gate_placement = v1::GatePlacement::Attention.into(),
            ["model.gate_placement", "has attention", "has ffn", "--gate"],
        ),
        (
            |r| model(r).shared_expert_placement = v1::SharedExpertPlacement::Attention.into(),
            ["model.shared_expert_placement", "has attention", "has ffn", "--shared-experts"],
        ),
        // Of a newer process: what this one has no name for is no default.
        (
            |r| model(r).activation_dtype = 71,
            ["model.activation_dtype", "has 71 (not known here)", "has float32", "--dtype"],
        ),
        (
            |r| model(r).gate_placement = 71,
            ["model.gate_placement", "has 71 (not known here)", "has ffn", "--gate"],
        ),
        (
            |r| model(r).shared_expert_placement = 71,
            ["model.shared_expert_placement", "has 71 (not known here)", "has ffn", "--shared-experts"],
        ),
        (|r| model(r).routing = 71, ["model.routing", "has 71 (not known here)", "has model", "--routing"]),
        (
            |r| r.identity.as_mut().unwrap().role = 71,
            ["identity.role", "is 71 (not known here)", "only attention ranks", "--ffn"],
        ),
        (|r| r.shard_count = 3, ["shard_count", "3", "2", "--shard"]),
        (
            |r| r.identity.as_mut().unwrap().role = v1::Role::Ffn.into(),
            ["identity.role", "is ffn", "only attention ranks", "--ffn"],
        ),
    ];
    for (change, parts) in cases {
        let message = refusal(change);
        for part in parts {
            assert!(message.contains(part), "`{message}` does not name {part}");
        }
        assert!(!message.contains("_ATTENTION") && !message.contains("DTYPE_"), "{message}");
    }
}

#[test]
fn missing_or_useless_fields_are_refused_by_name() {
    type Change = fn(&mut v1::JoinRequest);
    let cases: [(Change, &str); 8] = [
        (|r| r.identity = None, "`identity` is missing"),
        (|r| r.model = None, "`model` is missing"),
        (|r| r.identity.as_mut().unwrap().deployment.clear(), "`identity.deployment` is 0 characters long"),
        (|r| r.max_stages = 0, "`max_stages` is 0"),
        (|r| r.max_tokens_per_stage = 0, "`max_tokens_per_stage` is 0"),
        (|r| r.link_kinds.clear(), "`link_kinds` have nothing in common: the caller has none"),
        (|r| r.link_kinds = vec![v1::LinkKind::Nccl.into()], "nccl, this FFN rank has tcp"),
        (
            |r| r.link_kinds = vec![4711],
            "the caller has 4711 (not known here), this FFN rank has tcp, inline",
        ),
    ];
    for (change, part) in cases {
        let message = refusal(change);
        assert!(message.contains(part), "`{message}` does not say `{part}`");
    }
}

#[test]
fn the_join_token_is_asked_for_and_never_shown() {
    assert!(refusal(|r| r.join_token.clear()).contains("missing"));
    let message = refusal(|r| r.join_token = "sesam".into());
    assert!(message.contains("wrong") && !message.contains("sesam"), "{message}");
    assert_eq!(format!("{:?}", offer().join_token), "Some(JoinToken(…))");
    let open = Offer { join_token: None, ..offer() };
    assert!(agree(&open, &request()).is_ok(), "a token nobody asked for does no harm");
    assert!(JoinToken::new(" \n").is_none());
}
