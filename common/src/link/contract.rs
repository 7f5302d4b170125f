//! The contract of [`HopLink`] as tests, run by every implementation through [`contract_tests!`]. A wait that is not
//! answered within [`PATIENCE`] fails the test.
use std::time::{Duration, Instant};

use super::{Doorbell, HopLink, InFrame, Limits, LinkError, LinkKind};
use crate::frame::{Checksum, FrameHeader, FrameKind, RowType, SideKind, body_sum};
use crate::ids::{Epoch, HopKey};

mod damage;
mod large;

pub use damage::*;
pub use large::*;

/// Longest wait for anything.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Makes ends of one implementation.
pub trait Fixture {
    /// Two ends joined to each other.
    fn pair(&self, a: Limits, b: Limits) -> (Side, Side);

    /// An end, and in place of the other one its bare transport. `None` where nothing is encoded.
    fn raw(&self, limits: Limits) -> Option<(Side, Box<dyn Wire>)>;

    /// How both ends sum bodies.
    fn checksum(&self) -> Checksum {
        Checksum::Crc32c
    }

    /// Whether a sum may stand behind its body there.
    fn has_trailers(&self) -> bool {
        false
    }

    /// Rows of a frame larger than what the transport takes at once; fewer where all of it is allocated in advance.
    fn large_rows(&self) -> u32 {
        1 << 16
    }
}

/// What a peer can do that does not keep to the rules.
pub trait Wire {
    /// Sends these bytes: a frame, or what looks like one.
    fn write(&mut self, bytes: &[u8]);
    /// Sends as much of a frame as the transport can send of one, and breaks off without a word.
    fn cut_within(&mut self, frame: &[u8]);
}

/// One end with the bell it rings.
pub struct Side {
    /// The end.
    pub link: Box<dyn HopLink>,
    bell: Doorbell,
}

impl Side {
    /// Of any implementation.
    pub fn new(link: impl HopLink + 'static, bell: Doorbell) -> Self {
        Self { link: Box::new(link), bell }
    }

    /// Of whatever implementation this is.
    pub fn boxed(link: Box<dyn HopLink>, bell: Doorbell) -> Self {
        Self { link, bell }
    }

    /// What `poll_recv` says next, waiting for the bell.
    pub(super) fn next(&mut self) -> Result<InFrame, LinkError> {
        next(self.link.as_mut(), &self.bell)
    }

    fn dispatch(&mut self, step: u64, body: &[u8]) -> Result<(), LinkError> {
        self.link.send(rows(FrameKind::Dispatch, FrameHeader::key(step, 0, 0), body), &[body])
    }

    fn answer(&mut self, hop: HopKey, body: &[u8]) -> Result<(), LinkError> {
        self.link.send(rows(FrameKind::Combine, hop, body), &[body])
    }
}

/// What `poll_recv` of a link says next, waiting for the bell that it rings. Panics where that does not ring.
///
/// # Errors
/// The link's own.
pub fn next(link: &mut dyn HopLink, bell: &Doorbell) -> Result<InFrame, LinkError> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let seen = bell.count();
        if let Some(frame) = link.poll_recv()? {
            return Ok(frame);
        }
        assert!(bell.wait(seen, Some(deadline)), "the bell did not ring");
    }
}

const EPOCH: Epoch = Epoch(0xfeed_0001);
const MAX_ROWS: u32 = 512;
const COLUMNS: u32 = 64;

/// What the tests agree on: two credits, up to 512 rows of 64 f32 with their side tensors.
pub fn limits(peer: &str) -> Limits {
    Limits {
        kind: LinkKind::Loopback,
        peer: peer.into(),
        epoch: EPOCH,
        credits: 2,
        max_rows: MAX_ROWS,
        max_body_bytes: MAX_ROWS * (COLUMNS * 4 + 64),
        checksum: Checksum::Crc32c,
    }
}

/// The same, with bodies summed as the fixture says.
fn agreed(fixture: &dyn Fixture, peer: &str) -> Limits {
    Limits { checksum: fixture.checksum(), ..limits(peer) }
}

/// A header for `body` as rows of [`COLUMNS`] f32.
fn rows(kind: FrameKind, hop: HopKey, body: &[u8]) -> FrameHeader {
    FrameHeader {
        kind,
        dtype: RowType::F32,
        side: SideKind::None,
        epoch: Epoch(0),
        hop,
        rows: body.len() as u32 / (COLUMNS * 4),
        columns: COLUMNS,
        side_columns: 0,
        body_bytes: body.len() as u32,
    }
}

fn body(num_rows: u32, seed: u64) -> Vec<u8> {
    (0..u64::from(num_rows * COLUMNS * 4))
        .map(|i| (i.wrapping_mul(31) ^ seed.wrapping_mul(97)) as u8)
        .collect()
}

/// A dispatch frame as bytes.
fn encoded(fixture: &dyn Fixture, epoch: Epoch, step: u64, body: &[u8]) -> Vec<u8> {
    let header = FrameHeader { epoch, ..rows(FrameKind::Dispatch, FrameHeader::key(step, 0, 0), body) };
    [&header.encode(body_sum(fixture.checksum(), &[body])), body].concat()
}

fn pair(fixture: &dyn Fixture) -> (Side, Side) {
    fixture.pair(agreed(fixture, "B"), agreed(fixture, "A"))
}

/// Frames arrive whole and in order, from no row to as many as agreed, and their answers too.
pub fn frames_arrive_whole_and_in_order(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    for (step, num_rows) in [0, 1, 7, MAX_ROWS, 0, 33].into_iter().enumerate() {
        let (step, sent) = (step as u64, body(num_rows, step as u64));
        a.dispatch(2 * step, &sent).unwrap();
        a.dispatch(2 * step + 1, &[]).unwrap();
        let first = b.next().unwrap();
        assert_eq!((first.header.rows, first.header.epoch), (num_rows, EPOCH));
        assert_eq!(first.body(), sent);
        let second = b.next().unwrap();
        assert_eq!([first.header.hop.step.0, second.header.hop.step.0], [2 * step, 2 * step + 1]);
        b.answer(second.header.hop, &[]).unwrap();
        b.answer(first.header.hop, &sent).unwrap();
        assert_eq!(a.next().unwrap().header.hop, second.header.hop);
        assert_eq!(a.next().unwrap().body(), sent);
    }
    assert_eq!(b.link.poll_recv().unwrap().map(|frame| frame.header), None);
    let (sent, received) = (a.link.stats().counts(), b.link.stats().counts());
    assert_eq!((sent.frames_sent, sent.bytes_sent), (received.frames_received, received.bytes_received));
    assert_eq!((sent.frames_sent, sent.frames_received), (12, 12));
}

/// Side tensors come behind the rows, the parts of a body are joined, and an error frame carries its text.
pub fn side_tensors_and_text_travel(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    for (side, side_columns, per_row) in
        [(SideKind::RouterLogits, 8, 32), (SideKind::TopK, 2, 16), (SideKind::InputIds, 1, 8)]
    {
        let (hidden, beside) = (body(3, 5), vec![side as u8; 3 * per_row]);
        let plain = rows(FrameKind::Dispatch, FrameHeader::key(side as u64, 3, 1), &hidden);
        let header =
            FrameHeader { side, side_columns, body_bytes: (hidden.len() + beside.len()) as u32, ..plain };
        a.link.send(header, &[&hidden, &[], &beside[..5], &beside[5..]]).unwrap();
        let frame = b.next().unwrap();
        assert_eq!(frame.header, FrameHeader { epoch: EPOCH, ..header });
        assert_eq!(frame.body(), [&hidden[..], &beside[..]].concat());
        let text = b"\x03\0\0\0layer 3 wants router logits";
        let error = FrameHeader {
            kind: FrameKind::Error,
            rows: 0,
            columns: 0,
            body_bytes: text.len() as u32,
            ..rows(FrameKind::Error, frame.header.hop, &[])
        };
        b.link.send(error, &[text]).unwrap();
        let frame = a.next().unwrap();
        assert_eq!((frame.header.kind, frame.body()), (FrameKind::Error, &text[..]));
    }
}

/// A sender beyond its credits is told so, and may go on once it was answered.
pub fn credits_bound_what_is_in_flight(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    a.dispatch(1, &body(1, 1)).unwrap();
    assert!(matches!(a.dispatch(1, &[]), Err(LinkError::BadFrame { .. })), "the same hop twice");
    a.dispatch(2, &body(1, 2)).unwrap();
    assert_eq!(a.dispatch(3, &[]), Err(LinkError::NoCredit { peer: "B".into(), credits: 2 }));
    let first = b.next().unwrap().header.hop;
    assert_eq!(a.dispatch(3, &[]), Err(LinkError::NoCredit { peer: "B".into(), credits: 2 }));
    assert!(matches!(b.answer(FrameHeader::key(9, 0, 0), &[]), Err(LinkError::BadFrame { .. })));
    b.answer(first, &[]).unwrap();
    assert!(matches!(b.answer(first, &[]), Err(LinkError::BadFrame { .. })), "answered twice");
    assert_eq!(a.next().unwrap().header.hop, first);
    a.dispatch(3, &[]).unwrap();
    // The other direction has credits of its own.
    b.dispatch(100, &[]).unwrap();
    assert_eq!(a.next().unwrap().header.hop.step.0, 100);
}

/// What was not agreed is refused by `send` and leaves the link as it was.
pub fn frames_that_were_not_agreed_are_not_sent(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    let bad = |result| matches!(result, Err(LinkError::BadFrame { .. }));
    assert!(bad(a.dispatch(1, &body(MAX_ROWS + 1, 0))), "too many rows");
    let header = rows(FrameKind::Dispatch, FrameHeader::key(1, 0, 0), &body(2, 0));
    assert!(bad(a.link.send(header, &[&body(1, 0)])), "parts too small");
    assert!(bad(a.link.send(FrameHeader { columns: 65, ..header }, &[&body(2, 0)])), "another shape");
    assert!(
        bad(a.link.send(FrameHeader { kind: FrameKind::Close, ..header }, &[&body(2, 0)])),
        "a link's own"
    );
    a.dispatch(1, &body(2, 0)).unwrap();
    assert_eq!(b.next().unwrap().body(), body(2, 0));
}

/// Frames of another epoch never reach the engine.
pub fn another_epoch_is_dropped_and_counted(fixture: &dyn Fixture) {
    let other = Limits { epoch: Epoch(EPOCH.0 - 1), ..agreed(fixture, "B") };
    let (mut a, mut b) = fixture.pair(other, agreed(fixture, "A"));
    a.dispatch(1, &body(3, 1)).unwrap();
    a.dispatch(2, &[]).unwrap();
    b.dispatch(3, &[]).unwrap();
    a.link.close("done");
    assert!(b.next().is_err());
    let counts = b.link.stats().counts();
    assert_eq!((counts.dropped_epoch, counts.frames_received, counts.frames_held), (2, 0, 0));
    if let Some((mut side, mut wire)) = fixture.raw(agreed(fixture, "raw")) {
        wire.write(&encoded(fixture, Epoch(1), 1, &body(MAX_ROWS, 1)));
        wire.write(&encoded(fixture, EPOCH, 2, &body(1, 2)));
        assert_eq!(side.next().unwrap().header.hop.step.0, 2);
        assert_eq!(side.link.stats().counts().dropped_epoch, 1);
    }
}

/// The peer learns why a link was closed, after the frames sent before.
pub fn close_is_seen_with_its_reason_after_earlier_frames(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    a.dispatch(1, &body(MAX_ROWS, 1)).unwrap();
    a.dispatch(2, &[]).unwrap();
    a.link.close("draining");
    a.link.close("again");
    let closed = |peer: &str| LinkError::Closed { peer: peer.into(), reason: "draining".into() };
    assert_eq!(a.dispatch(3, &[]), Err(closed("B")));
    assert_eq!(a.next().unwrap_err(), closed("B"));
    assert_eq!(b.next().unwrap().body(), body(MAX_ROWS, 1));
    assert_eq!(b.next().unwrap().header.hop.step.0, 2);
    assert_eq!(b.next().unwrap_err(), closed("A"));
    assert_eq!(b.next().unwrap_err(), closed("A"));
    assert_eq!(b.answer(FrameHeader::key(1, 0, 0), &[]), Err(closed("A")));
}

/// Dropping an end closes it for the other one.
pub fn dropping_an_end_closes_the_link(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    a.dispatch(1, &body(9, 1)).unwrap();
    drop(a);
    assert_eq!(b.next().unwrap().body(), body(9, 1));
    assert!(matches!(b.next().unwrap_err(), LinkError::Closed { .. }));
}

/// Memory of received frames comes back and is used again.
pub fn buffers_are_returned_and_reused(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    for step in 0..50 {
        a.dispatch(step, &body(5, step)).unwrap();
        let frame = b.next().unwrap();
        assert_eq!(b.link.stats().counts().frames_held, 1);
        let (hop, echo) = (frame.header.hop, frame.body().to_vec());
        drop(frame);
        b.answer(hop, &echo).unwrap();
        assert_eq!(a.next().unwrap().body(), body(5, step));
    }
    for side in [&a, &b] {
        let counts = side.link.stats().counts();
        assert_eq!((counts.frames_held, counts.buffers_grown), (0, 0));
    }
    // A frame outlives its link.
    a.dispatch(99, &body(5, 99)).unwrap();
    let frame = b.next().unwrap();
    drop((a, b));
    assert_eq!(frame.body(), body(5, 99));
}

/// Two engines on two threads exchange hops without losing, doubling or waiting for ever.
pub fn two_threads_exchange_ten_thousand_hops(fixture: &dyn Fixture) {
    const HOPS: u64 = 10_000;
    let (mut a, mut b) = pair(fixture);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for _ in 0..HOPS {
                let frame = b.next().unwrap();
                b.answer(frame.header.hop, frame.body()).unwrap();
            }
            assert!(matches!(b.next().unwrap_err(), LinkError::Closed { .. }));
        });
        let (mut sent, mut answered) = (0, 0);
        while answered < HOPS {
            while sent < HOPS && sent - answered < 2 {
                a.dispatch(sent, &body((sent % 5) as u32, sent)).unwrap();
                sent += 1;
            }
            let frame = a.next().unwrap();
            let step = frame.header.hop.step.0;
            assert_eq!((step, frame.body()), (answered, &body((step % 5) as u32, step)[..]));
            answered += 1;
        }
        a.link.close("done");
    });
}

/// One `#[test]` per clause, for a value of a type that implements [`Fixture`].
#[doc(hidden)]
#[macro_export]
macro_rules! link_contract_tests {
    ($fixture:expr; $($name:ident)*) => {
        $(#[test]
        fn $name() {
            $crate::link::contract::$name(&$fixture);
        })*
    };
    ($fixture:expr) => {
        $crate::link_contract_tests! { $fixture;
            frames_arrive_whole_and_in_order
            bodies_of_several_mib_arrive_whole
            side_tensors_and_text_travel
            credits_bound_what_is_in_flight
            frames_that_were_not_agreed_are_not_sent
            another_epoch_is_dropped_and_counted
            a_duplicate_is_dropped_and_counted
            a_corrupt_frame_breaks_the_link
            any_damage_to_a_body_breaks_the_link
            another_checksum_than_agreed_breaks_the_link
            a_sum_behind_a_body_counts_as_one_before_it
            whoever_sent_a_corrupt_frame_is_told_so
            a_peer_beyond_its_credits_breaks_the_link
            a_truncated_stream_is_lost
            close_is_seen_with_its_reason_after_earlier_frames
            dropping_an_end_closes_the_link
            buffers_are_returned_and_reused
            two_threads_exchange_ten_thousand_hops
            sending_never_blocks
        }
    };
}
pub use crate::link_contract_tests as contract_tests;
