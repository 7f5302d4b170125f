//! The engine's loop: take commands, end what has ended, run a step, sleep when there is nothing to do.
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use afd_common::ids::StepId;
use afd_common::link::Doorbell;
use crossbeam_channel::Receiver;
use tokio::sync::watch;

use super::active::{Active, News};
use super::decode::LastDecode;
use super::handle::Command;
use super::profile::Profile;
use super::step::Planned;
use super::trace::StepRecorder;
use super::{AttentionPort, EngineConfig, EngineDeath, EngineMetrics, EngineState, FfnPort};
use crate::kv_cache::BlockPool;
use crate::request::{FinishReason, SequenceError, SequenceId};
use crate::sampler::Scratch;
use crate::scheduler::{NewSequence, Scheduler, StageCounts};

/// How soon a caller that went away is noticed while no step runs.
const WAITING_TICK: Duration = Duration::from_millis(50);

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
    pub(super) recorder: StepRecorder,
    pub(super) stage_counts: StageCounts,
    pub(super) profile: Option<Profile>,
    pub(super) last_step: StepId,
    /// The FFN ranks that were there before the first step have been warmed up.
    pub(super) ranks_are_warm: bool,
    /// Prompts of all sizes have run, where that makes the first ones faster.
    pub(super) prompts_are_warm: bool,
    /// The decode step that was the last to run.
    pub(super) last_decode: Option<LastDecode>,
    /// The step that the device has behind the last one.
    pub(super) launched: Option<Planned>,
    /// Set while the FFN cannot be used.
    pub(super) loss: Option<Loss>,
    /// Set while the ranks of some shard are about to stop.
    pub(super) leaving_since: Option<Instant>,
    /// The FFN could be used once.
    pub(super) was_ready: bool,
}

pub(super) struct Loss {
    pub(super) since: Instant,
    /// Steps lost in a row.
    pub(super) steps: u32,
    /// What the last of them was lost with, unless that was what is waited for: a shard without a rank.
    pub(super) what: Option<String>,
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
            ranks_are_warm: false,
            prompts_are_warm: false,
            last_decode: None,
            launched: None,
            loss: None,
            leaving_since: None,
            was_ready: false,
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
            if self.launched.is_some() {
                // Whatever comes of the ranks, the step is waited for first.
                self.step()?;
                self.publish();
                continue;
            }
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
                self.last_decode = None;
                self.news.deliver();
                self.bell.wait(seen, self.wake_at(now));
            }
        }
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Abort(id) => self.finish(id, FinishReason::Cancelled),
            Command::FailAll(error) => self.fail_all(&error),
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

    pub(super) fn change_state(&self, from: &EngineState, to: EngineState) {
        self.state.send_if_modified(|state| {
            let changes = state == from;
            if changes {
                *state = to;
            }
            changes
        });
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
        [tick, drained, self.scheduler.next_deadline(), self.ffn.wake_at()].into_iter().flatten().min()
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
