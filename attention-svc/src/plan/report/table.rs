//! A plan for people.
use std::fmt::Write as _;

use super::json::Plan;
use crate::plan::case::Case;
use crate::plan::evaluate::Evaluator;
use crate::plan::outcome::{Bound, Outcome, RankMemory};
use crate::plan::search::Misfit;
use crate::plan::stage::{LayerKind, Resource};
use crate::plan::sweep::Point;
use crate::plan::units::{self, Dimension, Tokens};
use crate::plan::verdict;

/// The verdict, the best layouts of both kinds side by side, their memory, and the sweeps.
pub fn table(plan: &Plan) -> String {
    let (case, limits) = (&plan.request.case, &plan.request.limits);
    let mut text = String::new();
    let target = limits.tpot_ms;
    let _ = writeln!(
        text,
        "{} on {}, context {}, {target} ms/token, up to {} GPUs\n{} layouts, {} of them do not fit the memory\n",
        case.shape.name,
        case.profile.name,
        Tokens(case.workload.context),
        limits.max_devices,
        plan.num_layouts,
        plan.num_out_of_memory,
    );
    let _ = writeln!(text, "{}\n", plan.verdict.sentence);
    for (title, outcomes) in [("AFD", &plan.afd), ("Colocated", &plan.colocated)] {
        let rows = outcomes.iter().map(|outcome| layout_row(case, outcome, target));
        text += &grid(&LAYOUT_HEADER.map(|cell| cell.replace("LAYOUT", title)), rows.collect());
        text.push('\n');
    }
    text += "Step and its parts in ms; a stage's way through the step: attention + FFN + communication + waiting + fixed.\n";
    if let Some(line) = plan.afd.first().and_then(|best| shared_line(case, best)) {
        let _ = writeln!(text, "{line}");
    }
    text += "Batch limit: what one more sequence per rank would break.\n\n";
    text += &memory_table(plan);
    for misfit in &plan.misfits {
        let _ = writeln!(text, "{}", misfit_line(misfit));
    }
    if !plan.sweeps.is_empty() {
        text.push('\n');
        text += &sweep_table(&plan.sweeps);
    }
    text
}

/// What shared experts cost attention, where it has them.
fn shared_line(case: &Case, best: &Outcome) -> Option<String> {
    if !case.shared_on_attention(best.layout) {
        return None;
    }
    let (evaluator, stages) = (Evaluator::new(case), f64::from(best.layout.stages()));
    let (layers, _) = evaluator.layer_seconds(best.layout, best.batch_per_rank, LayerKind::Moe);
    let each_s =
        evaluator.stages().shared(best.layout, LayerKind::Moe, best.batch_per_rank / stages) * layers;
    let held = layers * evaluator.stages().terms().shared_weights;
    Some(format!(
        "Of {}, shared experts take attention {:.2} ms a stage while the FFN computes, {:.2} of them longer than that takes, and \
         {} on each of its ranks.",
        best.layout,
        1e3 * each_s,
        best.parts.shared_ms,
        units::human(held, Dimension::Bytes),
    ))
}

const LAYOUT_HEADER: [&str; 13] = [
    "LAYOUT",
    "tok/s/GPU",
    "batch",
    "step",
    "attn",
    "FFN",
    "comm",
    "wait",
    "fixed",
    "idle A",
    "idle F",
    "bound by",
    "batch limit",
];

fn layout_row(case: &Case, outcome: &Outcome, tpot_ms: f64) -> Vec<String> {
    let (parts, percent) = (&outcome.parts, |part: f64| format!("{:.0} %", 100.0 * part));
    let ms = |value: f64| format!("{value:.2}");
    vec![
        outcome.layout.to_string(),
        units::significant(outcome.tokens_per_s_per_device),
        units::significant(outcome.batch_per_rank),
        ms(outcome.step_ms),
        ms(parts.attention_ms),
        ms(parts.ffn_ms),
        ms(parts.communication_ms),
        ms(parts.bubble_ms),
        ms(parts.fixed_ms),
        percent(outcome.idle_attention),
        percent(outcome.idle_ffn),
        bound_name(outcome.bound).into(),
        verdict::batch_limit(case, outcome, tpot_ms).into(),
    ]
}

fn bound_name(bound: Bound) -> &'static str {
    match bound {
        Bound::Attention(Resource::Memory) => "attention memory",
        Bound::Attention(Resource::Compute) => "attention compute",
        Bound::Attention(Resource::Measured) => "attention (measured)",
        Bound::Ffn(Resource::Memory) => "expert weights",
        Bound::Ffn(Resource::Compute) => "FFN compute",
        Bound::Ffn(Resource::Measured) => "FFN (measured)",
        Bound::Link => "link",
        Bound::RoundTrip => "round trip",
    }
}

fn memory_table(plan: &Plan) -> String {
    let mut rows = Vec::new();
    for outcome in plan.afd.iter().take(1).chain(plan.colocated.first()) {
        let mut row = |role: &str, memory: &RankMemory| {
            let gb = |bytes: f64| units::human(bytes, Dimension::Bytes);
            let part = format!("{:.0} %", 100.0 * memory.total() / outcome.memory.usable);
            let cells = [memory.weights, memory.kv_cache, memory.buffers, memory.total()].map(gb);
            rows.push([vec![format!("{}: {role}", outcome.layout)], cells.to_vec(), vec![part]].concat());
        };
        match &outcome.memory.ffn {
            Some(ffn) => {
                row("attention rank", &outcome.memory.attention);
                row("FFN rank", ffn);
            }
            None => row("rank", &outcome.memory.attention),
        }
    }
    grid(&["Memory per rank", "weights", "KV", "buffers", "total", "of usable"].map(String::from), rows)
}

/// What would not fit, and why.
fn misfit_line(misfit: &Misfit) -> String {
    let (memory, gb) = (&misfit.memory, |bytes: f64| units::human(bytes, Dimension::Bytes));
    let ffn = memory.ffn.filter(|ffn| ffn.total() > memory.usable);
    let (role, needs) = match (ffn, memory.ffn) {
        (Some(ffn), _) => ("an FFN rank", ffn.total()),
        (None, Some(_)) => ("an attention rank", memory.attention.total()),
        (None, None) => ("a rank", memory.attention.total()),
    };
    format!("{} does not fit: {role} would hold {} of {}", misfit.layout, gb(needs), gb(memory.usable))
}

/// One line a point.
pub fn sweep_table(points: &[Point]) -> String {
    let rate = |outcome: &Option<Outcome>| match outcome {
        Some(outcome) => units::significant(outcome.tokens_per_s_per_device),
        None => "-".into(),
    };
    let layout =
        |outcome: &Option<Outcome>| outcome.as_ref().map_or("-".into(), |outcome| outcome.layout.to_string());
    let row = |point: &Point| {
        let gain = match &point.verdict {
            Ok(verdict) => verdict.gain.map_or("-".into(), |gain| format!("{:+.1} %", 100.0 * gain)),
            Err(why) => why.clone(),
        };
        let (afd, colocated) = (&point.afd, &point.colocated);
        vec![point.setting.clone(), layout(afd), rate(afd), layout(colocated), rate(colocated), gain]
    };
    let header = ["What if", "AFD", "tok/s/GPU", "Colocated", "tok/s/GPU", "gain"].map(String::from);
    grid(&header, points.iter().map(row).collect())
}

/// Columns as wide as their widest cell; the first is left-aligned.
fn grid(header: &[String], rows: Vec<Vec<String>>) -> String {
    let cells: Vec<&[String]> = std::iter::once(header).chain(rows.iter().map(Vec::as_slice)).collect();
    let width = |column: usize| {
        let lengths = cells.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        lengths.max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..header.len()).map(width).collect();
    let mut text = String::new();
    for row in cells {
        let padded = row.iter().enumerate().map(|(column, cell)| match column {
            0 => format!("{cell:<width$}", width = widths[column]),
            _ => format!("{cell:>width$}", width = widths[column]),
        });
        text += padded.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}
