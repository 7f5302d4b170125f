//! The scheduler against fixed cases and against a seeded adversary that arrives, aborts, fails steps and shares
//! prefixes at random while a model of the cache's contents checks every slot that is read.
use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::kv_cache::PrefixChain;
use crate::request::StopRules;

fn scheduler(num_blocks: u32, block_size: usize, max_num_seqs: usize, budget: usize) -> Scheduler {
    let limits = SchedulerLimits { max_num_seqs, max_num_batched_tokens: budget, max_model_len: 1 << 20 };
    Scheduler::new(limits, BlockPool::new(num_blocks, block_size, true))
}

fn sequence(id: u64, prompt: impl IntoIterator<Item = u32>, max_tokens: u32) -> NewSequence {
    NewSequence {
        id: SequenceId(id),
        prompt: prompt.into_iter().collect(),
        stop: StopRules { max_tokens, min_tokens: 0, stop_token_ids: vec![] },
        deadline: None,
        prompt_logits: false,
    }
}

/// Commits everything; the same token for everybody.
fn commit_all(scheduler: &mut Scheduler, step: &Step) -> Vec<SequenceId> {
    let mut finished = Vec::new();
    for item in &step.items {
        if scheduler.commit(item, item.logits.choose().then_some(7)).is_some() {
            scheduler.remove(item.sequence);
            finished.push(item.sequence);
        }
    }
    finished
}

fn lens(step: &Step) -> Vec<(u64, usize)> {
    step.items.iter().map(|item| (item.sequence.0, item.tokens.len())).collect()
}

#[test]
fn a_long_prompt_does_not_stall_decoding_nor_short_prompts() {
    let mut scheduler = scheduler(3000, 16, 8, 1024);
    scheduler.submit(sequence(1, 0..4, 1000)).unwrap();
    let step = scheduler.schedule().unwrap();
    commit_all(&mut scheduler, &step);
    scheduler.submit(sequence(2, 0..30_000, 10)).unwrap();
    scheduler.submit(sequence(3, 100..150, 10)).unwrap();
    let mut step = scheduler.schedule().unwrap();
    assert_eq!(lens(&step), [(1, 1), (2, 1024 - 1 - 50), (3, 50)]);
    assert_eq!(
        (step.phase(), step.items[1].logits, step.items[2].logits),
        (Phase::Mixed, LogitRows::None, LogitRows::Last)
    );
    for _ in 0..29 {
        commit_all(&mut scheduler, &step);
        step = scheduler.schedule().unwrap();
        assert_eq!(lens(&step)[0], (1, 1), "decodes in every step");
        assert!(step.num_tokens() <= 1024);
    }
}

#[test]
fn a_step_ahead_has_a_token_more_of_everybody_who_is_sure_to_go_on() {
    let mut scheduler = scheduler(4, 4, 8, 64);
    scheduler.submit(sequence(1, 0..3, 3)).unwrap();
    scheduler.submit(sequence(2, 10..13, 12)).unwrap();
    let prompts = scheduler.schedule().unwrap();
    assert!(scheduler.ahead(&prompts).is_none(), "only decode steps are followed");
    commit_all(&mut scheduler, &prompts);
    let step = scheduler.schedule().unwrap();
    let ahead = scheduler.ahead(&step).unwrap();
    assert_eq!(lens(&ahead), [(1, 1), (2, 1)]);
    assert_eq!(ahead.items[0].tokens, 4..5);
    let rules = StageRules::default();
    let [stage] = &scheduler.stages(&ahead, &rules)[..] else { panic!("one stage") };
    // Both have begun their second block, and nobody knows their ids yet.
    assert_eq!((&stage.batch.input_ids[..], &stage.batch.positions[..]), (&[0, 0][..], &[4, 4][..]));
    assert_eq!(stage.batch.sequences.iter().map(|rows| rows.block_table.len()).sum::<usize>(), 4);
    commit_all(&mut scheduler, &step);
    assert!(scheduler.ahead(&ahead).is_none(), "the first has its last token now");
    assert_eq!(commit_all(&mut scheduler, &ahead), [SequenceId(1)]);
    let alone = scheduler.schedule().unwrap();
    assert!(scheduler.ahead(&ahead).is_none(), "not all of its sequences are there");
    scheduler.submit(sequence(3, 0..2, 9)).unwrap();
    assert!(scheduler.ahead(&alone).is_none(), "somebody waits");
}

#[test]
fn two_long_prompts_share_a_step() {
    let mut scheduler = scheduler(3000, 16, 8, 1024);
    for id in 1..=3 {
        scheduler.submit(sequence(id, (0..5000).map(|token| token + 5000 * id as u32), 10)).unwrap();
    }
    assert_eq!(lens(&scheduler.schedule().unwrap()), [(1, 512 + 128), (2, 256), (3, 128)]);
}

#[test]
fn the_latest_arrival_gives_way_and_keeps_its_tokens() {
    let mut scheduler = scheduler(4, 4, 8, 64);
    scheduler.submit(sequence(1, 0..7, 9)).unwrap();
    scheduler.submit(sequence(2, 20..23, 9)).unwrap();
    for _ in 0..2 {
        let step = scheduler.schedule().unwrap();
        assert_eq!(step.items.len(), 2);
        commit_all(&mut scheduler, &step);
    }
    // 1 now needs its third block and 2 its second: one is left.
    assert_eq!(lens(&scheduler.schedule().unwrap()), [(1, 1)]);
    let mut preempted = Vec::new();
    let mut finished = Vec::new();
    while let Some(step) = scheduler.schedule() {
        preempted.extend(step.preempted.clone());
        finished.extend(commit_all(&mut scheduler, &step));
        assert!(scheduler.is_idle() || scheduler.view(SequenceId(2)).unwrap().tokens.len() >= 5);
    }
    assert!(preempted.iter().all(|id| id.0 == 2), "{preempted:?}");
    assert!(scheduler.totals().preemptions > 0);
    assert_eq!(finished, [SequenceId(1), SequenceId(2)]);
    assert_eq!(scheduler.pool().num_used(), 0);
}

#[test]
fn what_can_never_fit_is_refused_and_what_just_fits_runs() {
    let mut scheduler = scheduler(4, 4, 8, 64);
    let refused = scheduler.submit(sequence(1, 0..10, 8));
    assert!(matches!(refused, Err(SequenceError::TooLarge { tokens: 18, limit: 17, .. })), "{refused:?}");
    scheduler.submit(sequence(2, 0..10, 7)).unwrap();
    let mut steps = 0;
    while let Some(step) = scheduler.schedule() {
        commit_all(&mut scheduler, &step);
        steps += 1;
    }
    assert_eq!(steps, 7);
}

#[test]
fn a_step_that_failed_runs_again() {
    let mut scheduler = scheduler(8, 4, 8, 64);
    scheduler.submit(sequence(1, 0..10, 2)).unwrap();
    let first = scheduler.schedule().unwrap();
    let second = scheduler.schedule().unwrap();
    assert_eq!(first.items, second.items);
    assert_eq!(
        scheduler.pool().look_up(PrefixChain::default().extend(&[0, 1, 2, 3], 4)).blocks,
        0,
        "not committed"
    );
    commit_all(&mut scheduler, &second);
    assert_eq!(scheduler.pool().look_up(PrefixChain::default().extend(&[0, 1, 2, 3], 4)).blocks, 1);
}

#[test]
fn the_same_prompt_again_computes_only_its_end() {
    let mut scheduler = scheduler(16, 4, 8, 64);
    for id in 1..=2 {
        scheduler.submit(sequence(id, 0..12, 1)).unwrap();
        let step = scheduler.schedule().unwrap();
        assert_eq!(lens(&step), [(id, if id == 1 { 12 } else { 4 })], "never the whole prompt");
        assert_eq!(scheduler.view(SequenceId(id)).unwrap().num_cached, if id == 1 { 0 } else { 8 });
        commit_all(&mut scheduler, &step);
    }
    assert_eq!(scheduler.totals(), SchedulerTotals { preemptions: 0, prefix_queries: 16, prefix_hits: 8 });
    let with_logits = NewSequence { prompt_logits: true, ..sequence(3, 0..12, 1) };
    scheduler.submit(with_logits).unwrap();
    let step = scheduler.schedule().unwrap();
    assert_eq!((lens(&step), step.items[0].logits), (vec![(3, 12)], LogitRows::All { choose: true }));
}

#[test]
fn stop_tokens_end_a_sequence_after_min_tokens() {
    let mut scheduler = scheduler(16, 4, 8, 64);
    let stop = StopRules { max_tokens: 9, min_tokens: 2, stop_token_ids: vec![7] };
    scheduler.submit(NewSequence { stop, ..sequence(1, 0..4, 0) }).unwrap();
    let mut reasons = Vec::new();
    while let Some(step) = scheduler.schedule() {
        reasons.push(scheduler.commit(&step.items[0], Some(7)));
        if reasons.last().unwrap().is_some() {
            scheduler.remove(SequenceId(1));
        }
    }
    assert_eq!(reasons, [None, None, Some(FinishReason::Stop)]);
}

#[test]
fn deadlines_pass_in_order_and_go_with_their_sequence() {
    let mut scheduler = scheduler(16, 4, 8, 64);
    let now = Instant::now();
    let at = |seconds| Some(now + Duration::from_secs(seconds));
    scheduler.submit(NewSequence { deadline: at(2), ..sequence(1, 0..4, 5) }).unwrap();
    scheduler.submit(NewSequence { deadline: at(1), ..sequence(2, 0..4, 5) }).unwrap();
    assert_eq!(scheduler.next_deadline(), at(1));
    assert_eq!(scheduler.expired(now + Duration::from_secs(1)), [SequenceId(2)]);
    scheduler.remove(SequenceId(2));
    assert_eq!((scheduler.next_deadline(), scheduler.expired(now)), (at(2), vec![]));
}

/// What the cache would hold: for every slot the hash of all tokens up to the one stored there.
#[derive(Default)]
struct CacheModel(HashMap<i64, u64>);

fn prefix_hashes(tokens: &[u32]) -> Vec<u64> {
    let mut hasher = DefaultHasher::new();
    let hash = |token: &u32| {
        token.hash(&mut hasher);
        hasher.finish()
    };
    tokens.iter().map(hash).collect()
}

impl CacheModel {
    /// "Runs" an item: checks everything it reads, writes its rows, and chooses the next token.
    fn run(&mut self, scheduler: &Scheduler, item: &StepItem) -> u32 {
        let sequence = &scheduler.running[&item.sequence];
        let slot = |position| sequence.table.slot(position, scheduler.pool.block_size());
        let hashes = prefix_hashes(&sequence.tokens);
        for (position, hash) in hashes.iter().enumerate().take(item.tokens.start) {
            let found = self.0.get(&slot(position));
            assert_eq!(found, Some(hash), "{:?} reads foreign position {position}", item.sequence);
        }
        for position in item.tokens.clone() {
            self.0.insert(slot(position), hashes[position]);
        }
        (hashes[item.tokens.end - 1] % 50) as u32
    }
}

fn check_step(scheduler: &Scheduler, step: &Step) {
    assert!(!step.items.is_empty() && step.num_tokens() <= scheduler.limits.max_num_batched_tokens);
    assert!(scheduler.num_running() <= scheduler.limits.max_num_seqs);
    scheduler.pool.check(scheduler.running.values().map(|sequence| (&sequence.table, sequence.num_computed)));
    assert!(scheduler.waiting.values().all(|sequence| sequence.table.blocks().is_empty()));
    let mut seen = HashSet::new();
    assert!(step.items.iter().all(|item| seen.insert(item.sequence)), "a sequence twice");
    let decodes = scheduler.running.values().filter(|sequence| sequence.num_pending() == 1);
    assert!(
        decodes.into_iter().all(|sequence| seen.contains(&sequence.id)),
        "a decoding sequence was left out"
    );

    let rules = StageRules { max_stages: 3, ..StageRules::default() };
    let mut slots = HashSet::new();
    for stage in scheduler.stages(step, &rules) {
        assert!(!stage.batch.input_ids.is_empty());
        assert!(stage.batch.slot_mapping.iter().all(|slot| slots.insert(*slot)), "a slot written twice");
        for (item, rows) in stage.items.iter().zip(&stage.batch.sequences) {
            assert_eq!((rows.len, rows.context_len), (item.tokens.len(), item.tokens.end));
            assert_eq!(rows.block_table.len(), rows.context_len.div_ceil(scheduler.pool.block_size()));
            assert_eq!(stage.batch.positions[rows.start] as usize, item.tokens.start);
        }
    }
    assert_eq!(slots.len(), step.num_tokens());
}

fn random_sequence(random: &mut ChaCha8Rng, id: u64) -> NewSequence {
    // A few common beginnings, so that prefixes meet.
    let common = random.random_range(0..4) * 1000;
    let shared = random.random_range(0..40);
    let own = random.random_range(1..20);
    let prompt: Vec<u32> =
        (common..common + shared).chain((0..own).map(|_| random.random_range(0..50))).collect();
    let stop = StopRules {
        max_tokens: random.random_range(1..30),
        min_tokens: random.random_range(0..3),
        stop_token_ids: vec![random.random_range(0..50)],
    };
    NewSequence {
        id: SequenceId(id),
        prompt: prompt.into(),
        stop,
        deadline: None,
        prompt_logits: random.random_bool(0.1),
    }
}

fn run_adversary(seed: u64) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let block_size = random.random_range(1..6);
    let num_blocks = (90 / block_size) as u32 + random.random_range(1..20);
    let max_num_seqs = random.random_range(1..12);
    let limits = SchedulerLimits {
        max_num_seqs,
        max_num_batched_tokens: max_num_seqs + random.random_range(0..40),
        max_model_len: 1000,
    };
    let mut scheduler =
        Scheduler::new(limits, BlockPool::new(num_blocks, block_size, random.random_bool(0.7)));
    let mut cache = CacheModel::default();
    let (mut next_id, mut live) = (0, Vec::new());

    let mut rounds = 0;
    while rounds < 150 || !scheduler.is_idle() {
        rounds += 1;
        assert!(rounds < 5000, "no progress");
        let arriving = rounds < 150;
        while arriving && random.random_bool(0.4) {
            next_id += 1;
            scheduler.submit(random_sequence(&mut random, next_id)).unwrap();
            live.push(SequenceId(next_id));
        }
        if arriving && random.random_bool(0.1) && !live.is_empty() {
            let victim = live.swap_remove(random.random_range(0..live.len()));
            assert!(scheduler.remove(victim).is_some());
        }
        let Some(step) = scheduler.schedule() else {
            assert!(scheduler.is_idle(), "waiting sequences, but nothing runs");
            continue;
        };
        check_step(&scheduler, &step);
        let failed = arriving && random.random_bool(0.1);
        for item in &step.items {
            let token = cache.run(&scheduler, item);
            let lost = failed && random.random_bool(0.5);
            if !lost && scheduler.commit(item, item.logits.choose().then_some(token)).is_some() {
                scheduler.remove(item.sequence).unwrap();
                live.retain(|id| *id != item.sequence);
            }
        }
    }
    assert!(live.is_empty(), "ended without being finished: {live:?}");
    assert_eq!(scheduler.pool().num_used(), 0, "the gauge returns to its start value");
    scheduler.pool.check(std::iter::empty());
}

#[test]
fn a_seeded_adversary_finds_no_leak_no_foreign_slot_and_no_stall() {
    for seed in 0..150 {
        let outcome = std::panic::catch_unwind(|| run_adversary(seed));
        assert!(outcome.is_ok(), "seed {seed}");
    }
}

/// Run with `--release -- --ignored --nocapture`: the goal is under 1 ms a step.
#[test]
#[ignore = "a measurement"]
fn a_thousand_running_and_ten_thousand_waiting() {
    let mut scheduler = scheduler(100_000, 16, 1000, 2048);
    for id in 0..11_000 {
        scheduler.submit(sequence(id, (0..200).map(|token| token + 200 * id as u32), 500)).unwrap();
    }
    let mut times = Vec::new();
    for _ in 0..300 {
        let start = Instant::now();
        let step = scheduler.schedule().unwrap();
        let scheduled = start.elapsed();
        let stages = scheduler.stages(&step, &StageRules { max_stages: 2, ..StageRules::default() });
        let built = start.elapsed();
        commit_all(&mut scheduler, &step);
        times.push((scheduled, built, start.elapsed(), step.items.len(), stages.len()));
    }
    times.sort();
    println!("running {}, waiting {}", scheduler.num_running(), scheduler.num_waiting());
    println!(
        "(schedule, + batches, + commit, items, stages): median {:?}, worst {:?}",
        times[150], times[299]
    );
}
