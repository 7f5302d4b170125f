//! The engine's loop: take commands, end what has ended, run a step, sleep when there is nothing to do.
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use afd_common::ids::StepId;
use afd_common::link::Doorbell;
use afd_gpu::ops::DrawRule;
use crossbeam_channel::Receiver;
use tokio::sync::watch;

use super::active::{Active, News};
use super::forward::{ForwardTimes, StageOutcomes, forward};
use super::handle::Command;
use super::profile::{Profile, StepTimes};
use super::trace::{StepRecorder, StepTrace};
use super::{
    AttentionPort, DecodeRun, DecodeStage, EagerReason, EngineConfig, EngineDeath, EngineMetrics,
    EngineState, FfnLoss, FfnPort, StepOutline,
};
use crate::kv_cache::BlockPool;
use crate::request::{FinishReason, SequenceError, SequenceEvent, SequenceId, Usage};
use crate::sampler::Scratch;
use crate::scheduler::{
    ChosenStages, NewSequence, Phase, Scheduler, Stage, StageCounts, StagePick, StageRules, Step, StepItem,
};

/// How soon a caller that went away is noticed while no step runs.
const WAITING_TICK: Duration = Duration::from_millis(50);

/// A step whose FFN was lost runs again at most this often in a row before its sequences fail.
const MAX_STEP_REPEATS: u32 = 2;

/// More than any warm-up has.
const MAX_WARM_UP_STEPS: u64 = 1000;

/// Everything that the engine's thread owns.
pub(super) struct Engine<A: AttentionPort> {
    pub(super) config: EngineConfig,
    pub(super) scheduler: Scheduler,
    pub(super) attention: A,
    pub(super) ffn: Box<dyn FfnPort>,
    pub(super) sequences: HashMap<SequenceId, Active>,
    pub(super) scratch: Scratch,
    pub(super) news: News,
    pub(super) metrics: Arc<EngineMetrics>,
    pub(super) commands: Receiver<Command>,
    pub(super) state: Arc<watch::Sender<EngineState>>,
    bell: Doorbell,
    recorder: StepRecorder,
    stage_counts: StageCounts,
    profile: Option<Profile>,
    last_step: StepId,
    /// Set while the FFN cannot be used.
    loss: Option<Loss>,
}

struct Loss {
    since: Instant,
    /// Steps lost in a row.
    steps: u32,
    what: String,
}

impl<A: AttentionPort> Engine<A> {
    pub(super) fn new(
        config: EngineConfig,
        attention: A,
        ffn: Box<dyn FfnPort>,
        commands: Receiver<Command>,
        bell: Doorbell,
        state: Arc<watch::Sender<EngineState>>,
        metrics: Arc<EngineMetrics>,
    ) -> Self {
        let pool = BlockPool::new(config.num_blocks, config.block_size, config.prefix_cache);
        metrics.kv_blocks_total.set(pool.num_total());
        let recorder =
            StepRecorder::new(config.tracing.clone(), attention.num_layers(), config.stages.max_stages);
        let stage_counts = StageCounts::new(config.stages.max_stages);
        Self {
            scheduler: Scheduler::new(config.limits(), pool),
            config,
            attention,
            ffn,
            sequences: HashMap::new(),
            scratch: Scratch::default(),
            news: News::default(),
            metrics,
            commands,
            state,
            bell,
            recorder,
            stage_counts,
            profile: None,
            last_step: StepId(0),
            loss: None,
        }
    }

    /// Until it is drained.
    ///
    /// # Errors
    /// [`EngineDeath`] when nothing can be served any more.
    pub(super) fn run(&mut self) -> Result<(), EngineDeath> {
        loop {
            // Read before anything is looked at, so that no ring between looking and sleeping is lost.
            let seen = self.bell.count();
            while let Ok(command) = self.commands.try_recv() {
                self.handle(command);
            }
            let now = Instant::now();
            self.end_overdue(now);
            self.ffn.idle();
            let ready = self.ffn.ready() && self.warm_up()?;
            let ready = self.is_ffn_ready(ready, now);
            if self.is_drained(now) {
                self.news.deliver();
                return Ok(());
            }
            let ran = ready && self.step()?;
            self.publish();
            if !ran && self.ffn.withdraw() {
                self.last_step = StepId(self.last_step.0 + 1);
            }
            if !ran {
                self.news.deliver();
                self.bell.wait(seen, self.wake_at(now));
            }
        }
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Abort(id) => self.finish(id, FinishReason::Cancelled),
            Command::Profile(profile) => self.profile = Some(profile),
            Command::Submit(id, request, queued) => {
                let new = NewSequence {
                    id,
                    prompt: Arc::clone(&request.prompt),
                    stop: request.stop.clone(),
                    deadline: request.deadline,
                    prompt_logits: request.prompt_logprobs.is_some(),
                };
                self.sequences.insert(id, Active::new(request, queued, Instant::now()));
                if let Err(error) = self.scheduler.submit(new) {
                    self.fail(id, error);
                }
            }
        }
    }

    /// Ends sequences whose caller is gone or whose deadline has passed.
    fn end_overdue(&mut self, now: Instant) {
        let abandoned = self.sequences.iter().filter(|(_, active)| active.is_abandoned()).map(|(id, _)| *id);
        for id in abandoned.collect::<Vec<_>>() {
            self.finish(id, FinishReason::Cancelled);
        }
        for id in self.scheduler.expired(now) {
            let waited = self.sequences.get(&id).map_or(Duration::ZERO, |active| now - active.submitted);
            self.fail(id, SequenceError::DeadlineExceeded { waited_ms: waited.as_millis() as u64 });
        }
    }

    fn change_state(&self, from: &EngineState, to: EngineState) {
        self.state.send_if_modified(|state| {
            let changes = state == from;
            if changes {
                *state = to;
            }
            changes
        });
    }

    /// Makes whole decode steps ready on the device. Whether that is done, or there is nothing to do.
    fn warm_up(&mut self) -> Result<bool, EngineDeath> {
        if self.attention.is_warm(&mut *self.ffn) {
            self.change_state(&EngineState::Warming, EngineState::Running);
            return Ok(true);
        }
        self.change_state(&EngineState::Running, EngineState::Warming);
        let first = StepId(self.last_step.0 + 1);
        match self.attention.warm_up(&mut *self.ffn, first) {
            Ok(steps) => {
                self.last_step = StepId(self.last_step.0 + steps);
                self.change_state(&EngineState::Warming, EngineState::Running);
                Ok(true)
            }
            Err(FfnLoss::Fatal { what }) => Err(EngineDeath(what)),
            Err(loss) => {
                // Ids of steps that were begun are not used again.
                self.last_step = StepId(self.last_step.0 + MAX_WARM_UP_STEPS);
                tracing::warn!(loss = %loss, "warming up was cut short");
                Ok(false)
            }
        }
    }

    /// Whether the FFN can be used. While it cannot, fails those who have waited long enough for it.
    fn is_ffn_ready(&mut self, ready: bool, now: Instant) -> bool {
        self.metrics.ffn_ready.set(ready.into());
        if ready {
            // Lost steps in a row are forgotten only when one succeeds.
            self.loss.take_if(|loss| loss.steps == 0);
            return true;
        }
        let unready = || Loss { since: now, steps: 0, what: String::new() };
        let since = self.loss.get_or_insert_with(unready).since;
        let timeout = self.config.ffn_loss_timeout;
        let overdue =
            self.sequences.iter().filter(|(_, active)| now - since.max(active.submitted) >= timeout);
        let overdue = overdue.map(|(id, _)| *id).collect::<Vec<_>>();
        if !overdue.is_empty() {
            let (waited_ms, standing) = (timeout.as_millis(), self.ffn.standing());
            let mut what = format!("waited {waited_ms} ms (--ffn-loss-timeout) for FFN ranks: {standing}");
            if let Some(Loss { steps: 1.., what: lost, .. }) = &self.loss {
                what = format!("{what}; the last step was lost with {lost}");
            }
            overdue.into_iter().for_each(|id| self.fail(id, SequenceError::FfnUnavailable(what.clone())));
        }
        false
    }

    fn is_drained(&mut self, now: Instant) -> bool {
        let EngineState::Draining { deadline } = *self.state.borrow() else { return false };
        if now >= deadline {
            self.fail_all(&SequenceError::ShuttingDown);
        }
        self.sequences.is_empty() && self.commands.is_empty()
    }

    fn wake_at(&self, now: Instant) -> Option<Instant> {
        let tick = (!self.sequences.is_empty()).then(|| now + WAITING_TICK);
        let drained = match *self.state.borrow() {
            EngineState::Draining { deadline } => Some(deadline),
            _ => None,
        };
        [tick, drained, self.scheduler.next_deadline()].into_iter().flatten().min()
    }

    /// Runs one step, if there is anything to run.
    fn step(&mut self) -> Result<bool, EngineDeath> {
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
            let times = match self.ffn.device_times() {
                Some(times) => StepTimes { on_device: true, attends: &times.attends, hops: &times.hops },
                None => {
                    let (attends, hops) = (&self.recorder.attends, self.ffn.hop_records());
                    StepTimes { on_device: false, attends, hops }
                }
            };
            self.profile = profile.handle_step(&outline, start, times);
        }
        self.metrics.step_us.add_time(start.elapsed());
        Ok(true)
    }

    /// Into how many stages the step is split, if its rules allow that.
    fn choose_stages(&mut self, step: &Step) -> ChosenStages {
        let (rules, rows) = (&self.config.stages, step.num_tokens());
        let splittable = rules.splittable(step.phase(), step.items.len(), rows);
        match rules.pick {
            StagePick::Measured => self.stage_counts.choose(step.phase(), rows, splittable),
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
                Ok(DecodeRun::Done { outputs, replayed }) => {
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
            self.loss = Some(Loss { since, steps: steps + 1, what });
        }
    }

    /// Frees all that a sequence holds, before anybody is told of its end: whoever is told may count on it.
    fn take_out(&mut self, id: SequenceId) -> Option<(Active, Usage)> {
        let mut active = self.sequences.remove(&id)?;
        active.leave_queue();
        let usage = self.scheduler.remove(id).unwrap_or_default();
        self.publish();
        Some((active, usage))
    }

    /// Ends a sequence well. Nothing happens when it has already ended.
    pub(super) fn finish(&mut self, id: SequenceId, reason: FinishReason) {
        let Some((mut active, usage)) = self.take_out(id) else { return };
        let count = match reason {
            FinishReason::Stop => &self.metrics.finished_stop,
            FinishReason::Length => &self.metrics.finished_length,
            FinishReason::Cancelled => &self.metrics.finished_cancelled,
        };
        count.add(1);
        self.end_spans(&mut active, usage, None);
        active.tell(&mut self.news, SequenceEvent::Finished { reason, usage });
    }

    /// Ends a sequence with an error.
    pub(super) fn fail(&mut self, id: SequenceId, error: SequenceError) {
        let Some((mut active, usage)) = self.take_out(id) else { return };
        self.metrics.failed.add(1);
        self.end_spans(&mut active, usage, Some(&error));
        active.tell(&mut self.news, SequenceEvent::Failed(error));
    }

    fn end_spans(&self, active: &mut Active, usage: Usage, error: Option<&SequenceError>) {
        if let Some(spans) = active.spans.take() {
            spans.end(&self.recorder.spans, usage, error.map(SequenceError::to_string).as_deref());
        }
    }

    fn fail_all(&mut self, error: &SequenceError) {
        for id in self.sequences.keys().copied().collect::<Vec<_>>() {
            self.fail(id, error.clone());
        }
    }

    pub(super) fn publish(&self) {
        let Self { metrics, scheduler, .. } = self;
        metrics.running.set(scheduler.num_running());
        metrics.waiting.set(scheduler.num_waiting());
        metrics.kv_blocks_used.set(scheduler.pool().num_used());
        let totals = scheduler.totals();
        metrics.preemptions.set(totals.preemptions);
        metrics.prefix_queries.set(totals.prefix_queries);
        metrics.prefix_hits.set(totals.prefix_hits);
    }
}
