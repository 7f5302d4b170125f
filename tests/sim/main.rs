//! The attention engine's port, links, and FFN processes as state machines in virtual time, with an adversary that drops,
//! delays, duplicates, reorders, corrupts and truncates frames, and crashes, stops, cuts off and restarts ranks.
//!
//! What runs is the real code on both sides ([`RemoteFfn`](attention_svc::remote_ffn::port::RemoteFfn) with its tables,
//! the links' checks and credits, the FFN engine with its queue, ledger and sessions); only sockets, tasks and the clock
//! are played. Invariants: every hop gets exactly its rows or a typed error; nobody is answered twice; no plan is
//! refused; no hop is sent more than three times; no step takes longer than its deadlines allow; no buffer outlives its
//! hop and no session its rank; and once nothing goes wrong any more, all works again.
//!
//! A seed that fails prints itself; `AFD_SIM_SEED=n cargo test -p afd-tests --test sim -- --nocapture` tells its story.
//! `AFD_SIM_SEEDS=n` runs more of them. It can fail: with the links' check of epochs taken out seed 8 finds wrong rows,
//! without the checksum of bodies seed 5 does, a port that forgets the parts of a lost rank fails seed 0, and one that sends
//! them once more often seed 36.
use std::panic::{AssertUnwindSafe, catch_unwind};

mod clock;
mod dice;
mod faults;
mod ffn;
mod model;
mod neighbour;
mod network;
mod run;
mod world;

use attention_svc::remote_ffn::hop_table::MAX_SENDS;
use run::Summary;

/// In the ordinary run; ten times as many with `AFD_TEST_FULL`.
const NUM_SEEDS: u64 = 2000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

/// Runs seeds one after the other.
fn run_all(seeds: impl Iterator<Item = u64>, is_told: bool) -> Summary {
    let _no_grad = tch::no_grad_guard();
    let mut all = Summary::default();
    for seed in seeds {
        let outcome = catch_unwind(AssertUnwindSafe(|| run::run(seed, is_told)));
        let run = match outcome {
            Ok(Ok(run)) => run,
            Ok(Err(what)) => panic!("seed {seed}: {what}\nAFD_SIM_SEED={seed} replays it"),
            Err(_) => panic!("seed {seed} panicked\nAFD_SIM_SEED={seed} replays it"),
        };
        all.add(&run);
    }
    all
}

#[test]
fn every_hop_gets_its_rows_or_a_typed_error_whatever_goes_wrong() {
    tch::set_num_threads(1);
    if let Some(seed) = number("AFD_SIM_SEED") {
        println!("{:?}", run_all(seed..seed + 1, true));
        return;
    }
    let full = std::env::var_os("AFD_TEST_FULL").is_some();
    let count = number("AFD_SIM_SEEDS").unwrap_or(if full { 10 * NUM_SEEDS } else { NUM_SEEDS });
    let (mut all, begun) = (Summary::default(), std::time::Instant::now());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let share = |at| scope.spawn(move || run_all((at as u64..count).step_by(threads), false));
        for thread in (0..threads).map(share).collect::<Vec<_>>() {
            all.add(&thread.join().expect("a seed failed: see above"));
        }
    });
    println!("{count} seeds in {:.1} s: {all:?}", begun.elapsed().as_secs_f64());
    // An adversary that does nothing proves nothing.
    let happened = [all.losses, all.replays, all.harmed, all.neighbours, all.failed];
    assert!(count < NUM_SEEDS || happened.iter().all(|count| *count > 0), "{all:?}");
    assert!(count < NUM_SEEDS || all.most_sends == MAX_SENDS, "nobody was lost twice in a hop: {all:?}");
    assert!(all.failed < all.hops / 20, "hardly anything gets through: {all:?}");
}
