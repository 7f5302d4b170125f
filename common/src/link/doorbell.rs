//! How a link wakes the engine thread that drives it.
use std::fmt;
use std::net::TcpStream;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use afd_ffi::futex::{self, Scope};
use afd_ffi::shm::Watch;
use afd_ffi::socket::Readiness;

/// Wakes an engine thread that sleeps until one of its links has something to say.
///
/// One bell per engine, shared by all its links. Rings are counted, so none is lost between looking and sleeping:
/// read [`count`](Self::count), poll every link, then [`wait`](Self::wait) with the count read before. Most links have no
/// thread that could ring: the bell sleeps on the lanes of those over shared memory, or on the sockets of those over TCP. No
/// call of the kernel waits for both, so whoever comes second needs a thread that rings.
#[derive(Clone, Default)]
pub struct Doorbell {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    count: AtomicU32,
    sleepers: AtomicU32,
    lanes: Mutex<Vec<Weak<Watch>>>,
    /// Sockets in `readiness`. Changed while `lanes` is held.
    num_sockets: AtomicU32,
    readiness: OnceLock<Readiness>,
}

impl Doorbell {
    /// Wakes the waiting engine thread. Cheap; may be called from any thread.
    pub fn ring(&self) {
        self.inner.count.fetch_add(1, SeqCst);
        if self.inner.sleepers.load(SeqCst) > 0 {
            futex::wake(&self.inner.count, Scope::Process);
            self.inner.readiness.get().into_iter().for_each(Readiness::wake);
        }
    }

    /// Rings so far; starts again at 0 after 2^32.
    pub fn count(&self) -> u64 {
        self.inner.count.load(SeqCst).into()
    }

    /// Sleeps until the bell rang after `seen` was read, or until `deadline` (`None`: no limit).
    /// Returns whether it rang.
    pub fn wait(&self, seen: u64, deadline: Option<Instant>) -> bool {
        let lanes = self.live_lanes();
        // Said before looking for the last time: whoever rings later sees it.
        self.inner.sleepers.fetch_add(1, SeqCst);
        lanes.iter().for_each(|lane| lane.set_sleeping(true));
        let rang = loop {
            if self.count() != seen || lanes.iter().any(|lane| lane.moved()) {
                break true;
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                break false;
            }
            if self.sleep(seen as u32, &lanes, left) {
                break true;
            }
        };
        lanes.iter().for_each(|lane| lane.set_sleeping(false));
        self.inner.sleepers.fetch_sub(1, SeqCst);
        rang
    }

    /// Wakes for this lane too, while somebody holds the watch. Returns `false` where the kernel cannot wait for several
    /// words, or for no more of them: a thread has to ring for the lane then.
    pub(super) fn watch(&self, lane: &Arc<Watch>) -> bool {
        let mut lanes = self.lock_lanes();
        lanes.retain(|lane| lane.strong_count() > 0);
        let watched = self.inner.num_sockets.load(SeqCst) == 0
            && lanes.len() + 1 < futex::MAX_WORDS
            && futex::can_wait_any();
        if watched {
            lanes.push(Arc::downgrade(lane));
        }
        drop(lanes);
        // An engine that sleeps must begin to watch it.
        self.ring();
        watched
    }

    /// Wakes whenever this socket can be read, for as long as somebody holds what is returned: whoever waits must have read
    /// it until nothing was left. `None` where the bell sleeps on lanes, or the system has no descriptors left: a thread has
    /// to ring for the socket then.
    pub(super) fn watch_socket(&self, socket: &Arc<TcpStream>) -> Option<SocketWatch> {
        let mut lanes = self.lock_lanes();
        lanes.retain(|lane| lane.strong_count() > 0);
        if !lanes.is_empty() {
            return None;
        }
        if self.inner.readiness.get().is_none() {
            // Nobody else sets it while the lanes are held.
            let _ = self.inner.readiness.set(Readiness::new().ok()?);
        }
        self.inner.readiness.get()?.add(socket).ok()?;
        self.inner.num_sockets.fetch_add(1, SeqCst);
        drop(lanes);
        self.ring();
        Some(SocketWatch { bell: self.clone(), socket: Arc::clone(socket) })
    }

    /// Returns whether a socket can be read.
    fn sleep(&self, seen: u32, lanes: &[Arc<Watch>], left: Option<Duration>) -> bool {
        if self.inner.num_sockets.load(SeqCst) > 0
            && let Some(sockets) = self.inner.readiness.get()
        {
            return sockets.wait(left);
        }
        let own = (&self.inner.count, seen, Scope::Process);
        if lanes.is_empty() {
            futex::wait(own.0, own.1, own.2, left);
            return false;
        }
        let words: Vec<_> = std::iter::once(own).chain(lanes.iter().map(|lane| lane.word())).collect();
        if futex::wait_any(&words, left).is_err() {
            // Worked when the lane was added; whatever changed, the engine must not spin.
            futex::wait(own.0, own.1, own.2, Some(Duration::from_millis(1)));
        }
        false
    }

    fn live_lanes(&self) -> Vec<Arc<Watch>> {
        self.lock_lanes().iter().filter_map(Weak::upgrade).collect()
    }

    fn lock_lanes(&self) -> std::sync::MutexGuard<'_, Vec<Weak<Watch>>> {
        self.inner.lanes.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// A socket that a bell sleeps on; no longer once it is dropped.
pub(super) struct SocketWatch {
    bell: Doorbell,
    socket: Arc<TcpStream>,
}

impl Drop for SocketWatch {
    fn drop(&mut self) {
        let lanes = self.bell.lock_lanes();
        self.bell.inner.readiness.get().into_iter().for_each(|sockets| sockets.remove(&self.socket));
        self.bell.inner.num_sockets.fetch_sub(1, SeqCst);
        drop(lanes);
    }
}

impl fmt::Debug for Doorbell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Doorbell").field("count", &self.count()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_between_looking_and_sleeping_is_not_lost() {
        let bell = Doorbell::default();
        let seen = bell.count();
        bell.ring();
        assert!(bell.wait(seen, None));
        let soon = Instant::now() + Duration::from_millis(2);
        assert!(!bell.wait(bell.count(), Some(soon)));
    }

    #[test]
    fn a_socket_wakes_while_it_is_watched_and_rings_do_so_too() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (near, bell) = (Arc::new(listener.accept().unwrap().0), Doorbell::default());
        let patience = || Some(Instant::now() + Duration::from_secs(20));
        let watch = bell.watch_socket(&near).unwrap();
        let seen = bell.count();
        std::thread::scope(|scope| {
            scope.spawn(|| std::io::Write::write_all(&mut far, b"a").unwrap());
            assert!(bell.wait(seen, patience()));
        });
        assert!(bell.wait(seen, patience()), "until it is read");
        drop(watch);
        let soon = Instant::now() + Duration::from_millis(2);
        assert!(!bell.wait(seen, Some(soon)), "no longer");
        let _watch = bell.watch_socket(&Arc::new(far)).unwrap();
        let seen = bell.count();
        std::thread::scope(|scope| {
            scope.spawn(|| bell.ring());
            assert!(bell.wait(seen, patience()));
        });
    }

    #[test]
    fn ten_thousand_rings_wake_two_threads_in_turn() {
        let bells = [Doorbell::default(), Doorbell::default()];
        let patience = || Some(Instant::now() + Duration::from_secs(20));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for turn in 0..10_000 {
                    assert!(bells[0].wait(turn, patience()));
                    bells[1].ring();
                }
            });
            for turn in 0..10_000 {
                bells[0].ring();
                assert!(bells[1].wait(turn, patience()));
            }
        });
    }
}
