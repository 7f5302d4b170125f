//! Layers against plain loops written here. (Against the reference implementation: `tests/parity`.)
use tch::{Device, Kind, Tensor};

use super::*;
use crate::config::model::{MoeConfig, RouterConfig, Scoring, Selection};

fn moe(num_experts: usize, top_k: usize, scoring: Scoring, selection: Selection) -> MoeConfig {
    MoeConfig {
        num_experts,
        experts_per_token: top_k,
        intermediate_size: 4,
        shared_intermediate_size: 0,
        router: RouterConfig {
            scoring,
            selection,
            normalize: true,
            normalize_eps: 1e-20,
            scaling_factor: 2.0,
            logits_in_f32: true,
        },
    }
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.flatten(0, -1).to_kind(Kind::Double)).unwrap()
}

/// What a row's choice is, by sorting.
fn naive(moe: &MoeConfig, logits: &[f64], bias: &[f64]) -> (Vec<i64>, Vec<f64>) {
    let scores: Vec<f64> = match moe.router.scoring {
        Scoring::Sigmoid => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
        Scoring::Softmax => {
            let sum: f64 = logits.iter().map(|x| x.exp()).sum();
            logits.iter().map(|x| x.exp() / sum).collect()
        }
    };
    let (groups, best_groups, best_in_group) = match moe.router.selection {
        Selection::Greedy => (1, 1, 1),
        Selection::GroupLimited { num_groups, topk_groups } => (num_groups, topk_groups, 1),
        Selection::NoAuxTc { num_groups, topk_groups } => (num_groups, topk_groups, 2),
    };
    let choice: Vec<f64> = scores.iter().zip(bias).map(|(score, bias)| score + bias).collect();
    let size = scores.len() / groups;
    let mut ranked: Vec<(f64, usize)> = (0..groups)
        .map(|group| {
            let mut members = choice[group * size..(group + 1) * size].to_vec();
            members.sort_by(|a, b| b.total_cmp(a));
            (members.iter().take(best_in_group).sum(), group)
        })
        .collect();
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
    let open: Vec<usize> = ranked.iter().take(best_groups).map(|&(_, group)| group).collect();
    let mut experts: Vec<usize> =
        (0..scores.len()).filter(|expert| open.contains(&(expert / size))).collect();
    experts.sort_by(|&a, &b| choice[b].total_cmp(&choice[a]));
    experts.truncate(moe.experts_per_token);
    experts.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    let sum: f64 = if moe.router.normalize { experts.iter().map(|&e| scores[e]).sum() } else { 1.0 };
    let weights = experts.iter().map(|&e| scores[e] / sum * moe.router.scaling_factor).collect();
    (experts.iter().map(|&e| e as i64).collect(), weights)
}

#[test]
fn every_selection_equals_sorting() {
    let cases = [
        (12, 3, Scoring::Softmax, Selection::Greedy),
        (12, 12, Scoring::Softmax, Selection::Greedy),
        (12, 3, Scoring::Softmax, Selection::GroupLimited { num_groups: 4, topk_groups: 2 }),
        (12, 1, Scoring::Softmax, Selection::GroupLimited { num_groups: 12, topk_groups: 1 }),
        (12, 4, Scoring::Sigmoid, Selection::NoAuxTc { num_groups: 3, topk_groups: 2 }),
        (7, 3, Scoring::Sigmoid, Selection::NoAuxTc { num_groups: 1, topk_groups: 1 }),
    ];
    tch::manual_seed(5);
    for (num_experts, top_k, scoring, selection) in cases {
        let biased = matches!(selection, Selection::NoAuxTc { .. });
        let moe = moe(num_experts, top_k, scoring, selection);
        let logits = Tensor::randn([50, num_experts as i64], (Kind::Float, Device::Cpu));
        // Large enough to let experts with low scores in, negative enough to put whole groups below zero.
        let bias = Tensor::randn([num_experts as i64], (Kind::Float, Device::Cpu)) * f64::from(biased);
        let selected = Selector::new(&moe, biased.then(|| bias.shallow_clone())).select(&logits).unwrap();
        let (ids, weights) = (values(&selected.ids), values(&selected.weights));
        let (logits, bias) = (values(&logits), values(&bias));
        for (row, logits) in logits.chunks(num_experts).enumerate() {
            let (naive_ids, naive_weights) = naive(&moe, logits, &bias);
            for (i, (id, weight)) in naive_ids.iter().zip(&naive_weights).enumerate() {
                let at = row * top_k + i;
                assert_eq!(ids[at] as i64, *id, "row {row} of {moe:?}");
                assert!((weights[at] - weight).abs() < 1e-5, "{} and {weight}", weights[at]);
            }
        }
    }
}

#[test]
fn no_rows_are_routed_nowhere() {
    for selection in [Selection::Greedy, Selection::NoAuxTc { num_groups: 2, topk_groups: 1 }] {
        let moe = moe(8, 2, Scoring::Sigmoid, selection);
        let none = Tensor::zeros([0, 8], (Kind::Float, Device::Cpu));
        let selected = Selector::new(&moe, None).select(&none).unwrap();
        assert_eq!((selected.ids.size(), selected.weights.size()), (vec![0, 2], vec![0, 2]));
    }
}
