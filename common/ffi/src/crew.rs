//! A few threads that stay, for loops that are too short to start threads for.
//!
//! [`Crew::run`] calls a function once for each of some chunks, on the caller's thread and on whichever of the crew are
//! awake in time. Chunks are taken one by one, so a thread that the system keeps waiting holds up nobody: with two
//! processes on two cores that is the rule, not the exception. Idle threads sleep; nothing spins.
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Threads that help the one that calls [`run`](Self::run). Dropping the crew ends them.
pub struct Crew {
    shared: Arc<Shared>,
    /// One caller at a time.
    turn: Mutex<()>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// There is a job, or the crew ends.
    wake: Condvar,
    /// Nobody is at work any more.
    quiet: Condvar,
}

#[derive(Default)]
struct State {
    job: Option<Job>,
    /// Counts jobs, so that no thread takes one twice.
    number: u64,
    at_work: usize,
    panicked: bool,
    ended: bool,
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
        let shared = Arc::new(Shared::default());
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
        // SAFETY: the lifetimes are only claimed to be longer. The job can be taken from `state` alone; it is removed
        // from there, and every thread that took it is waited for, before this function returns, by `withdraw` below,
        // which runs also when `take_part` panics (caught). So nobody uses `work` or `next` after they end.
        let job = unsafe {
            Job {
                work: std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(work),
                next: std::mem::transmute::<&AtomicUsize, &'static AtomicUsize>(&next),
                chunks,
            }
        };
        self.shared.publish(job, self.threads.len().min(chunks - 1));
        let mine = catch_unwind(AssertUnwindSafe(|| job.take_part()));
        // A panic must not leave chunks to be begun.
        next.fetch_max(chunks, Ordering::Relaxed);
        let others_panicked = self.shared.withdraw();
        if let Err(panic) = mine {
            resume_unwind(panic);
        }
        assert!(!others_panicked, "a thread of the crew panicked");
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self, job: Job, helpers: usize) {
        let mut state = self.lock();
        state.job = Some(job);
        state.number += 1;
        drop(state);
        for _ in 0..helpers {
            self.wake.notify_one();
        }
    }

    /// Takes the job back and waits for those who work on it. Whether one of them panicked.
    fn withdraw(&self) -> bool {
        let mut state = self.lock();
        state.job = None;
        while state.at_work > 0 {
            state = self.quiet.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        std::mem::take(&mut state.panicked)
    }

    fn work_until_the_end(&self) {
        let mut last_number = 0;
        let mut state = self.lock();
        while !state.ended {
            match state.job {
                Some(job) if state.number != last_number => {
                    last_number = state.number;
                    state.at_work += 1;
                    drop(state);
                    let outcome = catch_unwind(AssertUnwindSafe(|| job.take_part()));
                    state = self.lock();
                    state.at_work -= 1;
                    state.panicked |= outcome.is_err();
                    if state.at_work == 0 {
                        self.quiet.notify_one();
                    }
                }
                _ => state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.wake.notify_all();
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
}
