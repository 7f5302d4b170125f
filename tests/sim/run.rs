//! One run: an attention engine of straw drives the real port through some steps in a world of one seed.
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use afd_common::config::model::ModelConfig;
use afd_common::frame::{FrameHeader, RowType};
use afd_common::identity::{ExpertRules, GatePlacement};
use afd_common::ids::StepId;
use afd_common::link::Doorbell;
use afd_tests::fixtures;
use attention_svc::engine::{FfnLoss, FfnPort, SideTensors, StepOutline};
use attention_svc::remote_ffn::clock::Clock;
use attention_svc::remote_ffn::hop_table::MAX_SENDS;
use attention_svc::remote_ffn::port::{PortParts, RemoteFfn};
use attention_svc::remote_ffn::settings::PortSettings;
use attention_svc::remote_ffn::stats::FfnStats;
use attention_svc::scheduler::Phase;
use tch::{Kind, Tensor};

use crate::clock::{SimClock, lock};
use crate::dice::Dice;
use crate::faults::Faults;
use crate::model::{HIDDEN, Rows, TOP_K};
use crate::world::{LEASE, Shape, World};

const HOP_TIMEOUT: Duration = Duration::from_millis(80);
const LOSS_TIMEOUT: Duration = Duration::from_secs(1);
/// As the real engine: a step that was lost runs again so often.
const MAX_STEP_REPEATS: u32 = 3;
/// No step may take longer, whatever happens: every wait in it is bounded.
const STEP_BOUND: Duration = Duration::from_secs(20);
/// Of so many seeds one begins with a warm-up.
const WARM_UP_EVERY: u64 = 4;

/// What became of a run.
#[derive(Clone, Copy, Debug, Default)]
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
    }
}

/// The attention engine of straw.
struct Straw {
    world: Arc<Mutex<World>>,
    clock: SimClock,
    port: RemoteFfn,
    bell: Doorbell,
    shape: Shape,
    dice: Dice,
    step: u64,
    /// The last step of the warm-up.
    warm_up: StepId,
    stats: Arc<FfnStats>,
    summary: Summary,
}

impl Straw {
    /// An engine of straw with the real port, in a world of its own.
    fn new(seed: u64, is_told: bool, mut dice: Dice, shape: Shape, faults: Faults, in_order: bool) -> Self {
        let (events, receiver) = crossbeam_channel::unbounded();
        let (bell, stats, base) = (Doorbell::default(), Arc::new(FfnStats::default()), Instant::now());
        let world_dice = Dice::new(seed ^ 0xa5a5);
        let mut world = World::new(shape, faults, in_order, world_dice, base, events, bell.clone());
        world.is_told = is_told;
        let world = Arc::new(Mutex::new(world));
        let clock = || SimClock::new(Arc::clone(&world), base);
        let settings = PortSettings {
            hidden_size: HIDDEN as u32,
            rows: RowType::F32,
            rank: dice.between(0, 3) as u32,
            hop_timeout: HOP_TIMEOUT,
            hop_timeout_per_row: Duration::from_millis(1),
            warmup_timeout: HOP_TIMEOUT,
            loss_timeout: LOSS_TIMEOUT,
            model: model(),
            experts: ExpertRules {
                sides: if shape.is_routed { GatePlacement::Attention } else { GatePlacement::Ffn }.into(),
                ..ExpertRules::default()
            },
            place: None,
        };
        let parts = PortParts {
            bell: bell.clone(),
            events: receiver,
            clock: Box::new(clock()),
            stats: Arc::clone(&stats),
            standing: Arc::new(String::new),
        };
        let port = RemoteFfn::new(settings, parts);
        Self {
            world: Arc::clone(&world),
            clock: clock(),
            port,
            bell,
            shape,
            dice,
            step: 0,
            warm_up: StepId(0),
            summary: Summary::default(),
            stats,
        }
    }

    fn pass(&mut self, time: Duration) {
        let until = self.clock.now() + time;
        while self.clock.now() < until {
            let seen = self.bell.count();
            self.port.idle();
            self.clock.wait(&self.bell, seen, until);
        }
    }

    /// Waits for every shard to have a rank.
    fn become_ready(&mut self, limit: Duration) -> bool {
        let until = self.clock.now() + limit;
        loop {
            let seen = self.bell.count();
            self.port.idle();
            if self.port.ready() {
                return true;
            }
            if self.clock.now() >= until {
                return false;
            }
            self.clock.wait(&self.bell, seen, until);
        }
    }

    /// Runs a step until it is through or given up. `Ok(false)`: given up, with a typed error.
    fn step(&mut self) -> Result<bool, String> {
        for _ in 0..=MAX_STEP_REPEATS {
            if !self.become_ready(LOSS_TIMEOUT) {
                return Ok(false);
            }
            // Gaps are legal.
            self.step += self.dice.between(1, 3);
            let begun = self.clock.now();
            let stages = self.dice.between(1, self.shape.num_stages.into()) as u8;
            let rows: Vec<u32> = (0..stages).map(|_| self.dice.between(1, 3) as u32).collect();
            let outcome = self.try_step(&rows, false);
            self.port.end_step(StepId(self.step));
            let (took, left) = (self.clock.now() - begun, self.port.num_outstanding());
            if left != 0 {
                return Err(format!("{left} hops outlive step {}", self.step));
            }
            if took > STEP_BOUND {
                return Err(format!("step {} took {took:?}", self.step));
            }
            match outcome {
                Ok(()) => return Ok(true),
                Err(Failure::Wrong(what)) => return Err(what),
                Err(Failure::Loss(FfnLoss::Fatal { what })) => return Err(format!("fatal: {what}")),
                Err(Failure::Loss(loss @ FfnLoss::Rejected { .. })) => {
                    return Err(format!("a sound hop was rejected: {loss}"));
                }
                Err(Failure::Loss(FfnLoss::Unavailable { .. } | FfnLoss::Bereft { .. })) => {}
            }
        }
        Ok(false)
    }

    /// Warms the ranks up that are there, as far as they let it; those that come later go through the same beside the steps.
    fn warm_up(&mut self) -> Result<(), String> {
        if !self.become_ready(LOSS_TIMEOUT) || !self.port.begin_warm_up() {
            return Ok(());
        }
        let num_stages = usize::from(self.shape.num_stages);
        loop {
            for rows in [1, 3] {
                self.step += 1;
                let outcome = self.try_step(&vec![rows; num_stages], true);
                self.port.end_step(StepId(self.step));
                match outcome {
                    Ok(()) => {}
                    Err(Failure::Loss(FfnLoss::Unavailable { .. } | FfnLoss::Bereft { .. })) => return Ok(()),
                    Err(Failure::Loss(loss)) => return Err(format!("in the warm-up: {loss}")),
                    Err(Failure::Wrong(what)) => return Err(what),
                }
            }
            if !self.port.handle_warm() {
                return Ok(());
            }
        }
    }

    fn try_step(&mut self, rows: &[u32], warmup: bool) -> Result<(), Failure> {
        let stages = rows.len() as u8;
        let outline = StepOutline {
            step: StepId(self.step),
            phase: Phase::Decode,
            stage_rows: rows.iter().map(|rows| *rows as usize).collect(),
            profile: false,
            warmup,
            trace: None,
        };
        self.port.begin_step(&outline)?;
        let mut asked: Vec<Option<Rows>> = vec![None; stages.into()];
        for layer in 0..self.shape.num_layers {
            for stage in 0..stages {
                // The stage's previous layer first: one's FFN runs while another's attention does.
                self.combine(layer.wrapping_sub(1), stage, &mut asked)?;
                asked[usize::from(stage)] = Some(self.dispatch(layer, stage, rows[usize::from(stage)])?);
            }
        }
        for stage in 0..stages {
            self.combine(self.shape.num_layers - 1, stage, &mut asked)?;
        }
        Ok(())
    }

    fn dispatch(&mut self, layer: u16, stage: u8, rows: u32) -> Result<Rows, Failure> {
        // No rows at all are legal too.
        let num_rows = if self.dice.chance(50) { 0 } else { rows as usize };
        let rows = Rows::throw(&mut self.dice, num_rows, self.shape.is_routed);
        let tensor = Tensor::from_slice(&rows.values).view([num_rows as i64, HIDDEN as i64]);
        let key = FrameHeader::key(self.step, layer, stage);
        self.port.dispatch(key, &tensor, &self.side(&rows))?;
        Ok(rows)
    }

    fn side(&self, rows: &Rows) -> SideTensors {
        if !self.shape.is_routed {
            return SideTensors::None;
        }
        let (ids, weights): (Vec<i64>, Vec<f32>) =
            rows.choices.iter().map(|(expert, weight)| (*expert as i64, *weight)).unzip();
        let shape = [rows.len() as i64, TOP_K as i64];
        let (ids, weights) = (Tensor::from_slice(&ids), Tensor::from_slice(&weights));
        SideTensors::TopK { ids: ids.view(shape), weights: weights.view(shape) }
    }

    fn combine(&mut self, layer: u16, stage: u8, asked: &mut [Option<Rows>]) -> Result<(), Failure> {
        let Some(rows) = asked[usize::from(stage)].take() else { return Ok(()) };
        let key = FrameHeader::key(self.step, layer, stage);
        let sum = self.port.combine(key)?;
        let found = Vec::<f32>::try_from(sum.to_kind(Kind::Float).reshape([-1]));
        let found = found.map_err(|error| Failure::Wrong(error.to_string()))?;
        let expected = rows.whole(layer, self.shape.num_shards);
        if found != expected {
            return Err(Failure::Wrong(format!("{key}: {found:?} came back, expected {expected:?}")));
        }
        self.summary.hops += 1;
        Ok(())
    }
}

enum Failure {
    Loss(FfnLoss),
    Wrong(String),
}

impl From<FfnLoss> for Failure {
    fn from(loss: FfnLoss) -> Self {
        Self::Loss(loss)
    }
}

/// A configuration with as many experts as the model of straw; read once.
fn model() -> Arc<ModelConfig> {
    static MODEL: OnceLock<Arc<ModelConfig>> = OnceLock::new();
    let read = || Arc::new(ModelConfig::load(&fixtures::checkpoint("tiny-mixtral")).expect("a fixture"));
    Arc::clone(MODEL.get_or_init(read))
}

/// Runs a seed. With `is_told` it prints what happens.
///
/// # Errors
/// Which invariant was broken.
pub(crate) fn run(seed: u64, is_told: bool) -> Result<Summary, String> {
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
    let faults = Faults::throw(&mut dice, (shape.num_shards * shape.replicas) as usize, span_us);
    let in_order = dice.chance(500);
    if is_told {
        println!("seed {seed}: {shape:?}, {num_steps} steps, in order: {in_order}, {faults:?}");
    }
    let mut straw = Straw::new(seed, is_told, dice, shape, faults, in_order);

    if seed % WARM_UP_EVERY == WARM_UP_EVERY - 1 {
        straw.warm_up()?;
        straw.warm_up = StepId(straw.step);
    }
    for _ in 0..num_steps {
        if !straw.step()? {
            straw.summary.failed += 1;
        }
        let pause = Duration::from_micros(straw.dice.between(0, 500));
        straw.pass(pause);
        violated(&straw.world)?;
    }
    // Once nothing goes wrong any more, everything works again, by itself and before long.
    lock(&straw.world).heal();
    straw.pass(3 * LEASE);
    for _ in 0..2 {
        if !straw.step()? {
            return Err("it does not serve again though all is well".into());
        }
    }
    straw.summary.losses = straw.stats.losses.load(Ordering::Relaxed);
    straw.summary.replays = straw.stats.replays.load(Ordering::Relaxed);
    finish(straw)
}

fn violated(world: &Mutex<World>) -> Result<(), String> {
    lock(world).violations.first().cloned().map_or(Ok(()), Err)
}

/// The attention rank ends; nothing of it may be left anywhere.
fn finish(straw: Straw) -> Result<Summary, String> {
    let Straw { world, port, warm_up, mut summary, .. } = straw;
    drop(port);
    let mut world = lock(&world);
    summary.neighbours = world.num_neighbour_answers();
    summary.harmed = world.num_harmed();
    summary.most_sends = world.most_sends(warm_up);
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
