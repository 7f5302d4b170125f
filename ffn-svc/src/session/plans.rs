//! The plans of one session: which were announced, which are under way. Pure: it checks and remembers, it runs nothing.
//!
//! Rules: step ids grow and may skip; a plan may be replaced by a higher revision, and withdrawn; a step that was announced,
//! withdrawn or left behind cannot be announced again. Rows travel another way than plans, so a revision may come when its
//! step is over: that is nobody's fault and changes nothing. A plan is a bound, so hops that come without one are none of
//! this module's business.
use std::collections::VecDeque;

use afd_common::ids::StepId;
use afd_common::proto::v1;

/// Plans kept at once; an attention rank sends them one step ahead. Older ones that nothing came of are forgotten.
const MAX_OPEN: usize = 16;

/// What the session agreed to.
#[derive(Clone, Copy, Debug)]
pub struct PlanLimits {
    /// Stages of a step.
    pub max_stages: u32,
    /// Rows of a stage.
    pub max_tokens_per_stage: u32,
}

/// Why a plan is refused. It ends the stream it came on and nothing else.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The step was announced before and this is no newer revision of it.
    #[error("step {step} was announced already at revision {known}; the plan has revision {revision}")]
    Repeated {
        /// Which step.
        step: u64,
        /// Of the plan that was refused.
        revision: u32,
        /// Of the plan that stands.
        known: u32,
    },
    /// Step ids must grow.
    #[error("step {step} comes after step {newest}: step ids must grow")]
    Backwards {
        /// Which step.
        step: u64,
        /// Highest step so far.
        newest: u64,
    },
    /// The step was withdrawn, or is long over.
    #[error("step {step} was withdrawn or is long over")]
    Over {
        /// Which step.
        step: u64,
    },
    /// A step has no stage, or more than were agreed.
    #[error("step {step} has {found} stages; agreed were 1 to {max}")]
    Stages {
        /// Which step.
        step: u64,
        /// As sent.
        found: usize,
        /// Agreed.
        max: u32,
    },
    /// A stage is empty or larger than agreed.
    #[error("step {step}, stage {stage}: `padded_tokens` is {found}; agreed were 1 to {max}")]
    Tokens {
        /// Which step.
        step: u64,
        /// Which stage.
        stage: usize,
        /// As sent.
        found: u32,
        /// Agreed.
        max: u32,
    },
    /// The phase is not known to this protocol.
    #[error("step {step}: `phase` is {found}; expected prefill, decode or mixed")]
    Phase {
        /// Which step.
        step: u64,
        /// Number as sent.
        found: i32,
    },
    /// A step cannot be captured and replayed at once.
    #[error("step {step}: `graph_capture` and `graph_replay` exclude each other")]
    CaptureAndReplay {
        /// Which step.
        step: u64,
    },
    /// The session that sent it was replaced or has expired.
    #[error("step {step} was announced on a session that has ended: {why}")]
    Fenced {
        /// Which step.
        step: u64,
        /// What ended the session.
        why: String,
    },
}

/// What became of an accepted plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accepted {
    /// A new step.
    New,
    /// It replaces the step's earlier plan.
    Revised,
    /// It revises a step that is over.
    Late,
}

/// See the module's head.
#[derive(Debug)]
pub struct PlanBook {
    limits: PlanLimits,
    newest: Option<StepId>,
    /// Oldest first.
    known: VecDeque<Known>,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    step: StepId,
    revision: u32,
    is_over: bool,
}

impl PlanBook {
    /// An empty book.
    pub fn new(limits: PlanLimits) -> Self {
        Self { limits, newest: None, known: VecDeque::with_capacity(MAX_OPEN) }
    }

    /// Plans that wait for their step to end.
    pub fn num_open(&self) -> usize {
        self.known.iter().filter(|known| !known.is_over).count()
    }

    /// Checks a plan and notes it.
    ///
    /// # Errors
    /// [`PlanError`] says what is wrong with it; nothing else changes.
    pub fn accept(&mut self, plan: &v1::StepPlan) -> Result<Accepted, PlanError> {
        self.check(plan)?;
        let step = StepId(plan.step_id);
        match self.newest {
            Some(newest) if step <= newest => self.revise(plan, newest),
            _ => {
                if self.known.len() == MAX_OPEN {
                    self.known.pop_front();
                }
                self.known.push_back(Known { step, revision: plan.revision, is_over: false });
                self.newest = Some(step);
                Ok(Accepted::New)
            }
        }
    }

    /// Withdraws a step; whether it was announced and still open. A step that is not known is none of our concern: the
    /// withdrawal may have crossed the report.
    pub fn cancel(&mut self, step: StepId) -> bool {
        match self.known.iter().position(|known| known.step == step) {
            Some(at) => self.known.remove(at).is_some_and(|known| !known.is_over),
            None => false,
        }
    }

    /// A step is over; whether it had been announced.
    pub fn finish(&mut self, step: StepId) -> bool {
        let known = self.known.iter_mut().find(|known| known.step == step);
        known.is_some_and(|known| !std::mem::replace(&mut known.is_over, true))
    }

    fn revise(&mut self, plan: &v1::StepPlan, newest: StepId) -> Result<Accepted, PlanError> {
        let step = plan.step_id;
        match self.known.iter_mut().find(|known| known.step.0 == step) {
            Some(known) if plan.revision > known.revision => {
                known.revision = plan.revision;
                Ok(if known.is_over { Accepted::Late } else { Accepted::Revised })
            }
            Some(known) => Err(PlanError::Repeated { step, revision: plan.revision, known: known.revision }),
            None if step == newest.0 => Err(PlanError::Over { step }),
            None => Err(PlanError::Backwards { step, newest: newest.0 }),
        }
    }

    fn check(&self, plan: &v1::StepPlan) -> Result<(), PlanError> {
        let (step, PlanLimits { max_stages, max_tokens_per_stage: max }) = (plan.step_id, self.limits);
        let found = plan.padded_tokens.len();
        if found == 0 || found > max_stages as usize {
            return Err(PlanError::Stages { step, found, max: max_stages });
        }
        if let Some((stage, &found)) =
            plan.padded_tokens.iter().enumerate().find(|(_, tokens)| **tokens == 0 || **tokens > max)
        {
            return Err(PlanError::Tokens { step, stage, found, max });
        }
        if !matches!(v1::Phase::try_from(plan.phase), Ok(phase) if phase != v1::Phase::Unspecified) {
            return Err(PlanError::Phase { step, found: plan.phase });
        }
        if plan.graph_capture && plan.graph_replay {
            return Err(PlanError::CaptureAndReplay { step });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn book() -> PlanBook {
        PlanBook::new(PlanLimits { max_stages: 2, max_tokens_per_stage: 64 })
    }

    fn plan(step_id: u64, revision: u32) -> v1::StepPlan {
        v1::StepPlan {
            step_id,
            revision,
            padded_tokens: vec![64, 1],
            phase: v1::Phase::Decode.into(),
            ..Default::default()
        }
    }

    #[test]
    fn ids_grow_with_gaps_and_revisions_supersede() {
        let mut book = book();
        assert_eq!(book.accept(&plan(3, 0)), Ok(Accepted::New));
        assert_eq!(book.accept(&plan(9, 0)), Ok(Accepted::New));
        assert_eq!(book.accept(&plan(9, 2)), Ok(Accepted::Revised));
        assert_eq!(book.accept(&plan(3, 1)), Ok(Accepted::Revised), "an earlier step that is still open");
        assert_eq!(book.accept(&plan(9, 2)), Err(PlanError::Repeated { step: 9, revision: 2, known: 2 }));
        assert_eq!(book.accept(&plan(5, 0)), Err(PlanError::Backwards { step: 5, newest: 9 }));
        assert!(book.finish(StepId(9)));
        assert_eq!(book.accept(&plan(9, 3)), Ok(Accepted::Late), "it crossed the step's last hop");
        assert_eq!(book.accept(&plan(9, 3)), Err(PlanError::Repeated { step: 9, revision: 3, known: 3 }));
        assert_eq!(book.num_open(), 1, "step 3");
        assert_eq!(book.accept(&plan(10, 0)), Ok(Accepted::New));
    }

    #[test]
    fn a_withdrawn_step_does_not_come_back() {
        let mut book = book();
        book.accept(&plan(1, 0)).unwrap();
        assert!(book.cancel(StepId(1)));
        assert!(!book.cancel(StepId(1)) && !book.cancel(StepId(77)), "legal, and nothing to do");
        assert_eq!(book.accept(&plan(1, 1)), Err(PlanError::Over { step: 1 }));
        assert_eq!(book.num_open(), 0);
    }

    #[test]
    fn bounds_are_those_agreed_in_the_handshake() {
        let refused = |change: fn(&mut v1::StepPlan)| {
            let mut plan = plan(1, 0);
            change(&mut plan);
            book().accept(&plan).unwrap_err()
        };
        assert_eq!(refused(|p| p.padded_tokens.clear()), PlanError::Stages { step: 1, found: 0, max: 2 });
        assert_eq!(refused(|p| p.padded_tokens.push(1)), PlanError::Stages { step: 1, found: 3, max: 2 });
        let tokens = |stage, found| PlanError::Tokens { step: 1, stage, found, max: 64 };
        assert_eq!(refused(|p| p.padded_tokens[0] = 65), tokens(0, 65));
        assert_eq!(refused(|p| p.padded_tokens[1] = 0), tokens(1, 0));
        assert_eq!(refused(|p| p.phase = 0), PlanError::Phase { step: 1, found: 0 });
        assert_eq!(refused(|p| p.phase = 17), PlanError::Phase { step: 1, found: 17 });
        let both = |p: &mut v1::StepPlan| (p.graph_capture, p.graph_replay) = (true, true);
        assert_eq!(refused(both), PlanError::CaptureAndReplay { step: 1 });
    }

    proptest! {
        /// Whatever is sent, accepted new steps grow strictly, memory is bounded, and a refusal changes nothing.
        #[test]
        fn a_book_stays_in_order(moves in proptest::collection::vec((0u8..4, 0u64..40, 0u32..3), 0..200)) {
            let (mut book, mut newest) = (book(), None);
            for (what, step, revision) in moves {
                match what {
                    0 => { book.cancel(StepId(step)); }
                    1 => { book.finish(StepId(step)); }
                    _ => {
                        let before = book.num_open();
                        match book.accept(&plan(step, revision)) {
                            Ok(Accepted::New) => {
                                prop_assert!(newest < Some(step));
                                newest = Some(step);
                            }
                            Ok(Accepted::Revised | Accepted::Late) | Err(_) => prop_assert_eq!(book.num_open(), before),
                        }
                    }
                }
                prop_assert!(book.num_open() <= MAX_OPEN);
            }
        }
    }
}
