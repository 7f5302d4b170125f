//! Bare transports: a socket, and a futex with memory that both ends see. What a link over them costs more is its own.
use std::fmt;
use std::hint::black_box;
use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

use afd_ffi::futex::{self, Scope};
use afd_ffi::socket::{Readiness, recv_now};

use super::super::pairs::PairError;
use super::super::tcp::set_options;
use super::ways::{Aligned, PATIENCE, Way, broken};
use super::{Seats, TimingError};
use crate::frame::HEADER_BYTES;

/// How a thread waits for a bare socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiting {
    /// In the read: for this socket, and for nothing else in the world.
    Alone,
    /// Until any of several sockets can be read or somebody wakes it, as an engine with links has to; then it reads.
    Engine,
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Alone => "raw tcp",
            Self::Engine => "raw tcp, epoll",
        })
    }
}

/// The same bytes on a plain socket, read and written by the two threads that use them. The length comes first, in as many
/// bytes as a frame's header has.
pub(super) struct RawTcp {
    near: RawEnd,
    waiting: Waiting,
    buffer: Aligned,
    far: Option<JoinHandle<()>>,
}

struct RawEnd {
    socket: TcpStream,
    /// None where the read waits.
    sockets: Option<Readiness>,
}

impl RawEnd {
    fn new(socket: TcpStream, waiting: Waiting) -> io::Result<Self> {
        // The same as those of a link.
        set_options(&socket)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let sockets = match waiting {
            Waiting::Alone => None,
            Waiting::Engine => {
                let sockets = Readiness::new()?;
                sockets.add(&socket)?;
                Some(sockets)
            }
        };
        Ok(Self { socket, sockets })
    }

    /// As much as there is, and at least something.
    fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let Some(sockets) = &self.sockets else { return (&self.socket).read(buffer) };
        loop {
            match recv_now(&self.socket, buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    // An alarm of an earlier wait may ring in between.
                    let deadline = Instant::now() + PATIENCE;
                    while !sockets.wait(Some(deadline)) {
                        if Instant::now() >= deadline {
                            return Err(io::ErrorKind::TimedOut.into());
                        }
                    }
                }
                read => return read,
            }
        }
    }

    /// A whole message. Returns its bytes with the length before them.
    fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let (mut filled, mut wanted) = (0, HEADER_BYTES);
        while filled < wanted {
            match self.read(&mut buffer[filled..])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => filled += read,
            }
            if let (Some(len), true) = (buffer.first_chunk::<8>(), filled >= HEADER_BYTES) {
                wanted = HEADER_BYTES + u64::from_le_bytes(*len) as usize;
            }
        }
        Ok(wanted)
    }
}

impl RawTcp {
    pub(super) fn connect(waiting: Waiting, max_bytes: usize, seats: Seats) -> Result<Self, PairError> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let near = RawEnd::new(TcpStream::connect(listener.local_addr()?)?, waiting)?;
        let far = RawEnd::new(listener.accept()?.0, waiting)?;
        let (buffer, mut scratch) =
            (Aligned::new(HEADER_BYTES + max_bytes), Aligned::new(HEADER_BYTES + max_bytes));
        let answer = move || {
            seats.far();
            // Until the near end is gone.
            while let Ok(len) = far.receive(scratch.bytes_mut()) {
                if (&far.socket).write_all(&scratch.bytes()[..len]).is_err() {
                    return;
                }
            }
        };
        let far = Some(Builder::new().name("raw-tcp".into()).spawn(answer)?);
        Ok(Self { near, waiting, buffer, far })
    }

    fn exchange(&mut self, body: &[u8]) -> io::Result<()> {
        let head = &mut self.buffer.bytes_mut()[..HEADER_BYTES];
        head[..8].copy_from_slice(&(body.len() as u64).to_le_bytes());
        // One call where the socket takes it all, the rows from where they lie: as a link does.
        let mut socket = &self.near.socket;
        let written = socket.write_vectored(&[IoSlice::new(head), IoSlice::new(body)])?;
        socket.write_all(&head[written.min(HEADER_BYTES)..])?;
        socket.write_all(&body[written.saturating_sub(HEADER_BYTES)..])?;
        match self.near.receive(self.buffer.bytes_mut())? {
            len if len == HEADER_BYTES + body.len() => Ok(()),
            len => Err(io::Error::other(format!("{len} bytes came back"))),
        }
    }
}

impl Way for RawTcp {
    fn name(&self) -> String {
        self.waiting.to_string()
    }

    fn round_trip(&mut self, _: u32, body: &[u8]) -> Result<(), TimingError> {
        self.exchange(body).map_err(|error| broken(self, error))
    }
}

impl Drop for RawTcp {
    fn drop(&mut self) {
        let _ = self.near.socket.shutdown(Shutdown::Both);
        if let Some(far) = self.far.take() {
            let _ = far.join();
        }
    }
}

/// Its name.
pub(super) const RAW_FUTEX: &str = "raw futex";

/// Two threads that wake each other and hand the rows over in memory that both see: whoever sends copies them there, and
/// whoever receives reads each of them once. Nothing is checked, and nobody but the two can be waited for.
pub(super) struct RawFutex {
    shared: Arc<Shared>,
    turn: u32,
    far: Option<JoinHandle<()>>,
}

struct Shared {
    there: Lane,
    back: Lane,
}

/// One direction.
struct Lane {
    turn: AtomicU32,
    /// Nobody ever waits for it: whose turn it is not sleeps.
    rows: Mutex<Rows>,
}

struct Rows {
    bytes: Aligned,
    len: usize,
}

/// Told to the far end in place of a turn.
const STOP: u32 = u32::MAX;

impl Lane {
    fn new(max_bytes: usize) -> Self {
        Self { turn: AtomicU32::new(0), rows: Mutex::new(Rows { bytes: Aligned::new(max_bytes), len: 0 }) }
    }

    fn send(&self, turn: u32, body: &[u8]) {
        let mut rows = self.lock();
        rows.bytes.bytes_mut()[..body.len()].copy_from_slice(body);
        rows.len = body.len();
        drop(rows);
        self.set(turn);
    }

    /// Sleeps until it is this turn, and reads what came: its length and a sum. `None` when it says stop.
    fn receive(&self, turn: u32) -> Option<(usize, u64)> {
        loop {
            let seen = self.turn.load(SeqCst);
            if seen == turn {
                break;
            }
            if seen == STOP {
                return None;
            }
            futex::wait(&self.turn, seen, Scope::Shared, Some(PATIENCE));
        }
        let rows = self.lock();
        Some((rows.len, sum(&rows.bytes.bytes()[..rows.len])))
    }

    fn set(&self, turn: u32) {
        self.turn.store(turn, SeqCst);
        futex::wake(&self.turn, Scope::Shared);
    }

    fn lock(&self) -> MutexGuard<'_, Rows> {
        self.rows.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The cheapest way to look at every byte.
fn sum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let of_words = words.iter().fold(0u64, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word)));
    rest.iter().fold(of_words, |sum, byte| sum.wrapping_add((*byte).into()))
}

impl RawFutex {
    pub(super) fn start(max_bytes: usize, seats: Seats) -> Result<Self, PairError> {
        let shared = Arc::new(Shared { there: Lane::new(max_bytes), back: Lane::new(max_bytes) });
        let (theirs, body) = (Arc::clone(&shared), Aligned::new(max_bytes));
        let answer = move || {
            seats.far();
            for turn in 1..STOP {
                let Some((len, _)) = theirs.there.receive(turn).map(black_box) else { return };
                theirs.back.send(turn, &body.bytes()[..len]);
            }
        };
        let far = Some(Builder::new().name("raw-futex".into()).spawn(answer)?);
        Ok(Self { shared, turn: 0, far })
    }
}

impl Way for RawFutex {
    fn name(&self) -> String {
        RAW_FUTEX.into()
    }

    fn round_trip(&mut self, _: u32, body: &[u8]) -> Result<(), TimingError> {
        self.turn += 1;
        self.shared.there.send(self.turn, body);
        match self.shared.back.receive(self.turn).map(black_box) {
            Some((len, _)) if len == body.len() => Ok(()),
            back => Err(broken(self, format!("{back:?} came back of {} bytes", body.len()))),
        }
    }
}

impl Drop for RawFutex {
    fn drop(&mut self) {
        self.shared.there.set(STOP);
        if let Some(far) = self.far.take() {
            let _ = far.join();
        }
    }
}
