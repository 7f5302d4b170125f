//! What key and queue cost a hop, on both sides of the link and without it: `cargo bench -p afd-tests --bench hops`. The goal
//! is less than 2 µs a hop; the last lines say how long one takes, and whether that is less.
//!
//! The FFN's side is the header's check, the queue with its ledger, and the convoys' books; attention's is the header and the
//! table of who owes what. Rows, checksums of rows and system calls are `attention-svc bench links`' business.
use std::hint::black_box;
use std::time::{Duration, Instant};

use afd_common::frame::{BodySum, Checksum, FrameHeader, FrameKind, FrameLimits, RowType, SideKind};
use afd_common::ids::{Epoch, HopKey};
use attention_svc::remote_ffn::hop_table::{Arrival, EdgeId, HopTable};
use criterion::{Criterion, Throughput};
use ffn_svc::hop_queue::{Convoys, HopQueue, QueuedHop, SourceId};

const LAYERS: u16 = 61;
/// More than steps of a few ranks ever put into one batch.
const MAX_ROWS: u32 = 1 << 16;
const ROWS: u32 = 8;
const HIDDEN: u32 = 7168;
const LIMITS: FrameLimits =
    FrameLimits { max_rows: MAX_ROWS, max_body_bytes: u32::MAX, checksum: Checksum::Sum64 };
const GOAL: Duration = Duration::from_micros(2);
/// Steps that are timed for the last lines.
const STEPS: usize = 51;

/// Attention ranks, stages of each, shards that a hop goes to, and how long hops may wait for company.
const CASES: [(u64, u8, usize, u64); 4] = [(1, 1, 1, 0), (2, 2, 2, 0), (8, 2, 4, 0), (8, 2, 4, 2000)];

fn name((ranks, stages, shards, board_us): (u64, u8, usize, u64)) -> String {
    let boards = if board_us > 0 { ", boarding" } else { "" };
    format!("{ranks} ranks of {stages} stages, {shards} shards{boards}")
}

/// Both sides of all ranks' hops.
struct Hops {
    ranks: u64,
    stages: u8,
    shards: usize,
    queue: HopQueue<()>,
    convoys: Convoys,
    batch: Vec<QueuedHop<()>>,
    tables: Vec<HopTable<()>>,
    parts: Vec<(usize, ())>,
    step: u64,
    now_us: u64,
}

impl Hops {
    fn new((ranks, stages, shards, board_us): (u64, u8, usize, u64)) -> Self {
        let mut queue = HopQueue::new(LAYERS, MAX_ROWS);
        (1..=ranks).for_each(|rank| queue.open(SourceId(rank)));
        Self {
            ranks,
            stages,
            shards,
            queue,
            convoys: Convoys::new(board_us),
            batch: Vec::new(),
            tables: (0..ranks).map(|_| HopTable::default()).collect(),
            parts: Vec::new(),
            step: 0,
            now_us: 0,
        }
    }

    fn hops_of_step(&self) -> u64 {
        self.ranks * u64::from(self.stages) * u64::from(LAYERS)
    }

    /// One step of every rank through all layers, as one shard's queue and all of attention's tables see it.
    fn step(&mut self) {
        self.step += 1;
        for layer in 0..LAYERS {
            for stage in 0..self.stages {
                let key = FrameHeader::key(self.step, layer, stage);
                (1..=self.ranks).for_each(|rank| self.send(rank, key));
            }
            self.serve();
        }
    }

    fn send(&mut self, rank: u64, key: HopKey) {
        let table = &mut self.tables[rank as usize - 1];
        table.handle_open(key, (0..self.shards).map(|_| true));
        loop {
            let Some(part) = table.unsent().next() else { break };
            table.handle_sent(part.key, part.shard, EdgeId(part.shard as u64), self.now_us);
        }
        let header = over_the_wire(FrameKind::Dispatch, key);
        assert!(self.queue.push(SourceId(rank), header.hop, header.rows, ()).is_ok());
        self.convoys.handle_arrival(SourceId(rank), header.hop, header.rows, self.now_us);
        self.now_us += 20;
    }

    fn serve(&mut self) {
        while !self.queue.is_empty() {
            let until = self.convoys.update(self.now_us);
            let Self { queue, convoys, batch, .. } = self;
            if queue.pick_ready(batch, |hop| convoys.holds(hop.source, hop.key)).is_none() {
                self.now_us = until.map_or(self.now_us + 1, |until| until.max(self.now_us + 1));
                continue;
            }
            let (begun, hops) = (self.now_us, self.batch.iter().map(|hop| (hop.source, hop.key)));
            self.now_us += 100;
            let rows = ROWS * self.batch.len() as u32;
            self.convoys.handle_executed(hops, rows, begun, self.now_us);
            let mut batch = std::mem::take(&mut self.batch);
            batch.drain(..).for_each(|hop| self.receive(hop.source.0, hop.key));
            self.batch = batch;
        }
    }

    fn receive(&mut self, rank: u64, key: HopKey) {
        let header = over_the_wire(FrameKind::Combine, key);
        let table = &mut self.tables[rank as usize - 1];
        for shard in 0..self.shards {
            let arrival = table.handle_arrival(header.hop, shard, EdgeId(shard as u64), ());
            assert_eq!(arrival, Arrival::Accepted);
        }
        assert!(table.take(key, &mut self.parts));
        self.parts.clear();
    }
}

/// A header, written and read.
fn over_the_wire(kind: FrameKind, hop: HopKey) -> FrameHeader {
    let header = FrameHeader {
        kind,
        dtype: RowType::Bf16,
        side: SideKind::None,
        epoch: Epoch(7),
        hop,
        rows: ROWS,
        columns: HIDDEN,
        side_columns: 0,
        body_bytes: ROWS * HIDDEN * 2,
    };
    let bytes = black_box(header.encode(black_box(BodySum::Sum64(1))));
    FrameHeader::decode(&bytes, &LIMITS).expect("it is what was written").0
}

fn steps(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("a step's hops");
    for case in CASES {
        let mut hops = Hops::new(case);
        group.throughput(Throughput::Elements(hops.hops_of_step()));
        group.bench_function(name(case), |bencher| bencher.iter(|| hops.step()));
    }
    group.finish();
}

/// The median hop of each case, beside the goal.
fn hop_times() {
    for case in CASES {
        let mut hops = Hops::new(case);
        (0..STEPS).for_each(|_| hops.step());
        let mut times: Vec<Duration> = (0..STEPS)
            .map(|_| {
                let begun = Instant::now();
                hops.step();
                begun.elapsed()
            })
            .collect();
        times.sort_unstable();
        let a_hop = times[STEPS / 2].div_f64(hops.hops_of_step() as f64);
        let word = if a_hop < GOAL { "met" } else { "missed" };
        let micros = a_hop.as_secs_f64() * 1e6;
        println!("{}: {micros:.3} µs a hop, goal below 2 µs: {word}", name(case));
    }
}

fn main() {
    let mut criterion = Criterion::default().sample_size(20).configure_from_args();
    steps(&mut criterion);
    criterion.final_summary();
    // `cargo test` only wants to see that it runs.
    if !std::env::args().any(|arg| arg == "--test") {
        hop_times();
    }
}
