//! From bytes to verified frames: what every transport of encoded frames does the same way.
use std::io::{self, Read};
use std::sync::Arc;

use super::inbox::Inbox;
use super::loopback::receive_pool;
use super::pool::{Pool, PooledBuf};
use super::port::Port;
use super::{Body, InFrame, LinkError};
use crate::frame::{
    BodyCheck, BodySum, FrameHeader, FrameKind, FrameLimits, HEADER_BYTES, MAX_TEXT_BYTES, TRAILER_BYTES,
    verify_body,
};

/// Bytes of a body that are read together with its header: of the first, and the fewest.
const FIRST_READ_BYTES: usize = 64 << 10;
const LEAST_READ_BYTES: usize = 4 << 10;
/// Most bytes of a body that are read before their checksum is taken. What they hold of the next frame is copied once more.
const PIECE_BYTES: usize = 512 << 10;

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
#[derive(Debug)]
pub(super) enum Progress {
    /// A frame is whole; none where it was dropped.
    Frame(Option<InFrame>),
    /// There is nothing to read just now, and so much of a body is still to come.
    Waits {
        /// Bytes; 0 while the header is not there.
        missing: usize,
    },
}

/// Puts frames together from a stream of bytes, which may come in pieces of any size.
pub(super) struct FrameReader {
    pub(super) intake: Intake,
    /// Memory for the frame under way.
    frame: Option<PooledBuf>,
    /// Bytes of it so far.
    filled: usize,
    expected: Option<Expected>,
    /// Bytes of a body that are read together with its header: as many as the last one had, up to a limit.
    with_header: usize,
    /// What was read beyond the last frame, from `ahead_at` on.
    ahead: Vec<u8>,
    ahead_at: usize,
}

/// A frame whose header is there.
struct Expected {
    header: FrameHeader,
    /// None where it stands behind the body.
    sum: Option<BodySum>,
    /// Header, body and what stands behind it.
    bytes: usize,
    /// Of the body so far; none where it came in one piece.
    check: Option<BodyCheck>,
}

impl FrameReader {
    pub(super) fn new(intake: Intake) -> Self {
        let with_header = FIRST_READ_BYTES;
        // A frame's worth of bytes may turn out to be smaller frames.
        let ahead = Vec::with_capacity(PIECE_BYTES + HEADER_BYTES);
        Self { intake, frame: None, filled: 0, expected: None, with_header, ahead, ahead_at: 0 }
    }

    /// Reads until a frame is whole or, of an input that does not block, nothing is left. The error is how the link ends; a
    /// peer's farewell is one.
    pub(super) fn read(&mut self, input: &mut impl Read) -> Result<Progress, LinkError> {
        loop {
            let up_to = match &self.expected {
                Some(expected) if self.filled == expected.bytes => return self.finish(),
                Some(expected) => expected.bytes.min(self.filled + PIECE_BYTES),
                None if self.filled >= HEADER_BYTES => {
                    self.expect()?;
                    continue;
                }
                // The header, what is likely to follow it, and the next header if it is there.
                None if self.ahead_at == self.ahead.len() => HEADER_BYTES + self.with_header + HEADER_BYTES,
                None => HEADER_BYTES,
            };
            match self.read_some(input, up_to) {
                Ok(0) => return Err(self.intake.inbox.lost(self.where_it_ended())),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let missing = self.expected.as_ref().map_or(0, |expected| expected.bytes - self.filled);
                    return Ok(Progress::Waits { missing });
                }
                Err(error) => return Err(self.intake.inbox.lost(error)),
            }
        }
    }

    /// Some more of the frame, of which no more than `up_to` bytes are wanted.
    fn read_some(&mut self, input: &mut impl Read, up_to: usize) -> io::Result<usize> {
        let frame = memory(&mut self.frame, &self.intake);
        let up_to = up_to.min(frame.len());
        let piece = &mut frame[self.filled..up_to];
        let read = match self.ahead_at < self.ahead.len() {
            true => take(&self.ahead, &mut self.ahead_at, piece),
            false => input.read(piece)?,
        };
        if let Some(Expected { header, check: Some(check), .. }) = &mut self.expected {
            let body_left = (HEADER_BYTES + header.body_bytes as usize).saturating_sub(self.filled);
            check.update(&piece[..read.min(body_left)]);
        }
        self.filled += read;
        Ok(read)
    }

    /// The header is there: what follows it?
    fn expect(&mut self) -> Result<(), LinkError> {
        let frame = memory(&mut self.frame, &self.intake);
        let (head, behind) = frame[..self.filled].split_at(HEADER_BYTES);
        let head = head.first_chunk().ok_or_else(|| self.intake.inbox.corrupt("no header"))?;
        let (header, sum) = FrameHeader::decode(head, &self.intake.limits)
            .map_err(|error| self.intake.inbox.corrupt(error))?;
        let body = header.body_bytes as usize;
        let to_come = body + if sum.is_none() { TRAILER_BYTES } else { 0 };
        let bytes = HEADER_BYTES + to_come;
        if self.filled > bytes {
            self.ahead.clear();
            self.ahead.extend_from_slice(&behind[to_come..]);
            self.ahead_at = 0;
            self.filled = bytes;
        }
        let check = (self.filled < bytes).then(|| {
            let mut check = BodyCheck::new(self.intake.limits.checksum);
            check.update(&behind[..behind.len().min(body)]);
            check
        });
        self.with_header = to_come.clamp(LEAST_READ_BYTES, PIECE_BYTES);
        self.expected = Some(Expected { header, sum, bytes, check });
        Ok(())
    }

    /// All of a frame is there.
    fn finish(&mut self) -> Result<Progress, LinkError> {
        let (Some(Expected { header, sum, check, .. }), Some(mut frame)) =
            (self.expected.take(), self.frame.take())
        else {
            return Ok(Progress::Waits { missing: 0 });
        };
        self.filled = 0;
        let body = header.body_bytes as usize;
        let sum = sum.unwrap_or_else(|| {
            let behind = &frame.frame_mut()[HEADER_BYTES + body..];
            BodySum::Sum64(u64::from_le_bytes(std::array::from_fn(|i| behind[i])))
        });
        frame.shorten(body);
        let inbox = &self.intake.inbox;
        let verified = match check {
            Some(check) => check.verify(sum),
            None => verify_body(frame.bytes(), sum),
        };
        verified.map_err(|error| inbox.corrupt(error))?;
        if header.kind == FrameKind::Close {
            return Err(inbox.closed(String::from_utf8_lossy(frame.bytes())));
        }
        let admitted = inbox.admits(&header).then(|| inbox.frame(header, Body::Pooled(frame)));
        Ok(Progress::Frame(admitted))
    }

    fn where_it_ended(&self) -> &'static str {
        match (&self.expected, self.filled) {
            (Some(_), _) => "the connection ended within a body",
            (None, 0) => "the connection ended between two frames",
            (None, _) => "the connection ended within a header",
        }
    }
}

/// As much as a frame may have, and a header behind it.
fn memory<'a>(frame: &'a mut Option<PooledBuf>, intake: &Intake) -> &'a mut [u8] {
    let most = intake.limits.max_body_bytes.max(MAX_TEXT_BYTES) as usize;
    frame.get_or_insert_with(|| intake.pool.take(most)).frame_mut()
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
    use crate::frame::{Checksum, RowType, SideKind, body_sum};
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
            self.is_dry = !self.is_dry;
            if self.is_dry {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let (piece, _) = self.bytes.split_at(self.sizes.next().unwrap().min(self.bytes.len()));
            let read = (&mut &*piece).read(buf)?;
            self.bytes = &self.bytes[read..];
            Ok(read)
        }
    }

    /// On the wire, and its body. Of those with a sum of 64 bits every other one has it behind the body.
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
        let wire = match body_sum(limits.checksum, &[&body]) {
            BodySum::Sum64(sum) if step % 2 == 1 => {
                [&header.encode_before()[..], &body, &sum.to_le_bytes()].concat()
            }
            sum => [&header.encode(sum)[..], &body].concat(),
        };
        (wire, body)
    }

    #[test]
    fn frames_are_whole_in_whatever_pieces_they_come() {
        come_in_pieces(Checksum::Crc32c);
    }

    #[test]
    fn and_with_their_sums_before_and_behind_them() {
        come_in_pieces(Checksum::Sum64);
    }

    fn come_in_pieces(checksum: Checksum) {
        let large = 2 << 20;
        let (max_rows, max_body_bytes) = (1 << 16, large);
        let limits = Limits { max_rows, max_body_bytes, credits: 12, checksum, ..limits("pieces") };
        let (first, piece) = (FIRST_READ_BYTES, PIECE_BYTES);
        let sizes =
            [first, 0, 256, 33 * 256, 33 * 256, 0, first + 256, piece, piece, large as usize, 512, 512];
        let frames: Vec<_> = (0u64..).zip(sizes).map(|(step, bytes)| frame(step, bytes, &limits)).collect();
        let wire: Vec<u8> = frames.iter().flat_map(|(wire, _)| wire.clone()).collect();
        for pieces in [vec![1 << 22], vec![1, 63, 65, 4096], vec![64, 256], vec![9000], vec![5, 1 << 20]] {
            let port = Port::new(limits.clone(), Doorbell::default());
            let mut reader = FrameReader::new(Intake::new(&port));
            let mut input = Pieces { bytes: &wire, sizes: pieces.clone().into_iter().cycle(), is_dry: false };
            for (step, (_, body)) in (0u64..).zip(&frames) {
                let frame = loop {
                    match reader.read(&mut input).unwrap() {
                        Progress::Frame(frame) => break frame.expect("of this epoch"),
                        Progress::Waits { missing } => {
                            assert!(
                                missing <= body.len() + TRAILER_BYTES,
                                "{missing} of {} are missing",
                                body.len()
                            );
                        }
                    }
                };
                assert_eq!(frame.header.hop.step.0, step);
                assert!(frame.body() == body, "step {step} in pieces of {pieces:?}");
            }
            assert_eq!(port.inbox.stats.counts().buffers_grown, 0);
        }
    }
}
