//! One step through all layers, pipelined over its stages: while the FFN works on one stage's rows, attention works on
//! another's. The layer loop of the model is here and nowhere else.
//!
//! ```text
//! stage 0   attend L0 ──▶ FFN L0 ───────▶ attend L1 ──▶ FFN L1 ─ …
//! stage 1             attend L0 ──▶ FFN L0 ───────▶ attend L1 ─ …
//! ```
//!
//! Shared experts that are placed on attention are computed when nothing else is left to send: right before a stage's answer
//! is waited for, so that no other stage's rows leave later for it. A layer's output is then the shards' sum, added up in
//! their order as ever, plus the shared experts' in f32, rounded once.
use std::time::{Duration, Instant};

use afd_common::ids::{HopKey, LayerIdx, StageIdx, StepId};
use tch::Tensor;

use super::trace::{AttendRecord, Work};
use super::{AttentionError, AttentionPort, FfnLoss, FfnPort};
use crate::request::SequenceError;
use crate::scheduler::Stage;

/// What each stage's layers gave, or why its sequences fail.
pub(super) type StageOutcomes = Vec<Result<StageOutput, SequenceError>>;

/// A stage behind the last layer.
#[derive(Debug)]
pub struct StageOutput {
    /// Residual stream, `[num_rows, hidden]`.
    pub x: Tensor,
    /// The token of each row, where the device has chosen already.
    pub chosen: Option<Vec<DeviceChoice>>,
}

/// A token that was chosen where the logits are, by the rule that it was asked with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceChoice {
    /// Its id; `None` where the row has none that can be chosen.
    pub token: Option<u32>,
    /// Where a drawn token's interval begins; without meaning for the best.
    pub below: f64,
    /// Where it ends.
    pub upto: f64,
}

/// Where a step's time went.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ForwardTimes {
    pub(super) attention: Duration,
    pub(super) dispatch: Duration,
    pub(super) ffn_wait: Duration,
    /// Hops under way while attention computed something else; two at once count twice.
    pub(super) ffn_hidden: Duration,
    /// For how long the host had nothing to do but to wait for a decode step that a device ran from end to end.
    pub(super) device_wait: Option<Duration>,
}

impl ForwardTimes {
    pub(super) fn add(&mut self, other: &Self) {
        self.attention += other.attention;
        self.dispatch += other.dispatch;
        self.ffn_wait += other.ffn_wait;
        self.ffn_hidden += other.ffn_hidden;
    }
}

/// Why a stage stopped.
enum Stop {
    /// This stage's rows are at fault; the other stages go on.
    Stage(SequenceError),
    /// The FFN is gone: no stage can go on.
    Step(FfnLoss),
}

struct Pass<'a, A: AttentionPort> {
    step: StepId,
    attention: &'a mut A,
    ffn: &'a mut dyn FfnPort,
    times: &'a mut ForwardTimes,
    attends: Option<&'a mut Vec<AttendRecord>>,
}

/// A stage on its way through the layers.
struct Flight<P> {
    prepared: P,
    /// What the FFN's answer will be added to; `None` before the first layer.
    residual: Option<Tensor>,
    /// What the FFN was sent, for what attention adds to its answer.
    ffn_in: Option<Tensor>,
    dispatched: Option<Instant>,
}

/// Runs all stages through all layers. Fills `attends` when the step is recorded.
///
/// # Errors
/// [`FfnLoss`] (never `Rejected`, which is an outcome of its stage) when the step as a whole is lost.
pub(super) fn forward<A: AttentionPort>(
    attention: &mut A,
    ffn: &mut dyn FfnPort,
    step: StepId,
    stages: &[Stage],
    times: &mut ForwardTimes,
    attends: Option<&mut Vec<AttendRecord>>,
) -> Result<StageOutcomes, FfnLoss> {
    let num_layers = attention.num_layers();
    let mut pass = Pass { step, attention, ffn, times, attends };
    let mut flights: Vec<Result<Flight<A::Prepared>, SequenceError>> =
        stages.iter().map(|stage| pass.take_off(stage)).collect();
    for layer in (0..num_layers).map(LayerIdx) {
        for (index, flight) in flights.iter_mut().enumerate() {
            let hop = HopKey { step, layer, stage: StageIdx(index as u8) };
            let Ok(running) = flight else { continue };
            match pass.layer(hop, running, &stages[index]) {
                Ok(()) => {}
                Err(Stop::Stage(error)) => *flight = Err(error),
                Err(Stop::Step(loss)) => return Err(loss),
            }
        }
    }
    let last = LayerIdx(num_layers.saturating_sub(1));
    let land = |(index, flight): (usize, Result<Flight<A::Prepared>, SequenceError>)| {
        let hop = HopKey { step, layer: last, stage: StageIdx(index as u8) };
        match flight.map_err(Stop::Stage).and_then(|mut flight| pass.land(hop, &mut flight)) {
            Ok(x) => Ok(Ok(StageOutput { x, chosen: None })),
            Err(Stop::Stage(error)) => Ok(Err(error)),
            Err(Stop::Step(loss)) => Err(loss),
        }
    };
    flights.into_iter().enumerate().map(land).collect()
}

impl<A: AttentionPort> Pass<'_, A> {
    fn take_off(&mut self, stage: &Stage) -> Result<Flight<A::Prepared>, SequenceError> {
        let prepared = self.attention.prepare(&stage.batch).map_err(internal)?;
        Ok(Flight { prepared, residual: None, ffn_in: None, dispatched: None })
    }

    /// One layer of one stage: collects the FFN's answer for the layer before, attends, sends the rows on.
    fn layer(&mut self, hop: HopKey, flight: &mut Flight<A::Prepared>, stage: &Stage) -> Result<(), Stop> {
        let (start, x) = match hop.layer {
            LayerIdx(0) => (Instant::now(), self.attention.embed(&stage.batch.input_ids).map_err(at_fault)?),
            LayerIdx(layer) => {
                let x = self.land(HopKey { layer: LayerIdx(layer - 1), ..hop }, flight)?;
                (Instant::now(), x)
            }
        };
        let attended = self.attention.attend(hop.layer, x, &flight.prepared).map_err(at_fault)?;
        let side = self
            .attention
            .side_tensors(hop.layer, &attended.ffn_in, &stage.batch.input_ids)
            .map_err(at_fault)?;
        let attended_at = Instant::now();
        if let Some(attends) = &mut self.attends {
            attends.push(AttendRecord { work: Work::Attention, hop, begun: start, ended: attended_at });
        }
        self.ffn.dispatch(hop, &attended.ffn_in, &side).map_err(lost)?;
        self.times.attention += attended_at - start;
        let dispatched = Instant::now();
        self.times.dispatch += dispatched - attended_at;
        (flight.residual, flight.ffn_in) = (Some(attended.residual), Some(attended.ffn_in));
        flight.dispatched = Some(dispatched);
        Ok(())
    }

    /// What attention adds to the FFN's answer to `hop`, `[num_rows, hidden]` f32, if anything.
    fn shared_experts(
        &mut self,
        hop: HopKey,
        flight: &mut Flight<A::Prepared>,
    ) -> Result<Option<Tensor>, Stop> {
        let Some(ffn_in) = flight.ffn_in.take() else { return Ok(None) };
        let begun = Instant::now();
        let shared = self.attention.shared_experts(hop.layer, &ffn_in).map_err(at_fault)?;
        if shared.is_some() {
            let ended = Instant::now();
            self.times.attention += ended - begun;
            if let Some(attends) = &mut self.attends {
                attends.push(AttendRecord { work: Work::SharedExperts, hop, begun, ended });
            }
        }
        Ok(shared)
    }

    /// The residual stream after the layer of `hop`.
    fn land(&mut self, hop: HopKey, flight: &mut Flight<A::Prepared>) -> Result<Tensor, Stop> {
        debug_assert_eq!(hop.step, self.step);
        let shared = self.shared_experts(hop, flight)?;
        let start = Instant::now();
        self.times.ffn_hidden += flight.dispatched.take().map_or(Duration::ZERO, |sent| start - sent);
        let output = self.ffn.combine(hop).map_err(lost)?;
        self.times.ffn_wait += start.elapsed();
        let mut residual = flight.residual.take().ok_or_else(|| wrong(hop, "was never dispatched".into()))?;
        // An addition would stretch a single row over all others.
        if output.size() != residual.size() || output.kind() != residual.kind() {
            let describe = |tensor: &Tensor| format!("{:?} {:?}", tensor.size(), tensor.kind());
            let what = format!("the FFN returned {}, expected {}", describe(&output), describe(&residual));
            return Err(wrong(hop, what));
        }
        let sum = output.f_to_device(residual.device()).and_then(|output| match shared {
            None => residual.f_add_(&output),
            Some(mut shared) => residual.f_add_(&shared.f_add_(&output)?.f_to_kind(output.kind())?),
        });
        sum.map_err(|error| wrong(hop, error.to_string()))
    }
}

fn internal(error: AttentionError) -> SequenceError {
    SequenceError::Internal(error.0)
}

fn at_fault(error: AttentionError) -> Stop {
    Stop::Stage(internal(error))
}

fn wrong(hop: HopKey, what: String) -> Stop {
    Stop::Stage(SequenceError::Internal(format!("{hop}: {what}")))
}

fn lost(loss: FfnLoss) -> Stop {
    match loss {
        FfnLoss::Rejected { .. } => Stop::Stage(SequenceError::Internal(loss.to_string())),
        FfnLoss::Unavailable { .. } | FfnLoss::Bereft { .. } | FfnLoss::Fatal { .. } => Stop::Step(loss),
    }
}
