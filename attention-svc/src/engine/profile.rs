//! Some steps, recorded from end to end because somebody asked (`attention-svc profile`).
//!
//! FFN ranks time a hop only once they know the plan that asks for it, and the first plan may come behind its step's first
//! hops. So the first step is not recorded: it gives the plan of the second time to be there.
use std::time::{Duration, Instant};

use afd_common::ids::StepId;
use tokio::sync::mpsc;

use super::HopRecord;
use super::ffn_port::StepOutline;
use super::forward::ForwardTimes;
use super::trace::AttendRecord;
use crate::scheduler::Phase;

/// One step, as attention saw it.
#[derive(Clone, Debug)]
pub struct ProfiledStep {
    /// Which.
    pub step: StepId,
    /// What it did.
    pub phase: Phase,
    /// Rows of all stages.
    pub rows: usize,
    /// Stages.
    pub stages: usize,
    /// Time that the engine's thread waited for the FFN with nothing else to do: the bubble.
    pub ffn_wait: Duration,
    /// Time that hops were under way while attention computed something else; two at once count twice.
    pub ffn_hidden: Duration,
    /// When it began to be scheduled.
    pub begun: Instant,
    /// When its tokens had been told.
    pub ended: Instant,
    /// Whether the times below are a device's, by its own marks, and not those of the engine's thread.
    pub on_device: bool,
    /// Attention of every layer and stage.
    pub attends: Vec<AttendRecord>,
    /// Every hop to every shard.
    pub hops: Vec<HopRecord>,
}

/// What a recording sends as its steps end.
#[derive(Clone, Debug)]
pub enum Recorded {
    /// The first one, which is not recorded.
    First,
    /// Each of the others.
    Step(Box<ProfiledStep>),
}

/// What was noted of a step, and by whom.
pub(super) struct StepTimes<'a> {
    pub(super) forward: ForwardTimes,
    pub(super) on_device: bool,
    pub(super) attends: &'a [AttendRecord],
    pub(super) hops: &'a [HopRecord],
}

/// A recording under way.
pub(super) struct Profile {
    num_steps: usize,
    has_begun: bool,
    num_recorded: usize,
    recorded: mpsc::UnboundedSender<Recorded>,
}

impl Profile {
    pub(super) fn new(num_steps: usize, recorded: mpsc::UnboundedSender<Recorded>) -> Self {
        Self { num_steps, has_begun: false, num_recorded: 0, recorded }
    }

    /// Whether anybody still wants it.
    pub(super) fn is_wanted(&self) -> bool {
        !self.recorded.is_closed()
    }

    /// Whether the step after the present one will be wanted too.
    pub(super) fn goes_on(&self) -> bool {
        !self.has_begun || self.num_recorded + 1 < self.num_steps
    }

    /// A step is over. Gives itself back while more are to come.
    pub(super) fn handle_step(
        mut self,
        outline: &StepOutline,
        begun: Instant,
        times: StepTimes<'_>,
    ) -> Option<Self> {
        if !std::mem::replace(&mut self.has_begun, true) {
            return self.send(Recorded::First);
        }
        self.num_recorded += 1;
        let step = ProfiledStep {
            step: outline.step,
            phase: outline.phase,
            rows: outline.stage_rows.iter().sum(),
            stages: outline.stage_rows.len(),
            ffn_wait: times.forward.ffn_wait,
            ffn_hidden: times.forward.ffn_hidden,
            begun,
            ended: Instant::now(),
            on_device: times.on_device,
            attends: times.attends.to_vec(),
            hops: times.hops.to_vec(),
        };
        self.send(Recorded::Step(Box::new(step)))
    }

    fn send(self, recorded: Recorded) -> Option<Self> {
        // Whoever asked may have gone.
        let is_wanted = self.recorded.send(recorded).is_ok();
        (is_wanted && self.num_recorded < self.num_steps).then_some(self)
    }
}
