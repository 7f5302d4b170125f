//! One pass over a row of logits: its largest one, and whether it can be used at all.
use super::SampleError;

/// Independent running maxima, so that the compiler can use vector registers.
const LANES: usize = 16;

/// Logits that are looked at together: where the largest one is, is found out in one piece alone.
const PIECE: usize = 1024;

/// The largest logit. Minus infinity is a legal logit (a token that is ruled out), but not everywhere.
pub(super) fn max(row: &[f32]) -> Result<f32, SampleError> {
    Ok(largest(row)?.1)
}

/// The token with the largest logit, the lowest id among equals.
pub(super) fn best(row: &[f32]) -> Result<u32, SampleError> {
    let (piece, max) = largest(row)?;
    let behind = row[piece * PIECE..].iter().position(|logit| *logit == max);
    behind.map(|at| (piece * PIECE + at) as u32).ok_or(SampleError::NoCandidate)
}

/// The largest logit, and the first piece that has it.
fn largest(row: &[f32]) -> Result<(usize, f32), SampleError> {
    let (mut found, mut sound) = ((0, f32::NEG_INFINITY), true);
    for (index, piece) in row.chunks(PIECE).enumerate() {
        let (max, piece_sound) = look_at(piece);
        sound &= piece_sound;
        if max > found.1 {
            found = (index, max);
        }
    }
    if !sound {
        let token = row.iter().position(|logit| logit.is_nan() || *logit == f32::INFINITY).unwrap_or(0);
        return Err(SampleError::NotFinite { token: token as u32, infinite: !row[token].is_nan() });
    }
    if found.1 == f32::NEG_INFINITY { Err(SampleError::NoCandidate) } else { Ok(found) }
}

/// The largest logit of a piece, and whether all of it can be used.
fn look_at(piece: &[f32]) -> (f32, bool) {
    let mut largest = [f32::NEG_INFINITY; LANES];
    let mut unsound = [0u32; LANES];
    let (chunks, rest) = piece.as_chunks::<LANES>();
    let mut see = |lane: usize, logit: f32| {
        largest[lane] = if logit > largest[lane] { logit } else { largest[lane] };
        // False for a number that is none, too.
        let usable = logit < f32::INFINITY;
        unsound[lane] |= u32::from(!usable);
    };
    for chunk in chunks {
        chunk.iter().enumerate().for_each(|(lane, logit)| see(lane, *logit));
    }
    rest.iter().enumerate().for_each(|(lane, logit)| see(lane, *logit));
    (largest.into_iter().fold(f32::NEG_INFINITY, f32::max), unsound == [0; LANES])
}
