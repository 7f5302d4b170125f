//! `plan calibrate`: measured points to a profile. Two points fit the fixed and the linear part; more are fitted by least
//! squares; neither part may be negative, because no cause would be.
//!
//! Points are JSON, every list optional, in one file or several; under `points` in what the measuring commands write:
//! ```json
//! {
//!   "links":     [{"link": "scale_up", "bytes": 4096, "one_way_us": 3.2}, …],
//!   "probes":    [{"link": "scale_out", "latency_us": 21.0, "bandwidth": "48 GB/s"}, …],
//!   "attention": [{"rows": 8, "context": 4096, "layer_us": 31.0}, …],
//!   "ffn":       [{"pool_rows": 64, "ranks": 2, "layer_us": 250.0}, …],
//!   "steps":     [{"fits": "ffn", "layout": {"afd": {"attention": 12, "ffn": 4, "stages": 2}},
//!                  "batch_per_rank": 25, "context": 32768, "step_ms": 22.05}, …]
//! }
//! ```
//! `links` come from `attention-svc bench links --json` (payloads of two sizes or more), `probes` from `ffn-svc probe
//! --json` (the slowest edge of a kind counts: a step waits for it), `attention`, `ffn` (compute time per layer and stage)
//! and `steps` (decode step of a whole deployment) from `attention-svc bench --layers --json`. Lists are applied in the order above, so that a step is
//! explained with what was measured closer by.
//!
//! A step is one number and a layer has three unknown times, so each step says which of them it `fits`; the other two are
//! taken from the profile, and the cycle is solved for the one. Where the profile's attention alone would be longer than
//! the shortest measured cycle, the measurement is right: attention is then capped at what the cycle leaves it
//! (`attention_at_most`).
mod fit;
mod points;

pub use points::{
    AttentionPoint, FfnPoint, Fits, LinkName, LinkPoint, Measured, ProbePoint, StepPoint, parse,
};

use fit::{fit, fit_relative};

use super::calibration::{FfnLine, Ratio};
use super::case::{Case, Terms};
use super::evaluate::Evaluator;
use super::figure::{Figure, Unit};
use super::formulas::pipeline::StageTimes;
use super::layout::Layout;
use super::profile::{Profile, ProfileError};
use super::stage::{LayerKind, Stages};
use super::units::{self, Dimension};

/// Why points are refused. A retry with the same points does not help.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CalibrateError {
    /// Not the JSON described above.
    #[error("measured points: {what}")]
    Malformed {
        /// Line and field.
        what: String,
    },
    /// Two different loads are needed for two parts.
    #[error(
        "{what}: {count} point(s) at one load; two different ones are needed to tell the fixed from the linear part"
    )]
    TooFew {
        /// Which list.
        what: &'static str,
        /// How many there are.
        count: usize,
    },
    /// A number that cannot have been measured.
    #[error("{what}: {value} was not measured: {why}")]
    Absurd {
        /// Which list and field.
        what: &'static str,
        /// As given.
        value: f64,
        /// Why not.
        why: &'static str,
    },
    /// A step shorter than the other two times of its layers.
    #[error(
        "step of {step_ms} ms ({layout}): the profile's other times alone take longer, so it cannot be solved for {fits:?}"
    )]
    Unexplained {
        /// As measured.
        step_ms: f64,
        /// Of what.
        layout: Layout,
        /// What was asked.
        fits: Fits,
    },
    /// A measured link faster or slower than any.
    #[error(transparent)]
    Profile(#[from] ProfileError),
}

/// The profile of `case` with what was measured in the place of what was believed.
///
/// # Errors
/// [`CalibrateError`] names the list and the point.
pub fn calibrate(case: &Case, measured: &Measured) -> Result<Profile, CalibrateError> {
    let mut case = case.clone();
    fit_links(&mut case.profile, &measured.links)?;
    take_probes(&mut case.profile, &measured.probes)?;
    fit_attention(&mut case, &measured.attention)?;
    fit_ffn(&mut case, &measured.ffn)?;
    for fits in [Fits::Attention, Fits::Ffn, Fits::Exchange] {
        let steps: Vec<_> = measured.steps.iter().filter(|step| step.fits == fits).copied().collect();
        fit_steps(&mut case, fits, &steps)?;
    }
    case.profile.check()?;
    Ok(case.profile)
}

fn fit_links(profile: &mut Profile, points: &[LinkPoint]) -> Result<(), CalibrateError> {
    for link in [LinkName::ScaleUp, LinkName::ScaleOut] {
        let of_link = points.iter().filter(|point| point.link == link);
        let samples: Vec<_> = of_link.map(|point| (point.bytes, point.one_way_us * 1e-6)).collect();
        // Sizes span decades: each point counts by how far it is off in its own measure.
        let Some(fit) = fit_relative("links", &samples)? else { continue };
        if fit.per_row.0 <= 0.0 {
            let why = "larger payloads took no longer, so these sizes do not show the bandwidth";
            return Err(CalibrateError::Absurd { what: "links: one_way_us", value: samples[0].1 * 1e6, why });
        }
        set_link(profile, link, 1.0 / fit.per_row.0, fit.fixed.0, &fit.source);
    }
    Ok(())
}

fn take_probes(profile: &mut Profile, probes: &[ProbePoint]) -> Result<(), CalibrateError> {
    for link in [LinkName::ScaleUp, LinkName::ScaleOut] {
        let mut worst: Option<(f64, f64)> = None;
        let mut count = 0;
        for probe in probes.iter().filter(|probe| probe.link == link) {
            let bandwidth = units::parse(&probe.bandwidth, Dimension::BytesPerSecond)
                .map_err(|error| CalibrateError::Malformed { what: error.to_string() })?;
            let (slowest, latest) = worst.unwrap_or((f64::INFINITY, 0.0));
            worst = Some((slowest.min(bandwidth), latest.max(probe.latency_us * 1e-6)));
            count += 1;
        }
        let Some((bandwidth, latency)) = worst else { continue };
        set_link(profile, link, bandwidth, latency, &format!("slowest of {count} probed edges"));
    }
    Ok(())
}

fn set_link(profile: &mut Profile, link: LinkName, bandwidth: f64, latency: f64, source: &str) {
    let (bandwidth, latency) = (figure(bandwidth, source), figure(latency, source));
    match link {
        LinkName::ScaleUp => {
            profile.links.scale_up.bandwidth = bandwidth;
            profile.links.scale_up.latency = latency;
        }
        LinkName::ScaleOut => {
            profile.links.scale_out.bandwidth = bandwidth;
            profile.links.scale_out.latency = latency;
        }
    }
}

fn figure<U: Unit>(value: f64, source: &str) -> Figure<U> {
    Figure::new(value, format!("measured: {source}"))
}

/// Reading the cache stays a formula, so it is taken off before the line is drawn.
fn fit_attention(case: &mut Case, points: &[AttentionPoint]) -> Result<(), CalibrateError> {
    let at =
        |point: &AttentionPoint| (point.rows, point.layer_us * 1e-6 - kv_s(case, point.context, point.rows));
    let samples: Vec<_> = points.iter().map(at).collect();
    if let Some(line) = fit("attention", &samples)? {
        case.profile.calibration.attention = Some(line);
    }
    Ok(())
}

fn fit_ffn(case: &mut Case, points: &[FfnPoint]) -> Result<(), CalibrateError> {
    let share_of = |ranks| {
        Stages::new(case).ffn_share(Layout::Afd { attention: 1, ffn: ranks, stages: 1 }, ffn_kind(case))
    };
    let samples: Vec<_> =
        points.iter().map(|p| (share_of(p.ranks), p.pool_rows, p.layer_us * 1e-6)).collect();
    set_ffn(case, "ffn", &samples)
}

/// Points are (share, pool rows, s); times are brought to the first point's share the way [`FfnLine::at`] takes them from
/// it.
fn set_ffn(case: &mut Case, what: &'static str, samples: &[(f64, f64, f64)]) -> Result<(), CalibrateError> {
    let Some(&(first, ..)) = samples.first() else { return Ok(()) };
    // T = fixed · s/s₀ + slope · X · s, so T · s₀/s is a line over X · s₀.
    let scaled: Vec<_> = samples.iter().map(|(share, pool, s)| (pool * first, s * first / share)).collect();
    if let Some(line) = fit(what, &scaled)? {
        case.profile.calibration.ffn = Some(FfnLine { share: Ratio(first), line });
    }
    Ok(())
}

fn kv_s(case: &Case, context: u64, rows: f64) -> f64 {
    let mut case = case.clone();
    case.workload.context = context;
    let terms = Terms::of(&case);
    rows * terms.kv_read / terms.memory_bandwidth
}

/// The layers measured lines stand for.
fn ffn_kind(case: &Case) -> LayerKind {
    if case.shape.moe.is_some() { LayerKind::Moe } else { LayerKind::Dense }
}

fn fit_steps(case: &mut Case, fits: Fits, steps: &[StepPoint]) -> Result<(), CalibrateError> {
    if steps.is_empty() {
        return Ok(());
    }
    if fits == Fits::Ffn {
        cap_attention(case, steps)?;
    }
    let mut solved = Vec::with_capacity(steps.len());
    for step in steps {
        solved.push(solve(case, step)?);
    }
    let rows = |step: &StepPoint| step.batch_per_rank / f64::from(step.layout.stages());
    match fits {
        Fits::Attention => {
            let at = |(step, s): (&StepPoint, &f64)| (rows(step), s - kv_s(case, step.context, rows(step)));
            let samples: Vec<_> = steps.iter().zip(&solved).map(at).collect();
            case.profile.calibration.attention = fit("steps that fit attention", &samples)?;
        }
        Fits::Exchange => {
            let samples: Vec<_> = steps.iter().zip(&solved).map(|(step, s)| (rows(step), *s)).collect();
            case.profile.calibration.exchange = fit("steps that fit the exchange", &samples)?;
        }
        Fits::Ffn => {
            let stages = Stages::new(case);
            let kind = ffn_kind(case);
            let at = |(step, s): (&StepPoint, &f64)| {
                let pool = rows(step) * f64::from(step.layout.attention_ranks());
                (stages.ffn_share(step.layout, kind), pool, *s)
            };
            let samples: Vec<_> = steps.iter().zip(&solved).map(at).collect();
            set_ffn(case, "steps that fit the FFN", &samples)?;
        }
    }
    Ok(())
}

/// `T_A ≤ cycle / m` in every measured step: believed attention that is longer is scaled down to it.
fn cap_attention(case: &mut Case, steps: &[StepPoint]) -> Result<(), CalibrateError> {
    if case.profile.calibration.attention.is_some() {
        return Ok(());
    }
    let mut at_most = 1.0f64;
    for step in steps {
        let at = at_context(case, step.context);
        let (cycle_s, times) = (cycle_of(&at, step)?, times_of(&at, step));
        at_most = at_most.min(cycle_s / f64::from(step.layout.stages()) / times.attention);
    }
    if at_most < 1.0 {
        case.profile.calibration.attention_at_most = Some(Ratio(at_most));
    }
    Ok(())
}

fn at_context(case: &Case, context: u64) -> Case {
    let mut case = case.clone();
    case.workload.context = context;
    case
}

fn times_of(case: &Case, step: &StepPoint) -> StageTimes {
    let rows = step.batch_per_rank / f64::from(step.layout.stages());
    Stages::new(case).times(step.layout, ffn_kind(case), rows)
}

/// Cycle of the measured layers: the step less what is outside of them, over their number.
fn cycle_of(case: &Case, step: &StepPoint) -> Result<f64, CalibrateError> {
    let positive = [("steps: step_ms", step.step_ms), ("steps: batch_per_rank", step.batch_per_rank)];
    for (what, value) in positive {
        if !(value.is_finite() && value > 0.0) {
            return Err(CalibrateError::Absurd { what, value, why: "it must be above zero" });
        }
    }
    let evaluator = Evaluator::new(case);
    let all_s = step.step_ms * 1e-3;
    let predicted = evaluator.step_s(step.layout, step.batch_per_rank);
    let layers = evaluator.layer_seconds(step.layout, step.batch_per_rank, ffn_kind(case));
    let outside_s = predicted - layers.1;
    let cycle_s = (all_s - outside_s) / layers.0;
    let unexplained =
        CalibrateError::Unexplained { step_ms: step.step_ms, layout: step.layout, fits: step.fits };
    if cycle_s > 0.0 { Ok(cycle_s) } else { Err(unexplained) }
}

/// The asked time of one stage of one layer, s: the largest with which the cycle is still the measured one.
fn solve(case: &Case, step: &StepPoint) -> Result<f64, CalibrateError> {
    let case = at_context(case, step.context);
    let cycle_s = cycle_of(&case, step)?;
    let times = times_of(&case, step);
    let stages = f64::from(step.layout.stages());
    let afd = matches!(step.layout, Layout::Afd { .. });
    let exchange = times.dispatch + times.combine;
    let solved = match step.fits {
        Fits::Attention | Fits::Ffn => {
            let other = if step.fits == Fits::Ffn { times.attention } else { times.ffn };
            let busy = if afd { cycle_s / stages } else { cycle_s / stages - other };
            busy.min(cycle_s - other - exchange)
        }
        Fits::Exchange => (cycle_s - times.attention - times.ffn) / 2.0,
    };
    let unexplained =
        CalibrateError::Unexplained { step_ms: step.step_ms, layout: step.layout, fits: step.fits };
    if solved > 0.0 { Ok(solved) } else { Err(unexplained) }
}
