//! Links that a CUDA stream drives, as the engine sees them. Where rows of a host-driven link meet the hop queue, here a
//! whole step is enqueued when its plan comes, and the engine looks now and then whether it is over. What enqueues is a
//! [`StepRunner`]: the model on its device. Steps run in the order of their plans, all links' on one stream.
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use afd_common::ids::{Epoch, StepId};
use afd_common::link::{LinkKind, LinkStats};
use afd_gpu::channel::{GiveUp, Offer};
use tokio::sync::oneshot;

use super::{SessionTag, StepAccounts};

/// Names a stream-driven link within the engine; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamLinkId(pub u64);

/// A link to be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenStream {
    /// What the peer offers.
    pub peer: PeerEnd,
    /// Lifetime of the link.
    pub epoch: Epoch,
    /// Stages in flight: slots of the channel.
    pub num_stages: u32,
    /// Most rows of a stage.
    pub max_rows: u32,
    /// How long a wait waits.
    pub patience: Duration,
    /// How long opening may take.
    pub deadline: Duration,
}

/// The peer's end, by kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerEnd {
    /// Memory to be mapped.
    CudaIpc(Offer),
    /// It waits for ids.
    Nccl,
}

impl PeerEnd {
    /// The link's kind.
    pub fn kind(&self) -> LinkKind {
        match self {
            Self::CudaIpc(_) => LinkKind::CudaIpc,
            Self::Nccl => LinkKind::Nccl,
        }
    }
}

/// This end, for the peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnEnd {
    /// Memory to be mapped; the link is up.
    CudaIpc(Offer),
    /// What both join: towards the FFN, towards attention.
    Nccl([[u8; 128]; 2]),
}

/// Why a link is not opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenStreamError {
    /// The model is not on a GPU.
    #[error("this FFN rank has no GPU (--device)")]
    NoDevice,
    /// Another kind of link may work.
    #[error("{0}")]
    NotShared(String),
    /// The request cannot be served as it is.
    #[error("{0}")]
    Invalid(String),
    /// The device or the transport refused.
    #[error("{0}")]
    Failed(String),
    /// The engine has ended.
    #[error("the FFN engine has stopped")]
    Stopped,
}

/// What a plan asks of a stream-driven link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedStep {
    /// Which step.
    pub step: StepId,
    /// Rows of every stage's frames.
    pub stage_rows: Vec<u32>,
    /// Phase, as in the protocol: a part of a graph's key.
    pub phase: i32,
    /// How to run it.
    pub graph: GraphUse,
    /// Whether the times of its hops are wanted.
    pub profile: bool,
}

/// What the peer does with its own graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GraphUse {
    /// Nothing.
    None,
    /// Captures it.
    Capture,
    /// Launches it again.
    Replay,
}

/// How a step was run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepMode {
    /// One launch of a graph that was there.
    Replayed,
    /// Captured, then launched.
    Captured,
    /// Operation by operation, for this reason.
    Eager(&'static str),
}

impl StepMode {
    /// For metrics: how, and why not by a graph.
    pub fn labels(self) -> [&'static str; 2] {
        match self {
            Self::Replayed => ["replayed", ""],
            Self::Captured => ["captured", ""],
            Self::Eager(why) => ["eager", why],
        }
    }
}

/// A step that is over on the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepEnd {
    /// On which link.
    pub link: StreamLinkId,
    /// Which step.
    pub step: StepId,
    /// Rows of its stages.
    pub stage_rows: Vec<u32>,
    /// Of every hop, layer by layer and stage by stage, where that was wanted.
    pub hops: Vec<HopMoments>,
    /// Why it failed: the link is of no more use.
    pub failure: Option<String>,
}

/// When the device came to the parts of a hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopMoments {
    /// Its rows were there.
    pub arrived: Instant,
    /// Its result was there.
    pub computed: Instant,
    /// It was sent.
    pub sent: Instant,
}

/// What runs whole steps on a device. It lives on the engine's thread.
///
/// # Contract
/// - [`begin`](Self::begin) enqueues and returns; it may wait for the device only where what is enqueued before does not
///   wait for what would be enqueued after. Steps end in the order in which they began.
/// - A link that failed ends every step that was begun on it; [`close`](Self::close) it.
pub trait StepRunner {
    /// Opens this end of a link. May block for the request's deadline. `grant` is told what the peer needs before this
    /// end waits for the peer. Gives what breaks the link while the engine's thread waits for it, where there is such a thing.
    ///
    /// # Errors
    /// [`OpenStreamError`]; nothing is open then. `grant` may have been told already.
    fn open(
        &mut self,
        id: StreamLinkId,
        request: &OpenStream,
        grant: &mut dyn FnMut(OwnEnd),
    ) -> Result<Option<GiveUp>, OpenStreamError>;

    /// Enqueues a step.
    ///
    /// # Errors
    /// Why it cannot be; the link is of no more use.
    fn begin(&mut self, link: StreamLinkId, plan: &PlannedStep) -> Result<StepMode, String>;

    /// The next step that is over.
    fn poll(&mut self) -> Option<StepEnd>;

    /// Steps begun and not over.
    fn num_begun(&self) -> usize;

    /// Ends a link and its steps, of which nothing is heard any more.
    fn close(&mut self, link: StreamLinkId);
}

/// What breaks the links of sessions, for threads beside the engine's.
#[derive(Clone, Default)]
pub(super) struct GiveUps(Arc<Mutex<Vec<(SessionTag, StreamLinkId, GiveUp)>>>);

impl GiveUps {
    fn lock(&self) -> MutexGuard<'_, Vec<(SessionTag, StreamLinkId, GiveUp)>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(super) fn add(&self, session: SessionTag, link: StreamLinkId, give_up: GiveUp) {
        self.lock().push((session, link, give_up));
    }

    pub(super) fn remove(&self, link: StreamLinkId) {
        self.lock().retain(|(_, known, _)| *known != link);
    }

    /// Breaks the links of a session that is over.
    pub(super) fn call(&self, session: SessionTag) {
        self.lock().iter().filter(|(known, ..)| *known == session).for_each(|(.., give_up)| give_up.call());
    }
}

/// What other threads want of the engine.
pub(super) enum StreamCommand {
    Open { request: OpenStream, owner: StreamOwner, reply: oneshot::Sender<Result<OwnEnd, OpenStreamError>> },
    Plan { session: SessionTag, plan: PlannedStep },
}

/// Whose link it is.
pub struct StreamOwner {
    /// For messages.
    pub peer: String,
    /// Where its steps are accounted for.
    pub accounts: Arc<StepAccounts>,
    /// The session.
    pub session: SessionTag,
}

/// A link in use.
pub(super) struct StreamSource {
    pub(super) id: StreamLinkId,
    pub(super) kind: LinkKind,
    pub(super) epoch: Epoch,
    pub(super) owner: StreamOwner,
    pub(super) stats: Arc<LinkStats>,
    /// When the steps under way began, oldest first, microseconds since the Unix epoch.
    pub(super) begun: VecDeque<(StepId, u64)>,
}
