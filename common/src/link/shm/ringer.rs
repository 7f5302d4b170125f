//! A thread that sleeps on a lane and rings the engine's bell: for kernels on which the engine cannot sleep on several
//! words itself.
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use afd_ffi::futex;
use afd_ffi::shm::{Receiver, Watch};

use crate::link::Doorbell;

/// Longest sleep: bounds how long stopping takes when the wake-up for it comes a moment too early.
const NAP: Duration = Duration::from_millis(100);

/// Stops and joins its thread when dropped.
pub(super) struct Ringer {
    watch: Arc<Watch>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Ringer {
    pub(super) fn start(into: &Receiver, bell: Doorbell) -> io::Result<Self> {
        let (watch, stop) = (Arc::new(into.watch()), Arc::new(AtomicBool::new(false)));
        let (watched, stopped) = (Arc::clone(&watch), Arc::clone(&stop));
        let run = move || {
            let mut rung_at = watched.head();
            bell.ring();
            while !stopped.load(SeqCst) {
                // Said before looking: whoever sends later sees it.
                watched.set_sleeping(true);
                let head = watched.head();
                if head != rung_at {
                    rung_at = head;
                    bell.ring();
                }
                let (word, asleep, scope) = watched.word();
                futex::wait(word, asleep, scope, Some(NAP));
            }
            watched.set_sleeping(false);
        };
        let thread = Some(Builder::new().name("shm-ring".into()).spawn(run)?);
        Ok(Self { watch, stop, thread })
    }
}

impl Drop for Ringer {
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
        self.watch.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
