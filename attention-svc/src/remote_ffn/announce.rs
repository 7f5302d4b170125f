//! What FFN ranks were told of this attention rank's steps: the present one, and the one after it, which is told one step
//! ahead so that nobody waits for it. It is a guess: when the step turns out otherwise it is told again with a higher
//! revision, and when it does not come it is withdrawn.
//!
//! Every edge hears every plan once: a rank ends the session of who repeats itself. Losing a plan costs its deadline and its
//! trace and nothing else: the hop runs without it and is counted.
use afd_common::proto::v1;
use v1::steps_request::Message;

use super::edge::Edge;
use super::hop_table::EdgeId;
use super::stats::FfnStats;
use crate::engine::StepOutline;
use crate::scheduler::Phase;

/// See the module's head.
#[derive(Default)]
pub struct Announcements {
    current: Option<Announced>,
    ahead: Option<Announced>,
}

/// A step's plan, and the edges that have heard it.
struct Announced {
    plan: v1::StepPlan,
    to: Vec<EdgeId>,
}

impl Announcements {
    /// A step begins: what was said ahead of it stands, is replaced, or is withdrawn.
    pub fn begin<'a>(
        &mut self,
        outline: &StepOutline,
        edges: impl Iterator<Item = &'a Edge> + Clone,
        stats: &FfnStats,
    ) {
        let mut plan = step_plan(outline);
        let ahead = self.ahead.take();
        let announced = match ahead {
            Some(ahead) if ahead.plan.step_id == plan.step_id => {
                if ahead.plan == plan {
                    stats.handle_plan_ahead();
                    ahead
                } else {
                    plan.revision = ahead.plan.revision + 1;
                    Announced { plan, to: Vec::new() }
                }
            }
            other => {
                self.ahead = other;
                self.withdraw(edges.clone(), stats);
                Announced { plan, to: Vec::new() }
            }
        };
        self.current = Some(announced);
        edges.for_each(|edge| self.tell(edge, stats));
    }

    /// Tells an edge of the present step, unless it knows: one that joined since and gets a hop.
    pub fn tell(&mut self, edge: &Edge, stats: &FfnStats) {
        if let Some(announced) = &mut self.current {
            announced.tell(edge, stats);
        }
    }

    /// Tells all edges of the step after the present one.
    pub fn tell_ahead<'a>(
        &mut self,
        outline: &StepOutline,
        edges: impl Iterator<Item = &'a Edge>,
        stats: &FfnStats,
    ) {
        let mut ahead = Announced { plan: step_plan(outline), to: Vec::new() };
        edges.for_each(|edge| ahead.tell(edge, stats));
        self.ahead = Some(ahead);
    }

    /// The step that was told ahead does not come. Whether there was one.
    pub fn withdraw<'a>(&mut self, edges: impl Iterator<Item = &'a Edge>, stats: &FfnStats) -> bool {
        let Some(Announced { plan, to }) = self.ahead.take() else { return false };
        for edge in edges.filter(|edge| to.contains(&edge.id)) {
            say(edge, Message::Cancel(v1::CancelStep { step_id: plan.step_id }), stats);
        }
        true
    }

    /// The present step is over. Where some hop of it had no row for some shard, the ranks are told that nothing more comes:
    /// they would wait for its last layer.
    pub fn end<'a>(&mut self, has_skipped: bool, edges: impl Iterator<Item = &'a Edge>, stats: &FfnStats) {
        let Some(Announced { plan, to }) = self.current.take().filter(|_| has_skipped) else { return };
        for edge in edges.filter(|edge| to.contains(&edge.id)) {
            say(edge, Message::Cancel(v1::CancelStep { step_id: plan.step_id }), stats);
        }
    }
}

impl Announced {
    fn tell(&mut self, edge: &Edge, stats: &FfnStats) {
        if !self.to.contains(&edge.id) {
            self.to.push(edge.id);
            say(edge, Message::Plan(self.plan.clone()), stats);
        }
    }
}

/// Hands a message to an edge's control task, or counts it as dropped.
pub(super) fn say(edge: &Edge, message: Message, stats: &FfnStats) {
    if let Some(control) = &edge.control
        && control.plans.try_send(message).is_err()
    {
        stats.handle_plan_dropped();
    }
}

/// What is said of a step the first time.
pub fn step_plan(outline: &StepOutline) -> v1::StepPlan {
    let phase = match outline.phase {
        Phase::Prefill => v1::Phase::Prefill,
        Phase::Decode => v1::Phase::Decode,
        Phase::Mixed => v1::Phase::Mixed,
    };
    v1::StepPlan {
        step_id: outline.step.0,
        padded_tokens: outline.stage_rows.iter().map(|rows| *rows as u32).collect(),
        phase: phase.into(),
        traceparent: outline.trace.map(|trace| trace.to_string()).unwrap_or_default(),
        sampled: outline.trace.is_some(),
        warmup: outline.warmup,
        profile: outline.profile,
        ..v1::StepPlan::default()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use afd_common::frame::{Checksum, RowType};
    use afd_common::ids::{Epoch, Shard, StepId};
    use afd_common::link::{Doorbell, Limits, LinkKind, loopback};
    use tokio::sync::mpsc;

    use super::super::life::{EdgeControl, Life};
    use super::*;

    fn edge(id: u64) -> (Edge, mpsc::Receiver<Message>) {
        let limits = Limits {
            kind: LinkKind::Loopback,
            peer: "F".into(),
            epoch: Epoch(1),
            credits: 1,
            max_rows: 1,
            max_body_bytes: 1,
            checksum: Checksum::Crc32c,
        };
        let (link, _) = loopback::pair((limits.clone(), Doorbell::default()), (limits, Doorbell::default()));
        let (plans, heard) = mpsc::channel(8);
        let (abandon, _) = mpsc::channel(1);
        let edge = Edge {
            id: EdgeId(id),
            peer: Arc::from("F"),
            shard: Shard::WHOLE,
            combine_dtype: RowType::F32,
            link: Box::new(link),
            control: Some(EdgeControl {
                plans,
                abandon,
                life: Arc::new(Life::new(std::time::Instant::now())),
            }),
            hop_seconds: None,
            draining: false,
            warm_up: None,
        };
        (edge, heard)
    }

    fn outline(step: u64, rows: usize) -> StepOutline {
        StepOutline {
            step: StepId(step),
            phase: Phase::Decode,
            stage_rows: vec![rows],
            trace: None,
            profile: false,
            warmup: false,
        }
    }

    /// What an edge has heard: "3.1" is revision 1 of step 3, "-3" its withdrawal.
    fn heard(receiver: &mut mpsc::Receiver<Message>) -> Vec<String> {
        std::iter::from_fn(|| receiver.try_recv().ok())
            .map(|message| match message {
                Message::Plan(plan) => format!("{}.{}", plan.step_id, plan.revision),
                Message::Cancel(cancel) => format!("-{}", cancel.step_id),
                Message::Heartbeat(_) => "beat".into(),
            })
            .collect()
    }

    #[test]
    fn a_step_that_comes_as_told_is_told_once() {
        let ((edge, mut receiver), stats) = (edge(1), FfnStats::default());
        let (mut said, edges) = (Announcements::default(), [edge]);
        said.begin(&outline(1, 4), edges.iter(), &stats);
        said.tell_ahead(&outline(2, 4), edges.iter(), &stats);
        said.end(false, edges.iter(), &stats);
        said.begin(&outline(2, 4), edges.iter(), &stats);
        said.tell(&edges[0], &stats);
        assert_eq!(heard(&mut receiver), ["1.0", "2.0"]);
    }

    #[test]
    fn where_hops_had_no_row_for_a_shard_the_end_of_a_step_is_told() {
        let ((edge, mut receiver), stats) = (edge(1), FfnStats::default());
        let (mut said, edges) = (Announcements::default(), [edge]);
        said.begin(&outline(1, 4), edges.iter(), &stats);
        said.tell_ahead(&outline(2, 4), edges.iter(), &stats);
        said.end(true, edges.iter(), &stats);
        said.begin(&outline(2, 4), edges.iter(), &stats);
        said.end(false, edges.iter(), &stats);
        said.end(true, edges.iter(), &stats);
        assert_eq!(heard(&mut receiver), ["1.0", "2.0", "-1"]);
    }

    #[test]
    fn one_that_comes_otherwise_is_revised_and_one_that_does_not_come_is_withdrawn() {
        let ((edge, mut receiver), stats) = (edge(1), FfnStats::default());
        let (mut said, edges) = (Announcements::default(), [edge]);
        said.tell_ahead(&outline(2, 4), edges.iter(), &stats);
        said.begin(&outline(2, 3), edges.iter(), &stats);
        said.tell_ahead(&outline(3, 3), edges.iter(), &stats);
        assert!(said.withdraw(edges.iter(), &stats));
        assert!(!said.withdraw(edges.iter(), &stats), "nothing is left to withdraw");
        said.tell_ahead(&outline(4, 3), edges.iter(), &stats);
        said.begin(&outline(9, 3), edges.iter(), &stats);
        assert_eq!(heard(&mut receiver), ["2.0", "2.1", "3.0", "-3", "4.0", "-4", "9.0"]);
    }

    #[test]
    fn an_edge_that_joined_since_hears_what_it_missed_and_only_that() {
        let ((first, mut one), (second, mut two), stats) = (edge(1), edge(2), FfnStats::default());
        let (mut said, mut edges) = (Announcements::default(), vec![first]);
        said.tell_ahead(&outline(2, 4), edges.iter(), &stats);
        edges.push(second);
        said.begin(&outline(2, 4), edges.iter(), &stats);
        said.tell_ahead(&outline(3, 4), edges[..1].iter(), &stats);
        said.withdraw(edges.iter(), &stats);
        assert_eq!(
            (heard(&mut one), heard(&mut two)),
            (vec!["2.0".into(), "3.0".into(), "-3".to_string()], vec!["2.0".into()])
        );
    }
}
