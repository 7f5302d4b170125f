//! What comes back is what the reference computed, whichever way the rows went.
use std::time::Instant;

use afd_common::frame::FrameHeader;
use afd_common::link::features;
use afd_common::proto::v1;
use afd_common::proto::v1::layer_stage_service_client::LayerStageServiceClient;
use tch::{Kind, Tensor};

use crate::support::{Attention, Golden, PATIENCE, Rank, assert_close, bytes_of, options};

const LAYERS: u16 = 4;

#[tokio::test(flavor = "multi_thread")]
async fn every_layer_over_every_link_and_by_unary_call_equals_the_reference() {
    for name in &Golden::names() {
        let (rank, golden) = (Rank::start(options(name)).await, Golden::load(name));
        let mut stages = LayerStageServiceClient::new(rank.channel().await);
        let mut links = Vec::new();
        // One of an earlier version, which offers nothing, and one of this.
        let mut both = Vec::new();
        for (number, offered) in [(0, Vec::new()), (1, features::offered())] {
            let request = v1::JoinRequest { features: offered.clone(), ..rank.join_request(number).await };
            let mut attention = Attention::join_as(&rank, request).await.unwrap();
            assert_eq!(attention.joined.features, offered, "all of it is known there");
            for kind in [v1::LinkKind::Tcp, v1::LinkKind::Shm, v1::LinkKind::Inline] {
                links.push((kind, attention.open(kind).await));
            }
            both.push(attention);
        }
        for layer in 0..LAYERS {
            let rows = golden.get(&format!("layers.{layer}.ffn_in"));
            let expected = golden.get(&format!("layers.{layer}.ffn_out"));
            for (kind, link) in &mut links {
                let hop = FrameHeader::key(1, layer, 0);
                link.dispatch(hop, &rows);
                assert_close(
                    &link.combine(hop).await,
                    &expected,
                    &format!("{name}, layer {layer}, {kind:?}"),
                );
            }
            let answer = stages.run_stage(run_stage(layer, &rows)).await.unwrap().into_inner();
            let found = tensor_of(&answer.hidden_states.unwrap());
            assert_close(&found, &expected, &format!("{name}, layer {layer}, unary"));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn partial_sums_of_all_shards_add_up_to_the_reference() {
    for (name, count) in [("tiny-llama", 3), ("tiny-mixtral", 2), ("tiny-deepseek-v3", 3)] {
        let golden = Golden::load(name);
        let mut sums: Vec<Tensor> = Vec::new();
        for index in 0..count {
            let rank = Rank::shard(name, index, count).await;
            let mut attention = Attention::join(&rank, 0).await;
            assert_eq!(attention.joined.combine_dtype(), v1::Dtype::F32);
            assert_eq!(attention.joined.shard, Some(v1::ShardSpec { index, count }));
            let mut link = attention.open(v1::LinkKind::Tcp).await;
            for layer in 0..LAYERS {
                let hop = FrameHeader::key(1, layer, 0);
                link.dispatch(hop, &golden.get(&format!("layers.{layer}.ffn_in")));
                let part = link.combine(hop).await;
                match sums.get_mut(usize::from(layer)) {
                    Some(sum) => *sum += part,
                    None => sums.push(part),
                }
            }
        }
        for (layer, sum) in sums.iter().enumerate() {
            let expected = golden.get(&format!("layers.{layer}.ffn_out"));
            assert_close(sum, &expected, &format!("{name}, layer {layer}, {count} shards"));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_attention_ranks_at_once_each_get_their_own_rows() {
    let (rank, golden) = (Rank::start(options("tiny-mixtral")).await, Golden::load("tiny-mixtral"));
    let mut ranks = Vec::new();
    for index in 0..2 {
        let mut attention = Attention::join(&rank, index).await;
        let link = attention.open(v1::LinkKind::Tcp).await;
        // Different rows for each: from the front, from the back.
        ranks.push((attention, link, i64::from(index) * 4));
    }
    for layer in 0..LAYERS {
        let rows = golden.get(&format!("layers.{layer}.ffn_in"));
        let expected = golden.get(&format!("layers.{layer}.ffn_out"));
        for stage in 0..2u8 {
            for (_, link, start) in &mut ranks {
                link.dispatch(
                    FrameHeader::key(1, layer, stage),
                    &rows.narrow(0, *start + i64::from(stage), 2),
                );
            }
        }
        for stage in 0..2u8 {
            for (_, link, start) in &mut ranks {
                let found = link.combine(FrameHeader::key(1, layer, stage)).await;
                let expected = expected.narrow(0, *start + i64::from(stage), 2);
                assert_close(&found, &expected, &format!("layer {layer}, stage {stage}, rows from {start}"));
            }
        }
    }
    assert!(rank.metric("afd_ffn_hops_total 16"));
    assert!(rank.metric("afd_ffn_rows_total 32"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hop_without_rows_is_answered_without_rows() {
    let rank = Rank::start(options("tiny-mixtral")).await;
    let mut attention = Attention::join(&rank, 0).await;
    let mut link = attention.open(v1::LinkKind::Tcp).await;
    let hop = FrameHeader::key(1, 0, 0);
    link.dispatch(hop, &Tensor::zeros([0, 64], (Kind::Float, tch::Device::Cpu)));
    assert_eq!(link.combine(hop).await.size(), [0, 64]);
    let mut stages = LayerStageServiceClient::new(rank.channel().await);
    let none = Tensor::zeros([0, 64], (Kind::Float, tch::Device::Cpu));
    let answer = stages.run_stage(run_stage(0, &none)).await.unwrap().into_inner();
    assert_eq!(answer.hidden_states.unwrap().shape, [0, 64]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_planned_step_is_reported_and_profiled() {
    let (rank, golden) = (Rank::start(options("tiny-llama")).await, Golden::load("tiny-llama"));
    let mut attention = Attention::join(&rank, 0).await;
    let mut link = attention.open(v1::LinkKind::Tcp).await;
    let plan = |step_id| v1::StepPlan {
        step_id,
        padded_tokens: vec![16],
        phase: v1::Phase::Prefill.into(),
        profile: true,
        ..Default::default()
    };
    let rows = golden.get("layers.0.ffn_in").size()[0] as u64;
    let deadline = Instant::now() + PATIENCE;
    attention.plan(plan(7)).await;
    // A plan goes one step ahead; one that is overtaken by its hops is reported without them, so a later step counts.
    let profiled = 'steps: {
        for step in 7.. {
            attention.plan(plan(step + 1)).await;
            for layer in 0..LAYERS {
                let hop = FrameHeader::key(step, layer, 0);
                link.dispatch(hop, &golden.get(&format!("layers.{layer}.ffn_in")));
                let _ = link.combine(hop).await;
            }
            let report = attention.report().await;
            assert_eq!((report.step_id, report.num_hops, report.num_rows), (step, 4, 4 * rows));
            assert_eq!((report.last_layer, &report.error), (3, &None));
            if report.hops.len() == 4 {
                break 'steps report;
            }
            assert!(Instant::now() < deadline, "no plan came before its hops");
        }
        unreachable!("steps do not run out")
    };
    let layers: Vec<_> = profiled.hops.iter().map(|hop| hop.layer).collect();
    assert_eq!(layers, [0, 1, 2, 3]);
    for hop in &profiled.hops {
        assert!(hop.arrived_at_us <= hop.started_at_us && hop.started_at_us <= hop.finished_at_us, "{hop:?}");
    }
}

fn run_stage(layer: u16, rows: &Tensor) -> v1::RunStageRequest {
    v1::RunStageRequest {
        layer: layer.into(),
        hidden_states: Some(v1::Tensor {
            dtype: v1::Dtype::F32.into(),
            shape: rows.size(),
            data: bytes_of(rows),
        }),
        side_tensors: Vec::new(),
    }
}

fn tensor_of(tensor: &v1::Tensor) -> Tensor {
    assert_eq!(tensor.dtype(), v1::Dtype::F32);
    Tensor::from_data_size(&tensor.data, &tensor.shape, Kind::Float)
}
