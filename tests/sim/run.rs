//! One run: an attention engine of straw works through some steps in a world of one seed, and what must hold is looked at.
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use attention_svc::remote_ffn::hop_table::MAX_SENDS;

use crate::clock::lock;
use crate::dice::Dice;
use crate::faults::Faults;
use crate::straw::Straw;
use crate::world::{LEASE, Shape, Telling, World};

/// Of so many seeds one begins with a warm-up.
const WARM_UP_EVERY: u64 = 4;
/// Of so many seeds nothing goes wrong in one.
const SPARED_EVERY: u64 = 16;

/// What became of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Summary {
    pub(crate) hops: u64,
    /// Steps that ended with a typed error, however often they were repeated.
    pub(crate) failed: u64,
    pub(crate) replays: u64,
    /// The most that one shard was sent its part of one hop.
    pub(crate) most_sends: u8,
    pub(crate) losses: u64,
    pub(crate) harmed: u64,
    pub(crate) neighbours: u64,
    /// Attention ranks that died in the middle of a step.
    pub(crate) deaths: u64,
    /// Ranks that were told of the end of a step.
    pub(crate) ends_told: u64,
    /// Of everything that happened, where it was asked for.
    pub(crate) story: u64,
}

impl Summary {
    pub(crate) fn add(&mut self, other: &Self) {
        self.hops += other.hops;
        self.failed += other.failed;
        self.replays += other.replays;
        self.most_sends = self.most_sends.max(other.most_sends);
        self.losses += other.losses;
        self.harmed += other.harmed;
        self.neighbours += other.neighbours;
        self.deaths += other.deaths;
        self.ends_told += other.ends_told;
    }
}

/// Runs a seed.
///
/// # Errors
/// Which invariant was broken.
pub(crate) fn run(seed: u64, telling: Telling) -> Result<Summary, String> {
    let mut dice = Dice::new(seed);
    let shape = Shape {
        num_shards: dice.between(1, 3) as u32,
        replicas: dice.between(1, 2) as u32,
        num_layers: dice.between(1, 3) as u16,
        num_stages: dice.between(1, 2) as u8,
        is_routed: dice.chance(400),
    };
    let num_steps = dice.between(2, 8);
    let span_us = num_steps * u64::from(shape.num_layers) * 700;
    let faults = match seed % SPARED_EVERY {
        0 => Faults::none(),
        _ => Faults::throw(&mut dice, (shape.num_shards * shape.replicas) as usize, span_us),
    };
    let (is_spared, death, in_order) = (faults.are_none(), faults.death, dice.chance(500));
    if telling == Telling::Printed {
        println!("seed {seed}: {shape:?}, {num_steps} steps, in order: {in_order}, {faults:?}");
    }
    let base = Instant::now();
    let world = World::new(shape, faults, in_order, Dice::new(seed ^ 0xa5a5), base, telling);
    let mut straw = Straw::new(world, base, dice, death);

    if seed % WARM_UP_EVERY == WARM_UP_EVERY - 1 {
        straw.warm_up()?;
    }
    for _ in 0..num_steps {
        if !straw.step()? {
            straw.summary.failed += 1;
        }
        if straw.dice.chance(700) {
            let pause = Duration::from_micros(straw.dice.between(0, 500));
            straw.pass(pause);
        }
        violated(&straw.world)?;
    }
    // Nothing goes wrong any more, and nothing is asked for: nothing is under way.
    lock(&straw.world).calm();
    straw.pass(LEASE);
    lingers(&straw.world)?;
    // Everything works again, by itself and before long.
    lock(&straw.world).heal();
    straw.pass(3 * LEASE);
    for _ in 0..2 {
        if !straw.step()? {
            return Err("it does not serve again though all is well".into());
        }
    }
    straw.pass(LEASE);
    lingers(&straw.world)?;
    let summary = finish(straw)?;
    if is_spared && (summary.failed, summary.losses, summary.replays, summary.harmed) != (0, 0, 0, 0) {
        return Err(format!("something failed though nothing went wrong: {summary:?}"));
    }
    Ok(summary)
}

fn violated(world: &Mutex<World>) -> Result<(), String> {
    lock(world).violations.first().cloned().map_or(Ok(()), Err)
}

fn lingers(world: &Mutex<World>) -> Result<(), String> {
    lock(world).lingering().map_or(Ok(()), Err)
}

/// The attention rank ends; nothing of it may be left anywhere.
fn finish(mut straw: Straw) -> Result<Summary, String> {
    let is_silent = straw.dice.chance(300);
    // With it goes the port.
    let (world, mut summary): (Arc<Mutex<World>>, _) = straw.end(is_silent);
    let mut world = lock(&world);
    world.add_to(&mut summary);
    if summary.most_sends > MAX_SENDS {
        return Err(format!("a hop was sent {} times to one shard", summary.most_sends));
    }
    world.end();
    world.look();
    let until_us = world.now_us + 4 * LEASE.as_micros() as u64;
    while world.next_at().is_some_and(|at| at <= until_us) {
        world.step();
    }
    match world.leftovers().first().or(world.violations.first()) {
        Some(what) => Err(what.clone()),
        None => Ok(summary),
    }
}
