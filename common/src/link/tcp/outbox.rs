//! What a socket did not take at once: frames wait here, in memory made when the link was opened, for a thread that may
//! block.
use std::collections::VecDeque;
use std::io::{self, IoSlice, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use socket2::SockRef;

use crate::frame::HEADER_BYTES;
use crate::link::stream::LinkStream;

/// The way out of one end.
pub(super) struct Outbox {
    state: Mutex<State>,
    changed: Condvar,
    frame_bytes: usize,
}

struct State {
    waiting: VecDeque<Vec<u8>>,
    spare: Vec<Vec<u8>>,
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
        let state =
            State { waiting: VecDeque::with_capacity(frames), spare, writing: false, phase: Phase::Open };
        Self { state: Mutex::new(state), changed: Condvar::new(), frame_bytes }
    }

    /// Writes a frame without blocking, and leaves to the writer thread what the socket does not take.
    pub(super) fn write(
        &self,
        stream: &LinkStream,
        header: &[u8; HEADER_BYTES],
        body: &[&[u8]],
    ) -> io::Result<()> {
        let mut state = self.lock();
        match state.phase {
            Phase::Open => {}
            Phase::Finishing => return Err(io::ErrorKind::BrokenPipe.into()),
            Phase::Done(error) => return Err(error.unwrap_or(io::ErrorKind::BrokenPipe).into()),
        }
        if stream.is_tls() {
            return self.write_sealed(&mut state, stream, header, body);
        }
        let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(1 + body.len());
        slices.push(IoSlice::new(header));
        slices.extend(body.iter().map(|part| IoSlice::new(part)));
        let mut rest = &mut slices[..];
        if state.waiting.is_empty() && !state.writing {
            write_at_once(stream.socket(), &mut rest)?;
        }
        if rest.iter().any(|slice| !slice.is_empty()) {
            let mut buf = state.spare.pop().unwrap_or_else(|| Vec::with_capacity(self.frame_bytes));
            rest.iter().for_each(|slice| buf.extend_from_slice(slice));
            state.waiting.push_back(buf);
            self.changed.notify_all();
        }
        Ok(())
    }

    /// The same under TLS: records are made in the order in which they go out, under the lock that keeps that order.
    fn write_sealed(
        &self,
        state: &mut State,
        stream: &LinkStream,
        header: &[u8; HEADER_BYTES],
        body: &[&[u8]],
    ) -> io::Result<()> {
        let mut buf = state.spare.pop().unwrap_or_else(|| Vec::with_capacity(self.frame_bytes));
        stream.seal(&[header], &mut buf)?;
        stream.seal(body, &mut buf)?;
        if state.waiting.is_empty() && !state.writing {
            let slices: &mut [IoSlice<'_>] = &mut [IoSlice::new(&buf)];
            let mut rest = slices;
            write_at_once(stream.socket(), &mut rest)?;
            let left = rest.iter().map(|slice| slice.len()).sum::<usize>();
            buf.drain(..buf.len() - left);
        }
        if buf.is_empty() {
            state.spare.push(buf);
        } else {
            state.waiting.push_back(buf);
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

/// Writes as much of `rest` as the socket takes, and advances it.
fn write_at_once(stream: &TcpStream, rest: &mut &mut [IoSlice<'_>]) -> io::Result<()> {
    let socket = SockRef::from(stream);
    while rest.iter().any(|slice| !slice.is_empty()) {
        match socket.send_vectored_with_flags(rest, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) {
            Ok(written) => IoSlice::advance_slices(rest, written),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
