//! The mixture of experts at DeepSeek-V2-Lite's dimensions: a whole model's layers in a graph, each with weights of its own,
//! so that no cache helps.
use afd_gpu::ops::{Moe, MoeOutput, MoeScoring, MoeShape, MoeTuning, MoeWeights};
use afd_gpu::random::Random;
use afd_gpu::reference::{self, Route};
use afd_gpu::{Device, Region, Stream};

use crate::table::{Table, us};
use crate::timing::graph_us;
use crate::{Result, machine, moe_check};

pub(crate) const LITE: MoeShape = MoeShape {
    hidden: 2048,
    intermediate: 1408,
    num_experts: 64,
    top_k: 6,
    num_shared: 2,
    scoring: MoeScoring::Softmax,
    normalize: false,
    round_logits: false,
};
pub(crate) const LAYERS: usize = 26;
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
    let mut text = moe_check::run(device, &stream, &random, &layers[0])?;
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
            moe.enqueue(&stream, layer, x, rows, None, &out)?;
            let logits = moe.logits().read::<f32>()?;
            let counts = counts(&LITE, &routes(&LITE, &logits[..rows * LITE.num_experts], None));
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
        let layer = all(&moe)? / LAYERS as f64;
        // One layer's routing for all, alone.
        moe.set_overlap(false);
        let apart = all(&moe)?;
        let each = |part: usize| {
            graph_us(&stream, 4, || {
                let mut layers = layers.iter().zip(&x);
                layers.try_for_each(|(layer, x)| moe.enqueue_part(part, &stream, layer, (x, rows), &out))
            })
        };
        let part = |part: usize| -> Result<String> { Ok(us(each(part)? / LAYERS as f64)) };
        let wish = |t: f64| if t == 0.0 { "-".to_owned() } else { format!("{t:.0}") };
        table.row([
            rows.to_string(),
            us(layer),
            us(floor),
            format!("{:.0}", floor / layer * 100.0),
            wish(reach),
            wish(then),
            wish(predicted),
            us(apart / LAYERS as f64),
            part(0)?,
            part(1)?,
            part(2)?,
            part(3)?,
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
    let percents = [100, 60, 50, 40];
    let paces = [500, 700, 950];
    let columns = [
        "rows",
        "100 %",
        "60 %",
        "50 %",
        "40 %",
        "pace 500",
        "700",
        "950",
        "one kernel",
        "four",
        "without overlap",
    ];
    let title = "MoE layer, us, by the share of tiles that blocks do not compete for, by pace, by the number of kernels";
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
        // What cannot matter to so many rows is left out: every setting is a kernel to compile.
        let cell = |matters: bool, tuning: MoeTuning| -> Result<String> {
            if matters { Ok(us(time(tuning, true)?.0)) } else { Ok("-".to_owned()) }
        };
        for static_percent in percents {
            cells.push(cell(true, MoeTuning { static_percent, ..MoeTuning::default() })?);
        }
        for pace in paces {
            let tuning = MoeTuning { pace, pace_of_whole: pace, ..MoeTuning::default() };
            cells.push(cell(rows < 4, tuning)?);
        }
        for whole_rows in [8, 0] {
            cells.push(cell(rows <= 8, MoeTuning { whole_rows, ..MoeTuning::default() })?);
        }
        cells.push(us(time(MoeTuning::default(), false)?.0));
        table.row(cells);
        let (_, moe) = time(MoeTuning { trace: true, whole_rows: 8, ..MoeTuning::default() }, true)?;
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

pub(crate) fn weights(device: &Device, stream: &Stream, random: &Random, layer: usize) -> Result<MoeWeights> {
    weights_of(&LITE, device, stream, random, layer)
}

/// Uniform weights; of the router's, the standard deviation is 0.05.
pub(crate) fn weights_of(
    shape: &MoeShape,
    device: &Device,
    stream: &Stream,
    random: &Random,
    layer: usize,
) -> Result<MoeWeights> {
    let MoeShape { hidden, intermediate, num_experts, num_shared, .. } = *shape;
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
        counts: None,
        ahead: Vec::new(),
    })
}

/// Rows whose mean square is one, as a norm leaves them.
pub(crate) fn input(
    device: &Device,
    stream: &Stream,
    random: &Random,
    rows: usize,
    seed: u64,
) -> Result<Region> {
    let x = Region::alloc(device, rows * LITE.hidden * 2)?;
    random.fill(stream, &x, 77_000 + seed * 131 + rows as u64, 3f32.sqrt())?;
    Ok(x)
}

pub(crate) fn routes(shape: &MoeShape, logits: &[f32], bias: Option<&[f32]>) -> Vec<Route> {
    let wide = |row: &[f32]| row.iter().map(|l| f64::from(*l)).collect::<Vec<_>>();
    logits.chunks(shape.num_experts).map(|row| reference::route(shape, &wide(row), bias, 1.0)).collect()
}

pub(crate) fn counts(shape: &MoeShape, routes: &[Route]) -> Vec<usize> {
    let mut counts = vec![0; shape.num_experts];
    for expert in routes.iter().flat_map(|r| &r.experts) {
        counts[*expert] += 1;
    }
    counts
}
