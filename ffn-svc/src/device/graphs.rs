//! Captured steps of one link, by what makes two steps the same work: the padded rows of every stage, and the phase. Bounded:
//! whoever asks for more graphs than there may be gets the step without.
use std::collections::HashMap;

use afd_gpu::Graph;

use crate::engine::{GraphUse, PlannedStep};

/// Graphs of one link. A graph of 27 layers takes a few hundred kilobytes.
const MAX_GRAPHS: usize = 256;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    stage_rows: Vec<u32>,
    phase: i32,
}

/// See the module's head.
#[derive(Default)]
pub(super) struct Graphs {
    captured: HashMap<Key, Graph>,
}

/// What to do with a planned step.
pub(super) enum Choice<'a> {
    /// Launch this.
    Replay(&'a mut Graph),
    /// Capture it, [keep](Graphs::keep) it, launch it.
    Capture,
    /// Neither, for this reason.
    Eager(&'static str),
}

impl Graphs {
    /// `fits` says whether the step is one that the kernels can run whole.
    pub(super) fn choose(&mut self, plan: &PlannedStep, fits: Result<(), &'static str>) -> Choice<'_> {
        let key = Key::of(plan);
        let is_known = self.captured.contains_key(&key);
        match (plan.graph, fits) {
            (GraphUse::None, _) => Choice::Eager("not asked for"),
            (GraphUse::Replay | GraphUse::Capture, Err(why)) => Choice::Eager(why),
            (GraphUse::Replay, Ok(())) if !is_known => Choice::Eager("unknown key"),
            (GraphUse::Capture, Ok(())) if !is_known && self.captured.len() >= MAX_GRAPHS => {
                Choice::Eager("too many graphs")
            }
            (GraphUse::Capture, Ok(())) if !is_known => Choice::Capture,
            _ => self.captured.get_mut(&key).map_or(Choice::Eager("unknown key"), Choice::Replay),
        }
    }

    pub(super) fn keep(&mut self, plan: &PlannedStep, graph: Graph) -> &mut Graph {
        self.captured.entry(Key::of(plan)).or_insert(graph)
    }
}

impl Key {
    fn of(plan: &PlannedStep) -> Self {
        Self { stage_rows: plan.stage_rows.clone(), phase: plan.phase }
    }
}

#[cfg(test)]
mod tests {
    use afd_common::ids::StepId;

    use super::*;

    fn reason(graphs: &mut Graphs, graph: GraphUse, fits: Result<(), &'static str>) -> &'static str {
        let plan = PlannedStep { step: StepId(1), stage_rows: vec![8, 8], phase: 2, graph, profile: false };
        match graphs.choose(&plan, fits) {
            Choice::Replay(_) => "replay",
            Choice::Capture => "capture",
            Choice::Eager(why) => why,
        }
    }

    #[test]
    fn a_step_without_a_graph_says_why() {
        let mut graphs = Graphs::default();
        assert_eq!(reason(&mut graphs, GraphUse::None, Ok(())), "not asked for");
        assert_eq!(reason(&mut graphs, GraphUse::Replay, Ok(())), "unknown key");
        assert_eq!(reason(&mut graphs, GraphUse::Capture, Err("rows")), "rows");
        assert_eq!(reason(&mut graphs, GraphUse::Capture, Ok(())), "capture");
    }
}
