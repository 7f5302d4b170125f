//! The attention engine of straw: drives the real port through steps of made-up rows, as the real engine does, and holds
//! every sum that comes back to what it must be. It may die in the middle of a step, and another one takes its place.
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
use attention_svc::remote_ffn::port::{PortParts, RemoteFfn};
use attention_svc::remote_ffn::settings::PortSettings;
use attention_svc::remote_ffn::stats::FfnStats;
use attention_svc::scheduler::Phase;
use tch::{Kind, Tensor};

use crate::clock::{SimClock, lock};
use crate::dice::Dice;
use crate::faults::Death;
use crate::model::{HIDDEN, Rows, TOP_K};
use crate::run::Summary;
use crate::world::{Shape, World};

const HOP_TIMEOUT: Duration = Duration::from_millis(80);
const LOSS_TIMEOUT: Duration = Duration::from_secs(1);
/// As the real engine: a step that was lost runs again so often.
const MAX_STEP_REPEATS: u32 = 3;
/// No step may take longer, whatever happens: every wait in it is bounded.
const STEP_BOUND: Duration = Duration::from_secs(20);

/// See the module's head.
pub(crate) struct Straw {
    pub(crate) world: Arc<Mutex<World>>,
    clock: SimClock,
    base: Instant,
    settings: PortSettings,
    port: RemoteFfn,
    bell: Doorbell,
    stats: Arc<FfnStats>,
    shape: Shape,
    pub(crate) dice: Dice,
    step: u64,
    /// The last step of the warm-up.
    warm_up: StepId,
    /// What was said of the step after the present one.
    ahead: Option<StepOutline>,
    death: Option<Death>,
    pub(crate) summary: Summary,
}

impl Straw {
    /// With the real port, in a world that has begun at `base`.
    pub(crate) fn new(world: World, base: Instant, mut dice: Dice, death: Option<Death>) -> Self {
        let shape = world.shape();
        let settings = PortSettings {
            hidden_size: HIDDEN as u32,
            rows: RowType::F32,
            rank: dice.between(0, 3) as u32,
            hop_timeout: HOP_TIMEOUT,
            hop_timeout_per_row: Duration::from_millis(1),
            warmup_timeout: HOP_TIMEOUT,
            loss_timeout: LOSS_TIMEOUT,
            model: model(shape.num_layers.into()),
            experts: ExpertRules {
                sides: if shape.is_routed { GatePlacement::Attention } else { GatePlacement::Ffn }.into(),
                ..ExpertRules::default()
            },
            place: None,
        };
        let world = Arc::new(Mutex::new(world));
        let (port, bell, stats) = begin_life(&world, base, settings.clone());
        Self {
            clock: SimClock::new(Arc::clone(&world), base),
            world,
            base,
            settings,
            port,
            bell,
            stats,
            shape,
            dice,
            step: 0,
            warm_up: StepId(0),
            ahead: None,
            death,
            summary: Summary::default(),
        }
    }

    /// Lets time pass with nothing to do.
    pub(crate) fn pass(&mut self, time: Duration) {
        if let Some(ahead) = self.ahead.take() {
            self.port.withdraw();
            self.step = ahead.step.0;
        }
        let until = self.clock.now() + time;
        while self.clock.now() < until {
            let seen = self.bell.count();
            self.port.idle();
            let wake_at = self.port.wake_at().map_or(until, |at| at.min(until));
            self.clock.wait(&self.bell, seen, wake_at);
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
    ///
    /// # Errors
    /// Which invariant was broken.
    pub(crate) fn step(&mut self) -> Result<bool, String> {
        for _ in 0..=MAX_STEP_REPEATS {
            if !self.become_ready(LOSS_TIMEOUT) {
                return Ok(false);
            }
            let begun = self.clock.now();
            let outline = self.next_outline();
            let outcome = self.try_step(&outline);
            if let Err(Failure::Died) = outcome {
                self.live_again();
                return Ok(true);
            }
            self.port.end_step(outline.step);
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
                Err(Failure::Died) => unreachable!("seen above"),
            }
        }
        Ok(false)
    }

    /// Warms the ranks up that are there, as far as they let it; those that come later go through the same beside the steps.
    ///
    /// # Errors
    /// Which invariant was broken.
    pub(crate) fn warm_up(&mut self) -> Result<(), String> {
        if !self.become_ready(LOSS_TIMEOUT) || !self.port.begin_warm_up() {
            return Ok(());
        }
        let num_stages = usize::from(self.shape.num_stages);
        loop {
            for rows in [1, 3] {
                self.step += 1;
                self.warm_up = StepId(self.step);
                let outline = StepOutline { warmup: true, ..outline(self.warm_up, vec![rows; num_stages]) };
                let outcome = self.try_step(&outline);
                if !matches!(outcome, Err(Failure::Died)) {
                    self.port.end_step(outline.step);
                }
                match outcome {
                    Ok(()) => {}
                    Err(Failure::Loss(FfnLoss::Unavailable { .. } | FfnLoss::Bereft { .. })) => return Ok(()),
                    Err(Failure::Loss(loss)) => return Err(format!("in the warm-up: {loss}")),
                    Err(Failure::Wrong(what)) => return Err(what),
                    Err(Failure::Died) => {
                        self.live_again();
                        return Ok(());
                    }
                }
            }
            if !self.port.handle_warm() {
                return Ok(());
            }
        }
    }

    /// The next step, which may come as it was said one step ahead, otherwise, or not at all.
    fn next_outline(&mut self) -> StepOutline {
        let outline = match self.ahead.take() {
            Some(ahead) => match self.dice.index(4) {
                0 => StepOutline { stage_rows: self.stage_rows(), ..ahead },
                1 => {
                    if self.dice.chance(500) {
                        self.port.withdraw();
                    }
                    self.step = ahead.step.0;
                    self.later_outline()
                }
                _ => ahead,
            },
            None => self.later_outline(),
        };
        self.step = outline.step.0;
        outline
    }

    /// Some later step. Gaps are legal.
    fn later_outline(&mut self) -> StepOutline {
        let step = self.step + self.dice.between(1, 3);
        outline(StepId(step), self.stage_rows())
    }

    fn stage_rows(&mut self) -> Vec<usize> {
        let stages = self.dice.between(1, self.shape.num_stages.into());
        (0..stages).map(|_| self.dice.between(1, 3) as usize).collect()
    }

    fn try_step(&mut self, outline: &StepOutline) -> Result<(), Failure> {
        self.port.begin_step(outline)?;
        if !outline.warmup && self.dice.chance(500) {
            let ahead = self.later_outline();
            self.port.announce_ahead(&ahead);
            self.ahead = Some(ahead);
        }
        let stages = outline.stage_rows.len() as u8;
        let mut asked: Vec<Option<Rows>> = vec![None; stages.into()];
        for layer in 0..self.shape.num_layers {
            for stage in 0..stages {
                // The stage's previous layer first: one's FFN runs while another's attention does.
                self.combine(layer.wrapping_sub(1), stage, &mut asked)?;
                let rows = outline.stage_rows[usize::from(stage)];
                asked[usize::from(stage)] = Some(self.dispatch(layer, stage, rows)?);
            }
        }
        for stage in 0..stages {
            self.combine(self.shape.num_layers - 1, stage, &mut asked)?;
        }
        Ok(())
    }

    fn dispatch(&mut self, layer: u16, stage: u8, rows: usize) -> Result<Rows, Failure> {
        self.age()?;
        // No rows at all are legal too.
        let num_rows = if self.dice.chance(50) { 0 } else { rows };
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
        self.age()?;
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

    /// One call of the port less until it dies.
    fn age(&mut self) -> Result<(), Failure> {
        if let Some(death) = &mut self.death {
            death.calls_left = death.calls_left.checked_sub(1).ok_or(Failure::Died)?;
        }
        Ok(())
    }

    /// The process is gone from one moment to the next, and a new one takes its place.
    fn live_again(&mut self) {
        let is_silent = self.death.take().is_some_and(|death| death.is_silent);
        self.end_life(is_silent);
        let (port, bell, stats) = begin_life(&self.world, self.base, self.settings.clone());
        (self.port, self.bell, self.stats) = (port, bell, stats);
        (self.step, self.warm_up, self.ahead) = (0, StepId(0), None);
        self.summary.deaths += 1;
    }

    fn end_life(&mut self, is_silent: bool) {
        self.summary.losses += self.stats.losses.load(Ordering::Relaxed);
        self.summary.replays += self.stats.replays.load(Ordering::Relaxed);
        lock(&self.world).end_life(is_silent, self.warm_up);
    }

    /// It is gone for good.
    pub(crate) fn end(mut self, is_silent: bool) -> (Arc<Mutex<World>>, Summary) {
        self.end_life(is_silent);
        (self.world, self.summary)
    }
}

enum Failure {
    Loss(FfnLoss),
    Wrong(String),
    Died,
}

impl From<FfnLoss> for Failure {
    fn from(loss: FfnLoss) -> Self {
        Self::Loss(loss)
    }
}

/// A port in a world that knows of no other.
fn begin_life(
    world: &Arc<Mutex<World>>,
    base: Instant,
    settings: PortSettings,
) -> (RemoteFfn, Doorbell, Arc<FfnStats>) {
    let (events, receiver) = crossbeam_channel::unbounded();
    let (bell, stats) = (Doorbell::default(), Arc::new(FfnStats::default()));
    lock(world).begin_life(events, bell.clone());
    let parts = PortParts {
        bell: bell.clone(),
        events: receiver,
        clock: Box::new(SimClock::new(Arc::clone(world), base)),
        stats: Arc::clone(&stats),
        standing: Arc::new(String::new),
    };
    (RemoteFfn::new(settings, parts), bell, stats)
}

fn outline(step: StepId, stage_rows: Vec<usize>) -> StepOutline {
    StepOutline { step, phase: Phase::Decode, stage_rows, profile: false, warmup: false, trace: None }
}

/// A configuration with as many experts as the model of straw; read once.
fn model(num_layers: usize) -> Arc<ModelConfig> {
    static MODEL: OnceLock<ModelConfig> = OnceLock::new();
    let whole = MODEL
        .get_or_init(|| ModelConfig::load(&fixtures::checkpoint("tiny-mixtral")).expect("a fixture"))
        .clone();
    Arc::new(ModelConfig { layers: whole.layers[..num_layers].to_vec(), ..whole })
}
