//! What std has no call for: reading a socket without waiting while its other direction blocks, sleeping until it takes more to
//! send, and sleeping until one of several sockets has something to read or a thread says so.
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Tells the events of the wake-up and the alarm from those of sockets.
const ALARM: u64 = 2;
const WAKE: u64 = 1;
const SOCKET: u64 = 0;
/// Events taken from the kernel at once: what is left of them comes with the next call.
const MAX_EVENTS: usize = 8;

/// Reads what is there, at most as much as `buf` holds; 0 is the end of the stream. The socket's own mode does not matter.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] when nothing is there; otherwise the system's word.
pub fn recv_now(socket: impl AsFd, buf: &mut [u8]) -> io::Result<usize> {
    let socket = socket.as_fd().as_raw_fd();
    // SAFETY: the buffer and the descriptor are borrowed for the call; the kernel writes only into the buffer, and is asked
    // for no address. By the bare call: the library's prepares for the thread to be cancelled, which nobody does.
    let read = unsafe {
        libc::syscall(
            libc::SYS_recvfrom,
            socket,
            buf.as_mut_ptr(),
            buf.len(),
            libc::MSG_DONTWAIT,
            ptr::null_mut::<libc::sockaddr>(),
            ptr::null_mut::<libc::socklen_t>(),
        )
    };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}

/// Writes as much of `bufs`, one behind the other, as the socket takes. The socket's own mode does not matter.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] when it takes nothing; otherwise the system's word, and no signal.
pub fn send_now(socket: impl AsFd, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
    let (socket, flags) = (socket.as_fd().as_raw_fd(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
    let sent = if let [buf] = bufs {
        let nobody = ptr::null::<libc::sockaddr>();
        // SAFETY: the buffer and the descriptor are borrowed for the call; the kernel reads the buffer and is told no address.
        // The bare call, as above.
        unsafe { libc::syscall(libc::SYS_sendto, socket, buf.as_ptr(), buf.len(), flags, nobody, 0) }
    } else {
        // SAFETY: a msghdr is plain integers and pointers, for which zero is a value: no name, no control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = bufs.as_ptr().cast_mut().cast();
        message.msg_iovlen = bufs.len() as _;
        // SAFETY: `IoSlice` is laid out as an iovec (std's promise) of memory borrowed for the call, `msg_iovlen` of them; the
        // descriptor is borrowed for the call too. The kernel reads all of it and writes none. The bare call, as above.
        unsafe { libc::syscall(libc::SYS_sendmsg, socket, &raw const message, flags) }
    };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Sleeps until the socket takes something more to send, or is at its end, at most for `timeout`. May end early. Returns
/// whether it is worth an attempt.
///
/// # Errors
/// The system's word.
pub fn wait_writable(socket: impl AsFd, timeout: Duration) -> io::Result<bool> {
    let mut wanted = libc::pollfd { fd: socket.as_fd().as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    let timeout = crate::futex::timespec(timeout);
    // SAFETY: one pollfd, of which the kernel writes `revents`, and a timespec that it reads; both outlive the call, and so
    // does the borrowed descriptor. No signal mask is given.
    let found = unsafe { libc::ppoll(&raw mut wanted, 1, &raw const timeout, ptr::null()) };
    match found {
        ..0 => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::Interrupted => Ok(true),
            error => Err(error),
        },
        found => Ok(found > 0),
    }
}

/// Sockets of which one thread wants to know that they can be read, its bell and its alarm.
#[derive(Debug)]
pub struct Readiness {
    epoll: OwnedFd,
    wake: OwnedFd,
    alarm: Alarm,
}

/// Ends waits at a deadline. A timer costs more to set than all the rest of a short wait; deadlines that move away with every
/// wait, as those of hops do, cost nothing: what is set rings in the end, too early, and is set anew.
#[derive(Debug)]
struct Alarm {
    timer: OwnedFd,
    /// Times are counted from here.
    begun: Instant,
    /// When it rings, ns; `NEVER` when it is not set.
    rings_at: AtomicU64,
}

const NEVER: u64 = u64::MAX;

impl Alarm {
    fn new() -> io::Result<Self> {
        // SAFETY: takes plain flags and returns a new descriptor or -1.
        let timer =
            unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC | libc::TFD_NONBLOCK) };
        Ok(Self { timer: owned(timer)?, begun: Instant::now(), rings_at: AtomicU64::new(NEVER) })
    }

    /// Rings at `deadline`, if not before.
    fn set(&self, deadline: Instant) {
        let since_begun = |at: Instant| at.saturating_duration_since(self.begun).as_nanos() as u64;
        let rings_at = since_begun(deadline);
        if rings_at >= self.rings_at.load(Relaxed) {
            return;
        }
        // 0 would mean never.
        let left = rings_at.saturating_sub(since_begun(Instant::now())).max(1);
        let once = libc::itimerspec {
            it_interval: crate::futex::timespec(Duration::ZERO),
            it_value: crate::futex::timespec(Duration::from_nanos(left)),
        };
        // SAFETY: the descriptor is owned; the kernel only reads `once`, and is asked for nothing. It cannot fail with a timer
        // and such a time.
        unsafe { libc::timerfd_settime(self.timer.as_raw_fd(), 0, &raw const once, ptr::null_mut()) };
        self.rings_at.store(rings_at, Relaxed);
    }

    fn handle_rung(&self) {
        self.rings_at.store(NEVER, Relaxed);
    }
}

impl Readiness {
    /// Without a socket yet.
    ///
    /// # Errors
    /// The system has no descriptors left.
    pub fn new() -> io::Result<Self> {
        // SAFETY: both calls take plain flags and return a new descriptor or -1.
        let (epoll, wake) = unsafe {
            (
                libc::epoll_create1(libc::EPOLL_CLOEXEC),
                libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK),
            )
        };
        let (epoll, wake) = (owned(epoll), owned(wake));
        let set = Self { epoll: epoll?, wake: wake?, alarm: Alarm::new()? };
        // Seen once for every wake-up, so that nobody has to take it away again.
        let once = (libc::EPOLLIN | libc::EPOLLET) as u32;
        set.control(libc::EPOLL_CTL_ADD, &set.wake, once, WAKE)?;
        set.control(libc::EPOLL_CTL_ADD, &set.alarm.timer, once, ALARM)?;
        Ok(set)
    }

    /// Wakes for this socket too: once for whatever has come since the last time, its end included, so that whoever waits must
    /// have read until nothing was left. Looking again at what is left would cost every wait a tenth of a microsecond.
    ///
    /// # Errors
    /// The system's word; the socket is not waited for then.
    pub fn add(&self, socket: impl AsFd) -> io::Result<()> {
        self.control(
            libc::EPOLL_CTL_ADD,
            socket,
            (libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLET) as u32,
            SOCKET,
        )
    }

    /// Wakes for it no longer.
    pub fn remove(&self, socket: impl AsFd) {
        // Fails only for a socket that is not in the set.
        let _ = self.control(libc::EPOLL_CTL_DEL, socket, 0, SOCKET);
    }

    /// Ends a wait that is under way, or the next one.
    pub fn wake(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: writes the 8 bytes of `one` to a descriptor that `self` owns. It fails only where 2^64 wake-ups were
        // not seen, and then nobody need be told again.
        unsafe { libc::write(self.wake.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Sleeps until a socket can be read, a wake-up, or `deadline` (`None`: no limit). May end early. Returns whether a socket
    /// can be read. For one thread at a time.
    pub fn wait(&self, deadline: Option<Instant>) -> bool {
        if let Some(deadline) = deadline {
            self.alarm.set(deadline);
        }
        let mut events = [libc::epoll_event { events: 0, u64: WAKE }; MAX_EVENTS];
        // SAFETY: `events` has room for MAX_EVENTS, and the kernel writes nowhere else; no signal mask is given. The bare call,
        // as above.
        let found = unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait,
                self.epoll.as_raw_fd(),
                events.as_mut_ptr(),
                MAX_EVENTS as libc::c_int,
                -1 as libc::c_int,
                ptr::null::<libc::sigset_t>(),
                0usize,
            )
        };
        // An error is an interruption: there is nothing else that it could be.
        let events = &events[..usize::try_from(found).unwrap_or(0)];
        if events.iter().any(|event| { event.u64 } == ALARM) {
            self.alarm.handle_rung();
        }
        events.iter().any(|event| { event.u64 } == SOCKET)
    }

    fn control(&self, what: libc::c_int, socket: impl AsFd, events: u32, data: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events, u64: data };
        let socket = socket.as_fd().as_raw_fd();
        // SAFETY: both descriptors are open, one owned and one borrowed for the call; the kernel only reads `event`.
        let done = unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), what, socket, &raw mut event) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// A descriptor that a call has just returned, or the call's error.
fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it for us: nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::thread;
    use std::time::Instant;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);
    const SHORT: Duration = Duration::from_millis(5);

    #[test]
    fn what_is_there_is_read_and_what_has_room_is_written_and_nothing_is_waited_for() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut buf = [0; 3];
        assert_eq!(recv_now(&theirs, &mut buf).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(
            send_now(&ours, &[IoSlice::new(b"ab"), IoSlice::new(b""), IoSlice::new(b"cde")]).unwrap(),
            5
        );
        assert_eq!((recv_now(&theirs, &mut buf).unwrap(), &buf), (3, b"abc"));
        assert_eq!((recv_now(&theirs, &mut buf).unwrap(), &buf[..2]), (2, &b"de"[..]));
        let block = [0; 1 << 16];
        let full = std::iter::repeat_with(|| send_now(&ours, &[IoSlice::new(&block)])).find_map(Result::err);
        assert_eq!(full.unwrap().kind(), io::ErrorKind::WouldBlock);
        drop(ours);
        while recv_now(&theirs, &mut [0; 1 << 16]).unwrap() > 0 {}
        let (ours, _) = UnixStream::pair().unwrap();
        assert_eq!(send_now(&ours, &[IoSlice::new(b"a")]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn room_to_write_is_waited_for_and_no_longer_than_asked() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let block = [0; 1 << 16];
        let filled = std::iter::from_fn(|| (&ours).write(&block).ok()).sum::<usize>();
        let begun = Instant::now();
        assert!(!wait_writable(&ours, Duration::from_millis(5)).unwrap());
        assert!(begun.elapsed() >= Duration::from_millis(5));
        thread::scope(|scope| {
            scope.spawn(|| theirs.read_exact(&mut vec![0; filled]).unwrap());
            assert!(wait_writable(&ours, LONG).unwrap());
        });
        drop(theirs);
        assert!(wait_writable(&ours, LONG).unwrap(), "its end is worth seeing");
        assert!(begun.elapsed() < LONG / 2);
    }

    #[test]
    fn a_socket_a_wake_up_and_a_deadline_each_end_the_wait() {
        let (set, (mut ours, theirs)) = (Readiness::new().unwrap(), UnixStream::pair().unwrap());
        let begun = Instant::now();
        assert!(!set.wait(Some(begun + SHORT)));
        assert!(begun.elapsed() >= SHORT);
        set.wake();
        assert!(!set.wait(Some(begun + LONG)), "a wake-up before the wait is not lost");
        set.add(&theirs).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| ours.write_all(b"a").unwrap());
            while !set.wait(Some(begun + LONG)) {}
        });
        assert!(!set.wait(Some(Instant::now() + SHORT)), "told once, read or not");
        ours.write_all(b"b").unwrap();
        assert!(set.wait(Some(begun + LONG)), "something new has come");
        set.remove(&theirs);
        set.add(&theirs).unwrap();
        assert!(set.wait(Some(begun + LONG)), "what was there before is new to who begins to wait");
        set.remove(&theirs);
        thread::scope(|scope| {
            scope.spawn(|| set.wake());
            assert!(!set.wait(None));
        });
        assert!(begun.elapsed() < LONG / 2);
    }

    #[test]
    fn deadlines_are_kept_however_they_move() {
        let set = Readiness::new().unwrap();
        let wait_until = |deadline: Instant| {
            let mut waits = 0;
            while Instant::now() < deadline {
                assert!(!set.wait(Some(deadline)));
                waits += 1;
            }
            waits
        };
        set.wake();
        assert!(!set.wait(Some(Instant::now() + SHORT)), "sets the alarm, and ends before");
        assert!(wait_until(Instant::now() + 3 * SHORT) <= 2, "once at the alarm that was set");
        set.wake();
        assert!(!set.wait(Some(Instant::now() + LONG)));
        let begun = Instant::now();
        assert!(wait_until(begun + SHORT) <= 1, "it is set to ring sooner");
        assert!(begun.elapsed() < LONG / 2);
        assert!(!set.wait(Some(begun)), "what has passed ends at once");
        assert!(begun.elapsed() < LONG / 2);
    }
}
