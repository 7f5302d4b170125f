//! Which hops wait for company (`--board-ms`). Pure: times are passed in, microseconds on one clock.
//!
//! Attention ranks that run for themselves hardly ever meet at a layer, so an FFN that is bound by reading weights reads
//! them once for each rank. Ranks that have met at layer 0 and are then waited for at every layer go on together: a
//! *convoy*. So hops of layer 0 are **boarded**: held until the ranks that are about to come are there, for at most
//! `board_us`. At later layers the members of a convoy are held until all of them are there, again for at most `board_us`:
//! whoever misses that is dropped until its next step. Nobody else is held, ever.
//!
//! Waiting helps only while the FFN is the **bottleneck**: while serving the ranks one by one takes longer than a rank's
//! own turn. Aligning them when attention is the bottleneck only makes everybody wait, so nothing is held then. What
//! decides is measured: how long an execution takes by its rows, and how long a rank takes from an answer to its next hop. A
//! hop that came while the FFN was busy is seen only afterwards, so it says no more than that its rank took no longer.
//! Whether it did help is measured too: where turns are not shorter with company, it is left for a while (`trial`).
//!
//! A lane is one stage of one rank: at most one hop of it is under way. Stages of a rank are never boarded with each
//! other; they are there to overlap.
use afd_common::ids::{HopKey, StepId};

use super::SourceId;
use trial::Trial;

mod trial;

/// Weight of a new measurement.
const NEWEST: f64 = 0.2;
/// Company must save this much of a turn to begin with, and must not cost anything to go on.
const WORTH_BEGINNING: f64 = 0.95;
/// A lane whose period is not known yet counts as busy for so long after its last hop.
const UNKNOWN_PERIOD_US: u64 = 200_000;
/// A cost counts for so many executions after it was measured last. So what a disturbed execution said of company is
/// tried again, and a cost alone that nobody has paid for long keeps nobody together.
const FRESH: u64 = 512;
/// Row counts are told apart by powers of two.
const SIZES: usize = 24;

/// See the module's head.
#[derive(Debug)]
pub struct Convoys {
    board_us: u64,
    lanes: Vec<Lane>,
    next_convoy: u64,
    costs: Costs,
    /// By the rows of all busy ranks together, told apart as costs are.
    trials: [Trial; SIZES],
    /// Those rows.
    load: usize,
    is_on: bool,
    /// When it was on last.
    on_us: Option<u64>,
    /// When the last execution ended: nobody waits for company while the FFN is busy anyway.
    free_us: u64,
    /// Whether nobody has looked since: what is seen now may have come long ago.
    was_busy: bool,
    dropped: u64,
}

#[derive(Debug)]
struct Lane {
    source: SourceId,
    stage: u8,
    /// Its hop in the queue.
    waiting: Option<Waiting>,
    is_held: bool,
    /// The convoy it travels with, and for which step.
    convoy: Option<(u64, StepId)>,
    heard_us: u64,
    answered_us: Option<u64>,
    /// When its last step began here.
    began_us: Option<u64>,
    period_us: Option<f64>,
    think_us: Option<f64>,
    rows: f64,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    key: HopKey,
    since_us: u64,
    /// It need not wait for anybody any more.
    is_released: bool,
}

/// Mean time of an execution by its rows.
#[derive(Debug, Default)]
struct Costs {
    known: [Option<Cost>; SIZES],
    /// Executions so far.
    executions: u64,
}

#[derive(Clone, Copy, Debug)]
struct Cost {
    micros: f64,
    /// When it was measured last, in executions.
    seen: u64,
}

impl Convoys {
    /// Holds a hop for at most `board_us`; with 0 none ever.
    pub fn new(board_us: u64) -> Self {
        Self {
            board_us,
            lanes: Vec::new(),
            next_convoy: 0,
            costs: Costs::default(),
            trials: [Trial::default(); SIZES],
            load: 0,
            is_on: false,
            on_us: None,
            free_us: 0,
            was_busy: false,
            dropped: 0,
        }
    }

    /// Whether company is waited for at present.
    pub fn is_on(&self) -> bool {
        self.is_on
    }

    /// Times that a rank missed its convoy at a layer, so far.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Whether a hop that waits is to go on waiting. As of the last [`update`](Self::update).
    pub fn holds(&self, source: SourceId, key: HopKey) -> bool {
        self.is_on && self.lanes.iter().any(|lane| lane.is(source, key.stage.0) && lane.is_held)
    }

    /// A hop was queued.
    pub fn handle_arrival(&mut self, source: SourceId, key: HopKey, rows: u32, now_us: u64) {
        if self.board_us == 0 {
            return;
        }
        let at = match self.lanes.iter().position(|lane| lane.is(source, key.stage.0)) {
            Some(at) => at,
            None => {
                self.lanes.push(Lane::new(source, key.stage.0));
                self.lanes.len() - 1
            }
        };
        let lane = &mut self.lanes[at];
        if lane.convoy.is_some_and(|(_, step)| step != key.step) {
            lane.convoy = None;
        }
        if let Some(answered_us) = lane.answered_us.take() {
            let took = now_us.saturating_sub(answered_us) as f64;
            match self.was_busy {
                true => lane.think_us = lane.think_us.map(|known| known.min(took)),
                false => mix(&mut lane.think_us, took),
            }
        }
        let began_us = if key.layer.0 == 0 { lane.began_us.replace(now_us) } else { None };
        if let Some(began_us) = began_us {
            let period = now_us.saturating_sub(began_us) as f64;
            // A pause between requests is no period.
            if lane.period_us.is_none_or(|known| period < 4.0 * known) {
                mix(&mut lane.period_us, period);
                let with_company = self.on_us.is_some_and(|on_us| on_us >= began_us);
                self.trials[self.load].note(with_company, period, self.costs.executions);
            }
        }
        lane.rows += NEWEST * (f64::from(rows) - lane.rows);
        lane.heard_us = now_us;
        // Behind layer 0 only members of a convoy wait for anybody.
        let is_released = key.layer.0 > 0 && lane.convoy.is_none();
        lane.waiting = Some(Waiting { key, since_us: now_us, is_released });
    }

    /// Hops were computed together.
    pub fn handle_executed(
        &mut self,
        hops: impl Iterator<Item = (SourceId, HopKey)>,
        rows: u32,
        started_us: u64,
        finished_us: u64,
    ) {
        if self.board_us == 0 {
            return;
        }
        self.costs.note(rows, finished_us.saturating_sub(started_us) as f64);
        (self.free_us, self.was_busy) = (finished_us, true);
        for (source, key) in hops {
            if let Some(lane) = self.lanes.iter_mut().find(|lane| lane.is(source, key.stage.0)) {
                lane.waiting = None;
                lane.answered_us = Some(finished_us);
            }
        }
    }

    /// A link is gone.
    pub fn handle_closed(&mut self, source: SourceId) {
        self.lanes.retain(|lane| lane.source != source);
    }

    /// Looks at who is there. Returns until when somebody is held at most: look again then, if nothing comes before.
    pub fn update(&mut self, now_us: u64) -> Option<u64> {
        self.was_busy = false;
        self.lanes.iter_mut().for_each(|lane| lane.is_held = false);
        if self.board_us == 0 {
            return None;
        }
        self.is_on = self.helps(now_us);
        if self.is_on {
            self.on_us = Some(now_us);
        } else {
            self.lanes.iter_mut().for_each(|lane| lane.convoy = None);
            return None;
        }
        let mut until_us = (0..super::MAX_STAGES).filter_map(|stage| self.board(stage, now_us)).min();
        let mut next = 0;
        while let Some(convoy) = self.convoy_from(next) {
            until_us = until_us.into_iter().chain(self.gather(convoy, now_us)).min();
            next = convoy + 1;
        }
        until_us
    }

    /// Boards layer 0 for one stage, or holds who is there until the rest is. Returns the end of that.
    fn board(&mut self, stage: u8, now_us: u64) -> Option<u64> {
        let boards = |lane: &Lane| {
            let at_0 = lane.waiting.filter(|waiting| waiting.key.layer.0 == 0 && !waiting.is_released);
            at_0.filter(|_| lane.stage == stage && lane.convoy.is_none())
        };
        let first_us = self.lanes.iter().filter_map(boards).map(|waiting| waiting.since_us).min()?;
        let until_us = first_us.max(self.free_us) + self.board_us;
        let expected = |lane: &&Lane| {
            lane.stage == stage && boards(lane).is_none() && lane.is_due(now_us, self.board_us)
        };
        if now_us < until_us && self.lanes.iter().any(|lane| expected(&lane)) {
            self.lanes.iter_mut().filter(|lane| boards(lane).is_some()).for_each(|lane| lane.is_held = true);
            return Some(until_us);
        }
        let aboard = self.lanes.iter().filter(|lane| boards(lane).is_some()).count();
        let convoy = self.next_convoy;
        self.next_convoy += 1;
        for lane in &mut self.lanes {
            if let Some(waiting) = boards(lane) {
                lane.convoy = (aboard > 1).then_some((convoy, waiting.key.step));
                lane.waiting = Some(Waiting { is_released: true, ..waiting });
            }
        }
        None
    }

    /// The first convoy on its way whose number is `least` or more.
    fn convoy_from(&self, least: u64) -> Option<u64> {
        let convoys = self.lanes.iter().filter_map(|lane| Some(lane.convoy?.0));
        convoys.filter(|convoy| *convoy >= least).min()
    }

    /// Holds the members of a convoy that are there until all are, or too late. Returns the end of that.
    fn gather(&mut self, convoy: u64, now_us: u64) -> Option<u64> {
        let waits = |lane: &Lane| {
            let is_member = lane.convoy.is_some_and(|(of, _)| of == convoy);
            lane.waiting.filter(|waiting| is_member && !waiting.is_released)
        };
        let first_us = self.lanes.iter().filter_map(waits).map(|waiting| waiting.since_us).min()?;
        let until_us = first_us.max(self.free_us) + self.board_us;
        let is_missing =
            |lane: &Lane| lane.convoy.is_some_and(|(of, _)| of == convoy) && lane.waiting.is_none();
        let is_anyone_missing = self.lanes.iter().any(is_missing);
        // Members whose last hop was released and has not run yet are with us: they are merely ahead in the queue.
        if is_anyone_missing && now_us < until_us {
            self.lanes.iter_mut().filter(|lane| waits(lane).is_some()).for_each(|lane| lane.is_held = true);
            return Some(until_us);
        }
        for lane in self.lanes.iter_mut().filter(|lane| is_missing(lane)) {
            lane.convoy = None;
            self.dropped += 1;
        }
        // A member without rows here at this layer is ahead; it waits for the others to catch up.
        let layer = self.lanes.iter().filter_map(waits).map(|waiting| waiting.key.layer).min()?;
        for lane in &mut self.lanes {
            if let Some(waiting) = waits(lane) {
                lane.is_held = waiting.key.layer != layer;
                lane.waiting = Some(Waiting { is_released: !lane.is_held, ..waiting });
            }
        }
        None
    }

    /// Whether going together is faster for the busy ranks than going one by one.
    fn helps(&mut self, now_us: u64) -> bool {
        let busy = || self.lanes.iter().filter(|lane| lane.is_busy(now_us, self.board_us));
        let num_lanes = busy().count() as f64;
        let num_stages = busy().map(|lane| lane.stage).max().map_or(0.0, |stage| f64::from(stage) + 1.0);
        let ranks = if num_stages > 0.0 { num_lanes / num_stages } else { 0.0 };
        if ranks < 1.5 {
            return false;
        }
        let rows = busy().map(|lane| lane.rows).sum::<f64>() / num_lanes;
        let load = size(rows * ranks);
        let (thinking, known) = busy()
            .filter_map(|lane| lane.think_us)
            .fold((0.0, 0.0), |(sum, n), think| (sum + think, n + 1.0));
        let (Some(alone), Some(together)) = (self.costs.of(rows), self.costs.of(rows * ranks)) else {
            return false;
        };
        // Never seen to come while the FFN was free: it cannot be long, and trying will tell.
        let think = if known > 0.0 { thinking / known } else { 0.0 };
        let one_by_one = (num_lanes * alone).max(think + alone);
        let in_convoys = (num_stages * together).max(think + together);
        let threshold = if self.is_on { 1.0 } else { WORTH_BEGINNING };
        self.load = load;
        in_convoys < threshold * one_by_one && self.trials[load].allows(self.costs.executions)
    }
}

impl Lane {
    fn new(source: SourceId, stage: u8) -> Self {
        Self {
            source,
            stage,
            waiting: None,
            is_held: false,
            convoy: None,
            heard_us: 0,
            answered_us: None,
            began_us: None,
            period_us: None,
            think_us: None,
            rows: 1.0,
        }
    }

    fn is(&self, source: SourceId, stage: u8) -> bool {
        self.source == source && self.stage == stage
    }

    /// Whether it was heard lately, by its own measure.
    fn is_busy(&self, now_us: u64, board_us: u64) -> bool {
        let patience = self.period_us.map_or(UNKNOWN_PERIOD_US, |period| 2 * period as u64) + board_us;
        self.waiting.is_some() || now_us <= self.heard_us + patience
    }

    /// Whether its next step is due at layer 0: within half a period, or overdue by no more than it may be held. Of two
    /// ranks each of which is half a turn away from the other, only the one that is nearer waits: so they meet.
    fn is_due(&self, now_us: u64, board_us: u64) -> bool {
        let (Some(began_us), Some(period)) = (self.began_us, self.period_us) else { return false };
        let due_us = began_us + period as u64;
        self.is_busy(now_us, board_us) && due_us <= now_us + period as u64 / 2 && now_us <= due_us + board_us
    }
}

impl Costs {
    fn note(&mut self, rows: u32, micros: f64) {
        self.executions += 1;
        let (cost, seen) = (&mut self.known[size(f64::from(rows))], self.executions);
        let mut mean = cost.filter(|cost| cost.is_fresh(seen)).map(|cost| cost.micros);
        mix(&mut mean, micros);
        *cost = mean.map(|micros| Cost { micros, seen });
    }

    /// Of so many rows, or of the nearest number that is known, fewer first: a cost that is not known yet, or not any more,
    /// is tried.
    fn of(&self, rows: f64) -> Option<f64> {
        let at = size(rows);
        let fresh = |cost: &&Cost| cost.is_fresh(self.executions);
        let fewer = self.known[..=at].iter().rev().flatten().find(fresh);
        let nearest = fewer.or_else(|| self.known[at..].iter().flatten().find(fresh));
        nearest.map(|cost| cost.micros)
    }
}

impl Cost {
    fn is_fresh(&self, executions: u64) -> bool {
        executions - self.seen < FRESH
    }
}

fn size(rows: f64) -> usize {
    // The nearest power of two.
    (rows.max(1.0).log2().round() as usize).min(SIZES - 1)
}

/// What took more than twice as long as usual had something else in its way: it counts as twice as long, so that one such
/// measurement decides nothing.
fn mix(mean: &mut Option<f64>, new: f64) {
    *mean = Some(mean.map_or(new, |mean| mean + NEWEST * (new.min(2.0 * mean) - mean)));
}

#[cfg(test)]
mod tests;
