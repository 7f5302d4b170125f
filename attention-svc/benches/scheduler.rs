//! A step of the scheduler and its block pool with 1,000 sequences that run and 10,000 that wait: `cargo bench -p
//! attention-svc --bench scheduler`. The goal is less than 1 ms a step; the last lines say how long one takes, and whether
//! that is less.
use std::hint::black_box;
use std::time::{Duration, Instant};

use attention_svc::kv_cache::BlockPool;
use attention_svc::request::{SequenceId, StopRules};
use attention_svc::scheduler::{NewSequence, Scheduler, SchedulerLimits, StageRules};
use criterion::{BatchSize, Criterion};

const RUNNING: usize = 1_000;
const WAITING: usize = 10_000;
/// One more than whole blocks, so that the first tokens of an answer need no further one.
const PROMPT: usize = 65;
const BLOCK_SIZE: usize = 16;

/// Everything that runs is decoding. `max_num_seqs` decides whether those who wait are held back by that or by blocks.
fn scheduler(max_num_seqs: usize, prefix_cache: bool) -> Scheduler {
    let limits = SchedulerLimits { max_num_seqs, max_num_batched_tokens: 8 * RUNNING, max_model_len: 4096 };
    // Room for what runs and the scheduler's reserve of a hundredth, and not for one sequence more.
    let held = RUNNING * PROMPT.div_ceil(BLOCK_SIZE);
    let num_blocks = held + held / 99 + 1;
    let mut scheduler = Scheduler::new(limits, BlockPool::new(num_blocks as u32, BLOCK_SIZE, prefix_cache));
    for id in 0..(RUNNING + WAITING) as u64 {
        let prompt: Vec<u32> = (0..PROMPT as u32).map(|i| (id as u32).wrapping_mul(31) + i).collect();
        let stop = StopRules { max_tokens: 2048, min_tokens: 0, stop_token_ids: vec![] };
        let new = NewSequence {
            id: SequenceId(id),
            prompt: prompt.into(),
            stop,
            deadline: None,
            prompt_logits: false,
        };
        scheduler.submit(new).expect("it fits");
    }
    while scheduler.num_running() < RUNNING {
        run_step(&mut scheduler);
    }
    run_step(&mut scheduler);
    assert_eq!((scheduler.num_running(), scheduler.num_waiting()), (RUNNING, WAITING));
    scheduler
}

/// One whole step: schedule, split into stages, commit a token for each.
fn run_step(scheduler: &mut Scheduler) {
    let step = scheduler.schedule().expect("there is work");
    let stages = scheduler.stages(&step, &StageRules::default());
    for item in stages.iter().flat_map(|stage| &stage.items) {
        let token = item.logits.choose().then_some(7);
        assert_eq!(scheduler.commit(item, token), None);
    }
    black_box(&stages);
}

/// What keeps those who wait from running, with its `max_num_seqs`, and whether there is a prefix cache.
const CASES: [(&str, usize, bool); 3] = [
    ("1,000 run, 10,000 wait for a place", RUNNING, true),
    ("1,000 run, 10,000 wait for blocks", RUNNING + WAITING, true),
    ("the same without prefix cache", RUNNING + WAITING, false),
];
const GOAL: Duration = Duration::from_millis(1);
/// Fresh starts whose first step is timed for the last lines.
const STARTS: usize = 21;

fn steps(criterion: &mut Criterion) {
    for (name, max_num_seqs, prefix_cache) in CASES {
        criterion.bench_function(name, |bencher| {
            // Few steps from a fresh start each: later ones would find no blocks.
            bencher.iter_batched_ref(
                || scheduler(max_num_seqs, prefix_cache),
                run_step,
                BatchSize::LargeInput,
            );
        });
    }
}

/// The median step of each case, beside the goal.
fn step_times() {
    for (name, max_num_seqs, prefix_cache) in CASES {
        let mut times: Vec<Duration> = (0..STARTS)
            .map(|_| {
                let mut scheduler = scheduler(max_num_seqs, prefix_cache);
                let begun = Instant::now();
                run_step(&mut scheduler);
                begun.elapsed()
            })
            .collect();
        times.sort_unstable();
        let median = times[STARTS / 2];
        let word = if median < GOAL { "met" } else { "missed" };
        println!("{name}: {:.3} ms a step, goal below 1 ms: {word}", median.as_secs_f64() * 1e3);
    }
}

fn main() {
    let mut criterion = Criterion::default().sample_size(20).configure_from_args();
    steps(&mut criterion);
    criterion.final_summary();
    // `cargo test` only wants to see that it runs.
    if !std::env::args().any(|arg| arg == "--test") {
        step_times();
    }
}
