//! The random choice: one uniform number per generated token, and the token in whose interval it falls.
use rand::RngCore;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::truncate::Candidate;

/// A choice that can be checked: `below <= uniform < upto` (but for rounding), where the interval is the chosen token's
/// when the allowed tokens' probabilities are laid out in order of token id.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// In [0, 1).
    pub uniform: f64,
    /// Probability of all allowed tokens with a lower id.
    pub below: f64,
    /// The same with the chosen one.
    pub upto: f64,
}

/// The number for the output token at `index`: a function of the two alone, so that a sequence that was interrupted and
/// recomputed draws what it would have drawn.
pub(super) fn uniform(seed: u64, index: u32) -> f64 {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    // A number takes two of the generator's 32-bit words.
    random.set_word_pos(u128::from(index) * 2);
    (random.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// Draws from weighted tokens in order of token id, at least one of positive weight; `total` is the sum of the weights.
pub(super) fn draw(tokens: impl Iterator<Item = Candidate>, total: f64, uniform: f64) -> (u32, Draw) {
    let mut sum = 0.0;
    let mut chosen = (0, Draw { uniform, below: 0.0, upto: 0.0 });
    for Candidate { token, weight } in tokens.filter(|candidate| candidate.weight > 0.0) {
        let below = sum / total;
        sum += f64::from(weight);
        chosen = (token, Draw { uniform, below, upto: sum / total });
        if sum > uniform * total {
            break;
        }
    }
    chosen
}
