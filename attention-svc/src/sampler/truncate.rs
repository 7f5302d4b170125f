//! Top-k, top-p and min-p: which tokens may be drawn. Nothing here sorts the vocabulary.
use std::cmp::Ordering;

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

/// Whether anything is cut off at all.
pub(super) fn truncates(params: &SamplingParams) -> bool {
    params.top_k.is_some() || params.top_p < 1.0 || params.min_p > 0.0
}

/// The tokens that may be drawn, out of the weights of all and their sum: at least one, in order of token id.
pub(super) fn truncate(
    params: &SamplingParams,
    weights: &[f32],
    total: f64,
    candidates: &mut Vec<Candidate>,
) {
    let top_k = params.top_k.map(|k| k as usize).filter(|k| (1..weights.len()).contains(k));
    let top_p = Some(f64::from(params.top_p)).filter(|p| *p < 1.0);

    // What min-p cuts off never comes back, but it must not change what top-k and top-p see: it may go at once only when
    // they are not asked. All tokens below an equal share of 1 - p together weigh less than 1 - p, so the nucleus is in
    // the rest.
    let floor = match (top_k, top_p) {
        (None, None) => params.min_p,
        (None, Some(p)) => ((1.0 - p) * total / weights.len() as f64) as f32,
        (Some(_), _) => 0.0,
    };
    candidates.clear();
    let candidate = |(token, weight): (usize, &f32)| Candidate { token: token as u32, weight: *weight };
    let heavy = |candidate: &Candidate| candidate.weight >= floor;
    candidates.extend(weights.iter().enumerate().map(candidate).filter(heavy));

    if let Some(k) = top_k {
        candidates.select_nth_unstable_by(k - 1, by_weight);
        candidates.truncate(k);
    }
    if let Some(p) = top_p {
        let total = if top_k.is_some() { weight(candidates) } else { total };
        keep_nucleus(candidates, p * total);
    }
    // The most probable token weighs 1 and is never cut off.
    candidates.retain(|candidate| candidate.weight >= params.min_p);
    candidates.sort_unstable_by_key(|candidate| candidate.token);
}

/// Sum of the weights.
pub(super) fn weight(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|candidate| f64::from(candidate.weight)).sum()
}

/// The fewest most probable tokens that together weigh at least `target`; all, if they do not. Linear on average: the
/// border is found by halving, and only the half that holds it is looked at again.
fn keep_nucleus(candidates: &mut Vec<Candidate>, target: f64) {
    // The heaviest `low` are in front and weigh `sum`, too little; the heaviest `high` weigh enough.
    let (mut low, mut high, mut sum) = (0, candidates.len(), 0.0);
    while high - low > 1 {
        let middle = (low + high) / 2;
        candidates[low..high].select_nth_unstable_by(middle - low, by_weight);
        let more = weight(&candidates[low..middle]);
        if sum + more >= target {
            high = middle;
        } else {
            (low, sum) = (middle, sum + more);
        }
    }
    candidates.truncate(high);
}
