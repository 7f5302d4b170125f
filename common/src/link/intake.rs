//! From bytes to verified frames in the inbox: what every transport of encoded frames does the same way.
use std::io::{self, IoSliceMut, Read};
use std::sync::Arc;

use super::inbox::Inbox;
use super::loopback::receive_pool;
use super::pool::{Pool, PooledBuf};
use super::port::Port;
use super::{Body, LinkError};
use crate::frame::{
    BodyCheck, FrameHeader, FrameKind, FrameLimits, HEADER_BYTES, MAX_TEXT_BYTES, verify_body,
};

/// Most bytes of a body that are read together with its header; what they hold of the next frame is copied once more.
const READ_AHEAD_BYTES: usize = 64 << 10;
/// Most bytes of a larger body that are read before their checksum is taken.
const PIECE_BYTES: usize = 256 << 10;

/// One end's way in.
#[derive(Clone)]
pub(super) struct Intake {
    pub(super) inbox: Arc<Inbox>,
    pool: Pool,
    limits: FrameLimits,
}

impl Intake {
    /// Into the inbox of `port`.
    pub(super) fn new(port: &Port) -> Self {
        let (inbox, limits) = (Arc::clone(&port.inbox), port.limits.frame_limits());
        Self { inbox, pool: receive_pool(port), limits }
    }
}

/// How far reading got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// A frame lies in the inbox, or was dropped.
    Frame,
    /// There is nothing to read just now, and so much of a body is still to come.
    Waits {
        /// Bytes; 0 while the header is not there.
        missing: usize,
    },
}

/// Puts frames together from a stream of bytes, which may come in pieces of any size.
pub(super) struct FrameReader {
    pub(super) intake: Intake,
    head: [u8; HEADER_BYTES],
    /// Bytes of the header so far.
    filled: usize,
    /// Memory for the body, taken before it is known how long that is.
    body: Option<PooledBuf>,
    /// Bytes that came with the header and lie there.
    behind: usize,
    expected: Option<Expected>,
    /// What was read beyond the last frame, from `ahead_at` on.
    ahead: Vec<u8>,
    ahead_at: usize,
}

/// A frame whose header is there.
struct Expected {
    header: FrameHeader,
    crc: u32,
    /// Bytes of the body so far.
    filled: usize,
    /// Of these; none where the body came in one piece.
    check: Option<BodyCheck>,
}

impl FrameReader {
    pub(super) fn new(intake: Intake) -> Self {
        Self {
            intake,
            head: [0; HEADER_BYTES],
            filled: 0,
            body: None,
            behind: 0,
            expected: None,
            ahead: Vec::new(),
            ahead_at: 0,
        }
    }

    /// Reads until a frame is whole or, of an input that does not block, nothing is left. The error is how the link ends; a
    /// peer's farewell is one.
    pub(super) fn read(&mut self, input: &mut impl Read) -> Result<Progress, LinkError> {
        loop {
            let read = match &self.expected {
                None if self.filled == HEADER_BYTES => {
                    self.expect()?;
                    continue;
                }
                None => self.read_header(input),
                Some(expected) if expected.missing() == 0 => return self.finish(),
                Some(_) => self.read_body(input),
            };
            match read {
                Ok(0) => return Err(self.intake.inbox.lost(self.where_it_ended())),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(Progress::Waits {
                        missing: self.expected.as_ref().map_or(0, Expected::missing),
                    });
                }
                Err(error) => return Err(self.intake.inbox.lost(error)),
            }
        }
    }

    /// The rest of the header, and what comes with it.
    fn read_header(&mut self, input: &mut impl Read) -> io::Result<usize> {
        let rest = &mut self.head[self.filled..];
        if self.ahead_at < self.ahead.len() {
            let read = take(&self.ahead, &mut self.ahead_at, rest);
            self.filled += read;
            return Ok(read);
        }
        let body = memory(&mut self.body, &self.intake);
        let with_it = body.len().min(READ_AHEAD_BYTES);
        let wanted = rest.len();
        let read =
            input.read_vectored(&mut [IoSliceMut::new(rest), IoSliceMut::new(&mut body[..with_it])])?;
        self.filled += read.min(wanted);
        self.behind = read.saturating_sub(wanted);
        Ok(read)
    }

    /// The header is there: what follows it?
    fn expect(&mut self) -> Result<(), LinkError> {
        let (header, crc) = FrameHeader::decode(&self.head, &self.intake.limits)
            .map_err(|error| self.intake.inbox.corrupt(error))?;
        let bytes = header.body_bytes as usize;
        let body = memory(&mut self.body, &self.intake);
        let filled = self.behind.min(bytes);
        if self.behind > bytes {
            self.ahead.clear();
            self.ahead.extend_from_slice(&body[bytes..self.behind]);
            self.ahead_at = 0;
        }
        let check = (filled < bytes).then(|| {
            let mut check = BodyCheck::default();
            check.update(&body[..filled]);
            check
        });
        self.behind = 0;
        self.expected = Some(Expected { header, crc, filled, check });
        Ok(())
    }

    /// Some more of the body.
    fn read_body(&mut self, input: &mut impl Read) -> io::Result<usize> {
        let Some(expected) = &mut self.expected else { return Ok(0) };
        let body = memory(&mut self.body, &self.intake);
        let piece = &mut body[expected.filled..][..expected.missing().min(PIECE_BYTES)];
        let read = match self.ahead_at < self.ahead.len() {
            true => take(&self.ahead, &mut self.ahead_at, piece),
            false => input.read(piece)?,
        };
        expected.filled += read;
        expected.check.iter_mut().for_each(|check| check.update(&piece[..read]));
        Ok(read)
    }

    /// All of a frame is there.
    fn finish(&mut self) -> Result<Progress, LinkError> {
        let (Some(Expected { header, crc, check, .. }), Some(mut body)) =
            (self.expected.take(), self.body.take())
        else {
            return Ok(Progress::Waits { missing: 0 });
        };
        self.filled = 0;
        body.shorten(header.body_bytes as usize);
        let inbox = &self.intake.inbox;
        let verified = match check {
            Some(check) => check.verify(crc),
            None => verify_body(body.bytes(), crc),
        };
        verified.map_err(|error| inbox.corrupt(error))?;
        if header.kind == FrameKind::Close {
            return Err(inbox.closed(String::from_utf8_lossy(body.bytes())));
        }
        if inbox.admits(&header) {
            inbox.place(header, Body::Pooled(body));
        }
        Ok(Progress::Frame)
    }

    fn where_it_ended(&self) -> &'static str {
        match (&self.expected, self.filled) {
            (Some(_), _) => "the connection ended within a body",
            (None, 0) => "the connection ended between two frames",
            (None, _) => "the connection ended within a header",
        }
    }
}

impl Expected {
    fn missing(&self) -> usize {
        self.header.body_bytes as usize - self.filled
    }
}

/// As much as a body may have.
fn memory<'a>(body: &'a mut Option<PooledBuf>, intake: &Intake) -> &'a mut [u8] {
    let most = intake.limits.max_body_bytes.max(MAX_TEXT_BYTES) as usize;
    body.get_or_insert_with(|| intake.pool.take(most)).bytes_mut()
}

/// Copies what is left behind `at`, as far as it goes.
fn take(from: &[u8], at: &mut usize, to: &mut [u8]) -> usize {
    let taken = to.len().min(from.len() - *at);
    to[..taken].copy_from_slice(&from[*at..*at + taken]);
    *at += taken;
    taken
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{RowType, SideKind, body_crc};
    use crate::link::contract::limits;
    use crate::link::{Doorbell, Limits};

    /// Hands out bytes in pieces of these sizes, in turn, with nothing to read in between.
    struct Pieces<'a> {
        bytes: &'a [u8],
        sizes: std::iter::Cycle<std::vec::IntoIter<usize>>,
        is_dry: bool,
    }

    impl Read for Pieces<'_> {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            self.read_vectored(&mut [IoSliceMut::new(buf)])
        }

        fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
            self.is_dry = !self.is_dry;
            if self.is_dry {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let (piece, _) = self.bytes.split_at(self.sizes.next().unwrap().min(self.bytes.len()));
            let read = (&mut &*piece).read_vectored(bufs)?;
            self.bytes = &self.bytes[read..];
            Ok(read)
        }
    }

    fn frame(step: u64, bytes: usize, limits: &Limits) -> (Vec<u8>, Vec<u8>) {
        let body: Vec<u8> = (0..bytes).map(|i| (i as u64 * 31 + step) as u8).collect();
        let header = FrameHeader {
            kind: FrameKind::Dispatch,
            dtype: RowType::F32,
            side: SideKind::None,
            epoch: limits.epoch,
            hop: FrameHeader::key(step, 0, 0),
            rows: (bytes / 256) as u32,
            columns: 64,
            side_columns: 0,
            body_bytes: bytes as u32,
        };
        ([&header.encode(body_crc(&[&body]))[..], &body].concat(), body)
    }

    #[test]
    fn frames_are_whole_in_whatever_pieces_they_come() {
        let large = 2 << 20;
        let limits = Limits { max_rows: 1 << 16, max_body_bytes: large, credits: 8, ..limits("pieces") };
        let sizes = [0, 256, 33 * 256, 0, READ_AHEAD_BYTES, READ_AHEAD_BYTES + 256, large as usize, 512];
        let frames: Vec<_> = (0u64..).zip(sizes).map(|(step, bytes)| frame(step, bytes, &limits)).collect();
        let wire: Vec<u8> = frames.iter().flat_map(|(wire, _)| wire.clone()).collect();
        for pieces in [vec![1 << 22], vec![1, 63, 65, 4096], vec![64, 256], vec![9000], vec![5, 1 << 20]] {
            let port = Port::new(limits.clone(), Doorbell::default());
            let mut reader = FrameReader::new(Intake::new(&port));
            let mut input = Pieces { bytes: &wire, sizes: pieces.clone().into_iter().cycle(), is_dry: false };
            for (step, (_, body)) in (0u64..).zip(&frames) {
                while let Progress::Waits { missing } = reader.read(&mut input).unwrap() {
                    assert!(missing <= body.len(), "{missing} of {} are missing", body.len());
                }
                let frame = port.inbox.poll().unwrap().expect("it is whole");
                assert_eq!(frame.header.hop.step.0, step);
                assert!(frame.body() == body, "step {step} in pieces of {pieces:?}");
            }
            assert!(port.inbox.poll().unwrap().is_none());
            assert_eq!(port.inbox.stats.counts().buffers_grown, 0);
        }
    }
}
