//! Row-wise kernels: checked against the reference, then timed in a graph.
use half::bf16;

use afd_gpu::ops::{Ahead, MlaQueries, MlaWrite, NormRows, RowPlaces, Rows};
use afd_gpu::random::{Random, uniform};
use afd_gpu::reference::{self, relative_error};
use afd_gpu::{Device, Region, Stream};

use crate::Result;
use crate::table::{Table, us};
use crate::timing::graph_us;

const HIDDEN: usize = 2048;
const VOCAB: usize = 102_400;

pub(crate) fn run(device: &Device) -> Result<String> {
    let stream = device.stream()?;
    let (rows_ops, random) = (Rows::new(device)?, Random::new(device)?);
    let mut table = Table::new("row-wise kernels, us in a graph of 64", &["kernel", "rows", "us", "error"]);
    for rows in [1, 64, 128] {
        let region = |bytes| Region::alloc(device, bytes);
        let (delta, residual, out) =
            (region(rows * HIDDEN * 2)?, region(rows * HIDDEN * 2)?, region(rows * HIDDEN * 2)?);
        let weight = region(HIDDEN * 2)?;
        random.fill(&stream, &delta, 11, 1.0)?;
        random.fill(&stream, &residual, 12, 1.0)?;
        random.fill(&stream, &weight, 13, 1.0)?;
        let ahead = Ahead::default();
        let norm = NormRows {
            residual: &residual,
            weight: &weight,
            out: &out,
            also: None,
            more: None,
            rows,
            hidden: HIDDEN,
            epsilon: 1e-6,
            ahead,
        };
        let error = all_sums(&rows_ops, &stream, &norm, &delta)?;
        let time = graph_us(&stream, 10, || {
            (0..64).try_for_each(|_| rows_ops.rms_norm(&stream, Some(&delta), &norm))
        })?;
        table.row(["rms_norm + residual".into(), rows.to_string(), us(time / 64.0), format!("{error:.1e}")]);
        let error = mla_write(device, &rows_ops, &random, rows, &mut table)?;
        let logits = region(rows * VOCAB * 2)?;
        random.fill(&stream, &logits, 14, 4.0)?;
        let tokens = region(rows * 4)?;
        rows_ops.argmax(&stream, &logits, &tokens, rows, VOCAB)?;
        let values = logits.read::<bf16>()?;
        let wanted: Vec<i32> = values.chunks(VOCAB).map(|row| reference::argmax(row) as i32).collect();
        if tokens.read::<i32>()? != wanted {
            return Err(format!("argmax of {rows} rows is wrong").into());
        }
        let time = graph_us(&stream, 10, || {
            (0..64).try_for_each(|_| rows_ops.argmax(&stream, &logits, &tokens, rows, VOCAB))
        })?;
        table.row(["argmax of 102400".into(), rows.to_string(), us(time / 64.0), "exact".into()]);
        if error.is_nan() || error > 1e-2 {
            return Err(format!("error {error} with {rows} rows\n{table}").into());
        }
    }
    Ok(table.to_string())
}

/// The norm of a residual with everything added that can be, by both kernels: one delta, and one partial sum. The larger error.
fn all_sums(ops: &Rows, stream: &Stream, norm: &NormRows<'_>, delta: &Region) -> Result<f64> {
    let (device, rows) = (stream.device(), norm.rows);
    let numbers =
        |seed| (0..rows * HIDDEN).map(|i| uniform(seed, i as u64, 1.0).to_f32()).collect::<Vec<f32>>();
    let (deltas, residuals, more) = (numbers(11), numbers(12), numbers(15));
    let more_region = Region::from_slice(device, &more)?;
    let also = Region::alloc(device, rows * HIDDEN * 2)?;
    let residual = Region::from_slice(device, &norm.residual.read::<u16>()?)?;
    let all = NormRows { also: Some(&also), more: Some(&more_region), ..*norm };
    ops.rms_norm(stream, Some(delta), &all)?;
    let once = norm.out.read::<bf16>()?;
    if also.read::<bf16>()? != once {
        return Err("rows that are written twice differ".into());
    }
    let part = Region::from_slice(device, &deltas)?;
    let addresses = Region::from_slice(device, &[part.address()])?;
    ops.rms_norm_parts(stream, &addresses, &[part], &NormRows { residual: &residual, ..all })?;
    let by_parts = norm.out.read::<bf16>()?;
    let weights = norm.weight.read::<bf16>()?;
    let wanted: Vec<f64> = (0..rows)
        .flat_map(|r| {
            let sum = |i: usize| bf16::from_f32(residuals[i] + bf16::from_f32(deltas[i] + more[i]).to_f32());
            let sums: Vec<bf16> = (r * HIDDEN..(r + 1) * HIDDEN).map(sum).collect();
            reference::rms_norm(&sums, &weights, 1e-6)
        })
        .collect();
    let error = |found: Vec<bf16>| {
        relative_error(found.into_iter().map(|v| f64::from(v.to_f32())), wanted.iter().copied())
    };
    Ok(error(once).max(error(by_parts)))
}

/// Cache write and rope; the error over both outputs.
fn mla_write(device: &Device, ops: &Rows, random: &Random, rows: usize, table: &mut Table) -> Result<f64> {
    const LATENT: usize = 512;
    const NOPE: usize = 128;
    const ROPE: usize = 64;
    const HEADS: usize = 16;
    const STRIDE: usize = HEADS * (NOPE + ROPE) + LATENT + ROPE;
    let stream = device.stream()?;
    let region = |bytes| Region::alloc(device, bytes);
    let (projected, query) = (region(rows * STRIDE * 2)?, region(rows * HEADS * (LATENT + ROPE) * 2)?);
    let (norm, cache) = (region(LATENT * 2)?, Region::zeroed(device, 256 * 64 * (LATENT + ROPE) * 2)?);
    random.fill(&stream, &projected, 21, 1.0)?;
    random.fill(&stream, &norm, 23, 1.0)?;
    stream.synchronize()?;
    let angle = |position: usize, i: usize| position as f64 * 10_000f64.powf(-2.0 * i as f64 / ROPE as f64);
    let table_of = |position| {
        let cos = (0..ROPE / 2).map(move |i| angle(position, i).cos() as f32);
        cos.chain((0..ROPE / 2).map(move |i| angle(position, i).sin() as f32))
    };
    let cos_sin = Region::from_slice(device, &(0..512).flat_map(table_of).collect::<Vec<f32>>())?;
    let positions: Vec<i32> = (0..rows as i32).map(|r| r * 3 + 1).collect();
    let slots: Vec<i64> = (0..rows as i64).map(|r| if r == 5 { -1 } else { r * 97 + 3 }).collect();
    let (position, slot) = (Region::from_slice(device, &positions)?, Region::from_slice(device, &slots)?);
    let places = RowPlaces { positions: &position, slots: &slot, cos_sin: &cos_sin, rows };
    let write = MlaWrite {
        projected: &projected,
        stride: STRIDE,
        latent_norm: &norm,
        query: MlaQueries::Absorbed(&query),
        cache: &cache,
        latent: LATENT,
        nope: NOPE,
        rope: ROPE,
        heads: HEADS,
        interleaved: true,
        epsilon: 1e-6,
        // Beside rows that are checked, to see that it harms none.
        ahead: Ahead::of([&cache]),
    };
    ops.mla_write(&stream, &places, &write)?;
    let (before, turned, cached) = (projected.read::<bf16>()?, query.read::<bf16>()?, cache.read::<bf16>()?);
    let norms = norm.read::<bf16>()?;
    let (mut found, mut wanted) = (Vec::new(), Vec::new());
    let rotate = |pairs: &[bf16], position: i32| -> Vec<f64> {
        let value = |i: usize| f64::from(pairs[i].to_f32());
        let turn = |i: usize| angle(position as usize, i / 2);
        let one = |i: usize| match i % 2 {
            0 => value(i) * turn(i).cos() - value(i + 1) * turn(i).sin(),
            _ => value(i) * turn(i).cos() + value(i - 1) * turn(i).sin(),
        };
        (0..ROPE).map(one).collect()
    };
    let widen = |values: &[bf16]| values.iter().map(|v| f64::from(v.to_f32())).collect::<Vec<_>>();
    for r in 0..rows {
        let own = &before[r * STRIDE..][..STRIDE];
        if slots[r] >= 0 {
            let kv = &own[HEADS * (NOPE + ROPE)..];
            found.extend(widen(&cached[slots[r] as usize * (LATENT + ROPE)..][..LATENT + ROPE]));
            wanted.extend(reference::rms_norm(&kv[..LATENT], &norms, 1e-6));
            wanted.extend(rotate(&kv[LATENT..], positions[r]));
        }
        for head in 0..HEADS {
            found.extend(widen(&turned[((r * HEADS + head) * (LATENT + ROPE)) + LATENT..][..ROPE]));
            wanted.extend(rotate(&own[head * (NOPE + ROPE) + NOPE..][..ROPE], positions[r]));
        }
    }
    let error = relative_error(found, wanted);
    let time = graph_us(&stream, 10, || (0..64).try_for_each(|_| ops.mla_write(&stream, &places, &write)))?;
    table.row(["rope + cache write".into(), rows.to_string(), us(time / 64.0), format!("{error:.1e}")]);
    Ok(error)
}
