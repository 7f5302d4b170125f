//! Decode steps that a device runs from end to end: launched, waited for, told.
//!
//! While one runs, the next is launched behind it, so that the device need not wait for the host between the two. What the
//! host does not know of it then are its tokens, which the device has, and who ends: a sequence that ends with a stop
//! token, or whose caller leaves, has a row in it for nothing. So it is launched late, shortly before the one ahead will be
//! over, and not at all when somebody new is there, when a sequence will have all its tokens, when the host has a say
//! in the choice of one, or when there is something to be looked at between two steps: ranks that come and go, the end.
use std::time::{Duration, Instant};

use afd_common::ids::StepId;
use afd_gpu::ops::DrawRule;

use super::active::Active;
use super::forward::{ForwardTimes, StageOutcomes};
use super::profile::Profile;
use super::run::Engine;
use super::step::Planned;
use super::{
    AttentionPort, DecodeLaunch, DecodeStage, DecodeTurn, EagerReason, EngineState, FfnLoss, StepOutline,
};
use crate::request::SequenceId;
use crate::scheduler::{Phase, Stage, StagePick, StageRules};

/// What is left of a step when the next is launched behind it: enough for this side and the FFN's to have it there in time.
const BEFORE_THE_END: Duration = Duration::from_micros(600);

/// The decode step that ended last, if nothing came behind it yet.
#[derive(Clone, Debug)]
pub(super) struct LastDecode {
    stage_rows: Vec<usize>,
    on_device: Duration,
}

impl<A: AttentionPort> Engine<A> {
    /// Runs a step on the device, where it can be, or waits for it, if it is on its way. `ahead` is what would come behind it.
    pub(super) fn decode(
        &mut self,
        planned: &Planned,
        ahead: Option<&StepOutline>,
        times: &mut ForwardTimes,
    ) -> Result<Option<StageOutcomes>, FfnLoss> {
        let begun = Instant::now();
        let last = self.last_decode.take();
        let replayed = match planned.replayed {
            Some(replayed) => replayed,
            None => {
                let rules = self.rules(&planned.stages, |active| Some(active.rule())).unwrap_or_default();
                let turn = if last.is_some() { DecodeTurn::Next } else { DecodeTurn::First };
                match self.launch(&planned.outline, &planned.stages, &rules, turn)? {
                    DecodeLaunch::Unknown => return Ok(None),
                    DecodeLaunch::Eager(reason) => {
                        self.metrics.note_eager(reason);
                        return Ok(None);
                    }
                    DecodeLaunch::Launched { replayed } => replayed,
                }
            }
        };
        // Waking whoever waits for a token is nothing that the step needs.
        let delivers = Instant::now();
        self.news.deliver();
        let mut waited = delivers.elapsed();
        if let Some(outline) = ahead
            && let Some(last) = last.filter(|last| last.stage_rows == planned.outline.stage_rows)
        {
            self.launch_behind(planned, outline, begun + last.on_device, &mut waited)?;
        }
        let waits = Instant::now();
        let rows: Vec<usize> = planned.stages.iter().map(|stage| stage.batch.input_ids.len()).collect();
        let end = self.attention.finish(&mut *self.ffn, &rows).inspect_err(|_| {
            // What was behind it is lost too: its tokens are to come of this one.
            self.launched = None;
        })?;
        times.device_wait = Some(waited + waits.elapsed());
        match replayed {
            true => self.metrics.graph_replays.add(1),
            false if planned.outline.profile => self.metrics.note_eager(EagerReason::Profiled),
            false => self.metrics.note_eager(EagerReason::Off),
        }
        self.metrics.note_on_device(end.on_device, end.idle);
        let stage_rows = planned.outline.stage_rows.clone();
        self.last_decode = Some(LastDecode { stage_rows, on_device: end.on_device });
        times.attention = begun.elapsed();
        self.metrics.attention_us.add_time(times.attention);
        Ok(Some(end.outputs.into_iter().map(Ok).collect()))
    }

    /// Launches the step behind one that is on its way and will be over at about `end`, if one can be foreseen by then.
    fn launch_behind(
        &mut self,
        planned: &Planned,
        outline: &StepOutline,
        end: Instant,
        waited: &mut Duration,
    ) -> Result<(), FfnLoss> {
        let begun = Instant::now();
        while self.may_follow() && Instant::now() + BEFORE_THE_END < end {
            std::thread::yield_now();
        }
        *waited += begun.elapsed();
        if !self.may_follow() {
            return Ok(());
        }
        let Some(rules) = self.rules(&planned.stages, Active::device_rule_ahead) else { return Ok(()) };
        let Some(step) = self.scheduler.ahead(&planned.step) else { return Ok(()) };
        let chosen = self.choose_stages(&step);
        let split = StageRules { max_stages: planned.stages.len(), ..self.config.stages };
        let stages = self.scheduler.stages(&step, &split);
        if chosen.num_stages != planned.stages.len() || !same_sequences(&stages, &planned.stages) {
            return Ok(());
        }
        let replayed = match self.launch(outline, &stages, &rules, DecodeTurn::Behind) {
            Ok(DecodeLaunch::Launched { replayed }) => replayed,
            Ok(DecodeLaunch::Unknown | DecodeLaunch::Eager(_)) => return Ok(()),
            Err(FfnLoss::Fatal { what }) => return Err(FfnLoss::Fatal { what }),
            Err(loss) => {
                // The step under way needs the same ranks, and says so itself.
                tracing::warn!(loss = %loss, "no step could be launched behind the present one");
                return Ok(());
            }
        };
        self.last_step = outline.step;
        let (outline, replayed) = (outline.clone(), Some(replayed));
        self.launched = Some(Planned { step, chosen, stages, outline, replayed });
        Ok(())
    }

    /// Whether nobody has a say before the next step, and there is still one for it to be behind.
    fn may_follow(&self) -> bool {
        let is_quiet = self.commands.is_empty() && !self.ffn.has_news();
        is_quiet && !matches!(*self.state.borrow(), EngineState::Draining { .. }) && !self.attention.is_over()
    }

    fn launch(
        &mut self,
        outline: &StepOutline,
        stages: &[Stage],
        rules: &[Vec<DrawRule>],
        turn: DecodeTurn,
    ) -> Result<DecodeLaunch, FfnLoss> {
        let stages = stages.iter().zip(rules);
        let stages: Vec<_> =
            stages.map(|(stage, rules)| DecodeStage { batch: &stage.batch, rules }).collect();
        self.attention.launch(&mut *self.ffn, outline, &stages, turn)
    }

    /// By which rule the token of each row is chosen; `None` where `rule` has none for some sequence.
    fn rules(
        &self,
        stages: &[Stage],
        rule: impl Fn(&Active) -> Option<DrawRule>,
    ) -> Option<Vec<Vec<DrawRule>>> {
        let of_stage = |stage: &Stage| {
            let items = stage.items.iter();
            items.map(|item| self.sequences.get(&item.sequence).and_then(&rule)).collect::<Option<Vec<_>>>()
        };
        stages.iter().map(of_stage).collect()
    }

    /// The next step, where this one will most likely be followed by its like: everybody decodes, nobody waits, and its
    /// hops are not to be recorded.
    pub(super) fn foresee(&self, planned: &Planned) -> Option<StepOutline> {
        let Planned { step, outline, .. } = planned;
        let rules = &self.config.stages;
        let is_settled = match rules.pick {
            StagePick::Most => true,
            StagePick::Measured => self.stage_counts.is_settled(outline.phase, step.num_tokens()),
        };
        let all_decode = outline.phase == Phase::Decode && step.items.len() == self.scheduler.num_running();
        let recorded =
            step.items.iter().filter_map(|item| self.sequences.get(&item.sequence)?.spans.as_deref());
        let certain = is_settled
            && all_decode
            && self.scheduler.num_waiting() == 0
            && !self.recorder.will_record(recorded);
        let profile = self.profile.as_ref().is_some_and(Profile::goes_on);
        certain.then(|| StepOutline {
            step: StepId(outline.step.0 + 1),
            profile,
            trace: None,
            ..outline.clone()
        })
    }
}

/// Whether the rows of two steps are those of the same sequences, in the same places.
fn same_sequences(one: &[Stage], other: &[Stage]) -> bool {
    let sequences = |stages: &[Stage]| -> Vec<Vec<SequenceId>> {
        stages.iter().map(|stage| stage.items.iter().map(|item| item.sequence).collect()).collect()
    };
    sequences(one) == sequences(other)
}
