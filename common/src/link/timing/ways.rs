//! Ways for rows there and back: a link, a bare socket, a bare futex. Each has a thread at its far end that answers with as
//! much as it got, and ends with its way.
use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use afd_ffi::futex::{self, Scope};

use super::super::pairs::{End, PairError, Pairs};
use super::super::{Limits, LinkKind};
use super::TimingError;
use crate::frame::{FrameHeader, FrameKind, HEADER_BYTES, RowType, SideKind};
use crate::ids::Epoch;

/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// Rows there, and as many back.
pub(super) trait Way {
    fn name(&self) -> String;

    fn kind(&self) -> Option<LinkKind> {
        None
    }

    /// Returns once all of them are back.
    fn round_trip(&mut self, rows: u32, body: &[u8]) -> Result<(), TimingError>;
}

fn broken(way: &dyn Way, what: impl ToString) -> TimingError {
    TimingError::Broken { way: way.name(), what: what.to_string() }
}

/// A link between two threads, as engines use it.
pub(super) struct OverLink {
    near: End,
    kind: LinkKind,
    columns: u32,
    step: u64,
    far: Option<JoinHandle<()>>,
}

impl OverLink {
    pub(super) fn open(
        pairs: &Pairs,
        kind: LinkKind,
        max_rows: u32,
        columns: u32,
        max_body_bytes: u32,
    ) -> Result<Self, PairError> {
        let limits = |peer: &str| Limits {
            kind,
            peer: peer.into(),
            epoch: Epoch(1),
            credits: 2,
            max_rows,
            max_body_bytes,
        };
        let (near, mut far) = pairs.open(kind, limits("the far end"), limits("the near end"))?;
        let answer = move || {
            // Until the near end closes the link.
            while let Ok(frame) = far.next(PATIENCE) {
                let header = FrameHeader { kind: FrameKind::Combine, ..frame.header };
                if far.link.send(header, &[frame.body()]).is_err() {
                    return;
                }
            }
        };
        let far = Some(Builder::new().name("far-end".into()).spawn(answer)?);
        Ok(Self { near, kind, columns, step: 0, far })
    }
}

impl Way for OverLink {
    fn name(&self) -> String {
        self.kind.to_string()
    }

    fn kind(&self) -> Option<LinkKind> {
        Some(self.kind)
    }

    fn round_trip(&mut self, rows: u32, body: &[u8]) -> Result<(), TimingError> {
        self.step += 1;
        let header = FrameHeader {
            kind: FrameKind::Dispatch,
            dtype: RowType::Bf16,
            side: SideKind::None,
            epoch: Epoch(0),
            hop: FrameHeader::key(self.step, 0, 0),
            rows,
            columns: self.columns,
            side_columns: 0,
            body_bytes: body.len() as u32,
        };
        self.near.link.send(header, &[body]).map_err(|error| broken(self, error))?;
        let answer = self.near.next(PATIENCE).map_err(|error| broken(self, error))?;
        match answer.header.rows == rows {
            true => Ok(()),
            false => Err(broken(self, format!("{} rows came back of {rows}", answer.header.rows))),
        }
    }
}

impl Drop for OverLink {
    fn drop(&mut self) {
        self.near.link.close("measured");
        if let Some(far) = self.far.take() {
            let _ = far.join();
        }
    }
}

/// The same bytes on a plain socket, read and written by the two threads that use them. The length comes first, in as many
/// bytes as a frame's header has.
pub(super) struct RawTcp {
    near: TcpStream,
    buffer: Vec<u8>,
    far: Option<JoinHandle<()>>,
}

impl RawTcp {
    pub(super) fn connect(max_bytes: usize) -> Result<Self, PairError> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let near = TcpStream::connect(listener.local_addr()?)?;
        let (mut far, _) = listener.accept()?;
        for end in [&near, &far] {
            end.set_nodelay(true)?;
            end.set_read_timeout(Some(PATIENCE))?;
        }
        let buffer = vec![0; HEADER_BYTES + max_bytes];
        let mut scratch = buffer.clone();
        let answer = move || while echo(&mut far, &mut scratch).is_ok() {};
        let far = Some(Builder::new().name("raw-tcp".into()).spawn(answer)?);
        Ok(Self { near, buffer, far })
    }

    fn exchange(&mut self, body: &[u8]) -> io::Result<()> {
        let message = &mut self.buffer[..HEADER_BYTES + body.len()];
        message[..8].copy_from_slice(&(body.len() as u64).to_le_bytes());
        // One call where the socket takes it all, the rows from where they lie: as a link does.
        let head = &message[..HEADER_BYTES];
        let written = self.near.write_vectored(&[IoSlice::new(head), IoSlice::new(body)])?;
        self.near.write_all(&head[written.min(HEADER_BYTES)..])?;
        self.near.write_all(&body[written.saturating_sub(HEADER_BYTES)..])?;
        self.near.read_exact(message)
    }
}

fn echo(far: &mut TcpStream, buffer: &mut [u8]) -> io::Result<()> {
    let (mut filled, mut wanted) = (0, HEADER_BYTES);
    while filled < wanted {
        match far.read(&mut buffer[filled..])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => filled += read,
        }
        if let (Some(len), true) = (buffer.first_chunk::<8>(), filled >= HEADER_BYTES) {
            wanted = HEADER_BYTES + u64::from_le_bytes(*len) as usize;
        }
    }
    far.write_all(&buffer[..wanted])
}

impl Way for RawTcp {
    fn name(&self) -> String {
        "raw tcp".into()
    }

    fn round_trip(&mut self, _: u32, body: &[u8]) -> Result<(), TimingError> {
        self.exchange(body).map_err(|error| broken(self, error))
    }
}

impl Drop for RawTcp {
    fn drop(&mut self) {
        let _ = self.near.shutdown(Shutdown::Both);
        if let Some(far) = self.far.take() {
            let _ = far.join();
        }
    }
}

/// Two threads that wake each other, and copy the rows once a way.
pub(super) struct RawFutex {
    words: Arc<Words>,
    turn: u32,
    scratch: Vec<u8>,
    far: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Words {
    there: AtomicU32,
    back: AtomicU32,
    bytes: AtomicUsize,
}

/// Told to the far end in place of a turn.
const STOP: u32 = u32::MAX;

impl RawFutex {
    pub(super) fn start(max_bytes: usize) -> Result<Self, PairError> {
        let words = Arc::new(Words::default());
        let (theirs, body) = (Arc::clone(&words), vec![1u8; max_bytes]);
        let mut copy = body.clone();
        let answer = move || {
            for turn in 1..STOP {
                if wait_for(&theirs.there, turn) == STOP {
                    return;
                }
                let bytes = theirs.bytes.load(SeqCst);
                copy[..bytes].copy_from_slice(&body[..bytes]);
                set(&theirs.back, turn);
            }
        };
        let far = Some(Builder::new().name("raw-futex".into()).spawn(answer)?);
        Ok(Self { words, turn: 0, scratch: vec![0; max_bytes], far })
    }
}

/// Sleeps until the word has this value, or says stop.
fn wait_for(word: &AtomicU32, value: u32) -> u32 {
    loop {
        let seen = word.load(SeqCst);
        if seen == value || seen == STOP {
            return seen;
        }
        futex::wait(word, seen, Scope::Shared, Some(PATIENCE));
    }
}

fn set(word: &AtomicU32, value: u32) {
    word.store(value, SeqCst);
    futex::wake(word, Scope::Shared);
}

impl Way for RawFutex {
    fn name(&self) -> String {
        "raw futex".into()
    }

    fn round_trip(&mut self, _: u32, body: &[u8]) -> Result<(), TimingError> {
        self.turn += 1;
        self.scratch[..body.len()].copy_from_slice(body);
        self.words.bytes.store(body.len(), SeqCst);
        set(&self.words.there, self.turn);
        wait_for(&self.words.back, self.turn);
        Ok(())
    }
}

impl Drop for RawFutex {
    fn drop(&mut self) {
        set(&self.words.there, STOP);
        if let Some(far) = self.far.take() {
            let _ = far.join();
        }
    }
}
