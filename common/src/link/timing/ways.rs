//! Ways for rows there and back: a link, a bare socket, a bare futex. Each has a thread at its far end that answers with as
//! much as it got, and ends with its way.
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use super::super::pairs::{End, PairError, Pairs};
use super::super::{Limits, LinkKind, features};
use super::raw::{RAW_FUTEX, RawFutex, RawTcp, Waiting};
use super::{Seats, TimingError};
use crate::frame::{FrameHeader, FrameKind, RowType, SideKind};
use crate::ids::Epoch;

/// Longest wait for an answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// Bytes that begin where a line of the processor's cache does, as a tensor's do.
pub(super) struct Aligned {
    bytes: Vec<u8>,
    begin: usize,
}

impl Aligned {
    pub(super) fn new(len: usize) -> Self {
        const LINE: usize = 64;
        // Written to, so that there is memory behind them.
        let bytes = vec![1; len + LINE];
        let begin = bytes.as_ptr().addr().next_multiple_of(LINE) - bytes.as_ptr().addr();
        Self { bytes, begin }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[self.begin..]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.begin..]
    }
}

/// What there is to measure.
#[derive(Clone, Copy, Debug)]
pub(super) enum Which {
    Link(LinkKind),
    Futex,
    Tcp(Waiting),
}

impl Which {
    pub(super) fn name(self) -> String {
        match self {
            Self::Link(kind) => kind.to_string(),
            Self::Futex => RAW_FUTEX.into(),
            Self::Tcp(waiting) => waiting.to_string(),
        }
    }

    pub(super) fn kind(self) -> Option<LinkKind> {
        match self {
            Self::Link(kind) => Some(kind),
            Self::Futex | Self::Tcp(_) => None,
        }
    }

    /// With threads of its own, for bodies of up to `rows` rows. The far end's sits where `seats` say.
    pub(super) fn open(
        self,
        pairs: &Pairs,
        rows: u32,
        columns: u32,
        seats: Seats,
    ) -> Result<Box<dyn Way>, PairError> {
        let body_bytes = rows as usize * columns as usize * RowType::Bf16.bytes();
        Ok(match self {
            Self::Link(kind) => Box::new(OverLink::open(pairs, kind, rows, columns, seats)?),
            Self::Futex => Box::new(RawFutex::start(body_bytes, seats)?),
            Self::Tcp(waiting) => Box::new(RawTcp::connect(waiting, body_bytes, seats)?),
        })
    }
}

/// Rows there, and as many back.
pub(super) trait Way: Send {
    fn name(&self) -> String;

    /// Returns once all of them are back.
    fn round_trip(&mut self, rows: u32, body: &[u8]) -> Result<(), TimingError>;
}

pub(super) fn broken(way: &dyn Way, what: impl ToString) -> TimingError {
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
        seats: Seats,
    ) -> Result<Self, PairError> {
        let max_body_bytes = max_rows * columns * RowType::Bf16.bytes() as u32;
        let limits = |peer: &str| Limits {
            kind,
            peer: peer.into(),
            epoch: Epoch(1),
            credits: 2,
            max_rows,
            max_body_bytes,
            checksum: features::checksum(kind, &features::offered()),
        };
        let (near, mut far) = pairs.open(kind, limits("the far end"), limits("the near end"))?;
        let answer = move || {
            seats.far();
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
