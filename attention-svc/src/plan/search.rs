//! All layouts within limits, each with the largest batch that fits memory and target, best first.
//!
//! A layout's throughput grows with its batch (a step has a fixed part) and so do its step time and its memory, so the
//! largest batch within the limits is the best one, and bisection finds it.
use serde::{Deserialize, Serialize};

use super::case::Case;
use super::evaluate::Evaluator;
use super::layout::Layout;
use super::outcome::{Outcome, RoleMemory};

/// What a layout may take.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Devices there are.
    pub max_devices: u32,
    /// Longest time per output token, ms.
    pub tpot_ms: f64,
    /// Sequences there are to decode, in all; `None`: as many as fit.
    pub concurrency: Option<u32>,
    /// Most stages a step may be split into.
    pub max_stages: u32,
}

/// Stages beyond this gain nothing: four hide any exchange that can be hidden.
pub const MAX_STAGES: u32 = 8;

/// Why limits are refused. A retry does not help.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LimitError {
    /// A limit no layout can have.
    #[error("{option} is {value}; {what}")]
    Absurd {
        /// Which option.
        option: &'static str,
        /// As given.
        value: String,
        /// What would be accepted.
        what: &'static str,
    },
    /// Nothing fits the memory of so few devices.
    #[error(
        "the model does not fit: {layout} needs {needs_gb:.0} GB on a rank that has {usable_gb:.0} GB to give; {nearest}"
    )]
    Memory {
        /// The layout that came nearest.
        layout: Layout,
        /// Its fullest rank, one sequence per rank.
        needs_gb: f64,
        /// What a rank may use.
        usable_gb: f64,
        /// How many devices would do.
        nearest: String,
    },
    /// Every layout that fits is slower than the target, even with one sequence per rank and stage.
    #[error(
        "no layout reaches {target_ms} ms per token: the fastest of {max_devices} devices is {layout} with {fastest_ms:.3} ms"
    )]
    Target {
        /// As asked.
        target_ms: f64,
        /// As asked.
        max_devices: u32,
        /// The fastest one.
        layout: Layout,
        /// What it reaches.
        fastest_ms: f64,
    },
    /// More ranks than sequences, in every layout.
    #[error("{concurrency} sequences are fewer than the ranks and stages of any layout that fits")]
    TooFewSequences {
        /// As asked.
        concurrency: u32,
    },
}

/// A layout whose fullest rank holds more than it may.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Misfit {
    /// Which layout.
    pub layout: Layout,
    /// What its ranks would hold with one sequence per rank and stage.
    pub memory: RoleMemory,
}

/// Why one layout is out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rejected {
    /// A rank would hold more than it has.
    Memory(RoleMemory),
    /// Its fastest step is over the target.
    Target {
        /// With one sequence per rank and stage.
        fastest_ms: f64,
    },
    /// Fewer sequences than ranks × stages.
    TooFewSequences,
}

/// What the search found.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// AFD layouts within the limits, best first.
    pub afd: Vec<Outcome>,
    /// Colocated layouts within the limits, best first.
    pub colocated: Vec<Outcome>,
    /// The others, in the order of enumeration.
    pub rejected: Vec<(Layout, Rejected)>,
}

impl Found {
    /// The largest FFN group of each kind of layout that does not fit: one rank more and the experts may.
    pub fn misfits(&self) -> Vec<Misfit> {
        let misfit = |(layout, rejected): &(Layout, Rejected)| match rejected {
            Rejected::Memory(memory) => Some(Misfit { layout: *layout, memory: *memory }),
            _ => None,
        };
        let afd = |misfit: &Misfit| matches!(misfit.layout, Layout::Afd { .. });
        let all: Vec<_> = self.rejected.iter().filter_map(misfit).collect();
        let (apart, together): (Vec<_>, Vec<_>) = all.into_iter().partition(afd);
        let fewest_first = |misfit: &Misfit| {
            let layout = misfit.layout;
            (layout.ffn_ranks(), std::cmp::Reverse((layout.attention_ranks(), layout.stages())))
        };
        [apart, together].into_iter().filter_map(|kind| kind.into_iter().max_by_key(fewest_first)).collect()
    }

    /// Layouts looked at.
    pub fn num_layouts(&self) -> usize {
        self.afd.len() + self.colocated.len() + self.rejected.len()
    }
}

impl Limits {
    /// Refuses limits that nothing can meet, whatever the model.
    ///
    /// # Errors
    /// [`LimitError::Absurd`] names the option.
    pub fn check(&self) -> Result<(), LimitError> {
        check_devices("--gpus", self.max_devices)?;
        check_target("--tpot-ms", self.tpot_ms)?;
        if !(1..=MAX_STAGES).contains(&self.max_stages) {
            return absurd("--max-stages", self.max_stages.to_string(), "expected 1 to 8");
        }
        if self.concurrency == Some(0) {
            return absurd("--concurrency", "0".into(), "expected at least 1");
        }
        Ok(())
    }
}

fn absurd(option: &'static str, value: String, what: &'static str) -> Result<(), LimitError> {
    Err(LimitError::Absurd { option, value, what })
}

/// Refuses a number of devices that `option` gives.
///
/// # Errors
/// [`LimitError::Absurd`].
pub fn check_devices(option: &'static str, count: u32) -> Result<(), LimitError> {
    match count {
        1..=100_000 => Ok(()),
        other => absurd(option, other.to_string(), "expected 1 to 100000"),
    }
}

/// Refuses a time per token, ms, that `option` gives.
///
/// # Errors
/// [`LimitError::Absurd`].
pub fn check_target(option: &'static str, tpot_ms: f64) -> Result<(), LimitError> {
    match tpot_ms {
        1e-3..=1e7 => Ok(()),
        other => absurd(option, other.to_string(), "expected 0.001 to 1e7"),
    }
}

/// Every layout of up to `limits.max_devices` devices, in a fixed order. An FFN rank holds at least one expert.
pub fn layouts(case: &Case, limits: &Limits) -> Vec<Layout> {
    let most_ffn = case.shape.moe.map_or(case.shape.hidden, |moe| moe.num_experts);
    let mut layouts = Vec::new();
    for ffn in 1..=most_ffn.min(limits.max_devices.saturating_sub(1)) {
        for attention in 1..=limits.max_devices - ffn {
            layouts.extend((1..=limits.max_stages).map(|stages| Layout::Afd { attention, ffn, stages }));
        }
    }
    for ranks in 1..=most_ffn.min(limits.max_devices) {
        layouts.extend((1..=limits.max_stages.min(2)).map(|stages| Layout::Colocated { ranks, stages }));
    }
    layouts
}

/// Evaluates all of them.
///
/// # Errors
/// [`LimitError`] when nothing is within the limits: with the nearest that would be.
pub fn search(case: &Case, limits: &Limits) -> Result<Found, LimitError> {
    limits.check()?;
    let evaluator = Evaluator::new(case);
    let mut found = Found { afd: Vec::new(), colocated: Vec::new(), rejected: Vec::new() };
    for layout in layouts(case, limits) {
        match (best_batch(&evaluator, layout, limits), layout) {
            (Ok(outcome), Layout::Afd { .. }) => found.afd.push(outcome),
            (Ok(outcome), Layout::Colocated { .. }) => found.colocated.push(outcome),
            (Err(rejected), _) => found.rejected.push((layout, rejected)),
        }
    }
    found.afd.sort_by(better);
    found.colocated.sort_by(better);
    if found.afd.is_empty() && found.colocated.is_empty() {
        Err(nearest(case, limits, &found))
    } else {
        Ok(found)
    }
}

/// The best outcome of each kind of layout that people tell apart: experts on the fullest rank, and stages. Of neighbours
/// such as 66A + 5F and 67A + 5F one is enough. `outcomes` are best first, and so is the answer.
pub fn distinct(case: &Case, outcomes: &[Outcome], count: usize) -> Vec<Outcome> {
    let experts = case.shape.moe.map_or(case.shape.hidden, |moe| moe.num_experts);
    let mut seen = std::collections::HashSet::new();
    let kind = |outcome: &&Outcome| (experts.div_ceil(outcome.layout.ffn_ranks()), outcome.layout.stages());
    outcomes.iter().filter(|outcome| seen.insert(kind(outcome))).take(count).cloned().collect()
}

/// More tokens per second and device first; of equals, the smaller and simpler layout.
fn better(a: &Outcome, b: &Outcome) -> std::cmp::Ordering {
    let size = |outcome: &Outcome| (outcome.layout.num_devices(), outcome.layout.stages(), outcome.layout);
    b.tokens_per_s_per_device.total_cmp(&a.tokens_per_s_per_device).then_with(|| size(a).cmp(&size(b)))
}

/// The largest batch of one layout within the limits. Whole sequences per rank, except where the concurrency is given:
/// then their mean.
///
/// # Errors
/// [`Rejected`] when even the smallest batch is outside.
pub fn best_batch(evaluator: &Evaluator<'_>, layout: Layout, limits: &Limits) -> Result<Outcome, Rejected> {
    let smallest = f64::from(layout.stages());
    let there_are = limits.concurrency.map(|all| f64::from(all) / f64::from(layout.attention_ranks()));
    if there_are.is_some_and(|mean| mean < smallest) {
        return Err(Rejected::TooFewSequences);
    }
    let memory = evaluator.memory(layout, smallest);
    if !memory.fits() {
        return Err(Rejected::Memory(memory));
    }
    let tpot_ms =
        |batch: f64| evaluator.step_s(layout, batch) / evaluator.case().workload.tokens_per_step * 1e3;
    let within = |batch: f64| evaluator.memory(layout, batch).fits() && tpot_ms(batch) <= limits.tpot_ms;
    if !within(smallest) {
        return Err(Rejected::Target { fastest_ms: tpot_ms(smallest) });
    }
    if let Some(mean) = there_are.filter(|mean| within(*mean)) {
        return Ok(evaluator.outcome(layout, mean));
    }
    // Invariant: `low` is within the limits, `high` is not.
    let (mut low, mut high) = (smallest, there_are.map_or(smallest * 2.0, f64::ceil));
    while there_are.is_none() && within(high) {
        (low, high) = (high, high * 2.0);
    }
    while high - low > 1.0 {
        let middle = ((low + high) / 2.0).floor();
        if within(middle) { low = middle } else { high = middle }
    }
    Ok(evaluator.outcome(layout, low))
}

/// Says what came nearest when nothing was within the limits.
fn nearest(case: &Case, limits: &Limits, found: &Found) -> LimitError {
    let fastest = found.rejected.iter().filter_map(|(layout, rejected)| match rejected {
        Rejected::Target { fastest_ms } => Some((*layout, *fastest_ms)),
        _ => None,
    });
    if let Some((layout, fastest_ms)) = fastest.min_by(|a, b| a.1.total_cmp(&b.1)) {
        let (target_ms, max_devices) = (limits.tpot_ms, limits.max_devices);
        return LimitError::Target { target_ms, max_devices, layout, fastest_ms };
    }
    let fullest =
        |memory: &RoleMemory| memory.attention.total().max(memory.ffn.map_or(0.0, |rank| rank.total()));
    let smallest = found.rejected.iter().filter_map(|(layout, rejected)| match rejected {
        Rejected::Memory(memory) => Some((*layout, fullest(memory), memory.usable)),
        _ => None,
    });
    match (smallest.min_by(|a, b| a.1.total_cmp(&b.1)), limits.concurrency) {
        (Some((layout, needs, usable)), _) => LimitError::Memory {
            layout,
            needs_gb: needs / 1e9,
            usable_gb: usable / 1e9,
            nearest: devices_that_do(case, limits),
        },
        (None, concurrency) => LimitError::TooFewSequences { concurrency: concurrency.unwrap_or(0) },
    }
}

/// The smallest number of devices on which something fits.
fn devices_that_do(case: &Case, limits: &Limits) -> String {
    let evaluator = Evaluator::new(case);
    let fits = |devices: u32| {
        let limits = Limits { max_devices: devices, max_stages: 1, ..*limits };
        let of_that_size =
            layouts(case, &limits).into_iter().filter(|layout| layout.num_devices() == devices);
        of_that_size.into_iter().any(|layout| evaluator.memory(layout, 1.0).fits())
    };
    let most = case.shape.moe.map_or(64, |moe| moe.num_experts) * 2;
    match (limits.max_devices + 1..=most).find(|devices| fits(*devices)) {
        Some(devices) => format!("{devices} devices would do (--gpus {devices})"),
        None => "no number of them would do: shorten the context, or take devices with more memory".into(),
    }
}
