//! Whole steps over links that a stream drives: the port's other face.
use std::sync::Arc;
use std::time::Duration;

use afd_common::ids::StepId;
use afd_gpu::{Completion, Region, Stream};

use super::RemoteFfn;
use crate::device::{HopRows, StepRun, StreamFfn, StreamHop, Summand};
use crate::engine::FfnLoss;
use crate::remote_ffn::streams::{Streams, decode_plan};

/// Whole decode steps, over links that a stream drives.
impl StreamFfn for RemoteFfn {
    fn max_rows(&self) -> usize {
        self.streams.as_ref().map_or(0, Streams::max_rows)
    }

    fn max_stages(&self) -> usize {
        self.streams.as_ref().map_or(1, Streams::max_stages)
    }

    /// The ranks have made everything when they joined.
    fn prepare(&mut self, _padded_rows: &[usize]) -> Result<(), FfnLoss> {
        Ok(())
    }

    fn announce(&mut self, step: StepId, padded_rows: &[usize], run: StepRun) -> Result<(), FfnLoss> {
        let (plan, now) = (decode_plan(step, padded_rows, run), self.clock.now());
        let stats = Arc::clone(&self.stats);
        self.streams()?.announce(&plan, &stats, now)
    }

    fn begin(&mut self, stream: &Stream, stages: &[(usize, &Region)]) -> Result<(), FfnLoss> {
        self.streams()?.begin(stream, stages.iter().map(|(rows, real)| (*rows, Some(*real))))
    }

    fn direct(&self, hop: StreamHop) -> Option<Region> {
        let StreamHop { layer, stage, padded_rows } = hop;
        self.streams.as_ref()?.direct(layer, stage.0.into(), padded_rows)
    }

    fn dispatch(&mut self, stream: &Stream, hop: StreamHop, rows: &HopRows<'_>) -> Result<(), FfnLoss> {
        let StreamHop { layer, stage, padded_rows } = hop;
        self.streams()?.put_hop(stream, layer, stage.0.into(), padded_rows, rows)
    }

    fn combine(&mut self, stream: &Stream, hop: StreamHop) -> Result<Summand, FfnLoss> {
        let StreamHop { layer, stage, padded_rows } = hop;
        self.streams()?.wait_hop(stream, layer, stage.0.into(), padded_rows)
    }

    fn settle(&mut self, stream: &Stream) -> Result<(), FfnLoss> {
        self.streams()?.settle(stream)
    }

    fn watch(&mut self, mark: &Completion, deadline: Duration) -> Result<(), FfnLoss> {
        let late = |error| FfnLoss::Fatal { what: format!("a decode step does not end: {error}") };
        self.streams()?.watch(mark, deadline).map_err(late)
    }

    fn runs_ahead(&self) -> bool {
        self.streams.as_ref().is_some_and(Streams::runs_ahead)
    }

    fn is_sound(&self) -> bool {
        self.streams.as_ref().is_some_and(Streams::is_sound)
    }

    fn check(&mut self) -> Result<(), FfnLoss> {
        let (stats, now) = (Arc::clone(&self.stats), self.clock.now());
        let checked = self.streams()?.check(&stats, now);
        self.note_readiness();
        checked
    }

    fn is_elsewhere(&self) -> bool {
        true
    }

    fn generation(&self) -> u64 {
        self.streams.as_ref().map_or(0, Streams::generation)
    }
}
