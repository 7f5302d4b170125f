//! How much load, and in which shape.
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::stream::{self, StreamExt};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::BenchError;
use super::request::{Answer, Prompt, Target};
use super::sides::Sides;

/// One level of load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Level {
    pub(super) shape: Shape,
    pub(super) requests: usize,
}

/// What decides when a request starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Shape {
    /// The end of another: so many are in flight.
    Concurrency(usize),
    /// Chance: so many a second on average.
    Rate(f64),
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.shape {
            Shape::Concurrency(n) => write!(f, "{n} in flight"),
            Shape::Rate(rate) => write!(f, "{rate}/s"),
        }
    }
}

/// What came of a level.
#[derive(Clone, Debug)]
pub(super) struct Outcome {
    pub(super) level: Level,
    pub(super) answers: Vec<Answer>,
    pub(super) failures: Vec<String>,
    pub(super) elapsed: Duration,
    /// Where the server says it.
    pub(super) sides: Option<Sides>,
}

/// Makes prompts: the same for every server, another for every request.
#[derive(Clone, Debug)]
pub(super) struct Prompts {
    seed: u64,
    vocab_size: u32,
    input_len: usize,
    output_len: usize,
}

impl Prompts {
    pub(super) fn new(seed: u64, vocab_size: u32, input_len: usize, output_len: usize) -> Self {
        Self { seed, vocab_size, input_len, output_len }
    }

    pub(super) fn of_level(&self, index: usize) -> Self {
        Self { seed: self.seed.wrapping_add(1 + index as u64), ..self.clone() }
    }

    pub(super) fn warm_up(&self) -> Self {
        Self { output_len: self.output_len.min(4), ..self.clone() }
    }

    fn prompt(&self, rng: &mut ChaCha8Rng) -> Prompt {
        let ids = (0..self.input_len).map(|_| rng.random_range(3..self.vocab_size)).collect();
        Prompt { ids, output_len: self.output_len }
    }
}

/// Runs a level against a server.
///
/// # Errors
/// [`BenchError::AllFailed`].
pub(super) async fn run(target: &Target, level: Level, prompts: &Prompts) -> Result<Outcome, BenchError> {
    let mut rng = ChaCha8Rng::seed_from_u64(prompts.seed);
    let all: Vec<Prompt> = (0..level.requests).map(|_| prompts.prompt(&mut rng)).collect();
    let begun = Instant::now();
    let results: Vec<Result<Answer, String>> = match level.shape {
        Shape::Concurrency(n) => {
            stream::iter(all).map(|prompt| target.ask(prompt)).buffer_unordered(n).collect().await
        }
        Shape::Rate(rate) => {
            let mut start = Duration::ZERO;
            let asks = all.into_iter().map(|prompt| {
                // Times between Poisson arrivals are exponential.
                start += Duration::from_secs_f64(-(1.0 - rng.random::<f64>()).ln() / rate);
                let (target, at) = (Arc::new(target.clone()), begun + start);
                async move {
                    tokio::time::sleep_until(at.into()).await;
                    target.ask(prompt).await
                }
            });
            futures::future::join_all(asks).await
        }
    };
    let elapsed = begun.elapsed();
    let mut outcome = Outcome { level, answers: Vec::new(), failures: Vec::new(), elapsed, sides: None };
    for result in results {
        match result {
            Ok(answer) => outcome.answers.push(answer),
            Err(failure) => outcome.failures.push(failure),
        }
    }
    match outcome.failures.first() {
        Some(what) if outcome.answers.is_empty() => {
            Err(BenchError::AllFailed { url: target.url().to_owned(), what: what.clone() })
        }
        _ => Ok(outcome),
    }
}
