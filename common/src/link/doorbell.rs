//! How a link wakes the engine thread that drives it.
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

/// Wakes an engine thread that sleeps until one of its links has something to say.
///
/// One bell per engine, shared by all its links. Rings are counted, so none is lost between looking and sleeping:
/// read [`count`](Self::count), poll every link, then [`wait`](Self::wait) with the count read before.
#[derive(Clone, Default)]
pub struct Doorbell {
    inner: Arc<(Mutex<u64>, Condvar)>,
}

impl Doorbell {
    /// Wakes the waiting engine thread. Cheap; may be called from any thread.
    pub fn ring(&self) {
        let (count, condvar) = &*self.inner;
        *count.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) += 1;
        condvar.notify_one();
    }

    /// Rings so far.
    pub fn count(&self) -> u64 {
        *self.inner.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Sleeps until the bell rang after `seen` was read, or until `deadline` (`None`: no limit).
    /// Returns whether it rang.
    pub fn wait(&self, seen: u64, deadline: Option<Instant>) -> bool {
        let (count, condvar) = &*self.inner;
        let mut now = count.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        while *now == seen {
            match deadline {
                None => now = condvar.wait(now).unwrap_or_else(|poisoned| poisoned.into_inner()),
                Some(deadline) => {
                    let Some(left) = deadline.checked_duration_since(Instant::now()) else { return false };
                    now = condvar.wait_timeout(now, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
                }
            }
        }
        true
    }
}
