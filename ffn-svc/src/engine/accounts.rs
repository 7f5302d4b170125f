//! What a session's steps cost: written by the engine thread hop by hop, read by the session's control stream, which
//! makes step reports of it. No clock of its own: times are passed in, microseconds since the Unix epoch.
//!
//! A step is over when the last layer of every planned stage has been served, or when the attention rank says that nothing
//! more comes of it, as it does where the last layers had no row for this shard; without a plan, or with fewer stages than
//! planned, when a hop of a later step begins. What nobody collects is bounded and the oldest is given up.
//!
//! A plan says whether its step is recorded, and its hops may be here first: they travel another way. So, where traces are
//! exported at all, the times of a step without a plan are kept until its plan comes, in buffers that are used again.
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};

use afd_common::ids::{Epoch, HopKey, LayerIdx, StepId};
use afd_common::telemetry::TraceContext;
use tokio::sync::Notify;

/// Steps under way at once, planned ones included.
const MAX_OPEN: usize = 16;
/// Steps that are over and not yet reported.
const MAX_FINISHED: usize = 64;
/// Hops whose times are kept, per step.
const MAX_TIMINGS: usize = 4096;
/// Steps that are over, whose plan may still come and want their times.
const MAX_UNCLAIMED: usize = 8;
/// Recorded steps that nobody took yet.
const MAX_TRACED: usize = 64;
/// Stages that a buffer is made for at first.
const USUAL_STAGES: usize = 2;

/// Times of one served hop, microseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopTimes {
    /// Which hop.
    pub key: HopKey,
    /// Its rows.
    pub rows: u32,
    /// Rows of the batch it was computed in.
    pub batch_rows: u32,
    /// Hops of that batch.
    pub batch_hops: u32,
    /// On which life of the link it came.
    pub epoch: Epoch,
    /// When the engine saw it.
    pub arrived_us: u64,
    /// When its batch began to be computed.
    pub started_us: u64,
    /// When its batch had been computed.
    pub finished_us: u64,
    /// When its result had been handed to the link.
    pub sent_us: u64,
}

/// What one step cost. Times are summed over its hops; a hop that shared a batch counts the whole batch's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepAccount {
    /// Which step.
    pub step: StepId,
    /// Hops served.
    pub num_hops: u32,
    /// Rows served.
    pub num_rows: u64,
    /// Waiting, microseconds.
    pub queue_us: u64,
    /// Computing, microseconds.
    pub compute_us: u64,
    /// Sending, microseconds.
    pub send_us: u64,
    /// Last layer begun.
    pub last_layer: LayerIdx,
    /// First failure: gRPC code and message.
    pub error: Option<(i32, String)>,
    /// Times of its hops, when the plan asked for a profile.
    pub hops: Vec<HopTimes>,
    plan: Option<Planned>,
    last_layer_hops: u32,
    /// Not served yet.
    hops_begun: u32,
}

/// What an accepted plan says about the account of its step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Planned {
    /// Stages of the step.
    pub stages: u32,
    /// Whether the times of its hops are to be reported.
    pub profile: bool,
    /// The step's own span, when its hops are to be recorded as children of it.
    pub trace: Option<TraceContext>,
    /// Whether nobody waits for what the step computes.
    pub is_warmup: bool,
}

/// What is known of a hop that begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begun {
    /// There was a plan of its step.
    pub is_planned: bool,
    /// Its step is one of warm-up; without a plan of it, the last step that was planned is.
    pub is_warmup: bool,
}

/// A recorded step, or a part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracedStep {
    /// The step's own span.
    pub trace: TraceContext,
    /// Times of its hops.
    pub hops: Vec<HopTimes>,
}

/// See the module's head. Shared by a session's links and its control stream.
#[derive(Debug)]
pub struct StepAccounts {
    num_layers: u16,
    /// Whether steps may be recorded.
    records: bool,
    book: Mutex<Book>,
    finished: Notify,
    turns: AtomicU64,
    /// The control stream speaks seldom, and wants to be told of the next turn.
    is_resting: AtomicBool,
}

#[derive(Debug, Default)]
struct Book {
    /// Oldest step first.
    open: VecDeque<StepAccount>,
    finished: VecDeque<StepAccount>,
    last_begun: Option<HopKey>,
    /// The last step that is over, as are those before it.
    over: Option<StepId>,
    /// Times of steps that ended without a plan, oldest first.
    unclaimed: VecDeque<(StepId, Vec<HopTimes>)>,
    traced: VecDeque<TracedStep>,
    /// Empty buffers.
    spare: Vec<Vec<HopTimes>>,
    /// Whether the last step that a plan came of is one of warm-up.
    warms: bool,
}

impl StepAccounts {
    /// For a model of `num_layers` layers. `records` says whether traces are exported.
    pub fn new(num_layers: u16, records: bool) -> Self {
        let mut book = Book::default();
        if records {
            let buffer = || Vec::with_capacity(usize::from(num_layers) * USUAL_STAGES);
            book.spare.resize_with(MAX_UNCLAIMED + 2, buffer);
        }
        Self {
            num_layers,
            records,
            book: Mutex::new(book),
            finished: Notify::new(),
            turns: AtomicU64::new(0),
            is_resting: AtomicBool::new(false),
        }
    }

    /// Of a session whose steps are planned: hops that come before the first plan are taken for its warm-up, which is what an
    /// attention rank begins with.
    pub fn warm_at_first(self) -> Self {
        self.lock().warms = true;
        self
    }

    /// Executions begun for hops of the session, or while hops of it waited.
    pub fn turns(&self) -> u64 {
        self.turns.load(Relaxed)
    }

    /// Another one begins.
    pub fn handle_turn(&self) {
        self.turns.fetch_add(1, Relaxed);
        if self.is_resting.load(Relaxed) && self.is_resting.swap(false, Relaxed) {
            self.finished.notify_one();
        }
    }

    /// The control stream speaks seldom from here on: the next turn ends [`wait_finished`](Self::wait_finished).
    pub fn rest(&self) {
        self.is_resting.store(true, Relaxed);
    }

    /// Whether no turn has begun since.
    pub fn is_resting(&self) -> bool {
        self.is_resting.load(Relaxed)
    }

    /// The last hop that began; `None` before the first.
    pub fn last_begun(&self) -> Option<HopKey> {
        self.lock().last_begun
    }

    /// Whether a step has begun and not ended.
    pub fn under_way(&self) -> bool {
        self.lock().open.iter().any(|account| account.num_hops > 0)
    }

    /// A plan came, or a newer revision of it.
    pub fn handle_plan(&self, step: StepId, plan: Planned) {
        let plan = Planned { trace: plan.trace.filter(|_| self.records), ..plan };
        let mut book = self.lock();
        book.warms = plan.is_warmup;
        if let Some(at) = book.unclaimed.iter().position(|(unclaimed, _)| *unclaimed == step) {
            // It came after its step was over.
            if let Some((_, hops)) = book.unclaimed.remove(at) {
                book.trace(plan.trace, hops);
                self.finished.notify_one();
            }
            return;
        }
        let account = book.account(step);
        account.plan = Some(plan);
        if plan.trace.is_none() && !plan.profile {
            let hops = std::mem::take(&mut account.hops);
            book.recycle(hops);
        }
        self.close_served(&mut book, step);
    }

    /// A plan was withdrawn, or nothing more comes of a step: what has come of it, and of those before it, is all.
    pub fn handle_cancel(&self, step: StepId) {
        let mut book = self.lock();
        // Hops of it may still be on their way.
        book.over = book.over.max(Some(step));
        self.close_over(&mut book);
    }

    /// A hop is about to be computed. Ends every earlier step.
    pub fn handle_begin(&self, key: HopKey) -> Begun {
        let mut book = self.lock();
        book.last_begun = Some(key);
        book.over = book.over.max(key.step.0.checked_sub(1).map(StepId));
        self.close_over(&mut book);
        let warms = book.warms;
        let account = book.account(key.step);
        account.last_layer = key.layer;
        account.hops_begun += 1;
        let plan = account.plan;
        Begun { is_planned: plan.is_some(), is_warmup: plan.map_or(warms, |plan| plan.is_warmup) }
    }

    /// A hop was served.
    pub fn handle_served(&self, times: &HopTimes) {
        let mut book = self.lock();
        let mut spare = std::mem::take(&mut book.spare);
        let account = book.account(times.key.step);
        account.num_hops += 1;
        account.hops_begun = account.hops_begun.saturating_sub(1);
        account.num_rows += u64::from(times.rows);
        account.queue_us += times.started_us.saturating_sub(times.arrived_us);
        account.compute_us += times.finished_us.saturating_sub(times.started_us);
        account.send_us += times.sent_us.saturating_sub(times.finished_us);
        let kept = account.plan.map_or(self.records, |plan| plan.profile || plan.trace.is_some());
        if kept && account.hops.len() < MAX_TIMINGS {
            if account.hops.capacity() == 0 {
                account.hops = spare.pop().unwrap_or_default();
            }
            account.hops.push(*times);
        }
        account.last_layer_hops += u32::from(times.key.layer.0 + 1 == self.num_layers);
        book.spare = spare;
        self.close_served(&mut book, times.key.step);
    }

    /// A hop failed. The first failure of a step is kept.
    pub fn handle_failed(&self, step: StepId, code: i32, message: &str) {
        let mut book = self.lock();
        let account = book.account(step);
        account.num_hops += 1;
        account.hops_begun = account.hops_begun.saturating_sub(1);
        account.error.get_or_insert_with(|| (code, message.to_owned()));
        self.close_over(&mut book);
    }

    /// A step ended before its last hop: nothing more comes of it, and it is reported at once.
    pub fn handle_lost(&self, step: StepId, code: i32, message: &str) {
        let mut book = self.lock();
        book.account(step).error.get_or_insert_with(|| (code, message.to_owned()));
        if let Some(at) = book.open.iter().position(|account| account.step == step)
            && let Some(account) = book.open.remove(at)
        {
            book.finish(account);
            self.finished.notify_one();
        }
    }

    /// The oldest step that is over and was not taken yet.
    pub fn take_finished(&self) -> Option<StepAccount> {
        self.lock().finished.pop_front()
    }

    /// The oldest recorded step that was not taken yet.
    pub fn take_traced(&self) -> Option<TracedStep> {
        self.lock().traced.pop_front()
    }

    /// Gives the buffer of a recorded step back.
    pub fn recycle(&self, step: TracedStep) {
        self.lock().recycle(step.hops);
    }

    /// Waits until [`take_finished`](Self::take_finished) or [`take_traced`](Self::take_traced) may have something, or a
    /// [rest](Self::rest) is over. One task may wait.
    pub async fn wait_finished(&self) {
        self.finished.notified().await;
    }

    /// Ends a step that has been served.
    fn close_served(&self, book: &mut Book, step: StepId) {
        let is_served = |account: &StepAccount| {
            account.step == step && account.plan.is_some_and(|plan| account.last_layer_hops >= plan.stages)
        };
        if book.open.iter().any(is_served) {
            book.over = book.over.max(Some(step));
        }
        self.close_over(book);
    }

    /// Ends the steps that are over, but for those of which a hop has begun and is not on the account yet: the attention rank may
    /// have its answer already.
    fn close_over(&self, book: &mut Book) {
        let mut at = 0;
        while let Some(account) = book.open.get(at).filter(|account| Some(account.step) <= book.over) {
            if account.hops_begun > 0 {
                at += 1;
            } else if let Some(account) = book.open.remove(at).filter(|account| account.num_hops > 0) {
                book.finish(account);
                self.finished.notify_one();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Book {
    /// The open account of a step, made when it has none.
    fn account(&mut self, step: StepId) -> &mut StepAccount {
        let at = self.open.partition_point(|account| account.step < step);
        if self.open.get(at).is_none_or(|account| account.step != step) {
            self.open.insert(at, StepAccount { step, ..StepAccount::default() });
        }
        let mut at = at;
        if self.open.len() > MAX_OPEN {
            // The oldest goes, or, when that is the one asked for, the newest.
            if at == 0 {
                self.open.pop_back()
            } else {
                self.open.pop_front()
            };
            at = at.saturating_sub(1);
        }
        &mut self.open[at]
    }

    fn finish(&mut self, mut account: StepAccount) {
        let hops = std::mem::take(&mut account.hops);
        match account.plan {
            Some(Planned { profile: true, trace, .. }) => {
                account.hops = hops.clone();
                self.trace(trace, hops);
            }
            Some(plan) => self.trace(plan.trace, hops),
            None if hops.is_empty() => self.recycle(hops),
            None => {
                if self.unclaimed.len() == MAX_UNCLAIMED
                    && let Some((_, hops)) = self.unclaimed.pop_front()
                {
                    self.recycle(hops);
                }
                self.unclaimed.push_back((account.step, hops));
            }
        }
        if self.finished.len() == MAX_FINISHED {
            self.finished.pop_front();
        }
        self.finished.push_back(account);
    }

    /// Keeps the times of a step for whoever makes spans of them, if it is recorded.
    fn trace(&mut self, trace: Option<TraceContext>, hops: Vec<HopTimes>) {
        let Some(trace) = trace.filter(|_| !hops.is_empty()) else { return self.recycle(hops) };
        if self.traced.len() == MAX_TRACED
            && let Some(oldest) = self.traced.pop_front()
        {
            self.recycle(oldest.hops);
        }
        self.traced.push_back(TracedStep { trace, hops });
    }

    fn recycle(&mut self, mut hops: Vec<HopTimes>) {
        if hops.capacity() > 0 && self.spare.len() < MAX_UNCLAIMED + 2 {
            hops.clear();
            self.spare.push(hops);
        }
    }
}

#[cfg(test)]
mod tests;
