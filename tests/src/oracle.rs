//! The token oracle: the one place that decides whether emitted tokens are *the same tokens*.
//!
//! Kernels give slightly different sums for different batch sizes and shard counts, so equality is not the question
//! except where it can be: in fp32, greedy, on the fixtures, whose gaps between the best and the second logit are
//! recorded and large. Everywhere else the emitted tokens are fed through the monolithic path, and at every position the
//! chosen one must lie within a fixed gap of the best: 1e-3 in fp32, 1.0 in bf16 (in logits).
use anyhow::ensure;
use tch::Kind;

use crate::monolith::Monolith;

/// How far below the best logit a chosen token may lie, by compute dtype of the system under test.
pub fn allowed_gap(kind: Kind) -> f64 {
    match kind {
        Kind::Float => 1e-3,
        _ => 1.0,
    }
}

/// What the oracle found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Verdict {
    /// Tokens judged.
    pub num_tokens: usize,
    /// Largest gap between a position's best logit and the chosen token's.
    pub worst_gap: f64,
    /// Where that was, from 0.
    pub worst_at: usize,
}

/// Judges greedily chosen tokens that follow `prompt`, by teacher forcing through `reference` (in fp32, whatever the
/// system under test computes in: `kind` says that).
///
/// # Errors
/// When a token lies further below the best than allowed, or nothing was emitted.
pub fn judge(reference: &Monolith, prompt: &[u32], emitted: &[u32], kind: Kind) -> anyhow::Result<Verdict> {
    ensure!(
        !prompt.is_empty() && !emitted.is_empty(),
        "nothing to judge: {} tokens were emitted",
        emitted.len()
    );
    let forced: Vec<u32> = prompt.iter().chain(&emitted[..emitted.len() - 1]).copied().collect();
    let logits = reference.logits(&forced, prompt.len() - 1)?.to_kind(Kind::Double);
    let ids: Vec<i64> = emitted.iter().map(|id| i64::from(*id)).collect();
    let chosen = logits.f_gather(1, &tch::Tensor::from_slice(&ids).unsqueeze(1), false)?.squeeze_dim(1);
    let gaps = Vec::<f64>::try_from(logits.f_amax([1].as_slice(), false)?.f_sub(&chosen)?)?;
    let (worst_at, worst_gap) = gaps
        .iter()
        .copied()
        .enumerate()
        .fold((0, 0.0), |worst, gap| if gap.1 > worst.1 { gap } else { worst });
    ensure!(gaps.iter().all(|gap| gap.is_finite()), "the reference has no finite logits");
    ensure!(
        worst_gap <= allowed_gap(kind),
        "token {worst_at} ({}) lies {worst_gap:.2e} below the best logit, allowed are {:.0e}; emitted: {emitted:?}",
        emitted[worst_at],
        allowed_gap(kind)
    );
    Ok(Verdict { num_tokens: emitted.len(), worst_gap, worst_at })
}

/// The strict form for the fixtures in fp32: token for token.
///
/// # Errors
/// At the first difference.
pub fn same(expected: &[u32], emitted: &[u32]) -> anyhow::Result<()> {
    let prefix = expected.iter().zip(emitted).take_while(|(a, b)| a == b).count();
    ensure!(
        expected == emitted,
        "token {prefix} differs: expected {:?}, emitted {:?} (lengths {} and {})",
        expected.get(prefix),
        emitted.get(prefix),
        expected.len(),
        emitted.len()
    );
    Ok(())
}
