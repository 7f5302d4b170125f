//! Every message of the control plane comes out as it went in, whatever is in it; cut or garbled bytes are an error or
//! another message, never a panic.
use afd_common::proto::{RpcStatus, v1};
use proptest::prelude::*;
use prost::Message;

fn text() -> impl Strategy<Value = String> {
    "\\PC{0,12}"
}

fn identity() -> impl Strategy<Value = v1::Identity> {
    (text(), any::<i32>(), any::<u32>(), any::<u64>()).prop_map(|(deployment, role, rank, incarnation)| {
        v1::Identity { deployment, role, rank, incarnation }
    })
}

fn model() -> impl Strategy<Value = v1::ModelIdentity> {
    let numbers = (any::<u32>(), any::<u32>(), any::<[i32; 4]>());
    (text(), text(), text(), numbers).prop_map(|(fingerprint, architecture, placement, numbers)| {
        let (hidden_size, num_layers, enums) = numbers;
        let [activation_dtype, gate_placement, routing, shared_expert_placement] = enums;
        v1::ModelIdentity {
            fingerprint,
            architecture,
            hidden_size,
            num_layers,
            activation_dtype,
            gate_placement,
            placement,
            routing,
            shared_expert_placement,
        }
    })
}

fn join_request() -> impl Strategy<Value = v1::JoinRequest> {
    let who = (proptest::option::of(identity()), proptest::option::of(model()));
    let lists = (prop::collection::vec(any::<i32>(), 0..5), prop::collection::vec(text(), 0..3));
    (any::<[u32; 5]>(), who, lists, text()).prop_map(
        |(numbers, (identity, model), (link_kinds, features), token)| {
            let [protocol_major, protocol_minor, shard_count, max_stages, max_tokens_per_stage] = numbers;
            v1::JoinRequest {
                protocol_major,
                protocol_minor,
                identity,
                model,
                shard_count,
                link_kinds,
                max_stages,
                max_tokens_per_stage,
                features,
                join_token: token,
            }
        },
    )
}

fn join_response() -> impl Strategy<Value = v1::JoinResponse> {
    let shard = proptest::option::of(any::<[u32; 2]>());
    let lists = (prop::collection::vec(any::<i32>(), 0..5), prop::collection::vec(text(), 0..3));
    (any::<[u32; 5]>(), proptest::option::of(identity()), shard, lists, text(), any::<i32>()).prop_map(
        |(numbers, identity, shard, (link_kinds, features), session_id, combine_dtype)| {
            let [protocol_major, protocol_minor, max_stages, max_tokens_per_stage, lease_ms] = numbers;
            v1::JoinResponse {
                protocol_major,
                protocol_minor,
                identity,
                shard: shard.map(|[index, count]| v1::ShardSpec { index, count }),
                session_id,
                link_kinds,
                max_stages,
                max_tokens_per_stage,
                features,
                lease_ms,
                combine_dtype,
            }
        },
    )
}

fn open_links_request() -> impl Strategy<Value = v1::OpenLinksRequest> {
    let link = (any::<i32>(), any::<u32>(), any::<u32>()).prop_map(|(kind, credits, max_rows)| {
        v1::LinkRequest { kind, credits, max_rows, ..Default::default() }
    });
    (text(), prop::collection::vec(link, 0..4))
        .prop_map(|(session_id, links)| v1::OpenLinksRequest { session_id, links })
}

fn open_links_response() -> impl Strategy<Value = v1::OpenLinksResponse> {
    let secret = prop::collection::vec(any::<u8>(), 0..20);
    let link = (any::<i32>(), any::<[u64; 2]>(), secret, any::<[u32; 3]>()).prop_map(
        |(kind, [link_id, epoch], secret, [credits, max_rows, attach_timeout_ms])| v1::LinkGrant {
            kind,
            link_id,
            epoch,
            secret,
            credits,
            max_rows,
            attach_timeout_ms,
            ..Default::default()
        },
    );
    prop::collection::vec(link, 0..4).prop_map(|links| v1::OpenLinksResponse { links })
}

fn plan() -> impl Strategy<Value = v1::StepPlan> {
    let tokens = prop::collection::vec(any::<u32>(), 0..5);
    (any::<u64>(), any::<[u32; 2]>(), tokens, any::<i32>(), any::<[bool; 5]>(), text()).prop_map(
        |(step_id, [revision, deadline_ms], padded_tokens, phase, flags, traceparent)| {
            let [warmup, graph_capture, graph_replay, profile, sampled] = flags;
            v1::StepPlan {
                step_id,
                revision,
                padded_tokens,
                phase,
                warmup,
                graph_capture,
                graph_replay,
                profile,
                deadline_ms,
                traceparent,
                sampled,
            }
        },
    )
}

fn heartbeat() -> impl Strategy<Value = v1::Heartbeat> {
    (any::<[u64; 3]>(), any::<u32>()).prop_map(|([sent_at_us, last_step_id, turns], last_layer)| {
        v1::Heartbeat { sent_at_us, last_step_id, last_layer, turns }
    })
}

fn steps_request() -> impl Strategy<Value = v1::StepsRequest> {
    use v1::steps_request::Message as Said;
    let said = prop_oneof![
        plan().prop_map(Said::Plan),
        any::<u64>().prop_map(|step_id| Said::Cancel(v1::CancelStep { step_id })),
        heartbeat().prop_map(Said::Heartbeat),
    ];
    (text(), proptest::option::of(said))
        .prop_map(|(session_id, message)| v1::StepsRequest { session_id, message })
}

fn report() -> impl Strategy<Value = v1::StepReport> {
    let hop = (any::<[u32; 3]>(), any::<[u64; 4]>()).prop_map(|([layer, stage, rows], times)| {
        let [arrived_at_us, started_at_us, finished_at_us, sent_at_us] = times;
        v1::HopTiming { layer, stage, rows, arrived_at_us, started_at_us, finished_at_us, sent_at_us }
    });
    let error = (any::<i32>(), text());
    let error = proptest::option::of(error.prop_map(|(code, message)| RpcStatus {
        code,
        message,
        details: Vec::new(),
    }));
    (any::<[u64; 5]>(), any::<[u32; 2]>(), error, prop::collection::vec(hop, 0..4)).prop_map(
        |([step_id, num_rows, queue_us, compute_us, send_us], [num_hops, last_layer], error, hops)| {
            v1::StepReport {
                step_id,
                num_hops,
                num_rows,
                queue_us,
                compute_us,
                send_us,
                last_layer,
                error,
                hops,
            }
        },
    )
}

fn steps_response() -> impl Strategy<Value = v1::StepsResponse> {
    use v1::steps_response::Message as Said;
    let said = prop_oneof![
        report().prop_map(Said::Report),
        heartbeat().prop_map(Said::Heartbeat),
        any::<u32>().prop_map(|remaining_ms| Said::Draining(v1::Draining { remaining_ms })),
    ];
    proptest::option::of(said).prop_map(|message| v1::StepsResponse { message })
}

/// What is encoded is decoded; what is cut or garbled does not bring the reader down.
fn survives<M: Message + Default + PartialEq + std::fmt::Debug>(
    message: &M,
    cut: usize,
    flip: usize,
) -> Result<(), TestCaseError> {
    let mut bytes = message.encode_to_vec();
    prop_assert_eq!(bytes.len(), message.encoded_len());
    prop_assert_eq!(&M::decode(&bytes[..]).unwrap(), message);
    let _ = M::decode(&bytes[..cut.min(bytes.len())]);
    if let Some(byte) = flip.checked_rem(bytes.len()) {
        bytes[byte] ^= 1 << (flip % 8);
        let _ = M::decode(&bytes[..]);
    }
    Ok(())
}

proptest! {
    #[test]
    fn joins_and_links_come_out_as_they_went_in(
        join in join_request(),
        joined in join_response(),
        open in open_links_request(),
        opened in open_links_response(),
        cut in 0usize..200,
        flip: usize,
    ) {
        survives(&join, cut, flip)?;
        survives(&joined, cut, flip)?;
        survives(&open, cut, flip)?;
        survives(&opened, cut, flip)?;
    }

    #[test]
    fn steps_come_out_as_they_went_in(
        request in steps_request(),
        response in steps_response(),
        cut in 0usize..200,
        flip: usize,
    ) {
        survives(&request, cut, flip)?;
        survives(&response, cut, flip)?;
    }

    #[test]
    fn probes_and_drains_come_out_as_they_went_in(
        payload in prop::collection::vec(any::<u8>(), 0..100),
        answered_at_us: u64,
        identity in proptest::option::of(identity()),
        model in proptest::option::of(model()),
        link_kinds in prop::collection::vec(any::<i32>(), 0..5),
        numbers: [u32; 2],
        cut in 0usize..200,
        flip: usize,
    ) {
        survives(&v1::ProbeRequest { payload: payload.clone() }, cut, flip)?;
        let probed = v1::ProbeResponse {
            payload,
            answered_at_us,
            identity,
            model,
            link_kinds,
            ..Default::default()
        };
        survives(&probed, cut, flip)?;
        survives(&v1::DrainRequest { timeout_ms: numbers[0] }, cut, flip)?;
        survives(&v1::DrainResponse { open_sessions: numbers[1] }, cut, flip)?;
    }
}
