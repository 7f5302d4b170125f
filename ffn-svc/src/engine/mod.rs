//! The engine: one OS thread that owns the model and its device, and drives every link.
//!
//! On a hop's path it stands between the links and the model, around the [`crate::hop_queue`]. Other threads only pass
//! it links and calls, over a channel and a [`Doorbell`]; without work it sleeps on the bell. It runs what arrives: it
//! plans nothing, keeps no request, and an error in one hop is that hop's alone. If the thread ends without being asked
//! to, [`EngineHandle::ended`] says so and the process should not go on.
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use afd_common::frame::FrameHeader;
use afd_common::link::{Doorbell, HopLink};
use afd_common::routing::Routing;
use bytes::Bytes;
use crossbeam_channel::{Receiver, Sender, unbounded};
use tokio::sync::{oneshot, watch};

use crate::model::ExpertCounts;

mod accounts;
mod clock;
mod hop_error;
mod metrics;
mod stage_model;
mod staging;
#[doc(hidden)]
pub mod stepped;
mod steps;
mod stream_links;
#[cfg(test)]
mod stream_tests;
#[cfg(test)]
mod tests;
mod worker;

pub use accounts::{Begun, HopTimes, Planned, StepAccount, StepAccounts, TracedStep};
pub use hop_error::HopError;
pub use metrics::EngineMetrics;
pub use stage_model::{StageModel, StageSpec};
pub use stream_links::{
    GraphUse, HopMoments, OpenStream, OpenStreamError, OwnEnd, PeerEnd, PlannedStep, StepEnd, StepMode,
    StepRunner, StreamLinkId, StreamOwner,
};

use stream_links::{GiveUps, StreamCommand};

/// How an engine runs.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Most rows of one hop.
    pub max_rows: u32,
    /// Most rows of one batch, hops of all links together; at least `max_rows` to be of use.
    pub max_batch_rows: u32,
    /// Where its numbers go.
    pub metrics: EngineMetrics,
    /// Longest time that a hop waits for hops of other attention ranks at its layer; zero: none does.
    pub board: Duration,
    /// Added to the time that every batch takes; zero but for looking at a rank that is slow.
    pub inject_delay: Duration,
    /// Who chooses experts, where this role does.
    pub routing: Routing,
}

/// Links of one session, so that they can be ended together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SessionTag(pub u64);

/// Why the engine thread ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineEnd {
    /// It was asked to.
    Stopped,
    /// It panicked, with these words, or it could not use its device.
    Died(String),
}

/// What other threads say to the engine.
enum Command {
    Adopt { link: Box<dyn HopLink>, accounts: Arc<StepAccounts>, session: SessionTag, rank: u32 },
    CloseSession { session: SessionTag, reason: String },
    Call(Call),
    Stream(StreamCommand),
    Stop { reason: String },
}

/// One layer's FFN outside of any link.
struct Call {
    header: FrameHeader,
    body: Bytes,
    reply: oneshot::Sender<Result<Vec<u8>, HopError>>,
}

/// The way to a running engine. Dropping it stops the engine and waits for its thread.
pub struct EngineHandle {
    commands: Sender<Command>,
    bell: Doorbell,
    spec: Arc<StageSpec>,
    ended: watch::Receiver<Option<EngineEnd>>,
    metrics: EngineMetrics,
    expert_counts: Option<Arc<ExpertCounts>>,
    give_ups: GiveUps,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Starts the thread `engine`.
///
/// # Errors
/// When the system has no thread to give.
pub fn spawn(model: impl StageModel, options: EngineOptions) -> std::io::Result<EngineHandle> {
    let (commands, inbox) = unbounded();
    let (end, ended) = watch::channel(None);
    let (bell, spec, metrics) = (Doorbell::default(), Arc::new(model.spec()), options.metrics.clone());
    let bell_here = bell.clone();
    let expert_counts = model.expert_counts();
    let give_ups = GiveUps::default();
    let give_ups_there = give_ups.clone();
    let thread = std::thread::Builder::new().name("engine".into()).spawn(move || {
        let run = || run(model, options, (inbox, bell_here), give_ups_there);
        // What panics outside of the worker, or while it says farewell.
        let outcome = catch_unwind(AssertUnwindSafe(run));
        let outcome = outcome.unwrap_or_else(|panic| EngineEnd::Died(words_of(panic.as_ref())));
        if let EngineEnd::Died(what) = &outcome {
            tracing::error!(what, "the FFN engine thread died");
        }
        // Nobody may be left to hear it.
        let _ = end.send(Some(outcome));
    })?;
    let thread = Mutex::new(Some(thread));
    Ok(EngineHandle { commands, bell, spec, ended, metrics, expert_counts, give_ups, thread })
}

fn run(
    mut model: impl StageModel,
    options: EngineOptions,
    (inbox, bell): (Receiver<Command>, Doorbell),
    give_ups: GiveUps,
) -> EngineEnd {
    let _no_grad = tch::no_grad_guard();
    let _on_thread = match model.enter_thread() {
        Ok(on_thread) => on_thread,
        Err(what) => return EngineEnd::Died(what),
    };
    let mut worker = worker::Worker::new(model, options, (inbox, bell), give_ups);
    match catch_unwind(AssertUnwindSafe(|| worker.run())) {
        Ok(()) => EngineEnd::Stopped,
        Err(panic) => {
            let what = words_of(panic.as_ref());
            // Before the links are dropped, so that their peers hear why.
            worker.say_farewell(&format!("the FFN engine died: {what}"));
            EngineEnd::Died(what)
        }
    }
}

fn words_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no words").to_owned()
}

impl EngineHandle {
    /// What the model takes and returns.
    pub fn spec(&self) -> &Arc<StageSpec> {
        &self.spec
    }

    /// The engine's numbers.
    pub fn metrics(&self) -> &EngineMetrics {
        &self.metrics
    }

    /// How often experts were chosen, where the model counts that.
    pub fn expert_counts(&self) -> Option<&ExpertCounts> {
        self.expert_counts.as_deref()
    }

    /// What every link of this engine must ring.
    pub fn bell(&self) -> Doorbell {
        self.bell.clone()
    }

    /// Serves a link that belongs to no session, for the life of the engine.
    pub fn adopt(&self, link: Box<dyn HopLink>) {
        let accounts = Arc::new(StepAccounts::new(self.spec.layers.len() as u16, false));
        self.adopt_for(link, accounts, SessionTag(0), 0);
    }

    /// Serves a link of a session, which is attention rank `rank`'s, and keeps the session's accounts.
    pub fn adopt_for(
        &self,
        link: Box<dyn HopLink>,
        accounts: Arc<StepAccounts>,
        session: SessionTag,
        rank: u32,
    ) {
        self.tell(Command::Adopt { link, accounts, session, rank });
    }

    /// Ends the links of a session; their queued hops are dropped. What waits for its peer on a device is given up at once: the
    /// engine may be behind it.
    pub fn close_session(&self, session: SessionTag, reason: impl Into<String>) {
        self.give_ups.call(session);
        self.tell(Command::CloseSession { session, reason: reason.into() });
    }

    /// One layer's FFN on the rows of `header`, whose body is as in a dispatch frame: the result's bytes,
    /// `[rows, hidden]` in the combine dtype. Of the header's key only the layer is looked at.
    ///
    /// # Errors
    /// [`HopError`].
    pub async fn call(&self, header: FrameHeader, body: Bytes) -> Result<Vec<u8>, HopError> {
        let (reply, answer) = oneshot::channel();
        self.tell(Command::Call(Call { header, body, reply }));
        answer.await.unwrap_or(Err(HopError::Stopped))
    }

    /// Opens a link that a stream drives and serves it for its owner's session: what the peer needs to know. With NCCL the
    /// answer comes before both ends have joined.
    ///
    /// # Errors
    /// [`OpenStreamError`].
    pub async fn open_stream(
        &self,
        request: OpenStream,
        owner: StreamOwner,
    ) -> Result<OwnEnd, OpenStreamError> {
        let (reply, answer) = oneshot::channel();
        self.tell(Command::Stream(StreamCommand::Open { request, owner, reply }));
        answer.await.unwrap_or(Err(OpenStreamError::Stopped))
    }

    /// A session's plan came: the step is enqueued on its stream-driven links, if it has any.
    pub fn plan(&self, session: SessionTag, plan: PlannedStep) {
        self.tell(Command::Stream(StreamCommand::Plan { session, plan }));
    }

    /// Whether the engine can be given work.
    pub fn is_alive(&self) -> bool {
        self.ended.borrow().is_none()
    }

    /// Waits until the engine thread has ended, and says why.
    pub async fn ended(&self) -> EngineEnd {
        let mut ended = self.ended.clone();
        match ended.wait_for(Option::is_some).await.map(|end| end.clone()) {
            Ok(Some(end)) => end,
            _ => EngineEnd::Died("its thread is gone".into()),
        }
    }

    /// Ends all links with `reason` and waits for the thread. Blocks for at most one batch.
    pub fn stop(&self, reason: impl Into<String>) {
        self.tell(Command::Stop { reason: reason.into() });
        let thread = self.thread.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        if let Some(thread) = thread {
            // Its end, a panic included, was reported already.
            let _ = thread.join();
        }
    }

    fn tell(&self, command: Command) {
        // An engine that has ended takes nothing: what is in the command is dropped, which its other side notices.
        let _ = self.commands.send(command);
        self.bell.ring();
    }
}

impl Drop for EngineHandle {
    fn drop(&mut self) {
        self.stop("the FFN rank is stopping");
    }
}

impl fmt::Debug for EngineHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineHandle").field("alive", &self.is_alive()).finish_non_exhaustive()
    }
}
