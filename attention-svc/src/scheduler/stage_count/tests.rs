//! The number of stages on machines whose times are made up.
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

/// Times of a layer's parts for one hop, microseconds.
#[derive(Clone, Copy)]
struct Machine {
    attention: f64,
    attention_per_row: f64,
    /// Reading the weights.
    ffn: f64,
    ffn_per_row: f64,
    /// One way.
    link: f64,
}

const LAYERS: usize = 8;

fn even(phase: Phase, rows: usize, splittable: usize) -> StepLoad {
    StepLoad { phase, rows, largest: rows.div_ceil(splittable), splittable }
}

/// A step through all layers, attention and FFN each doing one thing at a time.
fn step(machine: &Machine, rows: usize, num_stages: usize) -> f64 {
    let rows = rows as f64 / num_stages as f64;
    let attention = machine.attention + machine.attention_per_row * rows;
    let ffn = (machine.ffn_per_row * rows).max(machine.ffn);
    let (mut attention_free, mut ffn_free, mut back) = (0.0f64, 0.0f64, vec![0.0f64; num_stages]);
    for _ in 0..LAYERS {
        for back in &mut back {
            attention_free = attention_free.max(*back) + attention;
            ffn_free = ffn_free.max(attention_free + machine.link) + ffn;
            *back = ffn_free + machine.link;
        }
    }
    back.into_iter().fold(0.0, f64::max)
}

/// Total time of `steps` steps, how often each count was used, and the best fixed count's time.
fn run(machine: Machine, rows: usize, steps: usize, noise: f64) -> (f64, [usize; 2], f64) {
    let (mut counts, mut random) = (StageCounts::new(2), ChaCha8Rng::seed_from_u64(rows as u64));
    let (mut total, mut used, mut fixed) = (0.0, [0; 2], [0.0; 2]);
    for _ in 0..steps {
        let mut mood = 1.0 + noise * random.random_range(-1.0..1.0);
        // Now and then something else has the machine.
        mood *= if noise > 0.0 && random.random_range(0..50) == 0 { 4.0 } else { 1.0 };
        let chosen = counts.choose(even(Phase::Decode, rows, 2));
        let time = step(&machine, rows, chosen.num_stages) * mood;
        counts.handle_step(chosen, time);
        total += time;
        used[chosen.num_stages - 1] += 1;
        (1..=2).for_each(|count| fixed[count - 1] += step(&machine, rows, count) * mood);
    }
    (total, used, fixed[0].min(fixed[1]))
}

/// The FFN reads its weights for as long as attention computes: a second stage reads them twice.
const WEIGHT_BOUND: Machine =
    Machine { attention: 200.0, attention_per_row: 2.0, ffn: 900.0, ffn_per_row: 1.0, link: 10.0 };
/// Both sides work row by row.
const TOKEN_BOUND: Machine =
    Machine { attention: 10.0, attention_per_row: 12.0, ffn: 20.0, ffn_per_row: 12.0, link: 10.0 };

#[test]
fn a_weight_bound_ffn_gets_one_stage_and_two_token_bound_sides_two() {
    assert!(step(&WEIGHT_BOUND, 32, 2) > 1.3 * step(&WEIGHT_BOUND, 32, 1));
    assert!(step(&TOKEN_BOUND, 128, 2) < 0.7 * step(&TOKEN_BOUND, 128, 1));
    let (_, used, _) = run(WEIGHT_BOUND, 32, 1000, 0.0);
    assert!(used[0] > 980, "{used:?}");
    let (_, used, _) = run(TOKEN_BOUND, 128, 1000, 0.0);
    assert!(used[1] > 980, "{used:?}");
}

#[test]
fn it_costs_less_than_three_percent_of_the_better_fixed_count() {
    for (machine, rows) in [
        (WEIGHT_BOUND, 4),
        (WEIGHT_BOUND, 64),
        (TOKEN_BOUND, 16),
        (TOKEN_BOUND, 500),
        (Machine { ffn: 300.0, ..TOKEN_BOUND }, 40),
    ] {
        for noise in [0.0, 0.1, 0.3] {
            let (total, used, fixed) = run(machine, rows, 2000, noise);
            assert!(total < 1.03 * fixed, "{rows} rows, noise {noise}: {} {used:?}", total / fixed);
        }
    }
}

#[test]
fn kinds_of_load_are_learnt_apart_and_a_change_is_noticed() {
    let mut counts = StageCounts::new(2);
    let mut machine = WEIGHT_BOUND;
    let mut run = |machine: &Machine, phase, rows, steps| {
        let mut last = 0;
        for _ in 0..steps {
            let chosen = counts.choose(even(phase, rows, 2));
            counts.handle_step(chosen, step(machine, rows, chosen.num_stages));
            last = chosen.num_stages;
        }
        last
    };
    assert_eq!(run(&machine, Phase::Decode, 8, 100), 1);
    assert_eq!(run(&TOKEN_BOUND, Phase::Prefill, 8, 100), 2);
    assert_eq!(run(&machine, Phase::Decode, 8, 1), 1, "nothing of it is forgotten");
    machine = TOKEN_BOUND;
    assert_eq!(run(&machine, Phase::Decode, 8, 3 * FIRST_PAUSE), 2);
}

/// Five percent between the counts, ten percent of noise: a probe of a few steps would be wrong one time in four.
#[test]
fn a_small_difference_is_found_in_noise() {
    let close = |count: usize| if count == 2 { 950.0 } else { 1000.0 };
    let runs = 200;
    let right = (0..runs).filter(|seed| {
        let (mut counts, mut random) = (StageCounts::new(2), ChaCha8Rng::seed_from_u64(*seed));
        let mut last = 0;
        for _ in 0..FIRST_PAUSE {
            let chosen = counts.choose(even(Phase::Decode, 8, 2));
            last = chosen.num_stages;
            counts.handle_step(chosen, close(last) * (1.0 + 0.1 * random.random_range(-1.0..1.0)));
        }
        last == 2
    });
    let right = right.count();
    assert!(right > runs as usize * 4 / 5, "{right} of {runs}");
}

#[test]
fn a_prompt_among_decodes_is_not_taken_for_prompts_of_equal_length() {
    let mut counts = StageCounts::new(2);
    let lopsided = StepLoad { largest: 400, ..even(Phase::Mixed, 407, 2) };
    for _ in 0..200 {
        for (step, times) in [(lopsided, [100.0, 150.0]), (even(Phase::Mixed, 407, 2), [100.0, 70.0])] {
            let chosen = counts.choose(step);
            counts.handle_step(chosen, times[chosen.num_stages - 1]);
        }
    }
    let chosen = [lopsided, even(Phase::Mixed, 407, 2)].map(|step| counts.choose(step).num_stages);
    assert_eq!(chosen, [1, 2]);
}

#[test]
fn what_cannot_be_split_is_one_stage_and_teaches_nothing() {
    let mut counts = StageCounts::new(4);
    let alone = counts.choose(even(Phase::Decode, 1, 1));
    counts.handle_step(alone, 1.0);
    assert_eq!((alone.num_stages, counts.loads.len()), (1, 0));
    let seen: std::collections::BTreeSet<usize> = (0..40)
        .map(|_| {
            let chosen = counts.choose(even(Phase::Mixed, 100, 3));
            counts.handle_step(chosen, 100.0);
            chosen.num_stages
        })
        .collect();
    assert_eq!(seen, [1, 2, 3].into(), "never more than the step can be split into");
}
