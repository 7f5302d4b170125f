//! One pass over a row of logits: its largest one, and whether it can be used at all.
use super::SampleError;

/// Independent running maxima, so that the compiler can use vector registers.
const LANES: usize = 16;

/// The largest logit. Minus infinity is a legal logit (a token that is ruled out), but not everywhere.
pub(super) fn max(row: &[f32]) -> Result<f32, SampleError> {
    let mut largest = [f32::NEG_INFINITY; LANES];
    let mut sound = [true; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    let mut see = |lane: usize, logit: f32| {
        largest[lane] = if logit > largest[lane] { logit } else { largest[lane] };
        sound[lane] &= logit < f32::INFINITY;
    };
    for chunk in chunks {
        chunk.iter().enumerate().for_each(|(lane, logit)| see(lane, *logit));
    }
    rest.iter().enumerate().for_each(|(lane, logit)| see(lane, *logit));

    if sound.contains(&false) {
        let token = row.iter().position(|logit| logit.is_nan() || *logit == f32::INFINITY).unwrap_or(0);
        return Err(SampleError::NotFinite { token: token as u32, infinite: !row[token].is_nan() });
    }
    let largest = largest.into_iter().fold(f32::NEG_INFINITY, f32::max);
    if largest == f32::NEG_INFINITY { Err(SampleError::NoCandidate) } else { Ok(largest) }
}

/// The token with the largest logit, the lowest id among equals.
pub(super) fn best(row: &[f32]) -> Result<u32, SampleError> {
    let max = max(row)?;
    row.iter().position(|logit| *logit == max).map(|token| token as u32).ok_or(SampleError::NoCandidate)
}
