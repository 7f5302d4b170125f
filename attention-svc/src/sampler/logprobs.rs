//! Log probabilities of a row of logits.
use super::{SampleError, Scratch, exp, row};
use crate::request::TokenLogprobs;

/// The chosen token's log probability and rank, and the `num_top` best ones.
///
/// # Errors
/// [`SampleError`] when the row has none, or no token `chosen`.
pub fn logprobs(
    row: &[f32],
    chosen: u32,
    num_top: usize,
    scratch: &mut Scratch,
) -> Result<TokenLogprobs, SampleError> {
    let max = row::max(row)?;
    let log_sum = exp::weights(row, max, 1.0, &mut scratch.weights).ln() as f32 + max;
    let logit = *row.get(chosen as usize).ok_or(SampleError::NoCandidate)?;
    let rank = 1 + row.iter().filter(|other| **other > logit).count() as u32;
    let top = best(row, num_top).into_iter().map(|(token, logit)| (token, logit - log_sum)).collect();
    Ok(TokenLogprobs { chosen: logit - log_sum, rank, top })
}

/// The `count` largest, largest first, the lower id first among equals. Few are asked for: one pass with insertion.
fn best(row: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut best: Vec<(u32, f32)> = Vec::with_capacity(count + 1);
    for (token, &logit) in row.iter().enumerate() {
        if best.len() == count && best.last().is_none_or(|(_, least)| logit <= *least) {
            continue;
        }
        let place = best.partition_point(|(_, other)| *other >= logit);
        best.insert(place, (token as u32, logit));
        best.truncate(count);
    }
    best
}
