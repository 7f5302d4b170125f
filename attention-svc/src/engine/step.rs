//! One step: schedule, choose stages, say what is coming, run the layers, commit what came of it.
//!
//! The loop around it is [`run`](super::run), the layers are [`forward`](super::forward).
use std::time::Instant;

use afd_common::ids::StepId;

use super::forward::{ForwardTimes, StageOutcomes, forward};
use super::profile::StepTimes;
use super::run::{Engine, Loss};
use super::trace::StepTrace;
use super::{AttentionPort, EngineDeath, FfnLoss, StepOutline};
use crate::request::SequenceError;
use crate::scheduler::{ChosenStages, Phase, Stage, StagePick, StageRules, Step, StepLoad};

/// A step whose FFN was lost runs again at most this often in a row before its sequences fail.
const MAX_STEP_REPEATS: u32 = 2;

/// A step that is about to run, or is on its way.
pub(super) struct Planned {
    pub(super) step: Step,
    pub(super) chosen: ChosenStages,
    pub(super) stages: Vec<Stage>,
    pub(super) outline: StepOutline,
    /// Whether it is one graph, once the device has it.
    pub(super) replayed: Option<bool>,
}

impl Planned {
    /// Whether a profile can have it: it was known of it when it was launched.
    fn is_recorded(&self) -> bool {
        self.outline.profile || self.replayed.is_none()
    }
}

impl<A: AttentionPort> Engine<A> {
    /// Runs one step, if there is anything to run; the one that was launched already, if there is one.
    pub(super) fn step(&mut self) -> Result<bool, EngineDeath> {
        let start = Instant::now();
        let (planned, trace) = match self.launched.take() {
            Some(launched) => (launched, None),
            None => match self.plan(start) {
                Some(planned) => planned,
                None => return Ok(false),
            },
        };
        let outline = &planned.outline;
        let span = tracing::debug_span!(
            "step",
            step = outline.step.0,
            phase = ?outline.phase,
            sequences = planned.step.items.len(),
            tokens = planned.step.num_tokens(),
            stages = planned.stages.len(),
        );
        let _entered = span.entered();
        self.metrics.steps.add(1);
        self.metrics.schedule_us.add_time(start.elapsed());

        let mut times = ForwardTimes::default();
        let begun = Instant::now();
        let outcomes = self.run_layers(&planned, &mut times);
        self.metrics.note_stages(planned.stages.len());
        if outcomes.is_ok() {
            self.stage_counts.handle_step(planned.chosen, begun.elapsed().as_secs_f64() * 1e6);
        }
        self.note_step(&planned.step, &times, trace.as_ref());
        let lost = outcomes.as_ref().err().map(FfnLoss::to_string);
        match outcomes {
            Ok(outcomes) => self.finish_step(&planned.stages, outcomes),
            Err(FfnLoss::Fatal { what }) => return Err(EngineDeath(what)),
            Err(loss) => self.lose_step(&planned.step, start, loss),
        }
        if let Some(trace) = trace {
            let hops = self.ffn.hop_records();
            self.recorder.end(&trace, outline, start, &times, hops, lost.as_deref());
        }
        if let Some(profile) = self.profile.take_if(|_| planned.is_recorded()) {
            let forward = times;
            let times = match self.ffn.device_times() {
                Some(times) => {
                    StepTimes { forward, on_device: true, attends: &times.attends, hops: &times.hops }
                }
                None => {
                    let (attends, hops) = (&self.recorder.attends, self.ffn.hop_records());
                    StepTimes { forward, on_device: false, attends, hops }
                }
            };
            self.profile = profile.handle_step(outline, start, times);
        }
        if let Some(waited) = times.device_wait {
            self.metrics.decode_host_us.add_time(start.elapsed().saturating_sub(waited));
        }
        self.metrics.step_us.add_time(start.elapsed());
        Ok(true)
    }

    /// What the scheduler gives for the next step, if anything, in its stages.
    fn plan(&mut self, now: Instant) -> Option<(Planned, Option<StepTrace>)> {
        let step = self.scheduler.schedule()?;
        for id in &step.admitted {
            self.sequences.get_mut(id).into_iter().for_each(|active| active.handle_admitted(now));
        }
        let chosen = self.choose_stages(&step);
        let rules = StageRules { max_stages: chosen.num_stages, ..self.config.stages };
        let stages = self.scheduler.stages(&step, &rules);
        self.last_step = StepId(self.last_step.0 + 1);
        let trace = self.record(&step);
        self.profile.take_if(|profile| !profile.is_wanted());
        if self.profile.is_some() && trace.is_none() {
            self.recorder.attends.clear();
        }
        let outline = self.outline(&step, &stages, trace.as_ref());
        Some((Planned { step, chosen, stages, outline, replayed: None }, trace))
    }

    /// Into how many stages the step is split, if its rules allow that.
    pub(super) fn choose_stages(&mut self, step: &Step) -> ChosenStages {
        let (rules, rows) = (&self.config.stages, step.num_tokens());
        let splittable = rules.splittable(step.phase(), step.items.len(), rows).min(self.ffn.max_stages());
        match rules.pick {
            StagePick::Measured => {
                let largest = step.items.iter().map(|item| item.tokens.len()).max().unwrap_or(0);
                self.stage_counts.choose(StepLoad { phase: step.phase(), rows, largest, splittable })
            }
            StagePick::Most => ChosenStages::fixed(splittable),
        }
    }

    /// Whether, and as part of which trace, a step is recorded hop by hop.
    fn record(&mut self, step: &Step) -> Option<StepTrace> {
        if !self.recorder.spans.is_on() {
            return None;
        }
        let Self { recorder, sequences, .. } = self;
        let recorded = step.items.iter().filter_map(|item| sequences.get(&item.sequence)?.spans.as_deref());
        recorder.begin(step.items.len(), recorded)
    }

    /// Adds what a step cost to the traces of the requests that it served.
    fn note_step(&mut self, step: &Step, times: &ForwardTimes, trace: Option<&StepTrace>) {
        if !self.recorder.spans.is_on() {
            return;
        }
        let link = trace.and_then(StepTrace::to_link);
        for item in &step.items {
            let active = self.sequences.get_mut(&item.sequence);
            if let Some(spans) = active.and_then(|active| active.spans.as_mut()) {
                spans.handle_step(times, link);
            }
        }
    }

    fn outline(&self, step: &Step, stages: &[Stage], trace: Option<&StepTrace>) -> StepOutline {
        StepOutline {
            step: self.last_step,
            phase: step.phase(),
            stage_rows: stages.iter().map(|stage| stage.batch.input_ids.len()).collect(),
            profile: self.profile.is_some(),
            warmup: false,
            trace: trace.map(|trace| trace.context),
        }
    }

    fn run_layers(&mut self, planned: &Planned, times: &mut ForwardTimes) -> Result<StageOutcomes, FfnLoss> {
        let (outline, stages) = (&planned.outline, &planned.stages[..]);
        let ahead = self.foresee(planned);
        if outline.phase == Phase::Decode {
            let decoded = self.decode(planned, ahead.as_ref(), times);
            if let Some(decoded) = decoded.transpose() {
                self.ffn.end_step(outline.step);
                return decoded;
            }
        }
        self.last_decode = None;
        self.news.deliver();
        let (ffn, attention) = (&mut *self.ffn, &mut self.attention);
        let is_recorded = outline.trace.is_some() || outline.profile;
        let attends = is_recorded.then_some(&mut self.recorder.attends);
        let outcomes = ffn
            .begin_step(outline)
            .map(|()| ahead.iter().for_each(|next| ffn.announce_ahead(next)))
            .and_then(|()| forward(attention, ffn, outline.step, stages, times, attends));
        ffn.end_step(outline.step);
        self.metrics.attention_us.add_time(times.attention);
        self.metrics.dispatch_us.add_time(times.dispatch);
        self.metrics.ffn_wait_us.add_time(times.ffn_wait);
        self.metrics.ffn_hidden_us.add_time(times.ffn_hidden);
        outcomes
    }

    fn finish_step(&mut self, stages: &[Stage], outcomes: StageOutcomes) {
        let start = Instant::now();
        self.loss = None;
        let mut failed = 0;
        for (stage, outcome) in stages.iter().zip(outcomes) {
            match outcome {
                Ok(output) => self.finish_stage(stage, &output),
                Err(error) => {
                    tracing::error!(%error, sequences = stage.items.len(), "a stage failed");
                    failed = 1;
                    stage.items.iter().for_each(|item| self.fail(item.sequence, error.clone()));
                }
            }
        }
        self.metrics.steps_failed.add(failed);
        self.metrics.sample_us.add_time(start.elapsed());
    }

    /// Nothing of the step was committed: its sequences run again once the FFN can be used, unless that has failed too
    /// often already.
    fn lose_step(&mut self, step: &Step, begun: Instant, loss: FfnLoss) {
        let what = loss.to_string();
        let (since, steps) = self.loss.take().map_or((begun, 0), |loss| (loss.since, loss.steps));
        tracing::warn!(loss = what, lost_in_a_row = steps + 1, "a step was lost");
        self.metrics.steps_failed.add(1);
        if steps >= MAX_STEP_REPEATS {
            let error = SequenceError::FfnUnavailable(what);
            step.items.iter().for_each(|item| self.fail(item.sequence, error.clone()));
        } else {
            let what = (!matches!(loss, FfnLoss::Bereft { .. })).then_some(what);
            self.loss = Some(Loss { since, steps: steps + 1, what });
        }
    }
}
