//! One step: schedule, choose stages, say what is coming, run the layers, commit what came of it.
//!
//! The loop around it is [`run`](super::run), the layers are [`forward`](super::forward).
use std::time::Instant;

use afd_common::ids::StepId;
use afd_gpu::ops::DrawRule;

use super::active::Active;
use super::forward::{ForwardTimes, StageOutcomes, forward};
use super::profile::{Profile, StepTimes};
use super::run::{Engine, Loss};
use super::trace::StepTrace;
use super::{AttentionPort, DecodeRun, DecodeStage, EagerReason, EngineDeath, FfnLoss, StepOutline};
use crate::request::SequenceError;
use crate::scheduler::{ChosenStages, Phase, Stage, StagePick, StageRules, Step, StepItem, StepLoad};

/// A step whose FFN was lost runs again at most this often in a row before its sequences fail.
const MAX_STEP_REPEATS: u32 = 2;

impl<A: AttentionPort> Engine<A> {
    /// Runs one step, if there is anything to run.
    pub(super) fn step(&mut self) -> Result<bool, EngineDeath> {
        let start = Instant::now();
        let Some(step) = self.scheduler.schedule() else { return Ok(false) };
        for id in &step.admitted {
            self.sequences.get_mut(id).into_iter().for_each(|active| active.handle_admitted(start));
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
        let span = tracing::debug_span!(
            "step",
            step = outline.step.0,
            phase = ?outline.phase,
            sequences = step.items.len(),
            tokens = step.num_tokens(),
            stages = stages.len(),
        );
        let _entered = span.entered();
        self.metrics.steps.add(1);
        self.metrics.schedule_us.add_time(start.elapsed());

        let mut times = ForwardTimes::default();
        let begun = Instant::now();
        let ahead = self.foresee(&step, &outline);
        let outcomes = self.run_layers(&outline, ahead.as_ref(), &stages, &mut times);
        self.metrics.note_stages(stages.len());
        if outcomes.is_ok() {
            self.stage_counts.handle_step(chosen, begun.elapsed().as_secs_f64() * 1e6);
        }
        self.note_step(&step, &times, trace.as_ref());
        let lost = outcomes.as_ref().err().map(FfnLoss::to_string);
        match outcomes {
            Ok(outcomes) => self.finish_step(&stages, outcomes),
            Err(FfnLoss::Fatal { what }) => return Err(EngineDeath(what)),
            Err(loss) => self.lose_step(&step, start, loss),
        }
        if let Some(trace) = trace {
            let hops = self.ffn.hop_records();
            self.recorder.end(&trace, &outline, start, &times, hops, lost.as_deref());
        }
        if let Some(profile) = self.profile.take() {
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
            self.profile = profile.handle_step(&outline, start, times);
        }
        if let Some(on_device) = times.on_device {
            self.metrics.note_decode(start.elapsed(), on_device);
        }
        self.metrics.step_us.add_time(start.elapsed());
        Ok(true)
    }

    /// Into how many stages the step is split, if its rules allow that.
    fn choose_stages(&mut self, step: &Step) -> ChosenStages {
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

    /// The next step, where this one will most likely be followed by its like: everybody decodes, nobody waits, and its
    /// hops are not to be recorded.
    fn foresee(&self, step: &Step, outline: &StepOutline) -> Option<StepOutline> {
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

    fn run_layers(
        &mut self,
        outline: &StepOutline,
        ahead: Option<&StepOutline>,
        stages: &[Stage],
        times: &mut ForwardTimes,
    ) -> Result<StageOutcomes, FfnLoss> {
        let (ffn, attention, news) = (&mut *self.ffn, &mut self.attention, &mut self.news);
        if outline.phase == Phase::Decode {
            let begun = Instant::now();
            let sequences = &self.sequences;
            let rule = |item: &StepItem| sequences.get(&item.sequence).map_or(DrawRule::Best, Active::rule);
            let rules: Vec<Vec<_>> =
                stages.iter().map(|stage| stage.items.iter().map(rule).collect()).collect();
            let decoded: Vec<_> = stages
                .iter()
                .zip(&rules)
                .map(|(stage, rules)| DecodeStage { batch: &stage.batch, rules })
                .collect();
            match attention.decode(ffn, outline, &decoded, &mut || news.deliver()) {
                Ok(DecodeRun::Unknown) => {}
                Ok(DecodeRun::Eager(reason)) => self.metrics.note_eager(reason),
                Ok(DecodeRun::Done { outputs, replayed, on_device }) => {
                    times.on_device = Some(on_device);
                    match replayed {
                        true => self.metrics.graph_replays.add(1),
                        false if outline.profile => self.metrics.note_eager(EagerReason::Profiled),
                        false => self.metrics.note_eager(EagerReason::Off),
                    }
                    ffn.end_step(outline.step);
                    times.attention = begun.elapsed();
                    self.metrics.attention_us.add_time(times.attention);
                    return Ok(outputs.into_iter().map(Ok).collect());
                }
                Err(loss) => {
                    ffn.end_step(outline.step);
                    return Err(loss);
                }
            }
        }
        news.deliver();
        let is_recorded = outline.trace.is_some() || outline.profile;
        let attends = is_recorded.then_some(&mut self.recorder.attends);
        let outcomes = ffn
            .begin_step(outline)
            .map(|()| ahead.into_iter().for_each(|next| ffn.announce_ahead(next)))
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
