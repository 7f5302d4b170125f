//! Mixture of experts, row by row.
use half::bf16;

use super::parallel;
use crate::ops::{MoeScoring, MoeShape};

/// Where a row goes.
#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    /// `top_k` experts, the best first, the lower index first on ties.
    pub experts: Vec<usize>,
    /// Their weights.
    pub weights: Vec<f64>,
}

/// Chooses from one row's logits: scores, then the best of them, to which `bias` (when there is one) is added.
pub fn route(shape: &MoeShape, logits: &[f64], bias: Option<&[f32]>, scale: f64) -> Route {
    let top = logits.iter().copied().fold(f64::MIN, f64::max);
    let all: f64 = logits.iter().map(|l| (l - top).exp()).sum();
    let score = |e: usize| match shape.scoring {
        MoeScoring::Softmax => (logits[e] - top).exp() / all,
        MoeScoring::Sigmoid => 1.0 / (1.0 + (-logits[e]).exp()),
    };
    let choice = |e: usize| score(e) + bias.map_or(0.0, |bias| f64::from(bias[e]));
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| choice(b).total_cmp(&choice(a)).then(a.cmp(&b)));
    let experts = order[..shape.top_k].to_vec();
    let scores: Vec<f64> = experts.iter().map(|&e| score(e)).collect();
    let sum: f64 = if shape.normalize { scores.iter().sum() } else { 1.0 };
    Route { weights: scores.iter().map(|s| s / sum * scale).collect(), experts }
}

/// The layer's result for `x` `[rows, hidden]`, given where each row goes. `gate_up` and `down` give one expert's
/// weights (shared ones behind the routed), laid out as [`MoeWeights`](crate::ops::MoeWeights) says. The activation
/// between the products is rounded to bf16, as kernels store it.
pub fn moe<'a>(
    shape: &MoeShape,
    x: &[bf16],
    routes: &[Route],
    gate_up: impl Fn(usize) -> &'a [bf16] + Sync,
    down: impl Fn(usize) -> &'a [bf16] + Sync,
) -> Vec<f64> {
    let MoeShape { hidden, intermediate, num_experts, num_shared, .. } = *shape;
    // (row, expert, weight), by row.
    let shared = (0..num_shared).map(|s| (num_experts + s, 1.0));
    let work: Vec<(usize, usize, f64)> = routes
        .iter()
        .enumerate()
        .flat_map(|(row, route)| {
            let routed = route.experts.iter().copied().zip(route.weights.iter().copied());
            routed
                .chain(shared.clone())
                .map(move |(expert, weight)| (row, expert, weight))
                .collect::<Vec<_>>()
        })
        .collect();
    let parts = parallel(work.len(), |i| {
        let (row, expert, weight) = work[i];
        let row = &x[row * hidden..][..hidden];
        let (gate_up, down) = (gate_up(expert), down(expert));
        let dot = |matrix: &[bf16], at: usize, width: usize, with: &[bf16]| -> f64 {
            // Exact products, summed in f64 by blocks of f32-exact terms.
            matrix[at * width..][..width]
                .iter()
                .zip(with)
                .map(|(a, b)| f64::from(a.to_f32() * b.to_f32()))
                .sum()
        };
        let inner: Vec<bf16> = (0..intermediate)
            .map(|j| {
                let gate = dot(gate_up, j, hidden, row);
                let up = dot(gate_up, intermediate + j, hidden, row);
                bf16::from_f64(gate / (1.0 + (-gate).exp()) * up)
            })
            .collect();
        (0..hidden).map(|j| weight * dot(down, j, intermediate, &inner)).collect::<Vec<f64>>()
    });
    let mut out = vec![0.0; routes.len() * hidden];
    for ((row, ..), part) in work.iter().zip(parts) {
        for (sum, value) in out[row * hidden..][..hidden].iter_mut().zip(part) {
            *sum += value;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: MoeShape = MoeShape {
        hidden: 2,
        intermediate: 1,
        num_experts: 3,
        top_k: 2,
        num_shared: 1,
        scoring: MoeScoring::Softmax,
        normalize: true,
        round_logits: false,
    };

    #[test]
    fn best_first_and_normalised() {
        let chosen = route(&SMALL, &[0.0, 2.0, 2.0], None, 4.0);
        assert_eq!(chosen.experts, [1, 2]);
        assert!(chosen.weights.iter().all(|w| (w - 2.0).abs() < 1e-12), "{chosen:?}");
    }

    #[test]
    fn a_bias_chooses_and_does_not_weigh() {
        let shape = MoeShape { scoring: MoeScoring::Sigmoid, normalize: false, ..SMALL };
        let chosen = route(&shape, &[0.0, 2.0, 1.0], Some(&[1.0, 0.0, 0.0]), 1.0);
        assert_eq!(chosen.experts, [0, 1]);
        assert!((chosen.weights[0] - 0.5).abs() < 1e-12, "{chosen:?}");
    }

    #[test]
    fn a_row_is_the_weighted_sum_of_its_experts_and_the_shared_one() {
        let one = |v: &[f32]| v.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>();
        // Expert e: gate = 30 (silu is the identity there), up = e + 1, down = (1, 2).
        let gate_up: Vec<_> = (0..4u8).map(|e| one(&[30.0, 0.0, 0.0, f32::from(e) + 1.0])).collect();
        let down = one(&[1.0, 2.0]);
        let routes = [Route { experts: vec![0, 2], weights: vec![0.25, 0.75] }];
        let x = one(&[1.0, 1.0]);
        let out = moe(&SMALL, &x, &routes, |e| &gate_up[e], |_| &down);
        let wanted = 30.0 * (0.25 * 1.0 + 0.75 * 3.0 + 4.0);
        assert!((out[0] - wanted).abs() < 1e-9 && (out[1] - 2.0 * wanted).abs() < 1e-9, "{out:?}");
    }
}
