//! The sampler against plain references that sort everything.
use afd_gpu::reference;
use half::bf16;
use proptest::prelude::*;

use super::truncate::{Candidate, truncate};
use super::*;

fn stop(min_tokens: u32, stop_token_ids: Vec<u32>) -> StopRules {
    StopRules { max_tokens: 100, min_tokens, stop_token_ids }
}

fn sampler(params: SamplingParams, prompt: &[u32]) -> SequenceSampler {
    SequenceSampler::new(params, stop(0, vec![]), prompt, 1)
}

fn greedy(params: SamplingParams, prompt: &[u32], output: &[u32], row: &[f32]) -> u32 {
    let mut sequence = sampler(SamplingParams { temperature: 0.0, ..params }, prompt);
    output.iter().for_each(|token| sequence.commit(*token));
    sequence.sample(row, &mut Scratch::default()).unwrap().token
}

#[test]
fn greedy_takes_the_best_and_the_lowest_id_among_equals() {
    let mut row = vec![0.0; 100];
    row[37] = 2.0;
    row[90] = 2.0;
    assert_eq!(greedy(SamplingParams::default(), &[], &[], &row), 37);
    row[99] = 3.0;
    assert_eq!(greedy(SamplingParams::default(), &[], &[], &row), 99);
    // Rows that are looked at in pieces.
    for equals in [[0, 1023], [1023, 1024], [1500, 2048], [2999, 2999]] {
        let mut row = vec![-1.0; 3000];
        equals.iter().for_each(|&token: &usize| row[token] = 2.0);
        assert_eq!(greedy(SamplingParams::default(), &[], &[], &row), equals[0] as u32);
    }
}

#[test]
fn the_rule_of_the_token_behind_the_next_is_what_it_will_be() {
    let drawn = || SamplingParams { temperature: 0.7, top_k: Some(9), ..SamplingParams::default() };
    for params in [drawn(), SamplingParams { temperature: 0.0, ..drawn() }] {
        let mut sequence = sampler(params, &[1, 2]);
        for token in 0..5 {
            let ahead = sequence.rule_ahead();
            sequence.commit(token);
            assert_eq!(ahead, sequence.rule());
            assert!(ahead.is_some());
        }
    }
    // The next token changes the logits of the one behind it, though nothing changes its own.
    for params in [
        SamplingParams { frequency_penalty: 0.5, ..drawn() },
        SamplingParams { presence_penalty: 0.5, ..drawn() },
        SamplingParams { repetition_penalty: 1.5, ..drawn() },
    ] {
        assert_eq!(sampler(params, &[]).rule_ahead(), None);
    }
}

#[test]
fn penalties_and_bias() {
    let default = SamplingParams::default;
    let row = [1.0, 1.9, 2.0, -1.0];
    let repetition = SamplingParams { repetition_penalty: 1.1, ..default() };
    assert_eq!(greedy(repetition.clone(), &[2], &[], &row), 1, "the prompt counts");
    assert_eq!(greedy(repetition.clone(), &[], &[2], &row), 1, "the output counts");
    assert_eq!(greedy(repetition, &[1, 2], &[], &row), 2);
    let negative = SamplingParams { repetition_penalty: 2.0, ..default() };
    assert_eq!(greedy(negative, &[0], &[], &[-1.0, -1.5]), 1, "negative logits are multiplied");
    let frequency = SamplingParams { frequency_penalty: 0.06, ..default() };
    assert_eq!(greedy(frequency.clone(), &[2, 2, 2], &[2], &row), 2, "the prompt does not count");
    assert_eq!(greedy(frequency, &[], &[2, 2], &row), 1);
    let presence = SamplingParams { presence_penalty: 0.09, ..default() };
    assert_eq!(greedy(presence, &[], &[2, 2], &row), 2, "once, however often");
    let bias = SamplingParams { logit_bias: vec![(3, 5.0), (77, 100.0)], ..default() };
    assert_eq!(greedy(bias, &[], &[], &row), 3);
}

#[test]
fn what_only_the_host_can_do_has_no_rule() {
    let default = SamplingParams::default;
    let changed = [
        SamplingParams { repetition_penalty: 1.1, ..default() },
        SamplingParams { presence_penalty: 0.5, ..default() },
        SamplingParams { logit_bias: vec![(1, 1.0)], ..default() },
    ];
    for params in changed {
        let mut sequence = sampler(params.clone(), &[3]);
        sequence.commit(3);
        assert_eq!(sequence.rule(), None, "{params:?}");
    }
    let waits = SequenceSampler::new(default(), stop(1, vec![2]), &[], 0);
    assert_eq!(waits.rule(), None, "a stop token is ruled out");
    assert_eq!(sampler(SamplingParams::greedy(), &[]).rule(), Some(DrawRule::Best));
    assert!(matches!(sampler(default(), &[]).rule(), Some(DrawRule::Draw { scale: 1.0, top_k: 0, .. })));
}

#[test]
fn stop_tokens_wait_for_min_tokens() {
    let mut sequence = SequenceSampler::new(SamplingParams::greedy(), stop(1, vec![2]), &[], 0);
    let (row, scratch) = ([1.0, 1.9, 2.0], &mut Scratch::default());
    assert_eq!(sequence.sample(&row, scratch).unwrap().token, 1);
    sequence.commit(1);
    assert_eq!(sequence.sample(&row, scratch).unwrap().token, 2);
}

#[test]
fn rows_that_cannot_be_used_are_typed_errors() {
    let mut row = vec![0.5; 40];
    for params in [SamplingParams::greedy(), SamplingParams::default()] {
        let sample = |row: &[f32]| sampler(params.clone(), &[]).sample(row, &mut Scratch::default());
        row[35] = f32::NAN;
        assert_eq!(sample(&row), Err(SampleError::NotFinite { token: 35, infinite: false }));
        row[35] = f32::INFINITY;
        assert_eq!(sample(&row), Err(SampleError::NotFinite { token: 35, infinite: true }));
        row[35] = f32::NEG_INFINITY;
        assert!(sample(&row).is_ok());
        assert_eq!(sample(&[f32::NEG_INFINITY; 20]), Err(SampleError::NoCandidate));
        assert_eq!(sample(&[]), Err(SampleError::NoCandidate));
    }
}

#[test]
fn tiny_temperatures_are_greedy_and_huge_ones_flat() {
    let row = [-30.0, 80.0, 79.9, 1.0];
    let at = |temperature| sampler(SamplingParams { temperature, ..SamplingParams::default() }, &[]);
    assert_eq!(at(1e-9).sample(&row, &mut Scratch::default()).unwrap().token, 1);
    assert_eq!(at(f32::MIN_POSITIVE / 2.0).sample(&row, &mut Scratch::default()).unwrap().token, 1);
    let draw = at(1e9).sample(&row, &mut Scratch::default()).unwrap().draw.unwrap();
    assert!((draw.upto - draw.below - 0.25).abs() < 1e-6, "{draw:?}");
}

#[test]
fn a_seed_repeats_whatever_happens_in_between_and_positions_differ() {
    let params = SamplingParams { seed: Some(42), ..SamplingParams::default() };
    let row = vec![0.0; 5000];
    let run = |restarts: bool| -> Vec<u32> {
        let mut sequence = sampler(params.clone(), &[]);
        let mut output = Vec::new();
        for _ in 0..20 {
            if restarts {
                sequence.sample(&row, &mut Scratch::default()).unwrap();
            }
            output.push(sequence.sample(&row, &mut Scratch::default()).unwrap().token);
            sequence.commit(output[output.len() - 1]);
        }
        output
    };
    assert_eq!(run(false), run(true));
    assert!(run(false).windows(2).all(|pair| pair[0] != pair[1]));
}

#[test]
fn draws_follow_the_probabilities() {
    let probabilities = [0.5f32, 0.3, 0.15, 0.05];
    let row = probabilities.map(f32::ln);
    let mut counts = [0.0; 4];
    for seed in 0..20_000 {
        let params = SamplingParams { seed: Some(seed), ..SamplingParams::default() };
        counts[sampler(params, &[]).sample(&row, &mut Scratch::default()).unwrap().token as usize] +=
            1.0 / 20_000.0;
    }
    for (count, probability) in counts.iter().zip(probabilities) {
        assert!((count - probability).abs() < 0.015, "{counts:?}");
    }
}

/// The allowed tokens, by sorting everything, as the module's head describes.
fn reference(params: &SamplingParams, row: &[f32]) -> Vec<u32> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut all: Vec<(u32, f64)> = row
        .iter()
        .zip(0..)
        .map(|(logit, id)| (id, (f64::from(logit - max) / f64::from(params.temperature)).exp()))
        .collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    all.truncate(params.top_k.map_or(usize::MAX, |k| k as usize));
    let total: f64 = all.iter().map(|(_, weight)| weight).sum();
    let mut sum = 0.0;
    let mut kept = Vec::new();
    for (id, weight) in all {
        if sum < f64::from(params.top_p) * total && weight >= f64::from(params.min_p) {
            kept.push(id);
        }
        sum += weight;
    }
    kept.sort_unstable();
    kept
}

proptest! {
    #[test]
    fn truncation_equals_the_sorting_reference(
        // Distinct by construction: ties in f32 weights may fall either way.
        order in Just((0..600u32).collect::<Vec<_>>()).prop_shuffle(),
        len in 1usize..600,
        spread in 0.001f32..0.05,
        temperature in 0.3f32..3.0,
        top_k in prop::option::of(1u32..700),
        top_p in 0.02f32..=1.0,
        min_p in prop_oneof![Just(0.0f32), 0.0f32..0.5],
    ) {
        let row: Vec<f32> = order[..len].iter().map(|rank| *rank as f32 * spread).collect();
        let params = SamplingParams { temperature, top_k, top_p, min_p, ..SamplingParams::default() };
        let mut candidates: Vec<Candidate> = Vec::new();
        let mut weights = Vec::new();
        let total = exp::weights(&row, row::max(&row).unwrap(), 1.0 / temperature, &mut weights);
        truncate(&params, &weights, total, &mut candidates);
        prop_assert!(candidates.is_sorted_by_key(|candidate| candidate.token) && !candidates.is_empty());
        let mut found: Vec<u32> = candidates.iter().map(|candidate| candidate.token).collect();
        found.sort_unstable();
        let expected = reference(&params, &row);
        // A sum that falls on the border within rounding may take one token more or less.
        let difference = found.iter().filter(|id| !expected.contains(id)).chain(expected.iter().filter(|id| !found.contains(id)));
        prop_assert!(difference.count() <= 1, "{found:?} {expected:?}");
    }

    #[test]
    fn the_uniform_number_lies_in_the_chosen_tokens_interval(
        row in prop::collection::vec(-8.0f32..8.0, 1..300),
        seed: u64,
        top_k in prop::option::of(1u32..50),
        top_p in 0.1f32..=1.0,
    ) {
        let params = SamplingParams { seed: Some(seed), top_k, top_p, ..SamplingParams::default() };
        let sampled = sampler(params.clone(), &[]).sample(&row, &mut Scratch::default()).unwrap();
        let draw = sampled.draw.unwrap();
        prop_assert!(draw.below - 1e-6 <= draw.uniform && draw.uniform <= draw.upto + 1e-6);
        // From scratch, in f64.
        let allowed = reference(&params, &row);
        let weight = |id: &u32| f64::from(row[*id as usize]).exp();
        let total: f64 = allowed.iter().map(weight).sum();
        let below: f64 = allowed.iter().filter(|id| **id < sampled.token).map(weight).sum::<f64>() / total;
        prop_assert!((below - draw.below).abs() < 1e-3);
        prop_assert!((below + weight(&sampled.token) / total - draw.upto).abs() < 1e-3);
    }

    #[test]
    fn a_devices_rule_comes_to_the_same_token(
        // In steps of 1/8, so that many are equal.
        steps in prop::collection::vec(-60i8..60, 8..400),
        seed: u64,
        temperature in 0.3f32..3.0,
        top_k in prop::option::of(1u32..450),
        top_p in prop_oneof![Just(1.0f32), 0.05f32..1.0],
        min_p in prop_oneof![Just(0.0f32), 0.0f32..0.5],
    ) {
        let params = SamplingParams { seed: Some(seed), temperature, top_k, top_p, min_p, ..SamplingParams::default() };
        let sampler = sampler(params, &[]);
        let row: Vec<bf16> = steps.iter().map(|step| bf16::from_f32(f32::from(*step) / 8.0)).collect();
        let wide: Vec<f32> = row.iter().map(|logit| logit.to_f32()).collect();
        let sampled = sampler.sample(&wide, &mut Scratch::default()).unwrap();
        let (draw, rule) = (sampled.draw.unwrap(), sampler.rule().unwrap());
        // What the kernel is checked against on a GPU.
        let own = reference::interval(&row, rule, sampled.token).unwrap();
        prop_assert!((own.below - draw.below).abs() < 1e-3 && (own.upto - draw.upto).abs() < 1e-3, "{own:?} {draw:?}");
        let drawn = reference::sample(&row, rule).unwrap();
        let is_near = |border: f64| (border - draw.uniform).abs() < 1e-6;
        prop_assert!(drawn.token == sampled.token || is_near(draw.below) || is_near(draw.upto), "{drawn:?} {sampled:?}");
    }

    #[test]
    fn logprobs_equal_the_sorting_reference(
        row in prop::collection::vec(-20.0f32..20.0, 1..200),
        chosen in 0usize..200,
        num_top in 0usize..22,
    ) {
        let chosen = chosen % row.len();
        let found = logprobs(&row, chosen as u32, num_top, &mut Scratch::default()).unwrap();
        let log_sum = row.iter().map(|logit| f64::from(*logit).exp()).sum::<f64>().ln();
        let logprob = |id: u32| f64::from(row[id as usize]) - log_sum;
        let mut ids: Vec<u32> = (0..row.len() as u32).collect();
        ids.sort_by(|a, b| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b)));
        prop_assert!((f64::from(found.chosen) - logprob(chosen as u32)).abs() < 1e-4);
        prop_assert_eq!(found.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), ids[..num_top.min(ids.len())].to_vec());
        for (id, value) in &found.top {
            prop_assert!((f64::from(*value) - logprob(*id)).abs() < 1e-4);
        }
        let rank = 1 + row.iter().filter(|logit| **logit > row[chosen]).count();
        prop_assert_eq!(found.rank as usize, rank);
    }
}

#[test]
fn logprobs_of_a_token_that_does_not_exist_are_an_error() {
    assert_eq!(logprobs(&[0.0, 1.0], 2, 1, &mut Scratch::default()), Err(SampleError::NoCandidate));
}
