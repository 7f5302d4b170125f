//! How many stages a step is worth, found out by measuring (`--stages auto`). Pure: loads in, times in, a number out.
//!
//! Two stages hide one side's work behind the other's, and read every expert twice. Which of the two weighs more follows
//! from model, machine, link and batch, so it is measured, for loads of a kind by themselves: steps that only decode apart
//! from others, steps that one sequence dominates apart from those that split evenly, and sizes apart by a factor of about
//! 1.4. A load that is new is *probed*: every count takes turns, so that whatever changes meanwhile touches all alike, until
//! one is clearly ahead of its neighbours in the same turns. Where none is, it goes on for longer: what is hard to tell apart
//! costs little to try. Then the best is used, and probed again after ever more steps while it stays the best: exploring
//! costs less than 1 % in the end.
use super::step::Phase;

#[cfg(test)]
mod tests;

/// Most counts there are.
const MAX_STAGES: usize = 4;
/// Turns of a probe at least, and at most.
const FEWEST_TURNS: usize = 4;
const MOST_TURNS: usize = 16;
/// Standard errors by which a count is ahead before it is believed early.
const CLEARLY: f64 = 2.5;
/// Steps between two probes at first, and at most.
const FIRST_PAUSE: u32 = 128;
const LONGEST_PAUSE: u32 = 2048;
/// Another count has to be better by this much to be taken: near a tie nothing is gained by changing.
const WORTH_A_CHANGE: f64 = 0.98;

/// See the module's head.
#[derive(Debug)]
pub struct StageCounts {
    most: usize,
    /// The first step of a count pays for buffers and the like: it is not counted.
    is_warm: [bool; MAX_STAGES],
    loads: Vec<Load>,
}

/// What a step is going to do, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLoad {
    /// What the step does.
    pub phase: Phase,
    /// Rows of it.
    pub rows: usize,
    /// Rows of its largest sequence.
    pub largest: usize,
    /// Into how many stages it may be split.
    pub splittable: usize,
}

/// What is known of one kind of load.
#[derive(Debug)]
struct Load {
    kind: LoadKind,
    best: usize,
    /// Logarithm of each count's time over that of one stage; `None` before the first probe.
    known: Option<[f64; MAX_STAGES]>,
    pause: u32,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LoadKind {
    decodes: bool,
    /// One sequence has more than two thirds of the rows: stages would be nothing like each other.
    is_lopsided: bool,
    /// Counts there are to choose from.
    most: usize,
    /// Twice the logarithm of the rows.
    size: u32,
}

#[derive(Debug)]
enum State {
    Probing(Box<Probe>),
    /// Steps until the next probe.
    Settled(u32),
}

/// Logarithms of the time for a row, by count and turn.
#[derive(Debug, Default)]
struct Probe {
    times: [[f64; MOST_TURNS]; MAX_STAGES],
    turns: [usize; MAX_STAGES],
}

/// What a probe found.
#[derive(Debug)]
struct Verdict {
    /// As [`Load::known`].
    times: [f64; MAX_STAGES],
    is_clear: bool,
}

/// A count that was chosen for a step, to be given back with the time that the step took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChosenStages {
    /// At least 1.
    pub num_stages: usize,
    rows: usize,
    load: Option<usize>,
}

impl ChosenStages {
    /// A count that nothing is to be learnt from.
    pub fn fixed(num_stages: usize) -> Self {
        Self { num_stages: num_stages.max(1), rows: 0, load: None }
    }
}

impl StageCounts {
    /// Up to `most` stages, 1 to 4.
    pub fn new(most: usize) -> Self {
        Self { most: most.clamp(1, MAX_STAGES), is_warm: [false; MAX_STAGES], loads: Vec::new() }
    }

    /// For the next step. Without a choice nothing is learnt.
    pub fn choose(&mut self, step: StepLoad) -> ChosenStages {
        let StepLoad { phase, rows, largest, splittable } = step;
        let most = self.most.min(splittable);
        if most <= 1 || rows == 0 {
            return ChosenStages::fixed(1);
        }
        let is_lopsided = 3 * largest > 2 * rows;
        let kind = LoadKind { decodes: phase == Phase::Decode, is_lopsided, most, size: rows.pow(2).ilog2() };
        let load = match self.loads.iter().position(|load| load.kind == kind) {
            Some(load) => load,
            None => {
                self.loads.push(Load::new(kind));
                self.loads.len() - 1
            }
        };
        let num_stages = match &self.loads[load].state {
            State::Settled(_) => self.loads[load].best,
            State::Probing(probe) => probe.next(most),
        };
        ChosenStages { num_stages, rows, load: Some(load) }
    }

    /// Whether the next step of this kind will be split as the last one was.
    pub fn is_settled(&self, phase: Phase, rows: usize) -> bool {
        let size = rows.max(1).pow(2).ilog2();
        let of_kind = |load: &&Load| load.kind.size == size && load.kind.decodes == (phase == Phase::Decode);
        let mut of_kind = self.loads.iter().filter(of_kind);
        of_kind.all(|load| matches!(load.state, State::Settled(2..)))
    }

    /// A step ran well and took so long.
    pub fn handle_step(&mut self, chosen: ChosenStages, micros: f64) {
        let Some(load) = chosen.load.and_then(|load| self.loads.get_mut(load)) else { return };
        let arm = chosen.num_stages - 1;
        match &mut load.state {
            State::Settled(0 | 1) => load.state = State::Probing(Box::default()),
            State::Settled(left) => *left -= 1,
            State::Probing(_) if !std::mem::replace(&mut self.is_warm[arm], true) => {}
            State::Probing(probe) => {
                probe.handle_time(arm, micros / chosen.rows as f64);
                if let Some(verdict) = probe.verdict(load.kind.most) {
                    load.settle(&verdict);
                }
            }
        }
    }
}

impl Load {
    fn new(kind: LoadKind) -> Self {
        Self { kind, best: 1, known: None, pause: FIRST_PAUSE, state: State::Probing(Box::default()) }
    }

    fn settle(&mut self, verdict: &Verdict) {
        // What is not clear by itself may be together with what was seen before.
        let times = match self.known {
            Some(known) if !verdict.is_clear => {
                std::array::from_fn(|arm| (known[arm] + verdict.times[arm]) / 2.0)
            }
            _ => verdict.times,
        };
        self.known = Some(times);
        let arms = 0..self.kind.most;
        let best_now = arms.min_by(|a, b| times[*a].total_cmp(&times[*b])).unwrap_or(0);
        if times[best_now] < times[self.best - 1] + WORTH_A_CHANGE.ln() {
            self.best = best_now + 1;
            self.pause = FIRST_PAUSE;
        } else {
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        }
        self.state = State::Settled(self.pause);
    }
}

impl Probe {
    /// The count that had the fewest turns; of equals the lowest in every other turn, so that none is always first.
    fn next(&self, most: usize) -> usize {
        let turns = &self.turns[..most];
        let fewest = turns.iter().copied().min().unwrap_or(0);
        let mut behind = (0..most).filter(|arm| turns[*arm] == fewest);
        let arm = if fewest % 2 == 0 { behind.next() } else { behind.next_back() };
        arm.map_or(1, |arm| arm + 1)
    }

    fn handle_time(&mut self, arm: usize, micros_per_row: f64) {
        if let Some(time) = self.times[arm].get_mut(self.turns[arm]) {
            *time = micros_per_row.max(f64::MIN_POSITIVE).ln();
            self.turns[arm] += 1;
        }
    }

    /// Once enough turns are over.
    fn verdict(&self, most: usize) -> Option<Verdict> {
        let turns = self.turns[0];
        if turns < FEWEST_TURNS || self.turns[..most].iter().any(|of| *of != turns) {
            return None;
        }
        let mut times = [0.0; MAX_STAGES];
        (1..most).for_each(|arm| times[arm] = self.ahead(0, arm, turns).0);
        let best = (0..most).min_by(|a, b| times[*a].total_cmp(&times[*b])).unwrap_or(0);
        let is_clear = (0..most).filter(|arm| *arm != best).all(|arm| {
            let (by, error) = self.ahead(best, arm, turns);
            by > CLEARLY * error
        });
        (is_clear || turns == MOST_TURNS).then_some(Verdict { times, is_clear })
    }

    /// By how much one count was ahead of another in the same turns: the median, and its standard error from the median
    /// deviation, so that a step which something else disturbed weighs little.
    fn ahead(&self, one: usize, other: usize, turns: usize) -> (f64, f64) {
        let mut by: [f64; MOST_TURNS] =
            std::array::from_fn(|turn| self.times[other][turn] - self.times[one][turn]);
        let middle = median(&mut by[..turns]);
        by[..turns].iter_mut().for_each(|by| *by = (*by - middle).abs());
        // 1.48 median deviations are a standard deviation, and a median's error is 1.25 of a mean's.
        let error = 1.48 * 1.25 * median(&mut by[..turns]) / (turns as f64).sqrt();
        (middle, error)
    }
}

/// Infinite when there is nothing.
fn median(times: &mut [f64]) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    match times.len() {
        0 => f64::INFINITY,
        len => (times[(len - 1) / 2] + times[len / 2]) / 2.0,
    }
}
