//! Decode attention over the latent cache: checked on ragged batches, then timed over a whole model's layers, each with
//! a cache of its own.
use half::bf16;

use afd_gpu::ops::{Mla, MlaShape, MlaStep};
use afd_gpu::random::Random;
use afd_gpu::reference::{self, relative_error};
use afd_gpu::{Device, Region};

use crate::table::{Table, us};
use crate::timing::graph_us;
use crate::{Result, machine};

const SHAPE: MlaShape = MlaShape { latent: 512, rope: 64, block_size: 64 };
const WIDTH: usize = 576;
const LAYERS: usize = 27;
const UNEQUAL: usize = 1088;

/// The attention with parts left out.
pub(crate) fn tune(device: &Device) -> Result<String> {
    let stream = device.stream()?;
    let random = Random::new(device)?;
    let columns = ["batch", "tokens", "whole", "no arithmetic"];
    let mut table = Table::new("MLA decode with parts left out, us", &columns);
    for (size, tokens) in [(64, 1024), (64, 4096)] {
        let batch = batch(device, &vec![tokens; size], SHAPE.block_size)?;
        let caches = (0..9)
            .map(|layer| {
                let cache = Region::alloc(device, batch.num_blocks * SHAPE.block_size * WIDTH * 2)?;
                random.fill(&stream, &cache, layer as u64, 1.0)?;
                Ok(cache)
            })
            .collect::<Result<Vec<_>>>()?;
        let (query, out) =
            (Region::alloc(device, size * 16 * WIDTH * 2)?, Region::alloc(device, size * 16 * 512 * 2)?);
        random.fill(&stream, &query, 99, 1.0)?;
        let mut cells = vec![size.to_string(), tokens.to_string()];
        for left_out in [0, 1] {
            let mla = Mla::with_parts(device, SHAPE, size, left_out)?;
            mla.plan(&stream, &batch.step)?;
            let time = graph_us(&stream, 10, || {
                let each = |(l, cache)| mla.decode(&stream, &batch.step, &query, cache, 0.07, &out, l > 0);
                caches.iter().enumerate().try_for_each(each)
            })?;
            cells.push(us(time / 9.0));
        }
        table.row(cells);
    }
    let mut warm = Table::new("the same of one cache again and again, us", &columns);
    for size in [1, 4, 8, 16, 24, 32] {
        let batch = batch(device, &vec![1024; size], SHAPE.block_size)?;
        let cache = Region::alloc(device, batch.num_blocks * SHAPE.block_size * WIDTH * 2)?;
        random.fill(&stream, &cache, 5, 1.0)?;
        let (query, out) =
            (Region::alloc(device, size * 16 * WIDTH * 2)?, Region::alloc(device, size * 16 * 512 * 2)?);
        random.fill(&stream, &query, 99, 1.0)?;
        let mut cells = vec![size.to_string(), "1024".to_owned()];
        for left_out in [0, 1] {
            let mla = Mla::with_parts(device, SHAPE, size, left_out)?;
            mla.plan(&stream, &batch.step)?;
            let time = graph_us(&stream, 10, || {
                (0..9).try_for_each(|l| mla.decode(&stream, &batch.step, &query, &cache, 0.07, &out, l > 0))
            })?;
            cells.push(us(time / 9.0));
        }
        warm.row(cells);
    }
    Ok(format!("{table}{warm}"))
}

/// A few calls, for a profiler to look at: of a cache that comes from memory, and of one that stays in the second-level cache.
pub(crate) fn profile(device: &Device) -> Result<String> {
    let stream = device.stream()?;
    let random = Random::new(device)?;
    for size in [64, 24] {
        let batch = batch(device, &vec![1024; size], SHAPE.block_size)?;
        let mla = Mla::new(device, SHAPE, size)?;
        let cache = Region::alloc(device, batch.num_blocks * SHAPE.block_size * WIDTH * 2)?;
        let (query, out) =
            (Region::alloc(device, size * 16 * WIDTH * 2)?, Region::alloc(device, size * 16 * 512 * 2)?);
        random.fill(&stream, &cache, 1, 1.0)?;
        random.fill(&stream, &query, 2, 1.0)?;
        mla.plan(&stream, &batch.step)?;
        for _ in 0..2 {
            mla.decode(&stream, &batch.step, &query, &cache, 0.07, &out, false)?;
        }
    }
    stream.synchronize()?;
    Ok(String::new())
}

/// A batch whose blocks are scattered over the cache.
struct Batch {
    step: MlaStep,
    lens: Vec<usize>,
    table: Vec<i32>,
    num_blocks: usize,
}

fn batch(device: &Device, lens: &[usize], block_size: usize) -> Result<Batch> {
    let max_blocks = lens.iter().map(|l| l.div_ceil(block_size)).max().unwrap_or(0).max(1);
    let num_blocks = lens.len() * max_blocks;
    // A permutation of the blocks: multiplication by a number that shares no factor with their count.
    let factor = (0..).map(|i| num_blocks * 2 / 3 + 1 + i).find(|f| gcd(*f, num_blocks) == 1).unwrap_or(1);
    let table: Vec<i32> = (0..num_blocks).map(|i| (i * factor % num_blocks) as i32).collect();
    let step = MlaStep {
        batch: lens.len(),
        block_table: Region::from_slice(device, &table)?,
        max_blocks,
        seq_lens: Region::from_slice(device, &lens.iter().map(|l| *l as i32).collect::<Vec<_>>())?,
    };
    Ok(Batch { step, lens: lens.to_vec(), table, num_blocks })
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

pub(crate) fn run(device: &Device) -> Result<String> {
    let mut text = check(device)?;
    let rate = machine::read_rate(device)?;
    let stream = device.stream()?;
    let random = Random::new(device)?;
    let mut table = Table::new(
        format!(
            "MLA decode, 16 heads, 512 + 64, {LAYERS} layers in one graph, us a layer; read {:.0} GB/s",
            rate / 1e3
        ),
        &["batch", "tokens", "layer", "floor", "% of read", "reach", "then", "predicted"],
    );
    for (size, tokens, reach, then, predicted) in [
        (64, 1024, "33", "25", "24"),
        (1, 1024, "-", "-", "8"),
        (8, 1024, "-", "-", "9"),
        (32, 1024, "-", "-", "14"),
        (128, 1024, "-", "-", "42"),
        (64, 4096, "-", "-", "77"),
        // Lengths that differ: on average so many.
        (8, UNEQUAL, "-", "-", "-"),
        (32, UNEQUAL, "-", "-", "-"),
        (64, UNEQUAL, "-", "-", "-"),
        (128, UNEQUAL, "-", "-", "-"),
    ] {
        let len = |i: usize| if tokens == UNEQUAL { tokens - 64 + i * 37 % 128 } else { tokens };
        let batch = batch(device, &(0..size).map(len).collect::<Vec<_>>(), SHAPE.block_size)?;
        let mla = Mla::new(device, SHAPE, size)?;
        let layers = if size * tokens > 200_000 { 9 } else { LAYERS };
        let caches = (0..layers)
            .map(|layer| {
                let cache = Region::alloc(device, batch.num_blocks * SHAPE.block_size * WIDTH * 2)?;
                random.fill(&stream, &cache, layer as u64, 1.0)?;
                Ok(cache)
            })
            .collect::<Result<Vec<_>>>()?;
        let query = Region::alloc(device, size * 16 * WIDTH * 2)?;
        random.fill(&stream, &query, 99, 1.0)?;
        let out = Region::alloc(device, size * 16 * SHAPE.latent * 2)?;
        mla.plan(&stream, &batch.step)?;
        let time = graph_us(&stream, 10, || {
            let each = |(l, cache)| mla.decode(&stream, &batch.step, &query, cache, 0.07, &out, l > 0);
            caches.iter().enumerate().try_for_each(each)
        })?;
        let (layer, floor) = (time / layers as f64, (size * tokens * WIDTH * 2) as f64 / rate);
        table.row([
            size.to_string(),
            tokens.to_string(),
            us(layer),
            us(floor),
            format!("{:.0}", floor / layer * 100.0),
            reach.into(),
            then.into(),
            predicted.into(),
        ]);
    }
    text.push_str(&table.to_string());
    Ok(text)
}

fn check(device: &Device) -> Result<String> {
    let stream = device.stream()?;
    let random = Random::new(device)?;
    let mut table =
        Table::new("MLA decode against the reference", &["batch", "block", "tokens", "error", "again equal"]);
    let mut ragged = vec![0, 1, 63, 64, 65, 1000, 17, 0, 333, 2048, 128];
    ragged.extend((0..21).map(|i| i * 37 % 300));
    // More sequences than blocks, so that these have several of them.
    let many = (0..6).flat_map(|_| ragged.clone()).collect();
    for (i, (lens, block_size)) in [
        (many, 64),
        (ragged.clone(), 64),
        (ragged, 16),
        (vec![5], 64),
        (vec![5, 40, 33, 100], 4),
        (vec![3000], 16),
        (vec![0, 0], 64),
        (vec![700; 64], 64),
    ]
    .into_iter()
    .enumerate()
    {
        let shape = MlaShape { block_size, ..SHAPE };
        let batch = batch(device, &lens, block_size)?;
        let mla = Mla::new(device, shape, lens.len())?;
        let cache = Region::alloc(device, batch.num_blocks * block_size * WIDTH * 2)?;
        let query = Region::alloc(device, lens.len() * 16 * WIDTH * 2)?;
        let out = Region::alloc(device, lens.len() * 16 * SHAPE.latent * 2)?;
        random.fill(&stream, &cache, 300 + i as u64, 1.0)?;
        // Scores of a few units, so that the softmax is neither flat nor a choice of one.
        random.fill(&stream, &query, 400 + i as u64, 2.0)?;
        out.fill(0xff)?;
        let scale = 0.1;
        mla.spoil()?;
        mla.plan(&stream, &batch.step)?;
        mla.decode(&stream, &batch.step, &query, &cache, scale, &out, false)?;
        stream.synchronize()?;
        let (found, rows, queries) = (out.read::<bf16>()?, cache.read::<bf16>()?, query.read::<bf16>()?);
        let row = |sequence: usize, token: usize| {
            let block = batch.table[sequence * batch.step.max_blocks + token / block_size] as usize;
            &rows[(block * block_size + token % block_size) * WIDTH..][..WIDTH]
        };
        let wanted = reference::mla_decode(&shape, &queries, &batch.lens, row, f64::from(scale));
        let nothing = wanted.iter().all(|w| *w == 0.0);
        let widened: Vec<f64> = found.iter().map(|v| f64::from(v.to_f32())).collect();
        let error =
            if nothing { widened.iter().map(|v| v.abs()).sum() } else { relative_error(widened, wanted) };
        let mut equal = true;
        for _ in 0..20 {
            out.fill(0xff)?;
            mla.decode(&stream, &batch.step, &query, &cache, scale, &out, false)?;
            equal &= out.read::<bf16>()?.iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits());
        }
        let tokens: usize = lens.iter().sum();
        table.row([
            lens.len().to_string(),
            block_size.to_string(),
            tokens.to_string(),
            format!("{error:.1e}"),
            equal.to_string(),
        ]);
        if error.is_nan() || error > 1e-2 || !equal {
            return Err(format!("wrong results\n{table}").into());
        }
    }
    Ok(table.to_string())
}
