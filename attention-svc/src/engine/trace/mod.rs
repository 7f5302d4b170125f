//! What the engine records for traces: the phases of a request's sequences ([`sequence`]) and, for a share of the steps,
//! every layer, stage and shard ([`step`]). Times are noted while the work goes on; spans are made of them afterwards, and
//! nothing here is touched for what is not recorded.
mod sequence;
mod step;

use afd_common::telemetry::SpanSink;

pub(super) use sequence::SequenceSpans;
pub use step::{AttendRecord, Work};
pub(super) use step::{StepRecorder, StepTrace};

/// Where the engine's spans go, and how many steps are recorded hop by hop.
#[derive(Clone, Debug, Default)]
pub struct EngineTracing {
    /// To a collector, or nowhere.
    pub spans: SpanSink,
    /// Share of the steps, 0 to 1, among those that serve a recorded request.
    pub hops_ratio: f64,
}
