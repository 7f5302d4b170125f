//! The same question with one thing changed at a time: context, target, devices, or a figure of the hardware.
use afd_common::identity::SharedExpertPlacement;
use serde::{Deserialize, Serialize};

use super::case::Case;
use super::outcome::Outcome;
use super::profile::Profile;
use super::search::{self, LimitError, Limits};
use super::units::Tokens;
use super::verdict::{self, Verdict};

/// One point of a sweep.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// What was set, as people write it.
    pub setting: String,
    /// The best AFD layout, if one is within the limits.
    pub afd: Option<Outcome>,
    /// The best colocated layout, likewise.
    pub colocated: Option<Outcome>,
    /// The answer at this point, or why there is none.
    pub verdict: Result<Verdict, String>,
}

/// Which figure of the hardware to change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhatIf {
    /// `W` of both links.
    LinkBandwidth,
    /// `α` of both links.
    LinkLatency,
    /// `BW`.
    MemoryBandwidth,
    /// `M`.
    MemorySize,
    /// `P` of all types.
    Compute,
}

impl WhatIf {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::LinkBandwidth, Self::LinkLatency, Self::MemoryBandwidth, Self::MemorySize, Self::Compute];

    /// The factor that makes it better, and what that is called.
    fn better(self) -> (f64, &'static str) {
        match self {
            Self::LinkBandwidth => (2.0, "links twice as fast"),
            Self::LinkLatency => (0.5, "half the link latency"),
            Self::MemoryBandwidth => (2.0, "memory twice as fast"),
            Self::MemorySize => (2.0, "twice the memory"),
            Self::Compute => (2.0, "twice the matrix rate"),
        }
    }

    /// A profile in which it is `factor` times as large. What was measured stays as measured.
    pub fn apply(self, profile: &Profile, factor: f64) -> Profile {
        let mut changed = profile.clone();
        let (compute, links) = (&mut changed.compute, &mut changed.links);
        match self {
            Self::LinkBandwidth => {
                links.scale_up.bandwidth.value *= factor;
                links.scale_out.bandwidth.value *= factor;
            }
            Self::LinkLatency => {
                links.scale_up.latency.value *= factor;
                links.scale_out.latency.value *= factor;
            }
            Self::MemoryBandwidth => changed.memory.bandwidth.value *= factor,
            Self::MemorySize => changed.memory.size.value *= factor,
            Self::Compute => {
                compute.bf16.value *= factor;
                for rate in [&mut compute.f32, &mut compute.fp8, &mut compute.int8].into_iter().flatten() {
                    rate.value *= factor;
                }
            }
        }
        changed
    }
}

/// One point.
pub fn point(setting: String, case: &Case, limits: &Limits) -> Point {
    match search::search(case, limits) {
        Ok(found) => Point {
            setting,
            afd: found.afd.first().cloned(),
            colocated: found.colocated.first().cloned(),
            verdict: Ok(verdict::judge(case, &found)),
        },
        Err(error) => Point { setting, afd: None, colocated: None, verdict: Err(error.to_string()) },
    }
}

/// Over context lengths.
pub fn contexts(case: &Case, limits: &Limits, contexts: &[u64]) -> Vec<Point> {
    let at = |context: &u64| {
        let mut case = case.clone();
        case.workload.context = *context;
        point(format!("context {}", Tokens(*context)), &case, limits)
    };
    contexts.iter().map(at).collect()
}

/// Over targets, ms per token.
pub fn targets(case: &Case, limits: &Limits, targets_ms: &[f64]) -> Vec<Point> {
    let at =
        |tpot_ms: &f64| point(format!("target {tpot_ms} ms"), case, &Limits { tpot_ms: *tpot_ms, ..*limits });
    targets_ms.iter().map(at).collect()
}

/// Over numbers of devices.
pub fn devices(case: &Case, limits: &Limits, counts: &[u32]) -> Vec<Point> {
    let at = |count: &u32| point(format!("{count} GPUs"), case, &Limits { max_devices: *count, ..*limits });
    counts.iter().map(at).collect()
}

/// What if one figure of the hardware were better, or shared experts were elsewhere.
pub fn sensitivity(case: &Case, limits: &Limits) -> Vec<Point> {
    let at = |what: WhatIf| {
        let (factor, name) = what.better();
        let case = Case { profile: what.apply(&case.profile, factor), ..case.clone() };
        point(name.into(), &case, limits)
    };
    WhatIf::ALL.into_iter().map(at).chain(other_side(case, limits)).collect()
}

/// What if shared experts were on the other side; nothing where there are none, or where they are part of a measured time.
fn other_side(case: &Case, limits: &Limits) -> Option<Point> {
    use SharedExpertPlacement::{Attention, Ffn};
    let calibration = &case.profile.calibration;
    if !case.shape.has_shared_experts() || calibration.ffn.is_some() || calibration.attention.is_some() {
        return None;
    }
    let mut other = case.clone();
    let (side, name) = match case.workload.shared_experts {
        Ffn => (Attention, "shared experts on attention"),
        Attention => (Ffn, "shared experts on the FFN"),
    };
    other.workload.shared_experts = side;
    Some(point(name.into(), &other, limits))
}

/// Best AFD throughput by ratio `n_A / n_F`, for the picture: pairs of ratio and tokens/s/device, ratios ascending.
///
/// Neighbouring ratios are reached with very different numbers of ranks (34 : 3 and 11 : 1), so a line through all of them
/// is a comb. Each point is the best layout whose ratio is within 8 % of its place; ratios that give less than a
/// quarter of the best are left out.
///
/// # Errors
/// As [`search::search`].
pub fn by_ratio(case: &Case, limits: &Limits) -> Result<RatioCurve, LimitError> {
    let found = search::search(case, limits)?;
    let ratio = |outcome: &Outcome| {
        f64::from(outcome.layout.attention_ranks()) / f64::from(outcome.layout.ffn_ranks())
    };
    let worth = found.afd.first().map_or(0.0, |best| best.tokens_per_s_per_device / 4.0);
    let shown = found.afd.iter().filter(|outcome| outcome.tokens_per_s_per_device >= worth);
    let mut all: Vec<_> = shown.map(|outcome| (ratio(outcome), outcome.tokens_per_s_per_device)).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    Ok(RatioCurve {
        context: case.workload.context,
        points: upper_envelope(&all, 1.08),
        colocated: found.colocated.first().map(|best| best.tokens_per_s_per_device),
    })
}

/// The highest point within a factor `near` of each place along `points` (ascending), each once.
fn upper_envelope(points: &[(f64, f64)], near: f64) -> Vec<(f64, f64)> {
    let mut envelope: Vec<(f64, f64)> = Vec::new();
    let (mut from, mut to) = (0, 0);
    for (place, _) in points {
        while points[from].0 * near < *place {
            from += 1;
        }
        while to < points.len() && points[to].0 <= place * near {
            to += 1;
        }
        let highest = points[from..to].iter().max_by(|a, b| a.1.total_cmp(&b.1));
        if let Some(highest) = highest.filter(|highest| envelope.last().is_none_or(|last| last.0 < highest.0))
        {
            envelope.push(*highest);
        }
    }
    envelope
}

/// One line of the picture.
#[derive(Clone, Debug, PartialEq)]
pub struct RatioCurve {
    /// Tokens.
    pub context: u64,
    /// Ratio and tokens/s/device.
    pub points: Vec<(f64, f64)>,
    /// Best colocated layout.
    pub colocated: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::upper_envelope;

    #[test]
    fn the_envelope_skips_dips_and_keeps_slopes() {
        let comb = [(10.0, 5.0), (10.2, 4.0), (10.4, 5.1), (10.6, 4.0), (12.0, 6.0), (20.0, 3.0)];
        assert_eq!(upper_envelope(&comb, 1.05), [(10.4, 5.1), (12.0, 6.0), (20.0, 3.0)]);
        assert!(upper_envelope(&[], 1.05).is_empty());
    }
}
