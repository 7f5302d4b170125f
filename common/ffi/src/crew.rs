//! A few threads that stay, for loops that are too short to start threads for.
//!
//! [`Crew::run`] calls a function once for each of some chunks, on the caller's thread and on whichever of the crew are
//! awake in time. Chunks are taken one by one, so a thread that the system keeps waiting holds up nobody: with two
//! processes on two cores that is the rule, not the exception.
//!
//! Waking a thread takes as long as a small matrix product, and a step has a hundred of them a few microseconds apart. So
//! a thread without work looks for the next job for [`SPIN`] before it sleeps, giving way to whoever else wants its core:
//! within a step it is there, between steps and in an idle process it costs nothing.
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::futex::{self, Scope};

/// How long a thread looks for work before it sleeps: longer than the caller's own work between two jobs, and short
/// beside the time that another process on the same cores computes before it is this one's turn again.
const SPIN: Duration = Duration::from_micros(50);

/// Looks between two glances at the clock.
const LOOKS: u32 = 16;

/// Threads that help the one that calls [`run`](Self::run). Dropping the crew ends them.
pub struct Crew {
    shared: Arc<Shared>,
    /// One caller at a time.
    turn: Mutex<()>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    /// The number of the last job, whether it may still be begun, and how many threads are at work on it; see [`Stand`].
    stand: AtomicU64,
    /// Written by the caller while the job before is closed and nobody is at work.
    job: UnsafeCell<Option<Job>>,
    /// Counts what idle threads sleep on: jobs, and the end.
    posted: AtomicU32,
    sleepers: AtomicU32,
    /// Counts threads that left a closed job: what the caller sleeps on.
    left: AtomicU32,
    caller_sleeps: AtomicBool,
    panicked: AtomicBool,
    ended: AtomicBool,
    spin: Duration,
}

// SAFETY: `job` is only written under `turn` while no thread is at work and none can begin (`stand` is closed), and only
// read by threads that are at work, which `stand` orders after the write.
unsafe impl Sync for Shared {}

/// What [`Shared::stand`] says: the job's number in the upper half, then the bit that it is open, then the threads at work.
#[derive(Clone, Copy)]
struct Stand(u64);

impl Stand {
    const OPEN: u64 = 1 << 31;

    fn opened(number: u32) -> Self {
        Self(u64::from(number) << 32 | Self::OPEN)
    }

    fn number(self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn is_open(self) -> bool {
        self.0 & Self::OPEN != 0
    }

    fn at_work(self) -> u64 {
        self.0 & (Self::OPEN - 1)
    }
}

/// Borrowed from a running [`Crew::run`], which does not return while a thread is at work on it.
#[derive(Clone, Copy)]
struct Job {
    work: &'static (dyn Fn(usize) + Sync),
    next: &'static AtomicUsize,
    chunks: usize,
}

impl Job {
    fn take_part(&self) {
        loop {
            let chunk = self.next.fetch_add(1, Ordering::Relaxed);
            if chunk >= self.chunks {
                return;
            }
            (self.work)(chunk);
        }
    }
}

impl Crew {
    /// `threads` counts the caller, so 1 starts none.
    ///
    /// # Errors
    /// The system's, when a thread cannot be started.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        // Where threads outnumber cores, one that looks keeps another from working.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared::new(if threads <= cores { SPIN } else { Duration::ZERO }));
        let mut crew = Self { shared: Arc::clone(&shared), turn: Mutex::new(()), threads: Vec::new() };
        for index in 1..threads {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(format!("crew-{index}"));
            crew.threads.push(thread.spawn(move || shared.work_until_the_end())?);
        }
        Ok(crew)
    }

    /// How many threads take part, the caller's included.
    pub fn num_threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `work` once with every number below `chunks`, in any order, on several threads; returns when all calls have
    /// returned.
    ///
    /// # Panics
    /// If a call does, after all others have returned.
    pub fn run(&self, chunks: usize, work: &(dyn Fn(usize) + Sync)) {
        if self.threads.is_empty() || chunks <= 1 {
            (0..chunks).for_each(work);
            return;
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let next = AtomicUsize::new(0);
        // SAFETY: the lifetimes are only claimed to be longer. A thread uses the job while it is counted in `stand`, which
        // it can be only until the job is closed, and `close` below, which runs also when `take_part` panics (caught),
        // closes it and waits until nobody is counted. So nobody uses `work` or `next` after they end.
        let job = unsafe {
            Job {
                work: std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(work),
                next: std::mem::transmute::<&AtomicUsize, &'static AtomicUsize>(&next),
                chunks,
            }
        };
        self.shared.open(job);
        let mine = catch_unwind(AssertUnwindSafe(|| job.take_part()));
        // A panic must not leave chunks to be begun.
        next.fetch_max(chunks, Ordering::Relaxed);
        let others_panicked = self.shared.close();
        if let Err(panic) = mine {
            resume_unwind(panic);
        }
        assert!(!others_panicked, "a thread of the crew panicked");
    }
}

impl Shared {
    fn new(spin: Duration) -> Self {
        Self {
            stand: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            posted: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            left: AtomicU32::new(0),
            caller_sleeps: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            spin,
        }
    }

    fn stand(&self) -> Stand {
        Stand(self.stand.load(Ordering::SeqCst))
    }

    /// Lets threads begin a job. The caller has its turn and has closed the job before.
    fn open(&self, job: Job) {
        debug_assert!(!self.stand().is_open() && self.stand().at_work() == 0);
        // SAFETY: the job before is closed and nobody is at work on it, so nobody reads this; one caller at a time.
        unsafe { *self.job.get() = Some(job) };
        let number = self.stand().number().wrapping_add(1);
        self.stand.store(Stand::opened(number).0, Ordering::SeqCst);
        self.post();
    }

    /// Wakes those who sleep. A thread says that it is about to sleep before it looks for the last time.
    fn post(&self) {
        self.posted.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            futex::wake(&self.posted, Scope::Process);
        }
    }

    /// Lets nobody begin the job any more and waits for those who work on it. Whether one of them panicked.
    fn close(&self) -> bool {
        self.stand.fetch_and(!Stand::OPEN, Ordering::SeqCst);
        let is_quiet = || self.stand().at_work() == 0;
        if !self.look_for(is_quiet) {
            self.caller_sleeps.store(true, Ordering::SeqCst);
            loop {
                let seen = self.left.load(Ordering::SeqCst);
                if is_quiet() {
                    break;
                }
                futex::wait(&self.left, seen, Scope::Process, None);
            }
            self.caller_sleeps.store(false, Ordering::SeqCst);
        }
        self.panicked.swap(false, Ordering::SeqCst)
    }

    /// Whether it came true within the time for which a thread may look.
    fn look_for(&self, is_true: impl Fn() -> bool) -> bool {
        if is_true() {
            return true;
        }
        let begun = Instant::now();
        while begun.elapsed() < self.spin {
            for _ in 0..LOOKS {
                if is_true() {
                    return true;
                }
                std::hint::spin_loop();
            }
            // Whoever has work for this core goes first.
            std::thread::yield_now();
        }
        false
    }

    fn work_until_the_end(&self) {
        let mut last_number = 0;
        while !self.ended.load(Ordering::SeqCst) {
            if let Some(job) = self.begin(&mut last_number) {
                let outcome = catch_unwind(AssertUnwindSafe(|| job.take_part()));
                self.panicked.fetch_or(outcome.is_err(), Ordering::SeqCst);
                self.leave();
            } else if !self.look_for(|| self.has_news(last_number)) {
                self.sleep(last_number);
            }
        }
    }

    /// Whether there is something to do for a thread that had job `last_number` last.
    fn has_news(&self, last_number: u32) -> bool {
        let stand = self.stand();
        stand.is_open() && stand.number() != last_number || self.ended.load(Ordering::SeqCst)
    }

    fn sleep(&self, last_number: u32) {
        let seen = self.posted.load(Ordering::SeqCst);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        if !self.has_news(last_number) {
            futex::wait(&self.posted, seen, Scope::Process, None);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// The open job, if there is one after `last_number`, with this thread counted as being at work on it.
    fn begin(&self, last_number: &mut u32) -> Option<Job> {
        let begun = self.stand.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |stand| {
            let stand = Stand(stand);
            (stand.is_open() && stand.number() != *last_number).then_some(stand.0 + 1)
        });
        *last_number = Stand(begun.ok()?).number();
        // SAFETY: this thread is counted, so the caller that wrote the job has not got past `close` and does not write.
        unsafe { *self.job.get() }
    }

    fn leave(&self) {
        let before = Stand(self.stand.fetch_sub(1, Ordering::SeqCst));
        if !before.is_open() && before.at_work() == 1 {
            self.left.fetch_add(1, Ordering::SeqCst);
            if self.caller_sleeps.load(Ordering::SeqCst) {
                futex::wake(&self.left, Scope::Process);
            }
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        self.shared.post();
        for thread in self.threads.drain(..) {
            // A panic was reported by the `run` it happened in.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Crew {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Crew of {}", self.num_threads())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_is_done_once_job_after_job() {
        let crew = Crew::new(4).unwrap();
        for chunks in [0, 1, 2, 3, 100] {
            for _ in 0..200 {
                let done: Vec<AtomicUsize> = (0..chunks).map(|_| AtomicUsize::new(0)).collect();
                crew.run(chunks, &|chunk| {
                    done[chunk].fetch_add(1, Ordering::Relaxed);
                });
                assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_crew_goes_on() {
        let crew = Crew::new(3).unwrap();
        let outcome = catch_unwind(AssertUnwindSafe(|| crew.run(50, &|chunk| assert_ne!(chunk, 20))));
        assert!(outcome.is_err());
        let count = AtomicUsize::new(0);
        crew.run(50, &|_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.into_inner(), 50);
    }

    #[test]
    fn threads_that_fell_asleep_are_woken_and_an_idle_crew_uses_no_time() {
        let crew = Crew::new(2).unwrap();
        let (mut helped, patience) = (false, Instant::now() + Duration::from_secs(20));
        let caller = std::thread::current().id();
        while !helped {
            assert!(Instant::now() < patience, "the crew sleeps on");
            let asleep = || crew.shared.sleepers.load(Ordering::SeqCst) == 1;
            while !asleep() {
                assert!(Instant::now() < patience, "the crew never sleeps");
                std::thread::yield_now();
            }
            let by_another = AtomicBool::new(false);
            crew.run(1000, &|_| {
                std::thread::sleep(Duration::from_micros(1));
                by_another.fetch_or(std::thread::current().id() != caller, Ordering::Relaxed);
            });
            helped = by_another.into_inner();
        }
    }

    #[test]
    fn callers_take_turns() {
        let crew = Crew::new(3).unwrap();
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        crew.run(7, &|chunk| {
                            sum.fetch_add(chunk, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), 3 * 500 * 21);
    }
}
