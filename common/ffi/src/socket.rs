//! What std has no call for: reading a socket without waiting while its other direction blocks, sleeping until it takes more to
//! send, and sleeping until one of several sockets has something to read or a thread says so.
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// Tells the events of the wake-up from those of sockets.
const WAKE: u64 = 1;
const SOCKET: u64 = 0;
/// Events taken from the kernel at once: what is left of them comes with the next call.
const MAX_EVENTS: usize = 8;

/// Reads what is there, at most as much as `bufs` hold; 0 is the end of the stream. The socket's own mode does not matter.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] when nothing is there; otherwise the system's word.
pub fn recv_now(socket: impl AsFd, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
    // SAFETY: a msghdr is plain integers and pointers, for which zero is a value: no name, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = bufs.as_mut_ptr().cast();
    message.msg_iovlen = bufs.len() as _;
    // SAFETY: `IoSliceMut` is laid out as an iovec (std's promise) of memory borrowed for the call, `msg_iovlen` of them;
    // the descriptor is borrowed for the call too. The kernel writes only into these buffers and into `message`.
    let read = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
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
    let found = unsafe { libc::ppoll(&raw mut wanted, 1, &raw const timeout, std::ptr::null()) };
    match found {
        ..0 => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::Interrupted => Ok(true),
            error => Err(error),
        },
        found => Ok(found > 0),
    }
}

/// Sockets of which one thread wants to know that they can be read, and its bell.
#[derive(Debug)]
pub struct Readiness {
    epoll: OwnedFd,
    wake: OwnedFd,
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
        let set = Self { epoll: epoll?, wake: wake? };
        // Seen once for every wake-up, so that nobody has to take it away again.
        set.control(libc::EPOLL_CTL_ADD, &set.wake, (libc::EPOLLIN | libc::EPOLLET) as u32, WAKE)?;
        Ok(set)
    }

    /// Wakes for this socket too, for as long as there is something to read, or its end to be seen.
    ///
    /// # Errors
    /// The system's word; the socket is not waited for then.
    pub fn add(&self, socket: impl AsFd) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, socket, (libc::EPOLLIN | libc::EPOLLRDHUP) as u32, SOCKET)
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

    /// Sleeps until a socket can be read, a wake-up, or for `timeout` (`None`: no limit). May end early. Returns whether a
    /// socket can be read.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        let mut events = [libc::epoll_event { events: 0, u64: WAKE }; MAX_EVENTS];
        let found = self.wait_exactly(&mut events, timeout).or_else(|error| match error.raw_os_error() {
            // Kernels before 5.11, and filters of calls.
            Some(libc::ENOSYS | libc::EPERM) => self.wait_millis(&mut events, timeout),
            _ => Err(error),
        });
        let found = found.unwrap_or(0);
        events[..found].iter().any(|event| { event.u64 } == SOCKET)
    }

    fn wait_exactly(
        &self,
        events: &mut [libc::epoll_event; MAX_EVENTS],
        timeout: Option<Duration>,
    ) -> io::Result<usize> {
        let timeout = timeout.map(crate::futex::timespec);
        let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: `events` has room for MAX_EVENTS; `timeout` is null or points to a timespec that outlives the call; no
        // signal mask is given. The kernel writes only into `events`.
        let found = unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait2,
                self.epoll.as_raw_fd(),
                events.as_mut_ptr(),
                MAX_EVENTS,
                timeout,
                std::ptr::null::<libc::sigset_t>(),
                0usize,
            )
        };
        usize::try_from(found).map_err(|_| io::Error::last_os_error())
    }

    fn wait_millis(
        &self,
        events: &mut [libc::epoll_event; MAX_EVENTS],
        timeout: Option<Duration>,
    ) -> io::Result<usize> {
        let millis = timeout.map_or(-1, |timeout| {
            libc::c_int::try_from(timeout.as_micros().div_ceil(1000)).unwrap_or(libc::c_int::MAX)
        });
        // SAFETY: `events` has room for MAX_EVENTS, and the kernel writes nowhere else.
        let found = unsafe {
            libc::epoll_wait(self.epoll.as_raw_fd(), events.as_mut_ptr(), MAX_EVENTS as libc::c_int, millis)
        };
        usize::try_from(found).map_err(|_| io::Error::last_os_error())
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

    #[test]
    fn what_is_there_is_read_into_several_places_and_nothing_is_waited_for() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let (mut first, mut second) = ([0; 3], [0; 8]);
        let mut read = || recv_now(&theirs, &mut [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second)]);
        assert_eq!(read().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        ours.write_all(b"abcde").unwrap();
        assert_eq!(read().unwrap(), 5);
        drop(ours);
        assert_eq!(read().unwrap(), 0);
        assert_eq!((&first, &second[..3]), (b"abc", &b"de\0"[..]));
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
    fn a_socket_a_wake_up_and_a_timeout_each_end_the_wait() {
        let (set, (mut ours, theirs)) = (Readiness::new().unwrap(), UnixStream::pair().unwrap());
        let begun = Instant::now();
        assert!(!set.wait(Some(Duration::from_millis(5))));
        assert!(begun.elapsed() >= Duration::from_millis(5));
        set.wake();
        assert!(!set.wait(Some(LONG)), "a wake-up before the wait is not lost");
        set.add(&theirs).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| ours.write_all(b"a").unwrap());
            while !set.wait(Some(LONG)) {}
        });
        assert!(set.wait(Some(LONG)), "until it is read");
        set.remove(&theirs);
        thread::scope(|scope| {
            scope.spawn(|| set.wake());
            assert!(!set.wait(Some(LONG)));
        });
        assert!(begun.elapsed() < LONG / 2);
    }

    #[test]
    fn old_kernels_wait_too() {
        let set = Readiness::new().unwrap();
        let begun = Instant::now();
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; MAX_EVENTS];
        assert_eq!(set.wait_millis(&mut events, Some(Duration::from_micros(4001))).unwrap(), 0);
        assert!(begun.elapsed() >= Duration::from_micros(4001));
        set.wake();
        assert_eq!(set.wait_millis(&mut events, None).unwrap(), 1);
    }
}
