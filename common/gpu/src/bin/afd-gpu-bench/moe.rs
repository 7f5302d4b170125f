//! The mixture of experts at DeepSeek-V2-Lite's dimensions: checked row by row, then a whole model's layers in a graph,
//! each with weights of its own, so that no cache helps.
use half::bf16;

use afd_gpu::ops::{Moe, MoeOutput, MoeScoring, MoeShape, MoeTuning, MoeWeights};
use afd_gpu::random::Random;
use afd_gpu::reference::{self, Route, relative_error};
use afd_gpu::{Device, Region, Stream};

use crate::table::{Table, us};
use crate::timing::graph_us;
use crate::{Result, machine};

const LITE: MoeShape = MoeShape {
    hidden: 2048,
    intermediate: 1408,
    num_experts: 64,
    top_k: 6,
    num_shared: 2,
    scoring: MoeScoring::Softmax,
    normalize: false,
    round_logits: false,
};
const LAYERS: usize = 26;
/// Rows, what to reach, then, and what was predicted before the first run; µs.
const TARGETS: [(usize, f64, f64, f64); 6] = [
    (1, 45.0, 38.0, 37.0),
    (8, 180.0, 160.0, 149.0),
    (16, 0.0, 0.0, 217.0),
    (32, 0.0, 0.0, 260.0),
    (64, 310.0, 270.0, 280.0),
    (128, 320.0, 280.0, 297.0),
];

pub(crate) fn run(device: &Device) -> Result<String> {
    let stream = device.stream()?;
    let random = Random::new(device)?;
    let layers = (0..LAYERS).map(|l| weights(device, &stream, &random, l)).collect::<Result<Vec<_>>>()?;
    stream.synchronize()?;
    let mut text = check(device, &stream, &random, &layers[0])?;
    let rate = machine::read_rate(device)?;
    let mut table = Table::new(
        format!(
            "MoE layer, 64 experts, top 6, 2 shared, {LAYERS} layers in one graph, us a layer; read {:.0} GB/s",
            rate / 1e3
        ),
        &[
            "rows",
            "layer",
            "floor",
            "% of read",
            "reach",
            "then",
            "predicted",
            "no overlap",
            "route",
            "gate+up",
            "down",
            "combine",
            "experts",
            "most rows",
        ],
    );
    for (rows, reach, then, predicted) in TARGETS {
        let mut moe = Moe::new(device, LITE, rows, MoeOutput::Bf16)?;
        let x = (0..LAYERS)
            .map(|l| input(device, &stream, &random, rows, l as u64))
            .collect::<Result<Vec<_>>>()?;
        let out = Region::alloc(device, rows * LITE.hidden * 2)?;
        let mut active = 0;
        let mut most = 0;
        for (layer, x) in layers.iter().zip(&x) {
            moe.route(&stream, layer, x, rows, None)?;
            let counts = counts(&routes(&moe.logits().read::<f32>()?));
            active += counts.iter().filter(|c| **c > 0).count();
            most = most.max(counts.into_iter().max().unwrap_or(0));
        }
        let expert_bytes = 3 * LITE.intermediate * LITE.hidden * 2;
        let experts = active as f64 / LAYERS as f64;
        let floor = (experts + LITE.num_shared as f64) * expert_bytes as f64 / rate;
        let all = |moe: &Moe| {
            graph_us(&stream, 4, || {
                layers
                    .iter()
                    .zip(&x)
                    .try_for_each(|(layer, x)| moe.enqueue(&stream, layer, x, rows, None, &out))
            })
        };
        let each = |part: &dyn Fn(&MoeWeights, &Region) -> std::result::Result<(), afd_gpu::GpuError>| {
            graph_us(&stream, 4, || layers.iter().zip(&x).try_for_each(|(layer, x)| part(layer, x)))
        };
        let layer = all(&moe)? / LAYERS as f64;
        // One layer's routing for all, alone.
        moe.set_overlap(false);
        let apart = all(&moe)?;
        let route = each(&|layer, x| moe.route(&stream, layer, x, rows, None))?;
        let up = each(&|layer, x| moe.gate_up(&stream, layer, x, rows))?;
        let down = each(&|layer, _| moe.down(&stream, layer, rows))?;
        let combine = each(&|layer, _| moe.combine(&stream, layer, rows, None, &out))?;
        let per_layer = |t: f64| us(t / LAYERS as f64);
        let wish = |t: f64| if t == 0.0 { "-".to_owned() } else { format!("{t:.0}") };
        table.row([
            rows.to_string(),
            us(layer),
            us(floor),
            format!("{:.0}", floor / layer * 100.0),
            wish(reach),
            wish(then),
            wish(predicted),
            per_layer(apart),
            per_layer(route),
            per_layer(up),
            per_layer(down),
            per_layer(combine),
            format!("{experts:.1}"),
            most.to_string(),
        ]);
    }
    text.push_str(&table.to_string());
    Ok(text)
}

/// The layer with other settings than the chosen ones, and where its time goes.
pub(crate) fn tune(device: &Device) -> Result<String> {
    let stream = device.stream()?;
    let random = Random::new(device)?;
    let layers = (0..LAYERS).map(|l| weights(device, &stream, &random, l)).collect::<Result<Vec<_>>>()?;
    let percents = [100, 80, 60, 40];
    let paces = [0, 700, 950, 1300];
    let columns = [
        "rows",
        "100 %",
        "80 %",
        "60 %",
        "40 %",
        "pace 0",
        "700",
        "950",
        "1300",
        "own split",
        "without overlap",
    ];
    let title = "MoE layer, us, by the share of tiles that blocks do not compete for, and by pace";
    let mut table = Table::new(title, &columns);
    let mut text = String::new();
    for rows in [1, 8, 64, 128] {
        let x = (0..LAYERS)
            .map(|l| input(device, &stream, &random, rows, l as u64))
            .collect::<Result<Vec<_>>>()?;
        let out = Region::alloc(device, rows * LITE.hidden * 2)?;
        let time = |tuning: MoeTuning, overlap: bool| -> Result<(f64, Moe)> {
            let mut moe = Moe::tuned(device, LITE, rows, MoeOutput::Bf16, tuning)?;
            moe.set_overlap(overlap);
            let all = graph_us(&stream, 4, || {
                layers
                    .iter()
                    .zip(&x)
                    .try_for_each(|(layer, x)| moe.enqueue(&stream, layer, x, rows, None, &out))
            })?;
            Ok((all / LAYERS as f64, moe))
        };
        let mut cells = vec![rows.to_string()];
        for static_percent in percents {
            cells.push(us(time(MoeTuning { static_percent, ..MoeTuning::default() }, true)?.0));
        }
        for pace in paces {
            cells.push(us(time(MoeTuning { pace, ..MoeTuning::default() }, true)?.0));
        }
        cells.push(us(time(MoeTuning { one_split: false, ..MoeTuning::default() }, true)?.0));
        cells.push(us(time(MoeTuning::default(), false)?.0));
        table.row(cells);
        let (_, moe) = time(MoeTuning { trace: true, ..MoeTuning::default() }, true)?;
        text.push_str(&timeline(rows, &moe.trace()?));
    }
    Ok(format!("{table}{text}"))
}

/// When each kernel of the last layer began, had waited and ended, µs since the router began.
fn timeline(rows: usize, trace: &[u64]) -> String {
    let columns = ["kernel", "began", "", "waited", "", "ended", "mean", ""];
    let mut table = Table::new(format!("one layer of {rows} rows, first and last block, us"), &columns);
    let blocks = |kernel: usize, what: usize| {
        let all = trace[kernel * 1024..(kernel + 1) * 1024].chunks(4).map(move |b| b[what]);
        all.filter(|t| *t > 0).collect::<Vec<u64>>()
    };
    let zero = blocks(0, 0).into_iter().min().unwrap_or(0);
    let since = |t: u64| us((t as f64 - zero as f64) / 1e3);
    for (kernel, name) in ["router", "gate + up", "down", "combine"].into_iter().enumerate() {
        let mut cells = vec![name.to_owned()];
        for what in 0..3 {
            let times = blocks(kernel, what);
            cells.push(times.iter().min().map_or("-".into(), |t| since(*t)));
            if what == 2 && !times.is_empty() {
                let mean = times.iter().map(|t| *t as f64 - zero as f64).sum::<f64>() / times.len() as f64;
                cells.push(us(mean / 1e3));
            }
            cells.push(times.iter().max().map_or("-".into(), |t| since(*t)));
        }
        table.row(cells);
    }
    table.to_string()
}

/// A few calls, for a profiler to look at.
pub(crate) fn profile(device: &Device) -> Result<String> {
    let stream = device.stream()?;
    let random = Random::new(device)?;
    let layer = weights(device, &stream, &random, 0)?;
    for rows in [8, 64, 128] {
        let moe = Moe::new(device, LITE, rows, MoeOutput::Bf16)?;
        let x = input(device, &stream, &random, rows, 1)?;
        let out = Region::alloc(device, rows * LITE.hidden * 2)?;
        moe.enqueue(&stream, &layer, &x, rows, None, &out)?;
    }
    stream.synchronize()?;
    Ok(String::new())
}

/// Uniform weights; of the router's, the standard deviation is 0.05.
fn weights(device: &Device, stream: &Stream, random: &Random, layer: usize) -> Result<MoeWeights> {
    let MoeShape { hidden, intermediate, num_experts, num_shared, .. } = LITE;
    let experts = num_experts + num_shared;
    let matrix = |elements: usize, seed: usize, deviation: f32| -> Result<Region> {
        let region = Region::alloc(device, elements * 2)?;
        random.fill(stream, &region, (1000 * layer + seed) as u64, deviation * 3f32.sqrt())?;
        Ok(region)
    };
    Ok(MoeWeights {
        router: Some(matrix(num_experts * hidden, 1, 0.05)?),
        bias: None,
        gate_up: matrix(experts * 2 * intermediate * hidden, 2, 0.02)?,
        down: matrix(experts * hidden * intermediate, 3, 0.02)?,
        first_expert: 0,
        num_here: num_experts,
        scale: 1.0,
        ahead: Vec::new(),
    })
}

/// Rows whose mean square is one, as a norm leaves them.
fn input(device: &Device, stream: &Stream, random: &Random, rows: usize, seed: u64) -> Result<Region> {
    let x = Region::alloc(device, rows * LITE.hidden * 2)?;
    random.fill(stream, &x, 77_000 + seed * 131 + rows as u64, 3f32.sqrt())?;
    Ok(x)
}

fn routes(logits: &[f32]) -> Vec<Route> {
    let rows = logits.chunks(LITE.num_experts);
    rows.map(|row| reference::route(&LITE, &row.iter().map(|l| f64::from(*l)).collect::<Vec<_>>(), None, 1.0))
        .collect()
}

fn counts(routes: &[Route]) -> Vec<usize> {
    let mut counts = vec![0; LITE.num_experts];
    for expert in routes.iter().flat_map(|r| &r.experts) {
        counts[*expert] += 1;
    }
    counts
}

/// Every result row against the reference, poisoned before; also with rows that are padding.
fn check(device: &Device, stream: &Stream, random: &Random, layer: &MoeWeights) -> Result<String> {
    let (router, gate_up, down) = (
        layer.router.as_ref().ok_or("no router")?.read::<bf16>()?,
        layer.gate_up.read::<bf16>()?,
        layer.down.read::<bf16>()?,
    );
    let mut table = Table::new(
        "MoE layer against the reference",
        &["rows", "real", "logits error", "error", "again equal"],
    );
    let mut worst: f64 = 0.0;
    for (i, (rows, real)) in
        [(1, 1), (5, 5), (8, 3), (13, 13), (37, 37), (64, 64), (128, 100)].into_iter().enumerate()
    {
        let moe = Moe::new(device, LITE, rows, MoeOutput::Bf16)?;
        let x = input(device, stream, random, rows, 500 + i as u64)?;
        let out = Region::alloc(device, rows * LITE.hidden * 2)?;
        let num_rows = Region::from_slice(device, &[real as i32])?;
        out.fill(0xff)?;
        moe.enqueue(stream, layer, &x, rows, Some(&num_rows), &out)?;
        stream.synchronize()?;
        let (found, logits, rows_in) = (out.read::<bf16>()?, moe.logits().read::<f32>()?, x.read::<bf16>()?);
        let logits = &logits[..real * LITE.num_experts];
        let wanted_logits = (0..real * LITE.num_experts).map(|i| {
            let (row, expert) = (i / LITE.num_experts, i % LITE.num_experts);
            let pairs =
                rows_in[row * LITE.hidden..][..LITE.hidden].iter().zip(&router[expert * LITE.hidden..]);
            pairs.map(|(a, b)| f64::from(a.to_f32() * b.to_f32())).sum::<f64>()
        });
        let logits_error = relative_error(logits.iter().map(|l| f64::from(*l)), wanted_logits);
        let per_up = 2 * LITE.intermediate * LITE.hidden;
        let per_down = LITE.intermediate * LITE.hidden;
        let wanted = reference::moe(
            &LITE,
            &rows_in[..real * LITE.hidden],
            &routes(logits),
            |e| &gate_up[e * per_up..(e + 1) * per_up],
            |e| &down[e * per_down..(e + 1) * per_down],
        );
        let widen = |values: &[bf16]| values.iter().map(|v| f64::from(v.to_f32())).collect::<Vec<_>>();
        let error = relative_error(widen(&found[..real * LITE.hidden]), wanted);
        if found[real * LITE.hidden..].iter().any(|v| v.to_f32() != 0.0) {
            return Err(format!("padding of {rows} rows is not zero").into());
        }
        // The same bits every time, whatever order blocks ran in.
        let mut equal = true;
        for _ in 0..20 {
            out.fill(0xff)?;
            moe.enqueue(stream, layer, &x, rows, Some(&num_rows), &out)?;
            equal &= out.read::<bf16>()?.iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits());
        }
        worst = worst.max(error).max(logits_error * 10.0);
        if error.is_nan() || !equal {
            worst = f64::NAN;
        }
        table.row([
            rows.to_string(),
            real.to_string(),
            format!("{logits_error:.1e}"),
            format!("{error:.1e}"),
            equal.to_string(),
        ]);
    }
    if worst.is_nan() || worst > 1e-2 {
        return Err(format!("wrong results\n{table}").into());
    }
    Ok(table.to_string())
}
