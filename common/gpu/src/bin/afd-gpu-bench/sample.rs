//! Sampled tokens: checked against a draw that sorts everything, then timed in a graph.
use half::bf16;

use afd_gpu::ops::{DrawRule, Rows, Sample};
use afd_gpu::reference;
use afd_gpu::{Device, Region, Stream};

use crate::Result;
use crate::table::{Table, us};
use crate::timing::graph_us;

/// Vocabularies of DeepSeek-V2-Lite and Qwen3.
const VOCABS: [usize; 2] = [102_400, 151_936];
const ROWS: usize = 128;
/// Of a rule that an interval may differ by from the reference's.
const TOLERANCE: f64 = 1e-3;

/// Numbers that look random, the same every time.
struct Numbers(u64);

impl Numbers {
    /// In [0, 1).
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Roughly normal.
    fn bell(&mut self) -> f64 {
        (0..4).map(|_| self.next() - 0.5).sum::<f64>() * 3f64.sqrt()
    }
}

pub(crate) fn run(device: &Device) -> Result<String> {
    let stream = device.stream()?;
    let (rows_ops, sample) = (Rows::new(device)?, Sample::new(device)?);
    let mut table =
        Table::new("choosing tokens, us in a graph of 16", &["rule", "vocab", "rows", "us", "of it argmax"]);
    for vocab in VOCABS {
        let logits = logits(vocab);
        check(device, &stream, &rows_ops, &sample, vocab, &logits)?;
        let on_device = Region::from_slice(device, &logits)?;
        let (tokens, intervals) = (Region::zeroed(device, ROWS * 4)?, Region::zeroed(device, ROWS * 16)?);
        let rules = [
            ("best", DrawRule::Best),
            ("temperature", draw(1.0, 0, 1.0, 0.0, 0.4)),
            ("top-k 50", draw(1.0, 50, 1.0, 0.0, 0.4)),
            ("top-p 0.9", draw(1.0, 0, 0.9, 0.0, 0.4)),
            ("all three", draw(1.2, 50, 0.9, 0.01, 0.4)),
        ];
        for (name, rule) in rules {
            let words = Region::from_slice(device, &vec![rule.words(); ROWS].concat())?;
            for rows in [1, 64, ROWS] {
                let best = || rows_ops.argmax(&stream, &on_device, &tokens, rows, vocab);
                let argmax = graph_us(&stream, 10, || (0..16).try_for_each(|_| best()))? / 16.0;
                let both = || {
                    rows_ops.argmax(&stream, &on_device, &tokens, rows, vocab)?;
                    sample.enqueue(&stream, &on_device, &words, (&tokens, &intervals), rows, vocab)
                };
                let time = graph_us(&stream, 10, || (0..16).try_for_each(|_| both()))? / 16.0;
                table.row([name.into(), vocab.to_string(), rows.to_string(), us(time), us(argmax)]);
            }
        }
    }
    Ok(format!("sampled tokens: as the reference draws them\n{table}"))
}

fn draw(scale: f32, top_k: u32, top_p: f32, min_p: f32, uniform: f64) -> DrawRule {
    DrawRule::Draw { scale, top_k, top_p, min_p, uniform }
}

/// Rows as models have them (bells of several widths), flat ones, ones with few values, and ones where tokens are ruled out.
fn logits(vocab: usize) -> Vec<bf16> {
    let mut numbers = Numbers(7);
    (0..ROWS * vocab)
        .map(|at| {
            let row = at / vocab;
            let value = match row % 8 {
                0 => 0.25,
                1 => (numbers.bell() * 2.0).round(),
                2 if at % 3 == 0 => f64::NEG_INFINITY,
                kind => numbers.bell() * [1.0, 2.0, 4.0, 0.1][kind % 4] + (row % 5) as f64 * 10.0 - 20.0,
            };
            bf16::from_f64(value)
        })
        .collect()
}

fn check(
    device: &Device,
    stream: &Stream,
    rows_ops: &Rows,
    sample: &Sample,
    vocab: usize,
    logits: &[bf16],
) -> Result<()> {
    let mut numbers = Numbers(11);
    let mut rule = |row: usize| {
        let scale = [1.0, 0.5, 2.0, 1e-9, f32::INFINITY, 1.3][row % 6];
        let top_k = [0, 0, 50, 1, 5000, 0, 20, 200_000, 40][row % 9];
        let top_p = [1.0, 0.9, 0.999, 0.1, 1.0, 0.95, 0.5][row % 7];
        let min_p = [0.0, 0.0, 0.05, 0.0, 0.5][row % 5];
        let uniform = if row % 16 == 3 { 1.0 - 1e-9 } else { numbers.next() };
        if row % 13 == 12 { DrawRule::Best } else { draw(scale, top_k, top_p, min_p, uniform) }
    };
    let rules: Vec<DrawRule> = (0..ROWS).map(&mut rule).collect();
    let on_device = Region::from_slice(device, logits)?;
    let words = Region::from_slice(device, &rules.iter().flat_map(|rule| rule.words()).collect::<Vec<_>>())?;
    let (tokens, intervals) = (Region::zeroed(device, ROWS * 4)?, Region::zeroed(device, ROWS * 16)?);
    let mut found = Vec::new();
    for _ in 0..2 {
        intervals.fill(0xff)?;
        rows_ops.argmax(stream, &on_device, &tokens, ROWS, vocab)?;
        sample.enqueue(stream, &on_device, &words, (&tokens, &intervals), ROWS, vocab)?;
        stream.synchronize()?;
        found.push((tokens.read::<u32>()?, intervals.read::<u64>()?));
    }
    if found[0] != found[1] {
        return Err("the same rows came to other tokens".into());
    }
    let (tokens, intervals) = &found[0];
    let (mut wrong, mut same) = (Vec::new(), 0);
    for (row, (values, &rule)) in logits.chunks(vocab).zip(&rules).enumerate() {
        let token = tokens[row];
        let DrawRule::Draw { uniform, .. } = rule else {
            if token as usize != reference::argmax(values) {
                wrong.push(format!("row {row}: {token} is not the best"));
            }
            continue;
        };
        let (below, upto) = (f64::from_bits(intervals[row * 2]), f64::from_bits(intervals[row * 2 + 1]));
        let wanted = reference::sample(values, rule).ok_or("the reference draws nothing")?;
        same += usize::from(wanted.token == token);
        let near = |a: f64, b: f64| (a - b).abs() < TOLERANCE;
        let fits = reference::interval(values, rule, token).is_some_and(|one| {
            near(one.below, below)
                && near(one.upto, upto)
                && one.below - TOLERANCE <= uniform
                && uniform <= one.upto + TOLERANCE
        });
        if !fits {
            wrong.push(format!("row {row}: {token} in {below}..{upto}, expected {wanted:?}, by {rule:?}"));
        }
    }
    let drawn = rules.iter().filter(|rule| **rule != DrawRule::Best).count();
    eprintln!("sample, vocabulary {vocab}: {same} of {drawn} rows exactly the reference's token");
    if wrong.is_empty() {
        Ok(())
    } else {
        Err(format!("{} rows are wrong: {}", wrong.len(), wrong[..wrong.len().min(6)].join("; ")).into())
    }
}
