//! What a socket did not take at once: frames wait here, in memory made when the link was opened, for a thread that may
//! block.
use std::collections::VecDeque;
use std::io::{self, IoSlice, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use afd_ffi::socket::{send_now, wait_writable};
use afd_ffi::sum64::Sum64;

use crate::frame::{HEADER_BYTES, TRAILER_BYTES};
use crate::link::stream::LinkStream;

/// Parts of a frame that go to the kernel in one call: header, rows, two side tensors, and more room than that.
const SLICES: usize = 8;
/// A frame of so few bytes is put together before it goes: the kernel takes one piece of memory sooner than it has learned where
/// two are, by more than the copy costs (deploy/bench/results/2026-12-01-cpu-links.txt, section 10).
const TOGETHER_BYTES: usize = HEADER_BYTES + (8 << 10);
/// What a core copies at least.
const COPY_BYTES_PER_NS: u64 = 4;

/// The way out of one end.
pub(super) struct Outbox {
    state: Mutex<State>,
    changed: Condvar,
    frame_bytes: usize,
}

struct State {
    waiting: VecDeque<Vec<u8>>,
    spare: Vec<Vec<u8>>,
    /// For a frame that is put together; empty in between.
    together: Vec<u8>,
    /// The writer thread holds a frame: nothing may overtake it.
    writing: bool,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    Open,
    /// Write what waits, then end this direction.
    Finishing,
    /// Nothing more will be written, for this reason if there is one.
    Done(Option<io::ErrorKind>),
}

impl Outbox {
    /// Room for `frames` frames of `frame_bytes`; their pages are taken from the system at first use.
    pub(super) fn new(frames: usize, frame_bytes: usize) -> Self {
        let spare = (0..frames).map(|_| Vec::with_capacity(frame_bytes)).collect();
        let (waiting, together) = (VecDeque::with_capacity(frames), Vec::with_capacity(TOGETHER_BYTES));
        let state = State { waiting, spare, together, writing: false, phase: Phase::Open };
        Self { state: Mutex::new(state), changed: Condvar::new(), frame_bytes }
    }

    /// Writes a frame without blocking, and leaves to the writer thread what the socket does not take.
    pub(super) fn write(
        &self,
        stream: &LinkStream,
        header: &[u8; HEADER_BYTES],
        body: &[&[u8]],
    ) -> io::Result<()> {
        let mut state = self.open()?;
        let parts = Parts { head: header, body };
        // What is to be copied behind other frames, or sealed, is put together there.
        if parts.len() > TOGETHER_BYTES || state.must_wait() || stream.is_tls() {
            return self.write_parts(&mut state, stream, &parts);
        }
        let mut together = std::mem::take(&mut state.together);
        parts.iter().for_each(|part| together.extend_from_slice(part));
        let written = self.write_parts(&mut state, stream, &Parts { head: &together, body: &[] });
        together.clear();
        state.together = together;
        written
    }

    fn write_parts(&self, state: &mut State, stream: &LinkStream, parts: &Parts<'_>) -> io::Result<()> {
        let mut leaving = Leaving::new(state, stream, parts.len(), self.frame_bytes);
        leaving.push(parts)?;
        self.end(leaving)
    }

    /// The same of a frame whose sum stands behind its body, which is summed piece by piece of `piece_bytes`.
    pub(super) fn write_in_pieces(
        &self,
        stream: &LinkStream,
        header: &[u8; HEADER_BYTES],
        body: &[&[u8]],
        piece_bytes: usize,
    ) -> io::Result<()> {
        let len = body.iter().fold(HEADER_BYTES + TRAILER_BYTES, |sum, part| sum + part.len());
        let mut state = self.open()?;
        let mut leaving = Leaving::new(&mut state, stream, len, self.frame_bytes);
        let mut sum = Sum64::default();
        let (mut head, mut pieces) =
            (&header[..], body.iter().flat_map(|part| part.chunks(piece_bytes)).peekable());
        while let Some(piece) = pieces.next() {
            sum.update(piece);
            let head = std::mem::take(&mut head);
            match pieces.peek() {
                Some(_) => leaving.push(&Parts { head, body: &[piece] })?,
                None => leaving.push(&Parts { head, body: &[piece, &sum.finish().to_le_bytes()] })?,
            }
        }
        self.end(leaving)
    }

    fn open(&self) -> io::Result<MutexGuard<'_, State>> {
        let state = self.lock();
        match state.phase {
            Phase::Open => Ok(state),
            Phase::Finishing => Err(io::ErrorKind::BrokenPipe.into()),
            Phase::Done(error) => Err(error.unwrap_or(io::ErrorKind::BrokenPipe).into()),
        }
    }

    fn end(&self, leaving: Leaving<'_>) -> io::Result<()> {
        if leaving.end()? {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Lets the writer thread end this direction once everything is written.
    pub(super) fn finish(&self) {
        let mut state = self.lock();
        if let Phase::Open = state.phase {
            state.phase = Phase::Finishing;
            self.changed.notify_all();
        }
    }

    /// Whether everything was written, and more may be.
    pub(super) fn is_idle(&self) -> bool {
        let state = self.lock();
        !state.must_wait() && matches!(state.phase, Phase::Open)
    }

    /// Why writing failed, if it did.
    pub(super) fn error(&self) -> Option<io::ErrorKind> {
        match self.lock().phase {
            Phase::Done(error) => error,
            _ => None,
        }
    }

    /// Waits until nothing more will be written.
    pub(super) fn wait_done(&self, at_most: Duration) {
        let deadline = Instant::now() + at_most;
        let mut state = self.lock();
        while !matches!(state.phase, Phase::Done(_)) {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { return };
            state = self.changed.wait_timeout(state, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
    }

    /// The writer thread: blocks in the socket so that no engine does.
    pub(super) fn run(&self, mut stream: &TcpStream) {
        let mut state = self.lock();
        let error = loop {
            if let Some(mut buf) = state.waiting.pop_front() {
                state.writing = true;
                drop(state);
                let written = stream.write_all(&buf);
                buf.clear();
                state = self.lock();
                state.writing = false;
                state.spare.push(buf);
                if let Err(error) = written {
                    break Some(error.kind());
                }
            } else if let Phase::Open = state.phase {
                state = self.changed.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
            } else {
                break None;
            }
        };
        state.phase = Phase::Done(error);
        self.changed.notify_all();
        drop(state);
        // After a failure the reader must not wait for a peer that is gone.
        let _ = stream.shutdown(if error.is_some() { Shutdown::Both } else { Shutdown::Write });
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl State {
    /// Frames before it are still on their way: nothing is overtaken.
    fn must_wait(&self) -> bool {
        !self.waiting.is_empty() || self.writing
    }
}

/// A frame on its way into the socket, under the lock that keeps frames in order.
struct Leaving<'a> {
    state: &'a mut State,
    stream: &'a LinkStream,
    /// Bytes that are still to come.
    left: usize,
    /// What the socket has not taken; none while it takes everything.
    behind: Option<Vec<u8>>,
    frame_bytes: usize,
    /// How long somebody is waited for who makes room.
    until: Option<Instant>,
}

impl<'a> Leaving<'a> {
    fn new(state: &'a mut State, stream: &'a LinkStream, left: usize, frame_bytes: usize) -> Self {
        let mut leaving = Self { state, stream, left, behind: None, frame_bytes, until: None };
        // Records of TLS are made in the order in which they go out.
        if leaving.state.must_wait() || stream.is_tls() {
            leaving.behind = Some(leaving.buffer());
        }
        leaving
    }

    fn buffer(&mut self) -> Vec<u8> {
        self.state.spare.pop().unwrap_or_else(|| Vec::with_capacity(self.frame_bytes))
    }

    /// The next bytes.
    fn push(&mut self, parts: &Parts<'_>) -> io::Result<()> {
        let mut sent = 0;
        if self.behind.is_none() {
            let (left, until) = (self.left, &mut self.until);
            sent = write_at_once(self.stream.socket(), parts, |sent| {
                *until.get_or_insert_with(|| Instant::now() + time_to_copy(left - sent))
            })?;
            if sent < parts.len() {
                self.behind = Some(self.buffer());
            }
        }
        if let Some(behind) = &mut self.behind {
            for part in parts.behind(sent) {
                self.stream.seal(&[part], behind)?;
            }
        }
        self.left -= parts.len();
        Ok(())
    }

    /// All bytes were pushed. Returns whether there is something for the writer thread.
    fn end(mut self) -> io::Result<bool> {
        let Some(mut behind) = self.behind.take() else { return Ok(false) };
        if self.stream.is_tls() && !self.state.must_wait() {
            let len = behind.len();
            let sent = write_at_once(self.stream.socket(), &Parts { head: &behind, body: &[] }, |sent| {
                *self.until.get_or_insert_with(|| Instant::now() + time_to_copy(len - sent))
            })?;
            behind.drain(..sent);
        }
        let is_left = !behind.is_empty();
        if is_left {
            self.state.waiting.push_back(behind);
        } else {
            self.state.spare.push(behind);
        }
        Ok(is_left)
    }
}

/// What is written one behind the other.
struct Parts<'a> {
    head: &'a [u8],
    body: &'a [&'a [u8]],
}

impl<'a> Parts<'a> {
    fn len(&self) -> usize {
        self.iter().map(<[u8]>::len).sum()
    }

    fn iter(&self) -> impl Iterator<Item = &'a [u8]> {
        std::iter::once(self.head).chain(self.body.iter().copied())
    }

    /// Without the first `sent` bytes, and without what is empty.
    fn behind(&self, mut sent: usize) -> impl Iterator<Item = &'a [u8]> {
        self.iter().filter_map(move |part| {
            let skipped = sent.min(part.len());
            sent -= skipped;
            Some(&part[skipped..]).filter(|rest| !rest.is_empty())
        })
    }
}

/// Writes as much as the socket takes without anybody waiting for long: `until` says how long, of what was sent by then.
/// Returns how many bytes that were.
fn write_at_once(
    stream: &TcpStream,
    parts: &Parts<'_>,
    mut until: impl FnMut(usize) -> Instant,
) -> io::Result<usize> {
    let (len, mut sent) = (parts.len(), 0);
    while sent < len {
        let mut slices = [IoSlice::new(&[]); SLICES];
        let filled =
            slices.iter_mut().zip(parts.behind(sent)).map(|(slice, part)| *slice = IoSlice::new(part));
        let filled = filled.count();
        match send_now(stream, &slices[..filled]) {
            Ok(written) => sent += written,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let left = until(sent).saturating_duration_since(Instant::now());
                if left.is_zero() || !wait_writable(stream, left)? {
                    return Ok(sent);
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(sent)
}

/// A peer that reads makes room sooner than what is left would be copied for the writer thread; for one that does not, no
/// more time than that is lost.
fn time_to_copy(bytes: usize) -> Duration {
    Duration::from_nanos(bytes as u64 / COPY_BYTES_PER_NS)
}
