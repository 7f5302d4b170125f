//! What attention may fetch into the second-level cache while it waits for the FFN, and what that wins: layers each behind a pause
//! as long as the FFN's layer takes, as they come in a pair, where the device is idle meanwhile.
use afd_gpu::ops::{Ahead, CachePart, Meanwhile};
use afd_gpu::random::Random;
use afd_gpu::{Device, GpuError, Region};

use crate::layer::{BLOCK, Bench, CACHE_ROW_BYTES, LAYERS};
use crate::table::{Table, us};
use crate::timing::graph_us;
use crate::{Result, machine};

/// Rows, and how long attention waits for the FFN's layer of them, with the way there and back, us.
const CALLS: [(usize, u64); 5] = [(1, 40), (8, 155), (32, 258), (64, 268), (128, 277)];

type Done = std::result::Result<(), GpuError>;

/// What is fetched for a layer.
#[derive(Clone, Copy)]
struct Sets {
    name: &'static str,
    projection: bool,
    up_and_out: bool,
    /// Of the cache, MB.
    cache_mb: usize,
}

const fn sets(name: &'static str, projection: bool, up_and_out: bool, cache_mb: usize) -> Sets {
    Sets { name, projection, up_and_out, cache_mb }
}

const SETS: [Sets; 9] = [
    sets("nothing", false, false, 0),
    sets("W_UK, W_UV, out", false, true, 0),
    sets("all weights", true, true, 0),
    sets("cache 8", false, false, 8),
    sets("cache 16", false, false, 16),
    sets("cache 32", false, false, 32),
    sets("cache 48", false, false, 48),
    sets("W_UK, W_UV, out, cache 32", false, true, 32),
    sets("nothing, again", false, false, 0),
];
/// MB of the head.
const HEADS: [usize; 4] = [0, 8, 16, 32];

pub(crate) fn run(device: &Device) -> Result<String> {
    let rate = machine::read_rate(device)?;
    let (meanwhile, random) = (Meanwhile::new(device)?, Random::new(device)?);
    let benches = CALLS.map(|(rows, pause)| (rows, pause, Bench::new(device, rows)));
    let time = Region::zeroed(device, 8)?;
    let columns: Vec<String> = std::iter::once("fetched".to_owned())
        .chain(CALLS.map(|(rows, pause)| format!("{rows} ({pause})")))
        .collect();
    let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
    let title = format!(
        "attention's layer behind a pause (us), by what was fetched in it (MB of the cache), us; read {:.0} GB/s, cache {} MB",
        rate / 1e3,
        device.cache_bytes() >> 20
    );
    let mut layers = Table::new(title, &columns);
    let mut chain = Table::new("the layer as far as, nothing fetched, us behind the pause", &columns);
    let mut heads =
        Table::new("norm, head and argmax behind a pause, by MB of the head fetched in it, us", &columns);
    let mut cells: Vec<Vec<String>> = Vec::new();
    for (rows, pause, bench) in benches {
        let bench = bench?;
        let stream = &bench.stream;
        let behind =
            |fetch: &dyn Fn(usize) -> Done, then: &dyn Fn(usize) -> Done, count: usize| -> Result<f64> {
                let all = graph_us(stream, 3, || {
                    (0..count).try_for_each(|l| {
                        random.stamp(stream, &time)?;
                        fetch(l)?;
                        random.pause_since(stream, &time, pause)?;
                        then(l)
                    })
                })?;
                Ok(all / count as f64 - pause as f64)
            };
        let mut column = Vec::new();
        for sets in SETS {
            column.push(us(behind(
                &|l| sets.fetch(&meanwhile, &bench, rows, l),
                &|l| layer(&bench, l, OPERATIONS.len()),
                LAYERS,
            )?));
        }
        for upto in 1..=OPERATIONS.len() {
            column.push(us(behind(&|_| Ok(()), &|l| layer(&bench, l, upto), LAYERS)?));
        }
        for mb in HEADS {
            let part = bench.head_weight.part(0..mb << 20)?;
            let fetch = |_| if mb == 0 { Ok(()) } else { meanwhile.fetch(stream, Ahead::of([&part]), None) };
            let then = |_| {
                bench.norm(0)?;
                bench.head()?;
                bench.argmax()
            };
            column.push(us(behind(&fetch, &then, 4)?));
        }
        cells.push(column);
    }
    let row_of =
        |at: usize, name: String| std::iter::once(name).chain(cells.iter().map(move |c| c[at].clone()));
    for (at, sets) in SETS.iter().enumerate() {
        layers.row(row_of(at, sets.name.to_owned()));
    }
    for (at, name) in OPERATIONS.iter().enumerate() {
        chain.row(row_of(SETS.len() + at, (*name).to_owned()));
    }
    for (at, mb) in HEADS.iter().enumerate() {
        heads.row(row_of(SETS.len() + OPERATIONS.len() + at, mb.to_string()));
    }
    Ok(format!("{layers}{chain}{heads}"))
}

const OPERATIONS: [&str; 8] = ["norm", "projection", "rope", "W_UK", "decode", "W_UV", "out", "norm"];

/// The first operations of a layer behind the FFN's answer.
fn layer(bench: &Bench, layer: usize, operations: usize) -> Done {
    let all: [&dyn Fn() -> Done; 8] = [
        &|| bench.norm(layer),
        &|| bench.project(layer),
        &|| bench.write(layer, Ahead::default()),
        &|| bench.absorb(layer),
        &|| bench.decode(layer),
        &|| bench.values(layer),
        &|| bench.out(layer),
        &|| bench.norm(layer),
    ];
    all.iter().take(operations).try_for_each(|operation| operation())
}

impl Sets {
    fn fetch(&self, meanwhile: &Meanwhile, bench: &Bench, rows: usize, layer: usize) -> Done {
        let weights = &bench.layers[layer];
        let projection = self.projection.then_some(&weights.projection);
        let others = self.up_and_out.then_some([&weights.up, &weights.out]);
        let ahead = Ahead::of(projection.into_iter().chain(others.into_iter().flatten()));
        if ahead.is_empty() && self.cache_mb == 0 {
            return Ok(());
        }
        let part = CachePart {
            cache: &weights.cache,
            second: None,
            row_bytes: CACHE_ROW_BYTES,
            block_size: BLOCK,
            block_table: &bench.step.block_table,
            max_blocks: bench.step.max_blocks,
            seq_lens: &bench.step.seq_lens,
            batch: rows,
            room: self.cache_mb << 20,
        };
        meanwhile.fetch(&bench.stream, ahead, (self.cache_mb > 0).then_some(&part))
    }
}
