//! A small fuzzer that runs on stable Rust as an ordinary test: seeds are mutated, and what makes the target behave in a
//! way not seen before (another kind of answer) joins the corpus. A run is determined by its seed and by how far it gets.
//!
//! `AFD_FUZZ_SECONDS` is the time for each target (default 1, `deploy/test.sh` gives more), `AFD_FUZZ_SEED` another run,
//! `AFD_FUZZ_KEEP=FILE` a file that always holds the input under test, for when the whole process dies of one.
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// An input that takes longer than this is a finding, debug builds on a busy machine included.
const SLOW: Duration = Duration::from_secs(30);
/// Inputs stay below this.
const MAX_BYTES: usize = 16 << 10;
/// Corpus entries beyond the seeds.
const MAX_KEPT: usize = 4096;

/// What a target says to an input: in a few words, the same for inputs of one kind.
pub(crate) type Answer = String;

/// Runs `target` on `seeds` and on mutations of them until its time is over. `words` are pieces that inputs are made of.
///
/// # Errors
/// A panic, a broken promise (which is a panic of the target's own) or an input that takes too long: the input is part
/// of the message.
pub(crate) fn fuzz(
    name: &str,
    seeds: Vec<Vec<u8>>,
    words: &[&str],
    mut target: impl FnMut(&[u8]) -> Answer,
) -> anyhow::Result<()> {
    let setting = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let keep = std::env::var_os("AFD_FUZZ_KEEP").map(PathBuf::from);
    let seed = setting("AFD_FUZZ_SEED").unwrap_or(1);
    let until = Instant::now() + Duration::from_secs(setting("AFD_FUZZ_SECONDS").unwrap_or(1));
    let (mut rng, mut corpus, mut seen) = (StdRng::seed_from_u64(seed), Vec::new(), HashSet::new());
    let (mut runs, mut waiting) = (0u64, seeds);
    while Instant::now() < until || !waiting.is_empty() {
        let is_seed = !waiting.is_empty();
        let input = match waiting.pop() {
            Some(input) => input,
            None => mutated(&corpus, words, &mut rng),
        };
        if let Some(path) = &keep {
            std::fs::write(path, &input).with_context(|| path.display().to_string())?;
        }
        let begun = Instant::now();
        let answered = catch_unwind(AssertUnwindSafe(|| target(&input)));
        let (took, shown) = (begun.elapsed(), input.escape_ascii());
        match answered {
            Err(_) => bail!("{name}, seed {seed}, run {runs}: a panic (see above) on b\"{shown}\""),
            Ok(_) if took > SLOW => bail!("{name}, seed {seed}, run {runs}: {took:?} for b\"{shown}\""),
            Ok(answer) => {
                let is_new = seen.insert(without_digits(&answer));
                if is_seed || (is_new && corpus.len() < MAX_KEPT) {
                    corpus.push(input);
                }
            }
        }
        runs += 1;
    }
    println!("{name}: {runs} inputs, {} kinds of answers, seed {seed}", seen.len());
    Ok(())
}

/// Numbers differ from input to input and say nothing new.
fn without_digits(answer: &str) -> String {
    answer.chars().filter(|c| !c.is_ascii_digit()).take(200).collect()
}

fn mutated(corpus: &[Vec<u8>], words: &[&str], rng: &mut StdRng) -> Vec<u8> {
    let pick = |rng: &mut StdRng| corpus.get(rng.random_range(0..corpus.len().max(1))).cloned();
    let mut input = pick(rng).unwrap_or_default();
    for _ in 0..rng.random_range(1..=8) {
        let at = rng.random_range(0..=input.len());
        let run = rng.random_range(0..=(input.len() - at).min(64));
        match rng.random_range(0..10) {
            0 if at < input.len() => input[at] ^= 1 << rng.random_range(0..8),
            1 if at < input.len() => {
                input[at] =
                    *[0, 1, 0x7f, 0x80, 0xff, b'"', b'-', b'9'].get(rng.random_range(0..8)).unwrap_or(&0)
            }
            2 => drop(input.drain(at..at + run)),
            3 => {
                let again = input[at..at + run].to_vec();
                input.splice(at..at, again);
            }
            4 => input.splice(at..at, (0..run).map(|_| rng.random())).for_each(drop),
            5 => {
                let number = [0, 1, u64::MAX, 1 << 31, 1 << 32, i64::MAX as u64][rng.random_range(0..6)];
                let end = (at + 8).min(input.len());
                input.splice(at..end, number.to_le_bytes()).for_each(drop);
            }
            6 => {
                // The beginning of this one, the end of another.
                let other = pick(rng).unwrap_or_default();
                let from = rng.random_range(0..=other.len());
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            7 | 8 if !words.is_empty() => {
                let word = words[rng.random_range(0..words.len())];
                input.splice(at..at, word.bytes()).for_each(drop);
            }
            _ => {
                // Deep instead of long.
                let word = words.get(rng.random_range(0..words.len().max(1))).unwrap_or(&"[");
                let deep = word.repeat(rng.random_range(1..200));
                input.splice(at..at, deep.bytes()).for_each(drop);
            }
        }
        input.truncate(MAX_BYTES);
    }
    input
}
