//! Puts the parts of the way to the FFN together: the engine's port, the bell, and what runs beside it in tokio.
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use afd_common::link::Doorbell;
use afd_common::telemetry::SpanSink;
use ffn_svc::engine::EngineHandle as FfnEngineHandle;
use ffn_svc::session::in_process::InProcess;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::clock::WallClock;
use super::directory::Directory;
use super::local::{self, TooManyRows};
use super::port::{PortParts, RemoteFfn};
use super::session::{ControlSettings, Shared};
use super::settings::PortSettings;
use super::stats::FfnStats;
use crate::engine::FfnPort;

/// The engine's way to the FFN, before the engine has started.
pub struct Way {
    /// For the engine.
    pub port: Box<dyn FfnPort>,
    /// Rung by everything that concerns the engine.
    pub bell: Doorbell,
    /// For metrics and readiness.
    pub stats: Arc<FfnStats>,
}

/// A way to FFN ranks behind `names` (`host:port`), and the directory whose `run` finds and joins them.
pub fn remote(names: Vec<String>, control: ControlSettings, port: PortSettings) -> (Way, Arc<Directory>) {
    let (bell, stats, started) = (Doorbell::default(), Arc::new(FfnStats::default()), Instant::now());
    let (events, receiver) = crossbeam_channel::unbounded();
    let shared = Shared {
        settings: control,
        events,
        bell: bell.clone(),
        started,
        shard_count: AtomicU32::new(0),
        next_edge: AtomicU64::new(1),
        changed: Notify::new(),
        vacated: Notify::new(),
        roster: Mutex::default(),
        reports: Arc::clone(&stats.reports),
    };
    let directory = Arc::new(Directory::new(names, Arc::new(shared), Arc::clone(&stats)));
    let described = Arc::clone(&directory);
    let parts = PortParts {
        bell: bell.clone(),
        events: receiver,
        clock: Box::new(WallClock),
        stats: Arc::clone(&stats),
        standing: Arc::new(move || described.describe()),
    };
    (Way { port: Box::new(RemoteFfn::new(port, parts)), bell, stats }, directory)
}

/// A way to an FFN engine in this process, and the task that makes its `spans`, if anybody wants them. `credits` are the
/// stages in flight, `max_rows` the most rows of a stage.
///
/// # Errors
/// [`TooManyRows`].
pub fn in_process(
    engine: &FfnEngineHandle,
    port: PortSettings,
    credits: u32,
    max_rows: u32,
    spans: &SpanSink,
) -> Result<(Way, Option<JoinHandle<InProcess>>), TooManyRows> {
    let (bell, stats) = (Doorbell::default(), Arc::new(FfnStats::default()));
    let (events, receiver) = crossbeam_channel::unbounded();
    let task = local::connect(engine, &events, &bell, credits, max_rows, spans)?;
    let parts = PortParts {
        bell: bell.clone(),
        events: receiver,
        clock: Box::new(WallClock),
        stats: Arc::clone(&stats),
        standing: Arc::new(|| "the FFN in this process is not there".into()),
    };
    Ok((Way { port: Box::new(RemoteFfn::new(port, parts)), bell, stats }, task))
}

/// A way that ends on the engine's own thread.
pub fn on_thread(port: Box<dyn FfnPort>) -> Way {
    let (bell, stats) = (Doorbell::default(), Arc::new(FfnStats::default()));
    stats.set_ready(true);
    Way { port, bell, stats }
}
