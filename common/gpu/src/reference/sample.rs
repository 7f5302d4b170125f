//! A draw by sorting everything, in f64.
use half::bf16;

use crate::ops::DrawRule;

/// A token and its interval in the sum of what could be drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drawn {
    /// Its id.
    pub token: u32,
    /// Probability of all that could be drawn and have a lower id.
    pub below: f64,
    /// The same with the token.
    pub upto: f64,
}

/// What could be drawn, in order of id, each with its interval; `None` when the rule is the best or every token is ruled
/// out. `row` has no NaN and nothing infinitely large.
fn layout(row: &[bf16], rule: DrawRule) -> Option<Vec<Drawn>> {
    let DrawRule::Draw { scale, top_k, top_p, min_p, .. } = rule else { return None };
    let best = row.iter().map(|logit| logit.to_f32()).fold(f32::NEG_INFINITY, f32::max);
    if best == f32::NEG_INFINITY {
        return None;
    }
    // As f32 numbers: what is infinitely small times infinity is no number, and stands for 0.
    let exponent = |logit: &bf16| f64::from(((logit.to_f32() - best) * scale).min(0.0));
    let mut all: Vec<(u32, f32, f64)> =
        row.iter().zip(0..).map(|(logit, id)| (id, logit.to_f32(), exponent(logit).exp())).collect();
    all.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap_or(std::cmp::Ordering::Equal).then(a.0.cmp(&b.0)));
    if top_k > 0 {
        all.truncate(top_k as usize);
    }
    let total: f64 = all.iter().map(|(_, _, weight)| weight).sum();
    let mut sum = 0.0;
    all.retain(|(_, _, weight)| {
        let before = sum;
        sum += weight;
        (top_p >= 1.0 || before < f64::from(top_p) * total) && *weight >= f64::from(min_p)
    });
    all.sort_by_key(|(id, _, _)| *id);
    let total: f64 = all.iter().map(|(_, _, weight)| weight).sum();
    let mut sum = 0.0;
    let placed = all.into_iter().map(|(token, _, weight)| {
        let below = sum / total;
        sum += weight;
        Drawn { token, below, upto: sum / total }
    });
    Some(placed.collect())
}

/// The token that the rule draws.
pub fn sample(row: &[bf16], rule: DrawRule) -> Option<Drawn> {
    let DrawRule::Draw { uniform, .. } = rule else { return None };
    let mut layout = layout(row, rule)?;
    layout.retain(|drawn| drawn.upto > drawn.below);
    layout.iter().find(|drawn| drawn.upto > uniform).or(layout.last()).copied()
}

/// The interval of `token`, if it could be drawn.
pub fn interval(row: &[bf16], rule: DrawRule, token: u32) -> Option<Drawn> {
    layout(row, rule)?.into_iter().find(|drawn| drawn.token == token)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(top_k: u32, top_p: f32, min_p: f32, uniform: f64) -> DrawRule {
        DrawRule::Draw { scale: 1.0, top_k, top_p, min_p, uniform }
    }

    #[test]
    fn cuts_keep_the_most_probable_and_ties_the_lower_ids() {
        let row = [1.0f32, 3.0, 2.0, 3.0, 2.0, 2.0].map(bf16::from_f32);
        let ids = |rule| layout(&row, rule).unwrap().iter().map(|one| one.token).collect::<Vec<_>>();
        assert_eq!(ids(rule(3, 1.0, 0.0, 0.0)), [1, 2, 3]);
        assert_eq!(ids(rule(0, 0.01, 0.0, 0.0)), [1]);
        assert_eq!(ids(rule(0, 1.0, 0.2, 0.0)), [1, 2, 3, 4, 5]);
        assert_eq!(ids(rule(0, 1.0, 0.5, 0.0)), [1, 3]);
        let drawn = sample(&row, rule(2, 1.0, 0.0, 0.75)).unwrap();
        assert_eq!((drawn.token, drawn.below, drawn.upto), (3, 0.5, 1.0));
        assert_eq!(sample(&[bf16::NEG_INFINITY; 8], rule(0, 1.0, 0.0, 0.5)), None);
    }
}
