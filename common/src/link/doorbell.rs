//! How a link wakes the engine thread that drives it.
use std::fmt;
use std::net::TcpStream;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use afd_ffi::futex::{self, Scope};
use afd_ffi::shm::Watch;
use afd_ffi::socket::Readiness;

/// Sleep between two looks where the kernel has stopped to wait for several words.
const NAP: Duration = Duration::from_millis(1);

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
    /// Made anew when one comes or goes, so that whoever sleeps takes all of them at once and allocates nothing.
    lanes: Mutex<Arc<[Arc<Watch>]>>,
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
            self.lanes().iter().for_each(|lane| lane.wake());
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
        // Said before looking for the last time: whoever rings later sees it.
        self.inner.sleepers.fetch_add(1, SeqCst);
        let rang = loop {
            // Sockets and lanes are never waited for together.
            let rang = match self.sockets() {
                Some(sockets) => self.sleep_on_sockets(sockets, seen, deadline),
                None => self.sleep_on_lanes(seen, deadline),
            };
            if let Some(rang) = rang {
                break rang;
            }
        };
        self.inner.sleepers.fetch_sub(1, SeqCst);
        rang
    }

    /// Wakes for this lane too, for as long as somebody holds what is returned. `None` where the kernel cannot wait for
    /// several words, or for no more of them: a thread has to ring for the lane then.
    pub(super) fn watch(&self, lane: Watch) -> Option<LaneWatch> {
        let mut lanes = self.lock_lanes();
        if self.inner.num_sockets.load(SeqCst) > 0
            || lanes.len() >= futex::MAX_WORDS
            || !(lanes.is_empty() || futex::can_wait_any())
        {
            return None;
        }
        let lane = Arc::new(lane);
        *lanes = lanes.iter().cloned().chain([Arc::clone(&lane)]).collect();
        drop(lanes);
        // An engine that sleeps must begin to watch it.
        self.ring();
        Some(LaneWatch { bell: self.clone(), lane })
    }

    /// Wakes once for whatever comes on this socket, for as long as somebody holds what is returned: whoever waits must have
    /// read it until nothing was left. `None` where the bell sleeps on lanes, or the system has no descriptors left: a
    /// thread has to ring for the socket then.
    pub(super) fn watch_socket(&self, socket: &Arc<TcpStream>) -> Option<SocketWatch> {
        let lanes = self.lock_lanes();
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

    fn sockets(&self) -> Option<&Readiness> {
        self.inner.readiness.get().filter(|_| self.inner.num_sockets.load(SeqCst) > 0)
    }

    /// Whether it rang, or `None` to look again: after a sleep, whatever ended it.
    fn sleep_on_sockets(&self, sockets: &Readiness, seen: u64, deadline: Option<Instant>) -> Option<bool> {
        if self.count() != seen || sockets.wait(deadline) {
            return Some(true);
        }
        // The clock is read only where nothing has come.
        let is_over = deadline.is_some_and(|deadline| Instant::now() >= deadline);
        is_over.then(|| self.count() != seen)
    }

    /// The same on lanes, or on the bell alone.
    fn sleep_on_lanes(&self, seen: u64, deadline: Option<Instant>) -> Option<bool> {
        let lanes = self.lanes();
        lanes.iter().for_each(|lane| lane.set_sleeping(true));
        let rang = self.look_and_sleep(seen, &lanes, deadline);
        lanes.iter().for_each(|lane| lane.set_sleeping(false));
        rang
    }

    fn look_and_sleep(&self, seen: u64, lanes: &[Arc<Watch>], deadline: Option<Instant>) -> Option<bool> {
        if self.count() != seen || lanes.iter().any(|lane| lane.moved()) {
            return Some(true);
        }
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Some(false);
        }
        match lanes {
            [] => futex::wait(&self.inner.count, seen as u32, Scope::Process, left),
            [lane] => {
                let (word, asleep, scope) = lane.word();
                futex::wait(word, asleep, scope, left);
            }
            lanes => {
                if futex::wait_any(lanes.iter().map(|lane| lane.word()), left).is_err() {
                    // Worked when the lanes were added; whatever changed, the engine must not spin.
                    futex::wait(&self.inner.count, seen as u32, Scope::Process, Some(NAP));
                }
            }
        }
        None
    }

    fn lanes(&self) -> Arc<[Arc<Watch>]> {
        Arc::clone(&self.lock_lanes())
    }

    fn lock_lanes(&self) -> MutexGuard<'_, Arc<[Arc<Watch>]>> {
        self.inner.lanes.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// A lane that a bell sleeps on; no longer once it is dropped.
pub(super) struct LaneWatch {
    bell: Doorbell,
    lane: Arc<Watch>,
}

impl Drop for LaneWatch {
    fn drop(&mut self) {
        let mut lanes = self.bell.lock_lanes();
        *lanes = lanes.iter().filter(|lane| !Arc::ptr_eq(lane, &self.lane)).cloned().collect();
        drop(lanes);
        // Whoever sleeps on it would not hear the bell any more.
        self.lane.wake();
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
        let soon = Instant::now() + Duration::from_millis(2);
        assert!(!bell.wait(seen, Some(soon)), "told once, read or not");
        std::thread::scope(|scope| {
            scope.spawn(|| std::io::Write::write_all(&mut far, b"b").unwrap());
            assert!(bell.wait(seen, patience()), "something new has come");
        });
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
