//! What was measured, as tables for people and JSON for machines.
use std::fmt::Write as _;

use serde_json::{Value, json};

use super::layers::{self, LayerTimes};
use super::levels::{Outcome, Shape};
use super::stats::Spread;

/// All levels of one server.
pub(super) struct Run {
    pub(super) url: String,
    pub(super) model: String,
    pub(super) levels: Vec<Outcome>,
}

impl Run {
    pub(super) fn new(url: &str, model: &str) -> Self {
        Self { url: url.to_owned(), model: model.to_owned(), levels: Vec::new() }
    }
}

/// Figures of a level.
struct Figures {
    output_tokens_per_s: f64,
    total_tokens_per_s: f64,
    requests_per_s: f64,
    first_token: Spread,
    per_token: Spread,
    inter_token: Spread,
    end_to_end: Spread,
}

impl Figures {
    fn of(outcome: &Outcome) -> Self {
        let answers = &outcome.answers;
        let seconds = outcome.elapsed.as_secs_f64().max(1e-9);
        let output: usize = answers.iter().map(|a| a.tokens).sum();
        let input: usize = answers.iter().map(|a| a.prompt_tokens).sum();
        let per_token = |a: &super::request::Answer| {
            (a.tokens > 1).then(|| (a.last - a.first).div_f64((a.tokens - 1) as f64))
        };
        Self {
            output_tokens_per_s: output as f64 / seconds,
            total_tokens_per_s: (input + output) as f64 / seconds,
            requests_per_s: answers.len() as f64 / seconds,
            first_token: Spread::of(answers.iter().map(|a| a.first)),
            per_token: Spread::of(answers.iter().filter_map(per_token)),
            inter_token: Spread::of(answers.iter().flat_map(|a| a.gaps.iter().copied())),
            end_to_end: Spread::of(answers.iter().map(|a| a.last)),
        }
    }
}

/// Everything, times in milliseconds unless their names say otherwise.
pub(super) fn json(runs: &[Run], layers: &[LayerTimes], input_len: usize, output_len: usize) -> Value {
    let level = |outcome: &Outcome| {
        let figures = Figures::of(outcome);
        let (concurrency, rate) = match outcome.level.shape {
            Shape::Concurrency(n) => (Some(n), None),
            Shape::Rate(rate) => (None, Some(rate)),
        };
        json!({
            "concurrency": concurrency,
            "rate": rate,
            "requests": outcome.level.requests,
            "failed": outcome.failures.len(),
            "first_failure": outcome.failures.first(),
            "elapsed_s": outcome.elapsed.as_secs_f64(),
            "output_tokens_per_s": figures.output_tokens_per_s,
            "total_tokens_per_s": figures.total_tokens_per_s,
            "requests_per_s": figures.requests_per_s,
            "ttft_ms": figures.first_token.json(),
            "tpot_ms": figures.per_token.json(),
            "itl_ms": figures.inter_token.json(),
            "e2e_ms": figures.end_to_end.json(),
            "ffn_waited": outcome.sides.map(|sides| sides.waited),
            "ffn_hidden": outcome.sides.map(|sides| sides.hidden),
        })
    };
    let run = |run: &Run| {
        let levels: Vec<Value> = run.levels.iter().map(level).collect();
        json!({"url": run.url, "model": run.model, "levels": levels})
    };
    json!({
        "input_len": input_len,
        "output_len": output_len,
        "servers": runs.iter().map(run).collect::<Vec<_>>(),
        "layers": layers,
        "points": layers::points(layers),
    })
}

/// A table for every server, how two of them compare, and where steps went.
pub(super) fn tables(runs: &[Run], layers: &[LayerTimes], input_len: usize, output_len: usize) -> String {
    let mut out = String::new();
    for run in runs {
        let _ = writeln!(
            out,
            "\n{}  {}  {input_len} tokens in, {output_len} out; times in ms",
            run.url, run.model
        );
        let rows = run.levels.iter().map(row).collect();
        out.push_str(&table(&HEADS, rows));
    }
    if let [first, second] = runs {
        let _ = writeln!(out, "\n{} relative to {}", first.url, second.url);
        let rows = first.levels.iter().zip(&second.levels).map(|(a, b)| comparison(a, b)).collect();
        out.push_str(&table(&["load", "tok/s", "TTFT p50", "TPOT p50"], rows));
    }
    if !layers.is_empty() {
        let _ = writeln!(out, "\n{}: decode steps; µs are per layer and stage", runs[0].url);
        let heads =
            ["load", "steps", "step ms", "stages", "rows", "attention µs", "hop µs", "FFN rows", "FFN µs"];
        out.push_str(&table(&heads, layers.iter().map(layer_row).collect()));
    }
    out
}

fn layer_row(times: &LayerTimes) -> Vec<String> {
    let ffn = |of: fn(&layers::FfnTimes) -> f64| {
        times.ffn.as_ref().map_or_else(|| "–".to_owned(), |ffn| format!("{:.1}", of(ffn)))
    };
    vec![
        format!("{} in flight", times.concurrency),
        times.steps.to_string(),
        format!("{:.2}", times.step_ms),
        times.stages.to_string(),
        format!("{:.1}", times.rows),
        format!("{:.1}", times.attention_us),
        format!("{:.1}", times.ffn_wait_us),
        ffn(|ffn| ffn.pool_rows),
        ffn(|ffn| ffn.compute_us),
    ]
}

const HEADS: [&str; 16] = [
    "load", "done", "failed", "tok/s", "in+out/s", "req/s", "TTFT p50", "p90", "p99", "TPOT p50", "p90",
    "p99", "ITL p50", "p99", "waited", "hidden",
];

fn row(outcome: &Outcome) -> Vec<String> {
    let f = Figures::of(outcome);
    let ms = |value: f64| if value < 100.0 { format!("{value:.1}") } else { format!("{value:.0}") };
    vec![
        outcome.level.to_string(),
        outcome.answers.len().to_string(),
        outcome.failures.len().to_string(),
        format!("{:.1}", f.output_tokens_per_s),
        format!("{:.1}", f.total_tokens_per_s),
        format!("{:.2}", f.requests_per_s),
        ms(f.first_token.p50),
        ms(f.first_token.p90),
        ms(f.first_token.p99),
        ms(f.per_token.p50),
        ms(f.per_token.p90),
        ms(f.per_token.p99),
        ms(f.inter_token.p50),
        ms(f.inter_token.p99),
        percent(outcome.sides.map(|sides| sides.waited)),
        percent(outcome.sides.map(|sides| sides.hidden)),
    ]
}

/// Of the steps' time.
fn percent(part: Option<f64>) -> String {
    part.map_or_else(|| "-".into(), |part| format!("{:.0} %", 100.0 * part))
}

fn comparison(a: &Outcome, b: &Outcome) -> Vec<String> {
    let (fa, fb) = (Figures::of(a), Figures::of(b));
    let ratio = |x: f64, y: f64| format!("{:.2} ×", x / y.max(1e-9));
    vec![
        a.level.to_string(),
        ratio(fa.output_tokens_per_s, fb.output_tokens_per_s),
        ratio(fa.first_token.p50, fb.first_token.p50),
        ratio(fa.per_token.p50, fb.per_token.p50),
    ]
}

/// Columns as wide as their widest cell, flush right but for the first.
pub(crate) fn table(heads: &[&str], rows: Vec<Vec<String>>) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([heads[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded = cells.zip(&widths).enumerate().map(|(i, (cell, width))| match i {
            0 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        padded.collect::<Vec<_>>().join("  ") + "\n"
    };
    let mut out = line(&mut heads.iter().copied());
    let _ = writeln!(out, "{}", "─".repeat(out.trim_end().chars().count()));
    for row in &rows {
        out.push_str(&line(&mut row.iter().map(String::as_str)));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::table;

    #[test]
    fn columns_line_up() {
        let text = table(&["load", "tok/s"], vec![vec!["1 in flight".into(), "7.0".into()]]);
        assert_eq!(text, "load         tok/s\n──────────────────\n1 in flight    7.0\n");
    }
}
