//! What FFN ranks were told of this attention rank's steps: the present one, and the one after it, which is told one step
//! ahead so that nobody waits for it. It is a guess: when the step turns out otherwise it is told again with a higher
//! revision, and when it does not come it is withdrawn.
//!
//! Every edge hears every plan once: a rank ends the session of who repeats itself. Losing a plan costs its deadline and its
//! trace and nothing else: the hop runs without it and is counted.
//!
//! A rank knows by itself that a step is over once it has served the last layer of every planned stage. One that had a part
//! of the step and not that is told: the last layers had no row for its shard, another rank has taken the shard over, or the
//! step was given up. Otherwise it would take the step for one under way until the next one comes, and not end before.
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

/// A step's plan, and the edges that were told it.
struct Announced {
    plan: v1::StepPlan,
    to: Vec<Told>,
}

/// What an edge knows of a step.
struct Told {
    edge: EdgeId,
    /// The plan is on its way; otherwise there was no room for it.
    has_plan: bool,
    /// Some hop was sent to it.
    has_hops: bool,
    /// Stages whose last layer it has answered.
    stages_served: usize,
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
        let announced = self.current.insert(announced);
        edges.for_each(|edge| _ = announced.tell(edge, stats));
    }

    /// A hop of the present step was sent to an edge. Tells it of the step, unless it knows: one that joined since.
    pub fn handle_sent(&mut self, edge: &Edge, stats: &FfnStats) {
        if let Some(announced) = &mut self.current {
            announced.tell(edge, stats).has_hops = true;
        }
    }

    /// An edge has served the last layer of a stage of the present step.
    pub fn handle_served(&mut self, edge: EdgeId) {
        let told = self.current.iter_mut().flat_map(|announced| &mut announced.to);
        told.filter(|told| told.edge == edge).for_each(|told| told.stages_served += 1);
    }

    /// Tells all edges of the step after the present one.
    pub fn tell_ahead<'a>(
        &mut self,
        outline: &StepOutline,
        edges: impl Iterator<Item = &'a Edge>,
        stats: &FfnStats,
    ) {
        let mut ahead = Announced { plan: step_plan(outline), to: Vec::new() };
        edges.for_each(|edge| _ = ahead.tell(edge, stats));
        self.ahead = Some(ahead);
    }

    /// The step that was told ahead does not come. Whether there was one.
    pub fn withdraw<'a>(&mut self, edges: impl Iterator<Item = &'a Edge>, stats: &FfnStats) -> bool {
        let Some(ahead) = self.ahead.take() else { return false };
        ahead.tell_over(edges, stats, |told| told.has_plan);
        true
    }

    /// The present step is over.
    pub fn end<'a>(&mut self, edges: impl Iterator<Item = &'a Edge>, stats: &FfnStats) {
        let Some(step) = self.current.take() else { return };
        let num_stages = step.plan.padded_tokens.len();
        let knows = |told: &Told| told.has_plan && told.stages_served >= num_stages;
        step.tell_over(edges, stats, |told| told.has_hops && !knows(told));
    }
}

impl Announced {
    /// What an edge knows, once it was told of the step.
    fn tell(&mut self, edge: &Edge, stats: &FfnStats) -> &mut Told {
        let at = self.to.iter().position(|told| told.edge == edge.id).unwrap_or_else(|| {
            let has_plan = say(edge, Message::Plan(self.plan.clone()), stats);
            self.to.push(Told { edge: edge.id, has_plan, has_hops: false, stages_served: 0 });
            self.to.len() - 1
        });
        &mut self.to[at]
    }

    /// Tells some of its edges that nothing of the step comes from here on.
    fn tell_over<'a>(
        &self,
        edges: impl Iterator<Item = &'a Edge>,
        stats: &FfnStats,
        is_to_know: impl Fn(&Told) -> bool,
    ) {
        let is_to_know = |edge: &&Edge| self.to.iter().any(|told| told.edge == edge.id && is_to_know(told));
        for edge in edges.filter(is_to_know) {
            say_over(edge, self.plan.step_id, stats);
        }
    }
}

/// Hands a message to an edge's control task, or counts it as dropped. Whether it was handed over.
pub(super) fn say(edge: &Edge, message: Message, stats: &FfnStats) -> bool {
    let is_said = edge.control.as_ref().is_none_or(|control| control.plans.try_send(message).is_ok());
    if !is_said {
        stats.handle_plan_dropped();
    }
    is_said
}

/// Says to an edge that nothing of a step comes from here on.
pub(super) fn say_over(edge: &Edge, step_id: u64, stats: &FfnStats) {
    say(edge, Message::Cancel(v1::CancelStep { step_id }), stats);
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
        said.end(edges.iter(), &stats);
        said.begin(&outline(2, 4), edges.iter(), &stats);
        said.handle_sent(&edges[0], &stats);
        assert_eq!(heard(&mut receiver), ["1.0", "2.0"]);
    }

    #[test]
    fn whoever_had_a_part_of_a_step_and_not_its_end_is_told_that_it_is_over() {
        let ((edge, mut receiver), stats) = (edge(1), FfnStats::default());
        let (mut said, edges) = (Announcements::default(), [edge]);
        for (step, num_hops, stages_served) in [(1, 0, 0), (2, 1, 0), (3, 2, 1), (4, 2, 2)] {
            let stage_rows = vec![4, 4];
            said.begin(&StepOutline { stage_rows, ..outline(step, 0) }, edges.iter(), &stats);
            (0..num_hops).for_each(|_| said.handle_sent(&edges[0], &stats));
            (0..stages_served).for_each(|_| said.handle_served(edges[0].id));
            said.handle_served(EdgeId(2));
            said.end(edges.iter(), &stats);
            said.end(edges.iter(), &stats);
        }
        assert_eq!(heard(&mut receiver), ["1.0", "2.0", "-2", "3.0", "-3", "4.0"]);
    }

    #[test]
    fn whoever_missed_the_plan_is_told_of_the_end_and_of_no_withdrawal() {
        let ((edge, mut receiver), stats) = (edge(1), FfnStats::default());
        let (mut said, edges) = (Announcements::default(), [edge]);
        let fill = || while say(&edges[0], Message::Heartbeat(v1::Heartbeat::default()), &stats) {};
        fill();
        said.begin(&outline(1, 4), edges.iter(), &stats);
        said.tell_ahead(&outline(2, 4), edges.iter(), &stats);
        assert!(heard(&mut receiver).iter().all(|message| message == "beat"));
        said.handle_sent(&edges[0], &stats);
        said.handle_served(edges[0].id);
        said.end(edges.iter(), &stats);
        said.withdraw(edges.iter(), &stats);
        assert_eq!(heard(&mut receiver), ["-1"]);
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
