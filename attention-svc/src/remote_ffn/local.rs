//! The monolithic mode (`--ffn local`): the FFN role's own engine in this process, over a loopback link. The same code
//! on both sides of the same seam, so it serves as oracle for tests and as baseline for speed.
use std::sync::Arc;

use afd_common::ids::Epoch;
use afd_common::link::loopback;
use afd_common::link::{Doorbell, Limits, LinkKind};
use ffn_svc::engine::EngineHandle;

use super::edge::{Edge, EdgeEvent};
use super::hop_table::EdgeId;

/// The rows of a full frame do not fit what a frame can carry.
#[derive(Debug, thiserror::Error)]
#[error("{max_rows} rows of {row_bytes} bytes do not fit a frame (--max-num-batched-tokens)")]
pub struct TooManyRows {
    max_rows: u32,
    row_bytes: usize,
}

/// Joins a running FFN engine to the port at the other end of `events`. `credits` are the stages in flight, `max_rows`
/// the most rows of a stage, `bell` the attention engine's.
///
/// # Errors
/// [`TooManyRows`].
pub fn connect(
    engine: &EngineHandle,
    events: &crossbeam_channel::Sender<EdgeEvent>,
    bell: &Doorbell,
    credits: u32,
    max_rows: u32,
) -> Result<(), TooManyRows> {
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
    };
    let here = (limits("FFN in this process"), bell.clone());
    let there = (limits("attention in this process"), engine.bell());
    let (here, there) = loopback::pair(here, there);
    engine.adopt(Box::new(there));
    let edge = Edge {
        id: EdgeId(0),
        peer: Arc::from("FFN in this process"),
        shard: spec.shard,
        combine_dtype: spec.combine(),
        link: Box::new(here),
        control: None,
        hop_seconds: None,
        draining: false,
    };
    // The port that would receive it is being built by the caller: it cannot be gone.
    let _ = events.send(EdgeEvent::Up(edge));
    bell.ring();
    Ok(())
}
