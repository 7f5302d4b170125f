//! The engine over loopback links, with a model whose results are easy to tell: every element of layer `n` is multiplied
//! by `n + 2`; an element of 666 makes the model fail, 999 makes it panic.
use std::sync::mpsc;
use std::time::Duration;

use afd_common::frame::{Checksum, FrameKind, RowType, SideKind};
use afd_common::ids::{Epoch, HopKey, LayerIdx, Shard, StepId};
use afd_common::link::contract;
use afd_common::link::loopback::{self, LoopbackLink};
use afd_common::link::{InFrame, Limits, LinkError, LinkKind};
use afd_common::telemetry::Metrics;
use afd_ffi::memory;
use tch::{Kind, Tensor};

use super::*;
use crate::model::{LayerSpec, Side};

const PATIENCE: Duration = Duration::from_secs(10);
const HIDDEN: usize = 2;

/// See the module's head. `gate` holds the first batch until it is opened, so that a test decides what has arrived.
struct Multiplier {
    spec: StageSpec,
    gate: Option<mpsc::Receiver<()>>,
    batches: mpsc::Sender<(u16, Vec<f32>)>,
}

impl StageModel for Multiplier {
    fn spec(&self) -> StageSpec {
        self.spec.clone()
    }

    fn forward(&mut self, layer: LayerIdx, rows: &Tensor, side: &Side) -> Result<Tensor, String> {
        let values = memory::f32s(rows).unwrap().to_vec();
        let _ = self.batches.send((layer.0, values.clone()));
        if let Some(gate) = &self.gate {
            let _ = gate.recv_timeout(PATIENCE);
        }
        assert!(!values.contains(&999.0), "the model panicked");
        if values.contains(&666.0) {
            return Err("666".into());
        }
        let product = rows * f64::from(layer.0 + 2);
        Ok(match side {
            Side::TopK { ids, weights } => {
                product + (ids.to_kind(Kind::Float) * weights).sum_dim_intlist(1, true, None)
            }
            _ => product,
        })
    }
}

struct Bench {
    engine: EngineHandle,
    batches: mpsc::Receiver<(u16, Vec<f32>)>,
    open_gate: mpsc::Sender<()>,
    metrics: Metrics,
}

fn bench(shard: Shard, gated: bool) -> Bench {
    let layer = |side, side_columns| LayerSpec {
        side,
        side_columns,
        num_experts: 4,
        experts_per_token: 2,
        ..LayerSpec::dense()
    };
    let layers = vec![layer(SideKind::None, 0), layer(SideKind::None, 0), layer(SideKind::TopK, 2)];
    let spec = StageSpec { hidden_size: HIDDEN, activations: RowType::F32, shard, layers };
    let (open_gate, gate) = mpsc::channel();
    let (sender, batches) = mpsc::channel();
    let model = Multiplier { spec, gate: gated.then_some(gate), batches: sender };
    let metrics = Metrics::new();
    let options = EngineOptions {
        max_rows: 8,
        max_batch_rows: 16,
        metrics: EngineMetrics::new(&metrics).unwrap(),
        inject_delay: Duration::ZERO,
        board: Duration::ZERO,
        routing: Routing::Model,
    };
    Bench { engine: spawn(model, options).unwrap(), batches, open_gate, metrics }
}

/// The attention rank's end of a link.
struct Caller {
    link: LoopbackLink,
    bell: Doorbell,
}

impl Bench {
    fn caller(&self, name: u64, accounts: &Arc<StepAccounts>) -> Caller {
        let limits = |peer: &str| Limits {
            kind: LinkKind::Loopback,
            peer: peer.into(),
            epoch: Epoch(name),
            credits: 4,
            max_rows: 16,
            max_body_bytes: 4096,
            checksum: Checksum::Crc32c,
        };
        let bell = Doorbell::default();
        let ours = (limits("F0"), bell.clone());
        let (link, theirs) = loopback::pair(ours, (limits(&format!("A{name}")), self.engine.bell()));
        self.engine.adopt_for(Box::new(theirs), Arc::clone(accounts), SessionTag(name), name as u32);
        Caller { link, bell }
    }

    fn count(&self, line: &str) -> bool {
        self.metrics.render().unwrap().lines().any(|found| found == line)
    }
}

fn le(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|chunk| f32::from_le_bytes(chunk.try_into().unwrap())).collect()
}

impl Caller {
    fn dispatch(&mut self, hop: HopKey, values: &[f32]) {
        let header = FrameHeader {
            kind: FrameKind::Dispatch,
            dtype: RowType::F32,
            side: SideKind::None,
            epoch: Epoch(0),
            hop,
            rows: (values.len() / HIDDEN) as u32,
            columns: HIDDEN as u32,
            side_columns: 0,
            body_bytes: (values.len() * 4) as u32,
        };
        self.send(header, &le(values));
    }

    fn send(&mut self, header: FrameHeader, body: &[u8]) {
        let body_bytes = body.len() as u32;
        self.link.send(FrameHeader { body_bytes, ..header }, &[body]).unwrap();
    }

    fn receive(&mut self) -> Result<InFrame, LinkError> {
        contract::next(&mut self.link, &self.bell)
    }

    fn combine(&mut self) -> (HopKey, Vec<f32>) {
        let frame = self.receive().unwrap();
        assert_eq!(frame.header.kind, FrameKind::Combine, "{:?}", String::from_utf8_lossy(frame.body()));
        (frame.header.hop, floats(frame.body()))
    }

    fn error(&mut self) -> (HopKey, u32, String) {
        let frame = self.receive().unwrap();
        assert_eq!(frame.header.kind, FrameKind::Error);
        let (code, text) = frame.body().split_at(4);
        let code = u32::from_le_bytes(code.try_into().unwrap());
        (frame.header.hop, code, String::from_utf8(text.to_vec()).unwrap())
    }
}

fn accounts() -> Arc<StepAccounts> {
    Arc::new(StepAccounts::new(3, false))
}

fn key(step: u64, layer: u16, stage: u8) -> HopKey {
    FrameHeader::key(step, layer, stage)
}

#[test]
fn hops_of_one_layer_run_together_and_each_gets_its_own_rows_back() {
    let bench = bench(Shard::WHOLE, true);
    let mut a = bench.caller(1, &accounts());
    let mut b = bench.caller(2, &accounts());
    a.dispatch(key(1, 0, 0), &[1.0, 2.0]);
    assert_eq!(bench.batches.recv_timeout(PATIENCE).unwrap(), (0, vec![1.0, 2.0]));
    // While the first batch computes, hops of another layer arrive on both links.
    a.dispatch(key(1, 1, 1), &[3.0, 4.0, 5.0, 6.0]);
    b.dispatch(key(7, 1, 0), &[]);
    b.dispatch(key(7, 1, 1), &[7.0, 8.0]);
    bench.open_gate.send(()).unwrap();
    bench.open_gate.send(()).unwrap();
    assert_eq!(a.combine(), (key(1, 0, 0), vec![2.0, 4.0]));
    assert_eq!(a.combine(), (key(1, 1, 1), vec![9.0, 12.0, 15.0, 18.0]));
    assert_eq!(b.combine(), (key(7, 1, 0), vec![]), "zero rows are legal");
    assert_eq!(b.combine(), (key(7, 1, 1), vec![21.0, 24.0]));
    let (layer, rows) = bench.batches.recv_timeout(PATIENCE).unwrap();
    assert_eq!((layer, rows.len()), (1, 6), "one batch for both links");
}

#[test]
fn a_wrong_hop_gets_an_error_and_nobody_else_notices() {
    let bench = bench(Shard::WHOLE, false);
    let (mut a, mut b) = (bench.caller(1, &accounts()), bench.caller(2, &accounts()));
    a.dispatch(key(1, 3, 0), &[1.0, 2.0]);
    let invalid = tonic::Code::InvalidArgument as u32;
    assert_eq!(a.error(), (key(1, 3, 0), invalid, "layer 3 is out of range: the model has 3 layers".into()));
    a.dispatch(key(1, 2, 0), &[1.0, 2.0]);
    let text = "layer 2 takes topk_ids and topk_weights [rows, 2], received no side tensors";
    assert_eq!(a.error(), (key(1, 2, 0), invalid, text.into()));
    a.dispatch(key(1, 0, 0), &[1.0; 9 * HIDDEN]);
    assert_eq!(a.error().2, "9 rows, at most 8 were agreed (--max-tokens-per-stage)");
    a.dispatch(key(1, 1, 0), &[1.0, 2.0]);
    assert_eq!(a.combine(), (key(1, 1, 0), vec![3.0, 6.0]), "the link lives on");
    a.dispatch(key(1, 1, 0), &[1.0, 2.0]);
    assert_eq!(a.error().1, tonic::Code::AlreadyExists as u32, "answered before");
    b.dispatch(key(1, 0, 0), &[5.0, 5.0]);
    assert_eq!(b.combine(), (key(1, 0, 0), vec![10.0, 10.0]));
    for (reason, count) in [("layer", 1), ("side", 1), ("rows", 1), ("duplicate", 1)] {
        let line = format!("afd_ffn_hops_refused_total{{reason=\"{reason}\"}} {count}");
        assert!(bench.count(&line), "{line}");
    }
}

#[test]
fn rows_that_the_model_fails_on_spoil_no_other_hop_of_their_batch() {
    let bench = bench(Shard::WHOLE, true);
    let account = accounts();
    let (mut a, mut b) = (bench.caller(1, &account), bench.caller(2, &accounts()));
    a.dispatch(key(1, 0, 0), &[0.0, 0.0]);
    bench.batches.recv_timeout(PATIENCE).unwrap();
    a.dispatch(key(1, 1, 0), &[1.0, 666.0]);
    b.dispatch(key(1, 1, 0), &[1.0, 2.0]);
    (0..4).for_each(|_| bench.open_gate.send(()).unwrap());
    a.combine();
    assert_eq!(a.error(), (key(1, 1, 0), tonic::Code::Internal as u32, "layer 1: 666".into()));
    assert_eq!(b.combine(), (key(1, 1, 0), vec![3.0, 6.0]));
    account.handle_begin(key(2, 0, 0));
    assert_eq!(account.take_finished().unwrap().error.unwrap().1, "layer 1: 666");
}

#[test]
fn side_tensors_of_all_hops_reach_the_model() {
    let bench = bench(Shard::WHOLE, false);
    let mut a = bench.caller(1, &accounts());
    let mut body = le(&[1.0, 2.0]);
    [1i32, 3].iter().for_each(|id| body.extend_from_slice(&id.to_le_bytes()));
    body.extend_from_slice(&le(&[0.5, 0.25]));
    let header = FrameHeader {
        kind: FrameKind::Dispatch,
        dtype: RowType::F32,
        side: SideKind::TopK,
        epoch: Epoch(0),
        hop: key(1, 2, 0),
        rows: 1,
        columns: HIDDEN as u32,
        side_columns: 2,
        body_bytes: 0,
    };
    a.send(header, &body);
    assert_eq!(a.combine(), (key(1, 2, 0), vec![4.0 + 1.25, 8.0 + 1.25]));
}

#[test]
fn closing_a_session_ends_its_links_only_and_says_why() {
    let bench = bench(Shard::WHOLE, false);
    let (mut a, mut b) = (bench.caller(1, &accounts()), bench.caller(2, &accounts()));
    bench.engine.close_session(SessionTag(1), "its lease has ended");
    let end = a.receive().unwrap_err();
    assert!(end.to_string().contains("its lease has ended"), "{end}");
    b.dispatch(key(1, 0, 0), &[1.0, 1.0]);
    assert_eq!(b.combine().1, [2.0, 2.0]);
    assert!(bench.count("afd_ffn_links{kind=\"loopback\"} 1"));
}

#[test]
fn accounts_say_what_a_step_cost() {
    let bench = bench(Shard::WHOLE, false);
    let account = accounts();
    account.handle_plan(StepId(5), Planned { stages: 2, profile: true, ..Planned::default() });
    let mut a = bench.caller(1, &account);
    a.dispatch(key(5, 0, 0), &[1.0, 1.0]);
    a.combine();
    a.dispatch(key(5, 0, 1), &[1.0; 6]);
    a.combine();
    assert_eq!(account.last_begun(), Some(key(5, 0, 1)));
    a.dispatch(key(6, 0, 0), &[1.0, 1.0]);
    a.combine();
    let step = account.take_finished().unwrap();
    assert_eq!((step.num_hops, step.num_rows, step.last_layer), (2, 4, LayerIdx(0)));
    assert_eq!(step.hops.iter().map(|hop| (hop.key.stage.0, hop.rows)).collect::<Vec<_>>(), [(0, 1), (1, 3)]);
    assert!(bench.count("afd_ffn_hops_unplanned_total 1"), "the hop of step 6");
}

#[tokio::test]
async fn whoever_waits_behind_others_sees_that_they_get_on() {
    let bench = bench(Shard::WHOLE, true);
    let (waits, first, idle) = (accounts(), accounts(), accounts());
    let (mut a, mut b) = (bench.caller(1, &first), bench.caller(2, &waits));
    let _c = bench.caller(3, &idle);
    waits.rest();
    a.dispatch(key(1, 0, 0), &[1.0, 1.0]);
    bench.batches.recv_timeout(PATIENCE).unwrap();
    // Both come while the first one runs, and the other layer is not theirs.
    b.dispatch(key(1, 1, 0), &[1.0, 1.0]);
    a.dispatch(key(1, 0, 1), &[1.0, 1.0]);
    bench.open_gate.send(()).unwrap();
    bench.batches.recv_timeout(PATIENCE).unwrap();
    assert_eq!(
        (first.turns(), waits.turns(), idle.turns()),
        (2, 1, 0),
        "one of the two waits behind the other"
    );
    tokio::time::timeout(PATIENCE, waits.wait_finished()).await.expect("its rest is over");
    assert!(!waits.is_resting());
    bench.open_gate.send(()).unwrap();
    bench.batches.recv_timeout(PATIENCE).unwrap();
    assert_eq!((first.turns() + waits.turns(), idle.turns()), (4, 0), "nobody waits behind the last one");
    bench.open_gate.send(()).unwrap();
    b.combine();
}

#[tokio::test]
async fn a_call_goes_through_the_same_engine() {
    let bench = bench(Shard::new(0, 2).unwrap(), false);
    let header = FrameHeader {
        kind: FrameKind::Dispatch,
        dtype: RowType::F32,
        side: SideKind::None,
        epoch: Epoch(0),
        hop: key(0, 1, 0),
        rows: 1,
        columns: HIDDEN as u32,
        side_columns: 0,
        body_bytes: 8,
    };
    for _ in 0..20 {
        let answer = bench.engine.call(header, Bytes::from(le(&[1.0, 2.0]))).await.unwrap();
        assert_eq!(floats(&answer), [3.0, 6.0]);
    }
    let refused = bench.engine.call(FrameHeader { columns: 3, ..header }, Bytes::new()).await.unwrap_err();
    assert_eq!(refused, HopError::Columns { expected: 2, found: 3 });
    bench.engine.stop("enough");
    assert_eq!(bench.engine.call(header, Bytes::new()).await, Err(HopError::Stopped));
    assert_eq!(bench.engine.ended().await, EngineEnd::Stopped);
}

#[tokio::test]
async fn the_death_of_the_thread_is_reported_and_its_peers_are_told() {
    let bench = bench(Shard::WHOLE, false);
    let mut a = bench.caller(1, &accounts());
    a.dispatch(key(1, 0, 0), &[999.0, 1.0]);
    let EngineEnd::Died(what) = bench.engine.ended().await else { panic!("it stopped") };
    assert!(what.contains("the model panicked"), "{what}");
    assert!(a.receive().is_err());
    assert!(!bench.engine.is_alive());
}
