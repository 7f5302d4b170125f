//! The API's side of the engine: cheap to clone, never blocks, may be used from any thread or task.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use afd_common::link::Doorbell;
use crossbeam_channel::{Receiver, Sender};
use tokio::sync::{mpsc, watch};

use super::ffn_port::Ending;
use super::profile::{Profile, Recorded};
use super::{EngineConfig, EngineMetrics};
use crate::request::{SequenceError, SequenceId, SequenceRequest};
use crate::scheduler::{Scheduler, SchedulerLimits};

/// What the handle tells the engine's thread.
pub(super) enum Command {
    Submit(SequenceId, SequenceRequest, Queued),
    Abort(SequenceId),
    FailAll(SequenceError),
    Profile(Profile),
}

/// How the engine is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineState {
    /// Takes requests, and makes its steps ready before it runs any.
    Warming,
    /// Takes requests.
    Running,
    /// Takes none; finishes what it has until then.
    Draining {
        /// What is unfinished then fails.
        deadline: Instant,
    },
    /// Ended as it was told to.
    Stopped,
    /// Ended by itself: the process cannot serve any more.
    Died {
        /// Why.
        reason: String,
    },
}

/// See the module's head.
///
/// The channel to the engine is bounded by what may wait (`max_queue`): a submission is refused here before it is sent.
#[derive(Clone)]
pub struct EngineHandle {
    shared: Arc<Shared>,
    commands: Sender<Command>,
}

struct Shared {
    next_id: AtomicU64,
    queued: Arc<AtomicUsize>,
    max_queue: usize,
    limits: SchedulerLimits,
    pool_tokens: usize,
    bell: Doorbell,
    state: Arc<watch::Sender<EngineState>>,
    ending: Ending,
    metrics: Arc<EngineMetrics>,
}

/// One place in the queue: taken when a sequence is submitted, given back when this is dropped.
#[derive(Debug)]
pub(super) struct Queued(Arc<AtomicUsize>);

impl Drop for Queued {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl EngineHandle {
    pub(super) fn new(
        config: &EngineConfig,
        bell: Doorbell,
        state: Arc<watch::Sender<EngineState>>,
        metrics: Arc<EngineMetrics>,
    ) -> (Self, Receiver<Command>) {
        let (commands, receiver) = crossbeam_channel::unbounded();
        let shared = Shared {
            next_id: AtomicU64::new(1),
            queued: Arc::default(),
            max_queue: config.max_queue,
            limits: config.limits(),
            pool_tokens: config.pool_tokens(),
            bell,
            state,
            ending: Ending::default(),
            metrics,
        };
        (Self { shared: Arc::new(shared), commands }, receiver)
    }

    /// Queues a sequence. Its events arrive on the channel in the request; the last one is `Finished` or `Failed`.
    ///
    /// # Errors
    /// `QueueFull` (retry later), `TooLarge` (never fits), `ShuttingDown`, `Internal` when the engine has died or the
    /// prompt is empty. Nothing was queued then.
    pub fn submit(&self, request: SequenceRequest) -> Result<SequenceId, SequenceError> {
        match &*self.shared.state.borrow() {
            EngineState::Warming | EngineState::Running => {}
            EngineState::Draining { .. } | EngineState::Stopped => return Err(SequenceError::ShuttingDown),
            EngineState::Died { reason } => return Err(SequenceError::Internal(reason.clone())),
        }
        if request.prompt.is_empty() || request.stop.max_tokens == 0 {
            return Err(SequenceError::Internal("an empty prompt or max_tokens 0 reached the engine".into()));
        }
        let num_tokens = request.prompt.len() + request.stop.max_tokens as usize;
        Scheduler::check_size(&self.shared.limits, self.shared.pool_tokens, num_tokens)?;
        let queued = self.queue()?;
        let id = SequenceId(self.shared.next_id.fetch_add(1, Relaxed));
        self.send(Command::Submit(id, request, queued))?;
        Ok(id)
    }

    /// Ends a sequence within one step; it finishes as cancelled. Nothing happens when it has already ended. Its blocks
    /// are free when the step that it is in ends: until then attention writes to them. A step that waits for an FFN
    /// rank that is lost ends by `--ffn-loss-timeout`.
    pub fn abort(&self, id: SequenceId) {
        // An engine that has ended has told every sequence so.
        let _ = self.send(Command::Abort(id));
    }

    /// Records the next steps. Each comes when it has run, and the channel ends behind the last, or with the engine; dropping
    /// it ends the recording. There is one at a time: whoever calls again meanwhile takes its place.
    pub fn profile(&self, num_steps: usize) -> mpsc::UnboundedReceiver<Recorded> {
        // Bounded by the number of steps.
        let (sender, recorded) = mpsc::unbounded_channel();
        // An engine that has ended drops what it is sent, which ends the channel.
        let _ = self.send(Command::Profile(Profile::new(num_steps, sender)));
        recorded
    }

    /// Ends everything that is there, and was submitted before this, with an error.
    pub fn fail_all(&self, error: SequenceError) {
        // An engine that has ended has told every sequence so.
        let _ = self.send(Command::FailAll(error));
    }

    /// Takes nothing new from now on, finishes what there is until `deadline`, then fails the rest as `ShuttingDown` and
    /// ends the engine's thread. A second call may move the deadline.
    pub fn drain(&self, deadline: Instant) {
        self.shared.state.send_if_modified(|state| {
            use EngineState::{Draining, Running, Warming};
            let drains = matches!(state, Warming | Running | Draining { .. });
            if drains {
                *state = Draining { deadline };
                // Whoever waits within a step looks there.
                self.shared.ending.set(deadline);
            }
            drains
        });
        self.shared.bell.ring();
    }

    pub(super) fn ending(&self) -> &Ending {
        &self.shared.ending
    }

    /// How the engine is, and to be told when that changes.
    pub fn state(&self) -> watch::Receiver<EngineState> {
        self.shared.state.subscribe()
    }

    /// Whether a request would run now: the engine is up and every FFN shard has a warm rank.
    pub fn ready(&self) -> bool {
        *self.shared.state.borrow() == EngineState::Running && self.shared.metrics.ffn_ready.get() == 1
    }

    /// Resolves with the reason when the engine has died; never when it is stopped in order.
    pub async fn died(&self) -> String {
        let mut state = self.state();
        loop {
            if let EngineState::Died { reason } = &*state.borrow_and_update() {
                return reason.clone();
            }
            if state.changed().await.is_err() {
                return "the engine's thread is gone".into();
            }
        }
    }

    /// The engine's numbers.
    pub fn metrics(&self) -> &Arc<EngineMetrics> {
        &self.shared.metrics
    }

    fn queue(&self) -> Result<Queued, SequenceError> {
        let room = |waiting| (waiting < self.shared.max_queue).then_some(waiting + 1);
        match self.shared.queued.fetch_update(Relaxed, Relaxed, room) {
            Ok(_) => Ok(Queued(Arc::clone(&self.shared.queued))),
            Err(waiting) => Err(SequenceError::QueueFull { waiting }),
        }
    }

    fn send(&self, command: Command) -> Result<(), SequenceError> {
        self.commands.send(command).map_err(|_| SequenceError::ShuttingDown)?;
        self.shared.bell.ring();
        Ok(())
    }
}
