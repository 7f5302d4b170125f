//! What the way to the FFN counts, as plain atomics: written by the engine thread, read by `/metrics` and `/health`.
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use afd_common::ids::Shard;
use afd_common::link::LinkKind;
use afd_common::link::book::LinkBook;
use afd_common::proto::v1;
use afd_common::telemetry::metrics::{Histogram, HistogramVec};
use tokio::sync::watch;

use super::hop_table::Arrival;

/// Reports of profiled steps that are kept.
const MAX_REPORTS: usize = 4096;

/// What an FFN rank said of a step that was profiled.
#[derive(Clone, Debug, PartialEq)]
pub struct FfnReport {
    /// For people.
    pub peer: Arc<str>,
    /// Which part of every layer it owns.
    pub shard: Shard,
    /// With the times of its hops.
    pub report: v1::StepReport,
}

/// Reports that nobody has taken yet, the oldest given up first.
#[derive(Debug, Default)]
pub struct FfnReports(Mutex<VecDeque<FfnReport>>);

impl FfnReports {
    /// Keeps a report, if it has times.
    pub fn handle_report(&self, peer: &Arc<str>, shard: Shard, report: v1::StepReport) {
        if report.hops.is_empty() {
            return;
        }
        let mut reports = self.lock();
        if reports.len() == MAX_REPORTS {
            reports.pop_front();
        }
        reports.push_back(FfnReport { peer: Arc::clone(peer), shard, report });
    }

    /// Takes all.
    pub fn take(&self) -> Vec<FfnReport> {
        self.lock().drain(..).collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<FfnReport>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Counters of all edges together.
#[derive(Debug, Default)]
pub struct FfnStats {
    /// Every shard has a rank.
    ready: watch::Sender<bool>,
    /// Hops dispatched (once per hop, whatever the number of shards).
    pub hops: AtomicU64,
    /// Rows of these.
    pub rows: AtomicU64,
    /// Rows sent, by shard; repetitions count again.
    shard_rows: OnceLock<Vec<AtomicU64>>,
    /// Time the engine waited for combines, microseconds.
    pub wait_us: AtomicU64,
    /// Ranks that joined late and are being warmed up, now.
    pub cold: AtomicU64,
    /// Ranks lost.
    pub losses: AtomicU64,
    /// Parts of hops sent again.
    pub replays: AtomicU64,
    /// Steps that came as they had been told ahead.
    pub plans_ahead: AtomicU64,
    /// Plans that did not fit into an edge's queue.
    pub plans_dropped: AtomicU64,
    /// Answers to hops that nobody waits for.
    pub dropped_unknown: AtomicU64,
    /// Answers of an edge that the part was no longer waiting on.
    pub dropped_stale: AtomicU64,
    /// From a part's sending to its answer, by kind of link; where somebody looks.
    pub hop_seconds: OnceLock<HistogramVec>,
    /// What went over the links.
    pub links: Arc<LinkBook>,
    /// Of steps that were profiled.
    pub reports: Arc<FfnReports>,
}

impl FfnStats {
    /// Whether every shard has a rank.
    pub fn is_ready(&self) -> bool {
        *self.ready.borrow()
    }

    /// Follows it.
    pub fn watch_ready(&self) -> watch::Receiver<bool> {
        self.ready.subscribe()
    }

    pub(super) fn set_ready(&self, ready: bool) {
        self.ready.send_if_modified(|was| std::mem::replace(was, ready) != ready);
    }

    pub(super) fn handle_dispatch(&self, rows: u32) {
        self.hops.fetch_add(1, Relaxed);
        self.rows.fetch_add(rows.into(), Relaxed);
    }

    /// It is known how many shards there are.
    pub(super) fn handle_shards(&self, num_shards: usize) {
        self.shard_rows.get_or_init(|| (0..num_shards).map(|_| AtomicU64::new(0)).collect());
    }

    /// A link took a shard's rows of a hop.
    pub(super) fn handle_sent(&self, shard: usize, rows: u32) {
        if let Some(count) = self.shard_rows.get().and_then(|counts| counts.get(shard)) {
            count.fetch_add(rows.into(), Relaxed);
        }
    }

    /// Rows sent so far, by shard; empty before any rank has joined.
    pub fn shard_rows(&self) -> Vec<u64> {
        self.shard_rows.get().into_iter().flatten().map(|count| count.load(Relaxed)).collect()
    }

    pub(super) fn handle_combine(&self, waited: Duration) {
        self.wait_us.fetch_add(waited.as_micros() as u64, Relaxed);
    }

    pub(super) fn handle_loss(&self, replays: usize) {
        self.losses.fetch_add(1, Relaxed);
        self.replays.fetch_add(replays as u64, Relaxed);
    }

    /// Where an edge of this kind counts its hops.
    pub(super) fn hop_seconds_of(&self, kind: LinkKind) -> Option<Histogram> {
        Some(self.hop_seconds.get()?.with_label_values(&[&kind.to_string()]))
    }

    pub(super) fn handle_plan_ahead(&self) {
        self.plans_ahead.fetch_add(1, Relaxed);
    }

    pub(super) fn handle_plan_dropped(&self) {
        self.plans_dropped.fetch_add(1, Relaxed);
    }

    pub(super) fn handle_arrival(&self, arrival: Arrival) {
        match arrival {
            Arrival::Accepted => {}
            Arrival::Unknown => drop(self.dropped_unknown.fetch_add(1, Relaxed)),
            Arrival::Stale => drop(self.dropped_stale.fetch_add(1, Relaxed)),
        }
    }
}
