//! Layers against plain loops written here. (Against the reference implementation: `tests/parity`.)
use std::path::PathBuf;

use tch::{Device, Kind, Tensor};

use super::*;
use crate::config::model::{Architecture, MoeConfig, RouterConfig, Scoring, Selection};
use crate::weights::Weights;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny").join(name)
}

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
        Scoring::SqrtSoftplus => logits.iter().map(|x| x.exp().ln_1p().sqrt()).collect(),
        Scoring::Softmax => {
            let sum: f64 = logits.iter().map(|x| x.exp()).sum();
            logits.iter().map(|x| x.exp() / sum).collect()
        }
    };
    let (groups, best_groups, best_in_group) = match moe.router.selection {
        Selection::Greedy => (1, 1, 1),
        Selection::GroupLimited { num_groups, topk_groups } => (num_groups, topk_groups, 1),
        Selection::NoAuxTc { num_groups, topk_groups } => (num_groups, topk_groups, 2),
        Selection::TokenTable { .. } => panic!("no scores choose"),
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
        (7, 3, Scoring::SqrtSoftplus, Selection::NoAuxTc { num_groups: 1, topk_groups: 1 }),
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
fn a_table_of_token_ids_chooses_and_scores_weigh() {
    let (num_experts, top_k, vocab_size) = (7, 3, 11);
    let selection = Selection::TokenTable { vocab_size };
    let moe = moe(num_experts, top_k, Scoring::SqrtSoftplus, selection);
    let folder = tempfile::tempdir().unwrap();
    let table = Tensor::from_slice(&(0..33).map(|i| i * 5 % 7).collect::<Vec<i32>>()).view([11, 3]);
    let write = |table: &Tensor| {
        let name = FfnNames::new(Architecture::DeepseekV3, 0).token_table();
        let path = folder.path().join("model.safetensors");
        Tensor::write_safetensors(&[(name, table.shallow_clone())], path).unwrap();
        let config = crate::config::model::ModelConfig::load(&fixture("tiny-deepseek-v3")).unwrap();
        let weights = Weights::open(folder.path(), &config, Kind::Float).unwrap();
        Selector::load(&weights, Architecture::DeepseekV3, 0, &moe)
    };
    let selector = write(&table).unwrap();
    tch::manual_seed(6);
    let tokens = [10i64, 0, -1, 4, 4, -7];
    let logits = Tensor::randn([6, num_experts as i64], (Kind::Float, Device::Cpu));
    let Selected { ids, weights } = selector.select_by_token(&logits, &Tensor::from_slice(&tokens)).unwrap();
    let (ids, weights, logits) = (values(&ids), values(&weights), values(&logits));
    for (row, &token) in tokens.iter().enumerate() {
        let at = row * top_k..(row + 1) * top_k;
        let Ok(token) = usize::try_from(token) else {
            assert_eq!((&ids[at.clone()], &weights[at]), (&[NO_EXPERT as f64; 3][..], &[0.0; 3][..]));
            continue;
        };
        let experts: Vec<usize> = (0..top_k).map(|i| (token * top_k + i) * 5 % 7).collect();
        let score = |expert: usize| logits[row * num_experts + expert].exp().ln_1p().sqrt();
        let sum: f64 = experts.iter().map(|&expert| score(expert)).sum();
        for (i, &expert) in experts.iter().enumerate() {
            let at = row * top_k + i;
            assert_eq!(ids[at] as usize, expert);
            assert!((weights[at] - 2.0 * score(expert) / sum).abs() < 1e-6);
        }
    }
    let logits = Tensor::zeros([1, num_experts as i64], (Kind::Float, Device::Cpu));
    assert!(selector.select(&logits).is_err(), "there are no token ids");
    assert!(selector.select_by_token(&logits, &Tensor::from_slice(&[11i64])).is_err(), "beyond the table");
    let beyond = write(&(table + 1)).unwrap_err().to_string();
    assert!(beyond.contains("mlp.gate.tid2eid` holds 7, expected 0 to 6"), "{beyond}");
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
