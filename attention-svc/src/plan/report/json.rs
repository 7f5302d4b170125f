//! A plan as a value: what was asked and what was answered, so that a stored plan can be judged again.
use serde::{Deserialize, Serialize};

use crate::plan::case::Case;
use crate::plan::evaluate::Evaluator;
use crate::plan::outcome::Outcome;
use crate::plan::search::{self, LimitError, Limits, Misfit};
use crate::plan::sweep::{self, Point};
use crate::plan::verdict::{self, Verdict};

/// A plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Raised when the meaning of a field changes.
    pub version: u32,
    /// What was asked.
    pub request: Request,
    /// The answer.
    pub verdict: Verdict,
    /// The best AFD layouts, best first, one per number of experts on a rank and of stages.
    pub afd: Vec<Outcome>,
    /// The best colocated layouts, likewise.
    pub colocated: Vec<Outcome>,
    /// Layouts looked at.
    pub num_layouts: usize,
    /// Layouts that do not fit a rank's memory.
    pub num_out_of_memory: usize,
    /// Of each kind of layout, the largest group of FFN ranks that does not fit.
    pub misfits: Vec<Misfit>,
    /// Sweeps that were asked for.
    pub sweeps: Vec<Point>,
}

/// What was asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Model, hardware, load.
    pub case: Case,
    /// Bounds.
    pub limits: Limits,
    /// Layouts of each kind to report.
    pub top: usize,
    /// Contexts to sweep over, tokens.
    pub contexts: Vec<u64>,
    /// Targets to sweep over, ms.
    pub targets_ms: Vec<f64>,
    /// Numbers of devices to sweep over.
    pub device_counts: Vec<u32>,
    /// Whether to ask what better hardware would change, and shared experts on the other side.
    pub sensitivity: bool,
}

/// Why a stored plan is refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// Not a plan.
    #[error("not a plan: {0}")]
    Malformed(String),
    /// Its own inputs give another answer.
    #[error("the plan's inputs give another answer: {what}")]
    Differs {
        /// The first difference.
        what: String,
    },
}

impl Plan {
    /// Answers a request.
    ///
    /// # Errors
    /// [`LimitError`] when nothing is within the limits.
    pub fn make(request: Request) -> Result<Self, LimitError> {
        let Request { case, limits, .. } = &request;
        let found = search::search(case, limits)?;
        let out_of_memory =
            |(_, rejected): &&(_, search::Rejected)| matches!(rejected, search::Rejected::Memory(_));
        let mut sweeps = sweep::contexts(case, limits, &request.contexts);
        sweeps.extend(sweep::targets(case, limits, &request.targets_ms));
        sweeps.extend(sweep::devices(case, limits, &request.device_counts));
        if request.sensitivity {
            sweeps.extend(sweep::sensitivity(case, limits));
        }
        let (verdict, num_layouts) = (verdict::judge(case, &found), found.num_layouts());
        let num_out_of_memory = found.rejected.iter().filter(out_of_memory).count();
        let afd = search::distinct(case, &found.afd, request.top);
        let colocated = search::distinct(case, &found.colocated, request.top);
        Ok(Self {
            version: 1,
            verdict,
            afd,
            colocated,
            num_layouts,
            num_out_of_memory,
            misfits: found.misfits(),
            sweeps,
            request,
        })
    }

    /// Reads a stored plan.
    ///
    /// # Errors
    /// [`PlanError::Malformed`] names line and field.
    pub fn from_json(text: &str) -> Result<Self, PlanError> {
        serde_json::from_str(text).map_err(|error| PlanError::Malformed(error.to_string()))
    }

    /// Evaluates the stored layouts with the stored batches again and compares, to nine digits.
    ///
    /// # Errors
    /// [`PlanError::Differs`] names the first difference.
    pub fn check(&self) -> Result<(), PlanError> {
        let evaluator = Evaluator::new(&self.request.case);
        for stored in self.afd.iter().chain(&self.colocated) {
            let again = evaluator.outcome(stored.layout, stored.batch_per_rank);
            let pairs = [
                ("step_ms", stored.step_ms, again.step_ms),
                ("tpot_ms", stored.tpot_ms, again.tpot_ms),
                ("tokens_per_s_per_device", stored.tokens_per_s_per_device, again.tokens_per_s_per_device),
                ("attention memory", stored.memory.attention.total(), again.memory.attention.total()),
                ("idle_ffn", 1.0 + stored.idle_ffn, 1.0 + again.idle_ffn),
            ];
            for (field, stored_value, again_value) in pairs {
                if (stored_value / again_value - 1.0).abs() > 1e-9 || stored.bound != again.bound {
                    let what = format!("{}: {field} was {stored_value}, is {again_value}", stored.layout);
                    return Err(PlanError::Differs { what });
                }
            }
        }
        Ok(())
    }
}
