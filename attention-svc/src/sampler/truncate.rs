//! Temperature, top-k, top-p and min-p: which tokens may be drawn, and their relative weights. Nothing here sorts the
//! whole vocabulary.
use std::cmp::Ordering;

use super::{SampleError, row};
use crate::request::SamplingParams;

/// A token that may be drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub(super) token: u32,
    /// Its probability over that of the most probable token.
    pub(super) weight: f32,
}

/// Most probable first; the lower id first among equals, so that the choice does not depend on the algorithm.
fn by_weight(a: &Candidate, b: &Candidate) -> Ordering {
    b.weight.total_cmp(&a.weight).then(a.token.cmp(&b.token))
}

/// Leaves the tokens that may be drawn in `candidates`, in any order, at least one.
pub(super) fn truncate(
    params: &SamplingParams,
    row: &[f32],
    candidates: &mut Vec<Candidate>,
) -> Result<(), SampleError> {
    let max = row::max(row)?;
    // The difference first: it is at most 0, so no temperature can make it overflow.
    let scale = 1.0 / f64::from(params.temperature);
    let weight = |logit: f32| (f64::from(logit - max) * scale).max(-1e9) as f32;
    candidates.clear();
    let candidate =
        |(token, logit): (usize, &f32)| Candidate { token: token as u32, weight: weight(*logit).exp() };
    candidates.extend(row.iter().enumerate().map(candidate));

    if let Some(k) = params.top_k.map(|k| k as usize).filter(|k| *k > 0) {
        keep_best(candidates, k);
    }
    if params.top_p < 1.0 {
        keep_nucleus(candidates, f64::from(params.top_p));
    }
    // The most probable token weighs 1 and is never cut off.
    candidates.retain(|candidate| candidate.weight > 0.0 && candidate.weight >= params.min_p);
    Ok(())
}

fn keep_best(candidates: &mut Vec<Candidate>, k: usize) {
    if k < candidates.len() {
        candidates.select_nth_unstable_by(k - 1, by_weight);
        candidates.truncate(k);
    }
}

/// The fewest most probable tokens that together reach `p` of the weight.
fn keep_nucleus(candidates: &mut Vec<Candidate>, p: f64) {
    let total: f64 = candidates.iter().map(|candidate| f64::from(candidate.weight)).sum();
    // All tokens below an equal share of 1 - p together weigh less than 1 - p: what is left contains the nucleus.
    let floor = (1.0 - p) * total / candidates.len() as f64;
    candidates.retain(|candidate| f64::from(candidate.weight) >= floor);

    let (mut sorted, mut step, mut sum) = (0, 64, 0.0);
    while sorted < candidates.len() {
        let rest = &mut candidates[sorted..];
        let step_len = step.min(rest.len());
        if step_len < rest.len() {
            rest.select_nth_unstable_by(step_len, by_weight);
        }
        rest[..step_len].sort_unstable_by(by_weight);
        for (index, candidate) in rest[..step_len].iter().enumerate() {
            sum += f64::from(candidate.weight);
            if sum >= p * total {
                candidates.truncate(sorted + index + 1);
                return;
            }
        }
        sorted += step_len;
        step *= 4;
    }
}
