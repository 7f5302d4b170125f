//! A healthy deployment, and one fault at a time.
use std::time::Duration;

use afd_common::proto::v1;
use ffn_svc::probe::edge::Edge;

use super::diagnose::{Fault, Finding, diagnose};
use super::look::{AttentionRank, Clock, FfnRank, Found, Seen};
use super::report;

const MAX_SKEW: Duration = Duration::from_millis(500);

fn model() -> v1::ModelIdentity {
    v1::ModelIdentity {
        fingerprint: "f00d".into(),
        architecture: "MixtralForCausalLM".into(),
        hidden_size: 64,
        num_layers: 4,
        activation_dtype: v1::Dtype::F32.into(),
        gate_placement: v1::GatePlacement::Ffn.into(),
        ..Default::default()
    }
}

fn identity(role: v1::Role, rank: u32, incarnation: u64) -> Option<v1::Identity> {
    Some(v1::Identity { deployment: "d".into(), role: role.into(), rank, incarnation })
}

fn peer(address: &str, index: u32) -> v1::FfnPeer {
    let shard = Some(v1::ShardSpec { index, count: 2 });
    v1::FfnPeer { address: address.into(), shard, link: "shm".into() }
}

fn attention() -> AttentionRank {
    AttentionRank {
        info: v1::GetModelInfoResponse {
            name: "tiny".into(),
            model: Some(model()),
            identity: identity(v1::Role::Attention, 0, 1),
            link_kinds: vec!["shm".into(), "tcp".into()],
            ffn_peers: vec![peer("10.0.0.1:7001", 0), peer("10.0.0.2:7001", 1)],
            protocol_major: 1,
            software_version: "0.1.0".into(),
            ..Default::default()
        },
        round_trip: Duration::from_millis(1),
        clock: Clock { ahead_us: 100, within: Duration::from_micros(500) },
    }
}

fn ffn(index: u32) -> FfnRank {
    let answer = v1::ProbeResponse {
        identity: identity(v1::Role::Ffn, index, 7),
        shard: Some(v1::ShardSpec { index, count: 2 }),
        model: Some(model()),
        link_kinds: vec![v1::LinkKind::Shm.into(), v1::LinkKind::CudaIpc.into()],
        protocol_major: 1,
        software_version: "0.1.0".into(),
        ..Default::default()
    };
    FfnRank {
        edge: Edge {
            round_trip: Duration::from_micros(300),
            bandwidth: Some(2e9),
            clock_ahead_us: -50,
            clock_within: Duration::from_micros(100),
            answer,
        },
    }
}

/// One attention rank and two shards, changed by the test: `change(attention, first FFN, second FFN)`.
fn deployment(change: impl FnOnce(&mut AttentionRank, &mut FfnRank, &mut FfnRank)) -> Vec<Seen> {
    let (mut a, mut f0, mut f1) = (attention(), ffn(0), ffn(1));
    change(&mut a, &mut f0, &mut f1);
    let seen = |address: &str, expected, found| Seen { address: address.into(), expected, found };
    vec![
        seen("10.0.0.9:8000", v1::Role::Attention, Found::Attention(Box::new(a))),
        seen("10.0.0.1:7001", v1::Role::Ffn, Found::Ffn(Box::new(f0))),
        seen("ffn-1:7001", v1::Role::Ffn, Found::Ffn(Box::new(f1))),
    ]
}

/// The one fault of a deployment and its sentence.
#[track_caller]
fn only(seen: &[Seen]) -> (Fault, String) {
    match &diagnose(seen, MAX_SKEW)[..] {
        [Finding { fault, sentence, .. }] => (*fault, sentence.clone()),
        other => panic!("one finding was expected: {other:#?}"),
    }
}

#[track_caller]
fn says(seen: &[Seen], fault: Fault, words: &[&str]) {
    let (found, sentence) = only(seen);
    assert_eq!(found, fault, "{sentence}");
    for word in words {
        assert!(sentence.contains(word), "{word:?} is not in: {sentence}");
    }
}

#[test]
fn a_rank_that_is_looked_for_in_vain_is_a_finding_while_a_replica_serves() {
    let absence = |address: &str| v1::FfnAbsence {
        address: address.into(),
        why: "was up, shard 0/2, and is not there, for 2.0 s: Connection refused".into(),
    };
    let mut seen = deployment(|a, _, _| a.info.ffn_absent.push(absence("10.0.0.3:7001")));
    says(
        &seen,
        Fault::Absent,
        &["A0 at 10.0.0.9:8000", "10.0.0.3:7001 was up, shard 0/2", "refused", "--ffn"],
    );
    assert!(!report::text(&seen, &diagnose(&seen, MAX_SKEW)).contains("healthy"));
    // Asked by this doctor too, it has one finding.
    let found = Found::Nobody("cannot be reached: refused".into());
    seen.push(Seen { address: "10.0.0.3:7001".into(), expected: v1::Role::Ffn, found });
    says(&seen, Fault::Unreachable, &["10.0.0.3:7001"]);
    // One that answers this doctor and is not used has the better reason of the two.
    let seen = deployment(|a, _, _| {
        a.info.ffn_peers.pop();
        a.info.ffn_absent.push(absence("10.0.0.2:7001"));
    });
    says(&seen, Fault::Absent, &["10.0.0.2:7001 was up"]);
}

/// The faults, and the sentences.
fn found(seen: &[Seen]) -> (Vec<Fault>, Vec<String>) {
    diagnose(seen, MAX_SKEW).into_iter().map(|finding| (finding.fault, finding.sentence)).unzip()
}

fn absent(address: &str) -> v1::FfnAbsence {
    v1::FfnAbsence { address: address.into(), why: "is not there, for 2.0 s: Connection refused".into() }
}

#[test]
fn a_rank_without_which_attention_is_not_ready_is_one_cause_and_one_sentence() {
    let is_gone = |a: &mut AttentionRank| {
        a.info.ffn_peers.truncate(1);
        a.info.ffn_absent.push(absent("10.0.0.2:7001"));
        // Said at another moment than the one above.
        a.info.not_ready =
            "shard 1/2 has no rank, for 2.1 s: 10.0.0.1:7001 is up, shard 0/2; 10.0.0.2:7001 is not there, \
                            for 2.1 s: Connection refused"
                .into();
    };
    // Nobody was asked about it: attention's own words are all there is.
    let mut seen = deployment(|a, _, _| is_gone(a));
    seen.truncate(2);
    says(&seen, Fault::NotReady, &["10.0.0.2:7001 is not there"]);
    // A second attention rank says so too, and once is enough.
    let Found::Attention(a) = &seen[0].found else { panic!() };
    let (mut other, expected) = (a.clone(), v1::Role::Attention);
    other.info.identity = identity(v1::Role::Attention, 1, 2);
    seen.push(Seen { address: "10.0.0.8:8000".into(), expected, found: Found::Attention(other) });
    let (faults, sentences) = found(&seen);
    assert_eq!(faults, [Fault::NotReady, Fault::NotReady]);
    let short = "A1 at 10.0.0.8:8000 is not ready: shard 1/2 has no rank, for 2.1 s; absent: 10.0.0.2:7001";
    assert!(sentences[0].contains("is not there") && sentences[1] == short, "{sentences:#?}");
    // Asked by this doctor too.
    seen.truncate(2);
    let nobody = Found::Nobody("cannot be reached: Connection refused".into());
    seen.push(Seen { address: "ffn-1:7001".into(), expected: v1::Role::Ffn, found: nobody });
    let (faults, sentences) = found(&seen);
    assert_eq!(faults, [Fault::Unreachable, Fault::NotReady]);
    assert!(sentences[1].ends_with("for 2.1 s; absent: 10.0.0.2:7001"), "{sentences:#?}");
    // Another name has the same port: whose address it is nobody knows, and nothing is left out.
    seen.push(Seen {
        address: "ffn-9:7001".into(),
        expected: v1::Role::Ffn,
        found: Found::Ffn(Box::new(ffn(0))),
    });
    assert!(found(&seen).1[1].contains("10.0.0.2:7001 is not there"), "{:#?}", found(&seen));
}

#[test]
fn one_rank_that_several_look_for_in_vain_is_told_once() {
    let mut seen = deployment(|a, _, _| a.info.ffn_absent.push(absent("10.0.0.3:7001")));
    let Found::Attention(a) = &seen[0].found else { panic!() };
    let (mut other, expected) = (a.clone(), v1::Role::Attention);
    other.info.identity = identity(v1::Role::Attention, 1, 2);
    seen.push(Seen { address: "10.0.0.8:8000".into(), expected, found: Found::Attention(other) });
    let both = "A0 at 10.0.0.9:8000, A1 at 10.0.0.8:8000 are without an FFN rank that their --ffn";
    says(&seen, Fault::Absent, &[both, "10.0.0.3:7001 is not there"]);
}

#[test]
fn what_is_wrong_with_a_rank_is_why_it_is_not_used() {
    let other_model = |rank: &mut FfnRank| rank.edge.answer.model.as_mut().unwrap().hidden_size = 128;
    let seen = deployment(|a, f0, _| {
        other_model(f0);
        a.info.ffn_peers.remove(0);
    });
    says(&seen, Fault::Model, &["10.0.0.1:7001"]);
    let seen = deployment(|a, f0, _| {
        other_model(f0);
        a.info.ffn_peers.remove(0);
        a.info.ffn_absent.push(absent("10.0.0.1:7001"));
    });
    says(&seen, Fault::Model, &["10.0.0.1:7001"]);
}

#[test]
fn of_many_findings_of_a_kind_people_read_a_few_and_programs_all() {
    let many = |a: &mut AttentionRank| {
        a.info.ffn_absent.extend((0..20).map(|host| absent(&format!("10.0.1.{host}:7001"))));
    };
    let seen = deployment(|a, _, _| many(a));
    let findings = diagnose(&seen, MAX_SKEW);
    let text = report::text(&seen, &findings);
    let told: Vec<&str> = text.lines().filter(|line| line.starts_with('✗')).collect();
    assert!(told.len() == 9 && told[..8].iter().all(|line| line.contains("is not there")), "{text}");
    assert!(
        told[8].starts_with("✗ and 12 more like these, at 10.0.1.") && told[8].contains("and 4 more"),
        "{text}"
    );
    assert_eq!(report::json(&seen, &findings)["findings"].as_array().unwrap().len(), 20);
}

#[test]
fn a_healthy_deployment_has_no_findings_and_says_so() {
    let seen = deployment(|_, _, _| ());
    let findings = diagnose(&seen, MAX_SKEW);
    assert_eq!(findings, []);
    let text = report::text(&seen, &findings);
    assert!(text.contains("healthy: 1 attention and 2 FFN ranks"), "{text}");
    assert!(text.contains("shm, cuda-ipc") && text.contains("2.00"), "{text}");
    let json = report::json(&seen, &findings);
    assert_eq!(json["healthy"], true);
    assert_eq!(json["ranks"][1]["found"]["edge"]["bandwidth_bytes_per_s"], 2e9);
}

#[test]
fn an_address_where_nobody_is() {
    let mut seen = deployment(|_, _, _| ());
    seen.push(Seen {
        address: "10.0.0.3:7001".into(),
        expected: v1::Role::Ffn,
        found: Found::Nobody("is not there: Connection refused".into()),
    });
    says(&seen, Fault::Unreachable, &["10.0.0.3:7001", "an FFN rank", "Connection refused"]);
    assert!(report::text(&seen, &diagnose(&seen, MAX_SKEW)).contains("✗ 10.0.0.3:7001"));
}

#[test]
fn a_rank_of_the_other_role() {
    let mut seen = deployment(|_, _, _| ());
    seen[1].expected = v1::Role::Attention;
    says(
        &seen,
        Fault::WrongRole,
        &["10.0.0.1:7001", "given as an attention rank", "F0, an FFN rank", "--ffn"],
    );
}

#[test]
fn another_model_is_told_by_the_plainest_field() {
    fn of(rank: &mut FfnRank) -> &mut v1::ModelIdentity {
        rank.edge.answer.model.as_mut().unwrap()
    }
    let seen = deployment(|_, _, f1| {
        of(f1).hidden_size = 128;
        of(f1).fingerprint = "beef".into();
    });
    says(&seen, Fault::Model, &["ffn-1:7001", "`model.hidden_size` is 128 there and 64 here"]);
    let seen = deployment(|_, f0, _| of(f0).fingerprint = "beef".into());
    says(&seen, Fault::Model, &["`model.fingerprint` is beef there and f00d here", "--seed"]);
    let seen = deployment(|_, f0, _| of(f0).gate_placement = v1::GatePlacement::Attention.into());
    says(&seen, Fault::Model, &["`model.gate_placement` is attention there and ffn here", "--gate"]);
    // A rank that says nothing of shared experts has them.
    let there = v1::SharedExpertPlacement::Ffn;
    assert!(
        diagnose(&deployment(|_, f0, _| of(f0).shared_expert_placement = there.into()), MAX_SKEW).is_empty()
    );
    let seen = deployment(|_, f0, _| {
        of(f0).shared_expert_placement = v1::SharedExpertPlacement::Attention.into();
    });
    let words = "`model.shared_expert_placement` is attention there and ffn here";
    says(&seen, Fault::Model, &[words, "--shared-experts"]);
}

#[test]
fn a_missing_shard_and_ranks_that_count_differently() {
    fn both_first(a: &mut AttentionRank, f1: &mut FfnRank) {
        f1.edge.answer.shard = Some(v1::ShardSpec { index: 0, count: 2 });
        a.info.ffn_peers[1].shard = f1.edge.answer.shard;
    }
    let seen = deployment(|a, _, f1| both_first(a, f1));
    says(&seen, Fault::ShardMissing, &["shard 1 of 2", "--shard 1/2"]);
    let seen = deployment(|_, _, f1| f1.edge.answer.shard = Some(v1::ShardSpec { index: 1, count: 3 }));
    says(&seen, Fault::ShardCount, &["ffn-1:7001 owns shard 1 of 3", "one of 2"]);
    // What is known otherwise is not called missing.
    let seen = deployment(|a, _, f1| {
        both_first(a, f1);
        a.info.not_ready = "shard 1/2 has no rank, for 2.0 s: 10.0.0.3:1 refuses: another model".into();
    });
    says(&seen, Fault::NotReady, &["another model"]);
}

#[test]
fn a_rank_that_does_not_say_who_it_is_is_not_called_missing() {
    let mut seen = deployment(|a, _, _| a.info.ffn_peers.truncate(1));
    seen[2].found = Found::Stranger("tells nothing without a token".into());
    says(&seen, Fault::Unreachable, &["ffn-1:7001", "without a token"]);
    // Nor is one that attention uses and --ffn left out.
    let mut seen = deployment(|_, _, _| ());
    seen.truncate(2);
    assert_eq!(diagnose(&seen, MAX_SKEW), []);
}

#[test]
fn two_processes_with_one_rank_but_not_one_process_with_two_addresses() {
    let twin = |incarnation| {
        let mut seen = deployment(|_, _, _| ());
        let mut f0 = ffn(0);
        f0.edge.answer.identity = identity(v1::Role::Ffn, 0, incarnation);
        let found = Found::Ffn(Box::new(f0));
        seen.push(Seen { address: "ffn-0:7001".into(), expected: v1::Role::Ffn, found });
        seen
    };
    says(&twin(8), Fault::TwinRank, &["ffn-0:7001 and 10.0.0.1:7001", "F0 of deployment d", "--rank"]);
    assert_eq!(diagnose(&twin(7), MAX_SKEW), []);
}

#[test]
fn links_without_a_kind_in_common_and_ranks_that_are_not_used() {
    let seen = deployment(|a, _, _| a.info.link_kinds = vec!["tcp".into()]);
    let faults: Vec<_> = diagnose(&seen, MAX_SKEW);
    assert!(faults.len() == 2 && faults.iter().all(|finding| finding.fault == Fault::Links), "{faults:#?}");
    assert!(
        faults[0].sentence.contains("asks for tcp") && faults[0].sentence.contains("offers shm, cuda-ipc")
    );
    let seen = deployment(|a, _, _| a.info.ffn_peers.truncate(0));
    assert!(report::text(&seen, &[]).contains("(in use: none)"));
    let faults: Vec<_> = diagnose(&seen, MAX_SKEW).into_iter().map(|finding| finding.fault).collect();
    assert_eq!(faults, [Fault::Unused, Fault::Unused]);
}

#[test]
fn protocols_readiness_and_clocks() {
    let seen = deployment(|_, f0, _| f0.edge.answer.protocol_major = 2);
    says(&seen, Fault::Protocol, &["10.0.0.1:7001 speaks protocol 2.0", "1.0"]);
    let seen = deployment(|a, _, _| a.info.not_ready = "FFN ranks: F1 is away".into());
    says(&seen, Fault::NotReady, &["A0", "F1 is away"]);
    let seen = deployment(|_, _, f1| f1.edge.clock_ahead_us = -700_000);
    says(&seen, Fault::Clock, &["ffn-1:7001", "700.0 ms behind"]);
    let seen = deployment(|a, _, _| a.clock.ahead_us = 500_400);
    assert_eq!(diagnose(&seen, MAX_SKEW), [], "not known that well");
}

/// A second attention rank at 10.0.0.8:8000, of this deployment.
fn beside(seen: &mut Vec<Seen>, deployment: &str) {
    let mut other = attention();
    other.info.identity = identity(v1::Role::Attention, 1, 2);
    other.info.identity.as_mut().unwrap().deployment = deployment.into();
    let found = Found::Attention(Box::new(other));
    seen.push(Seen { address: "10.0.0.8:8000".into(), expected: v1::Role::Attention, found });
}

#[test]
fn a_peer_that_nothing_is_forwarded_to_is_a_finding_unless_its_cause_is_one_already() {
    let absence =
        |address: &str, why: &str| v1::AttentionAbsence { address: address.into(), why: why.into() };
    let mut seen = deployment(|a, _, _| {
        a.info.attention_absent.push(absence("10.0.0.1:7001", "it is an FFN rank: it belongs into --ffn"));
        a.info.attention_absent.push(absence("10.0.0.8:8000", "it cannot be reached: Connection refused"));
    });
    let (faults, sentences) = found(&seen);
    assert_eq!(faults, [Fault::PeerAbsent, Fault::PeerAbsent]);
    assert_eq!(
        sentences[0],
        "A0 at 10.0.0.9:8000 forwards nothing to 10.0.0.1:7001, which its --peers names: it is an FFN rank: it belongs \
         into --ffn"
    );
    assert!(!report::text(&seen, &diagnose(&seen, MAX_SKEW)).contains("healthy"));
    let nobody = Found::Nobody("cannot be reached: Connection refused".into());
    seen.push(Seen { address: "a-1:8000".into(), expected: v1::Role::Attention, found: nobody });
    assert_eq!(found(&seen).0, [Fault::Unreachable, Fault::PeerAbsent], "{:#?}", found(&seen));
    // A healthy rank of another deployment has no finding of its own.
    let why = "`identity.deployment` of A1 there is other, and d here (--deployment, or --peers)";
    let mut seen = deployment(|a, _, _| a.info.attention_absent.push(absence("10.0.0.8:8000", why)));
    beside(&mut seen, "other");
    says(&seen, Fault::PeerAbsent, &["10.0.0.8:8000", "other, and d here"]);
}

#[test]
fn the_table_names_deployments_where_there_are_several() {
    let mut seen = deployment(|_, _, _| ());
    assert!(!report::text(&seen, &[]).contains("deployment"));
    beside(&mut seen, "other");
    let text = report::text(&seen, &[]);
    assert!(text.contains("deployment") && text.contains("other"), "{text}");
}
