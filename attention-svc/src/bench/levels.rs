//! How much load, and in which shape.
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::task::JoinSet;

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

    /// So many of another seed than any level's.
    pub(super) fn take(&self, count: usize) -> Vec<Prompt> {
        let mut rng = ChaCha8Rng::seed_from_u64(!self.seed);
        (0..count).map(|_| self.prompt(&mut rng)).collect()
    }

    /// Tokens of a sequence half-way through its answer.
    pub(super) fn middle(&self) -> u64 {
        (self.input_len + self.output_len / 2) as u64
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
    let all: Vec<Vec<u8>> = (0..level.requests).map(|_| target.write(&prompts.prompt(&mut rng))).collect();
    let begun = Instant::now();
    let results: Vec<Result<Answer, String>> = match level.shape {
        Shape::Concurrency(n) => in_flight(target, n, all).await,
        Shape::Rate(rate) => {
            let starts = arrivals(rate, all.len(), &mut rng);
            let asks = all.into_iter().zip(starts).map(|(body, start)| {
                let (target, at) = (Arc::new(target.clone()), begun + start);
                async move {
                    tokio::time::sleep_until(at.into()).await;
                    target.ask(body, || ()).await
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

/// Asks everything, `n` at a time. Each of them by a task of its own: one that has so many connections to open would
/// keep all of them waiting for the last.
async fn in_flight(target: &Target, n: usize, all: Vec<Vec<u8>>) -> Vec<Result<Answer, String>> {
    let queue = Arc::new(Mutex::new(all.into_iter()));
    let next = |queue: &Mutex<std::vec::IntoIter<Vec<u8>>>| {
        queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner).next()
    };
    let mut askers = JoinSet::new();
    for _ in 0..n {
        let (target, queue) = (target.clone(), Arc::clone(&queue));
        askers.spawn(async move {
            let mut results = Vec::new();
            while let Some(body) = next(&queue) {
                results.push(target.ask(body, || ()).await);
            }
            results
        });
    }
    let mut results = Vec::new();
    while let Some(joined) = askers.join_next().await {
        match joined {
            Ok(asked) => results.extend(asked),
            Err(error) => results.push(Err(error.to_string())),
        }
    }
    results
}

/// When `count` requests of a Poisson process of `rate` a second start: times between them are exponential.
fn arrivals(rate: f64, count: usize, rng: &mut ChaCha8Rng) -> Vec<Duration> {
    let mut at = 0.0;
    let next = |_| {
        at += -(1.0 - rng.random::<f64>()).ln() / rate;
        Duration::from_secs_f64(at)
    };
    (0..count).map(next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_a_rate_arrive_by_chance_and_as_many_a_second_as_asked_for() {
        let (rate, count) = (50.0, 20_000);
        let starts = arrivals(rate, count, &mut ChaCha8Rng::seed_from_u64(3));
        assert!(starts.is_sorted());
        let seconds = starts[count - 1].as_secs_f64();
        assert!((count as f64 / seconds / rate - 1.0).abs() < 0.03, "{count} in {seconds} s");
        // Of exponential times a third is longer than the mean times one, a seventh longer than twice the mean.
        let gaps: Vec<f64> = starts.windows(2).map(|two| (two[1] - two[0]).as_secs_f64() * rate).collect();
        for (longer_than, share) in [(1.0, (-1.0f64).exp()), (2.0, (-2.0f64).exp())] {
            let found = gaps.iter().filter(|gap| **gap > longer_than).count() as f64 / gaps.len() as f64;
            assert!((found - share).abs() < 0.02, "{found} of the gaps are longer than {longer_than}");
        }
    }

    #[test]
    fn every_prompt_is_another_one_and_the_same_again_with_the_same_seed() {
        let prompts = Prompts::new(7, 100, 16, 4);
        let of = |prompts: &Prompts| prompts.take(3).into_iter().map(|prompt| prompt.ids).collect::<Vec<_>>();
        let (first, again, other) = (of(&prompts), of(&prompts), of(&prompts.of_level(0)));
        assert_eq!(first, again);
        assert!(first[0] != first[1] && first[0] != other[0]);
        assert!(first.iter().flatten().all(|id| (3..100).contains(id)));
    }
}
