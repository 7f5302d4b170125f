//! The answer in a sentence.
use serde::{Deserialize, Serialize};

use super::case::Case;
use super::evaluate::Evaluator;
use super::formulas::routing;
use super::layout::Layout;
use super::outcome::{Bound, Outcome};
use super::search::Found;
use super::stage::Resource;

/// A gain below this is not worth a second service to run: the arithmetic is no better than that.
pub const WORTHWHILE: f64 = 0.03;

/// Whether to disaggregate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Verdict {
    /// What to do.
    pub answer: Answer,
    /// Tokens/s/device of the best AFD layout over the best colocated one, minus one; `None` when either does not fit.
    pub gain: Option<f64>,
    /// Why, in a sentence for people.
    pub sentence: String,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Run attention and FFN apart.
    Disaggregate,
    /// Do not.
    Dont,
}

/// Judges what a search found. At least one layout is within the limits.
pub fn judge(case: &Case, found: &Found) -> Verdict {
    match (found.afd.first(), found.colocated.first()) {
        (Some(afd), Some(colocated)) => compare(case, afd, colocated),
        (Some(afd), None) => Verdict {
            answer: Answer::Disaggregate,
            gain: None,
            sentence: format!(
                "disaggregate: {} is within the limits ({:.0} tokens/s/GPU at {:.1} ms) and no colocated layout is",
                afd.layout, afd.tokens_per_s_per_device, afd.tpot_ms
            ),
        },
        (None, colocated) => Verdict {
            answer: Answer::Dont,
            gain: None,
            sentence: match colocated {
                Some(best) => format!(
                    "do not disaggregate: no AFD layout is within the limits and {} is ({:.0} tokens/s/GPU at {:.1} ms)",
                    best.layout, best.tokens_per_s_per_device, best.tpot_ms
                ),
                None => "do not disaggregate: nothing is within the limits".into(),
            },
        },
    }
}

/// Judges one AFD layout against one colocated layout.
pub fn compare(case: &Case, afd: &Outcome, colocated: &Outcome) -> Verdict {
    let gain = afd.tokens_per_s_per_device / colocated.tokens_per_s_per_device - 1.0;
    let rates = format!(
        "{} gives {:.0} tokens/s/GPU at {:.1} ms, {} gives {:.0} at {:.1} ms",
        afd.layout,
        afd.tokens_per_s_per_device,
        afd.tpot_ms,
        colocated.layout,
        colocated.tokens_per_s_per_device,
        colocated.tpot_ms
    );
    let (answer, sentence) = if gain > WORTHWHILE {
        let held = why_it_wins(afd, colocated);
        (Answer::Disaggregate, format!("disaggregate: {held}; {rates} ({:+.1} %)", 100.0 * gain))
    } else if gain > -WORTHWHILE {
        let within = 100.0 * WORTHWHILE;
        (
            Answer::Dont,
            format!("do not disaggregate: the two are within {within:.0} % of each other; {rates}"),
        )
    } else {
        let reason = why_it_loses(case, afd, colocated);
        (Answer::Dont, format!("do not disaggregate: {reason}; {rates} ({:+.1} %)", 100.0 * gain))
    };
    Verdict { answer, gain: Some(gain), sentence }
}

/// Rate of an attention rank over that of a colocated rank: `(b / T) / (b' / T')`. With the share of FFN ranks it is the
/// whole comparison: gain + 1 = (1 − share) × this.
fn attention_speedup(afd: &Outcome, colocated: &Outcome) -> f64 {
    afd.batch_per_rank / afd.tpot_ms / (colocated.batch_per_rank / colocated.tpot_ms)
}

fn why_it_wins(afd: &Outcome, colocated: &Outcome) -> String {
    format!(
        "freed of experts, a rank decodes {:.2} times as fast, which pays for the {:.0} % of the GPUs that are FFN ranks",
        attention_speedup(afd, colocated),
        100.0 * ffn_share(afd.layout)
    )
}

fn why_it_loses(case: &Case, afd: &Outcome, colocated: &Outcome) -> String {
    let (attention_waits, ffn_waits) = (100.0 * afd.idle_attention, 100.0 * afd.idle_ffn);
    match afd.bound {
        Bound::Link => match link_cap(case, afd.layout) {
            (name, Some(cap)) if cap < 0.95 => {
                format!("the {name} link caps the FFN at {:.0} % of its rate", 100.0 * cap)
            }
            (name, _) => format!("the {name} link is busy all the time"),
        },
        _ if afd.layout.stages() == 1 => format!(
            "with one stage attention waits {attention_waits:.0} % of the time and the FFN {ffn_waits:.0} %, and every further \
             stage reads the experts once more"
        ),
        Bound::RoundTrip => format!(
            "a layer's round trip is longer than the work of {} stages, so attention waits {attention_waits:.0} % of the time \
             and the FFN {ffn_waits:.0} %",
            afd.layout.stages()
        ),
        Bound::Ffn(Resource::Memory) => {
            format!(
                "the FFN reads its experts once a stage and attention waits {attention_waits:.0} % of the time for it"
            )
        }
        Bound::Ffn(_) => {
            format!("the FFN cannot keep up and attention waits {attention_waits:.0} % of the time")
        }
        Bound::Attention(_) => format!(
            "the FFN ranks are {:.0} % of the GPUs, and freed of experts an attention rank decodes only {:.2} times as fast",
            100.0 * ffn_share(afd.layout),
            attention_speedup(afd, colocated)
        ),
    }
}

fn ffn_share(layout: Layout) -> f64 {
    f64::from(layout.ffn_ranks()) / f64::from(layout.num_devices())
}

/// Which link a layout crosses, and the part of its matrix rate it leaves an FFN rank (the dead-zone test).
pub fn link_cap(case: &Case, layout: Layout) -> (&'static str, Option<f64>) {
    let links = &case.profile.links;
    let near = layout.num_devices() <= links.scale_up.devices;
    let (name, bandwidth) = match near {
        true => ("scale-up", links.scale_up.bandwidth.value),
        false => ("scale-out", links.scale_out.bandwidth.value),
    };
    let Some(moe) = &case.shape.moe else { return (name, None) };
    let ffn = layout.ffn_ranks();
    let targets = f64::from(if near { ffn } else { ffn.div_ceil(case.profile.devices_per_host) });
    let sent = routing::send_fraction(moe.num_experts, moe.experts_per_token, targets);
    let local = routing::local_experts_per_row(moe.experts_per_token, targets, sent);
    let (bytes_in, bytes_out) = (case.precision.dispatch.bytes(), case.precision.combine.bytes());
    let intensity = routing::network_intensity(moe.intermediate, local, bytes_in, bytes_out);
    (name, Some(routing::max_hfu(bandwidth, intensity, case.profile.compute.rate(case.precision.ffn))))
}

/// What limited the batch of an outcome, for the table: one more sequence would not fit, or would miss the target.
pub fn batch_limit(case: &Case, outcome: &Outcome, tpot_ms: f64) -> &'static str {
    let evaluator = Evaluator::new(case);
    let one_more = outcome.batch_per_rank.floor() + 1.0;
    match () {
        () if !evaluator.memory(outcome.layout, one_more).fits() => "memory",
        () if evaluator.step_s(outcome.layout, one_more) * 1e3 / case.workload.tokens_per_step > tpot_ms => {
            "target"
        }
        () => "load",
    }
}
