//! The monolithic mode (`--ffn local`): the FFN role's own engine in this process, over a loopback link. The same code
//! on both sides of the same seam, so it serves as oracle for tests and as baseline for speed.
use std::sync::Arc;
use std::time::Instant;

use afd_common::frame::Checksum;
use afd_common::ids::Epoch;
use afd_common::link::loopback;
use afd_common::link::{Doorbell, Limits, LinkKind};
use afd_common::telemetry::SpanSink;
use ffn_svc::engine::{EngineHandle, SessionTag};
use ffn_svc::session::in_process::InProcess;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::edge::{Edge, EdgeEvent};
use super::hop_table::EdgeId;
use super::life::{EdgeControl, Life};

/// The engine serves this one link all its life.
const NO_SESSION: SessionTag = SessionTag(0);
/// Plans that may wait for the task beside the engine; what does not fit costs spans and nothing else.
const PLAN_QUEUE: usize = 64;

/// The rows of a full frame do not fit what a frame can carry.
#[derive(Debug, thiserror::Error)]
#[error("{max_rows} rows of {row_bytes} bytes do not fit a frame (--max-num-batched-tokens)")]
pub struct TooManyRows {
    max_rows: u32,
    row_bytes: usize,
}

/// Joins a running FFN engine to the port at the other end of `events`. `credits` are the stages in flight, `max_rows`
/// the most rows of a stage, `bell` the attention engine's, `spans` where those of the FFN's side of recorded steps go: they
/// are made in a task of the caller's, who must be in a tokio runtime then.
///
/// # Errors
/// [`TooManyRows`].
pub fn connect(
    engine: &EngineHandle,
    events: &crossbeam_channel::Sender<EdgeEvent>,
    bell: &Doorbell,
    credits: u32,
    max_rows: u32,
    spans: &SpanSink,
) -> Result<Option<JoinHandle<InProcess>>, TooManyRows> {
    let spec = engine.spec();
    let row_bytes = spec.max_row_bytes();
    let max_body_bytes =
        Limits::body_bytes(max_rows, row_bytes).ok_or(TooManyRows { max_rows, row_bytes })?;
    let limits = |peer: &str| Limits {
        kind: LinkKind::Loopback,
        peer: peer.to_owned(),
        epoch: Epoch(1),
        credits,
        max_rows,
        max_body_bytes,
        // Nothing is encoded.
        checksum: Checksum::default(),
    };
    let here = (limits("FFN in this process"), bell.clone());
    let there = (limits("attention in this process"), engine.bell());
    let (here, there) = loopback::pair(here, there);
    let session = InProcess::new(engine, spans.clone());
    engine.adopt_for(Box::new(there), Arc::clone(session.accounts()), NO_SESSION, 0);
    // Without a trace nobody has to know what is planned.
    let (control, task) = match spans.is_on() {
        false => (None, None),
        true => {
            let (plans, planned) = mpsc::channel(PLAN_QUEUE);
            // This edge is never given up: its engine ends with the process, or the process with it.
            let (abandon, _) = mpsc::channel(1);
            let life = Arc::new(Life::new(Instant::now()));
            (Some(EdgeControl { plans, abandon, life }), Some(tokio::spawn(session.run(planned))))
        }
    };
    let edge = Edge {
        id: EdgeId(0),
        peer: Arc::from("FFN in this process"),
        shard: spec.shard,
        combine_dtype: spec.combine(),
        link: Box::new(here),
        control,
        hop_seconds: None,
        draining: false,
        warm_up: None,
    };
    // The port that would receive it is being built by the caller: it cannot be gone.
    let _ = events.send(EdgeEvent::Up(edge));
    bell.ring();
    Ok(task)
}
