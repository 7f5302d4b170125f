//! The mixture of experts against the reference, row by row: other shapes, shards and ways to choose, padding, the counts of
//! experts, the same bits every time.
use half::bf16;

use afd_gpu::ops::{Moe, MoeOutput, MoeScoring, MoeShape, MoeTuning, MoeWeights};
use afd_gpu::random::Random;
use afd_gpu::reference::{self, relative_error};
use afd_gpu::{Device, Region, Stream};

use crate::Result;
use crate::moe::{LITE, counts, input, routes, weights_of};
use crate::table::Table;

const AGAIN: usize = 20;

/// A layer, of which some experts may be elsewhere.
struct Case<'a> {
    name: &'static str,
    shape: MoeShape,
    weights: MoeWeights,
    /// What is in `weights`, on the host.
    router: &'a [bf16],
    gate_up: &'a [bf16],
    down: &'a [bf16],
    bias: Option<Vec<f32>>,
}

/// Rows, how many of them are real, and up to how many rows one kernel does it.
type Calls<'a> = &'a [(usize, usize, usize)];

pub(crate) fn run(device: &Device, stream: &Stream, random: &Random, lite: &MoeWeights) -> Result<String> {
    let mut table = Table::new(
        "MoE layer against the reference",
        &["layer", "rows", "real", "one kernel", "logits error", "error", "again equal"],
    );
    let host = |region: &Region| region.read::<bf16>();
    let (router, gate_up, down) =
        (host(lite.router.as_ref().ok_or("no router")?)?, host(&lite.gate_up)?, host(&lite.down)?);
    let case = |name, shape, weights: MoeWeights, bias| Case {
        name,
        shape,
        weights,
        router: &router,
        gate_up: &gate_up,
        down: &down,
        bias,
    };
    let calls: Calls<'_> = &[
        (1, 1, 8),
        (5, 5, 8),
        (8, 3, 8),
        (8, 8, 0),
        (13, 13, 0),
        (37, 37, 0),
        (64, 64, 0),
        (96, 70, 0),
        (128, 100, 0),
    ];
    check(device, stream, random, &case("V2-Lite", LITE, lite.clone(), None), calls, &mut table)?;
    let few: Calls<'_> = &[(1, 1, 8), (3, 2, 8), (2, 0, 8), (8, 8, 8), (6, 6, 0), (20, 20, 0), (48, 40, 0)];
    let (first, here) = (LITE.num_experts / 2, LITE.num_experts / 2);
    let from = |region: &Region, each: usize| region.part(first * each * 2..region.len());
    let shard = MoeWeights {
        gate_up: from(&lite.gate_up, per_up(&LITE))?,
        down: from(&lite.down, per_down(&LITE))?,
        first_expert: first,
        num_here: here,
        ..lite.clone()
    };
    check(device, stream, random, &case("a shard of it", LITE, shard, None), few, &mut table)?;
    let bias: Vec<f32> = (0..LITE.num_experts).map(|e| (e * 7 % 11) as f32 * 0.03).collect();
    let sigmoid = MoeShape { scoring: MoeScoring::Sigmoid, normalize: true, round_logits: true, ..LITE };
    let biased = MoeWeights { bias: Some(Region::from_slice(device, &bias)?), ..lite.clone() };
    check(device, stream, random, &case("sigmoid, bias", sigmoid, biased, Some(bias)), few, &mut table)?;
    // Nearly every expert is somebody's choice, or so it looks from the padded rows: blocks fetch before they know. With a favourite,
    // more rows of it than a segment has.
    let alone = MoeShape { num_shared: 0, ..LITE };
    let sure: Calls<'_> =
        &[(1, 1, 8), (16, 16, 0), (40, 40, 0), (64, 64, 0), (64, 2, 0), (32, 0, 0), (128, 90, 0)];
    check(device, stream, random, &case("none shared", alone, lite.clone(), None), sure, &mut table)?;
    let bias: Vec<f32> = (0..LITE.num_experts).map(|e| if e == 5 { 9.0 } else { 0.0 }).collect();
    let biased = MoeWeights { bias: Some(Region::from_slice(device, &bias)?), ..lite.clone() };
    let favourite = case("a favourite", MoeShape { num_shared: 0, ..sigmoid }, biased, Some(bias));
    check(device, stream, random, &favourite, &[(64, 64, 0), (80, 70, 0)], &mut table)?;
    let qwen =
        MoeShape { intermediate: 768, num_experts: 128, top_k: 8, num_shared: 0, normalize: true, ..LITE };
    let weights = weights_of(&qwen, device, stream, random, 99)?;
    stream.synchronize()?;
    let (router, gate_up, down) =
        (host(weights.router.as_ref().ok_or("no router")?)?, host(&weights.gate_up)?, host(&weights.down)?);
    let (router, gate_up, down) = (&router[..], &gate_up[..], &down[..]);
    let case = Case { name: "Qwen3-30B", shape: qwen, weights, router, gate_up, down, bias: None };
    check(device, stream, random, &case, few, &mut table)?;
    Ok(table.to_string())
}

fn per_up(shape: &MoeShape) -> usize {
    2 * shape.intermediate * shape.hidden
}

fn per_down(shape: &MoeShape) -> usize {
    shape.intermediate * shape.hidden
}

fn check(
    device: &Device,
    stream: &Stream,
    random: &Random,
    case: &Case<'_>,
    calls: Calls<'_>,
    table: &mut Table,
) -> Result<()> {
    let Case { name, shape, weights, .. } = case;
    let MoeShape { hidden, num_experts, .. } = *shape;
    let here = weights.first_expert..weights.first_expert + weights.num_here;
    let (up, down) = (per_up(shape), per_down(shape));
    let nothing = vec![bf16::ZERO; up];
    for (i, &(rows, real, whole_rows)) in calls.iter().enumerate() {
        let tuning = MoeTuning { whole_rows, ..MoeTuning::default() };
        let moe = Moe::tuned(device, *shape, rows, MoeOutput::Bf16, tuning)?;
        let x = input(device, stream, random, rows, 500 + i as u64)?;
        let out = Region::alloc(device, rows * hidden * 2)?;
        let num_rows = Region::from_slice(device, &[real as i32])?;
        out.fill(0xff)?;
        let chosen = Region::zeroed(device, num_experts * 8)?;
        let counted = MoeWeights { counts: Some(chosen.clone()), ..weights.clone() };
        moe.enqueue(stream, &counted, &x, rows, Some(&num_rows), &out)?;
        stream.synchronize()?;
        let (found, logits, rows_in) = (out.read::<bf16>()?, moe.logits().read::<f32>()?, x.read::<bf16>()?);
        let logits = &logits[..real * num_experts];
        let wanted_logits = (0..real * num_experts).map(|i| {
            let (row, expert) = (i / num_experts, i % num_experts);
            let pairs = rows_in[row * hidden..][..hidden].iter().zip(&case.router[expert * hidden..]);
            pairs.map(|(a, b)| f64::from(a.to_f32() * b.to_f32())).sum::<f64>()
        });
        // Rounded logits are rounded.
        let most = if shape.round_logits { 5e-3 } else { 1e-5 };
        let logits_error = relative_error(logits.iter().map(|l| f64::from(*l)), wanted_logits);
        let routes = routes(shape, logits, case.bias.as_deref());
        // Experts elsewhere add nothing.
        let is_here = |e: usize| e >= num_experts || here.contains(&e);
        let wanted = reference::moe(
            shape,
            &rows_in[..real * hidden],
            &routes,
            |e| if is_here(e) { &case.gate_up[e * up..(e + 1) * up] } else { &nothing[..] },
            |e| if is_here(e) { &case.down[e * down..(e + 1) * down] } else { &nothing[..down] },
        );
        let widen = |values: &[bf16]| values.iter().map(|v| f64::from(v.to_f32())).collect::<Vec<_>>();
        let error = relative_error(widen(&found[..real * hidden]), wanted);
        if found[real * hidden..].iter().any(|v| v.to_f32() != 0.0) {
            return Err(format!("{name}: padding of {rows} rows is not zero").into());
        }
        // The same bits every time, whatever order blocks ran in.
        let mut equal = true;
        for _ in 0..AGAIN {
            out.fill(0xff)?;
            moe.enqueue(stream, &counted, &x, rows, Some(&num_rows), &out)?;
            equal &= out.read::<bf16>()?.iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits());
        }
        let mut wanted: Vec<u64> =
            counts(shape, &routes).iter().map(|count| (AGAIN as u64 + 1) * *count as u64).collect();
        (0..num_experts).filter(|e| !is_here(*e)).for_each(|e| wanted[e] = 0);
        if chosen.read::<u64>()? != wanted {
            return Err(format!("{name}: experts of {rows} rows are counted wrong").into());
        }
        let shown = |error: f64| if real == 0 { "-".to_owned() } else { format!("{error:.1e}") };
        table.row([
            (*name).to_owned(),
            rows.to_string(),
            real.to_string(),
            (rows <= whole_rows).to_string(),
            shown(logits_error),
            shown(error),
            equal.to_string(),
        ]);
        let is_right = real == 0 || (error < 1e-2 && logits_error < most);
        if !is_right || !equal {
            return Err(format!("wrong results\n{table}").into());
        }
    }
    Ok(())
}
