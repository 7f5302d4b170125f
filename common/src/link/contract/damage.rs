//! The clauses about peers that do not keep to the contract, and wires that harm what is on them.
use super::{EPOCH, Fixture, MAX_ROWS, body, encoded, limits, rows};
use crate::frame::{FrameHeader, FrameKind};
use crate::ids::HopKey;
use crate::link::LinkError;

/// A frame that is on the wire twice reaches the engine once.
pub fn a_duplicate_is_dropped_and_counted(fixture: &dyn Fixture) {
    let Some((mut side, mut wire)) = fixture.raw(limits("raw")) else { return };
    let unasked = FrameHeader { epoch: EPOCH, ..rows(FrameKind::Combine, FrameHeader::key(5, 0, 0), &[]) };
    wire.write(&encoded(EPOCH, 1, &body(1, 1)));
    wire.write(&encoded(EPOCH, 1, &body(1, 1)));
    assert_eq!(side.next().unwrap().header.hop.step.0, 1);
    wire.write(&unasked.encode(0));
    wire.write(&encoded(EPOCH, 2, &[]));
    assert_eq!(side.next().unwrap().header.hop.step.0, 2);
    let counts = side.link.stats().counts();
    assert_eq!((counts.dropped_duplicate, counts.dropped_unasked), (1, 1));
}

/// Damage on the wire ends the link after what came before it, and no damaged row is ever seen.
pub fn a_corrupt_frame_breaks_the_link(fixture: &dyn Fixture) {
    let good = encoded(EPOCH, 1, &body(2, 1));
    let oversized =
        FrameHeader { epoch: EPOCH, ..rows(FrameKind::Dispatch, HopKey::default(), &body(MAX_ROWS + 1, 0)) };
    let flipped = |at: usize| {
        let mut bytes = encoded(EPOCH, 2, &body(2, 2));
        bytes[at] ^= 1;
        bytes
    };
    for bad in [flipped(0), flipped(17), flipped(63), flipped(64), flipped(300), oversized.encode(0).to_vec()]
    {
        let Some((mut side, mut wire)) = fixture.raw(limits("raw")) else { return };
        wire.write(&good);
        wire.write(&bad);
        assert_eq!(side.next().unwrap().body(), body(2, 1));
        let error = side.next().unwrap_err();
        assert!(matches!(error, LinkError::Corrupt { .. }), "{error}");
        assert_eq!(side.link.poll_recv().unwrap_err(), error, "the same for ever");
        assert_eq!(side.dispatch(7, &[]).unwrap_err(), error);
    }
}

/// More dispatches than credits allow for are the peer's mistake.
pub fn a_peer_beyond_its_credits_breaks_the_link(fixture: &dyn Fixture) {
    let Some((mut side, mut wire)) = fixture.raw(limits("raw")) else { return };
    (1..=3).for_each(|step| wire.write(&encoded(EPOCH, step, &[])));
    for step in 1..=2 {
        assert_eq!(side.next().unwrap().header.hop.step.0, step);
    }
    assert!(matches!(side.next().unwrap_err(), LinkError::Corrupt { .. }));
}

/// A transport that ends without a word is a loss, after what had arrived whole.
pub fn a_truncated_stream_is_lost(fixture: &dyn Fixture) {
    for cut_frame in [encoded(EPOCH, 2, &body(4, 2)), Vec::new()] {
        let Some((mut side, mut wire)) = fixture.raw(limits("raw")) else { return };
        wire.write(&encoded(EPOCH, 1, &body(2, 1)));
        wire.cut_within(&cut_frame);
        assert_eq!(side.next().unwrap().body(), body(2, 1));
        let error = side.next().unwrap_err();
        assert!(matches!(error, LinkError::Lost { .. }), "{error}");
        assert_eq!(side.link.poll_recv().unwrap_err(), error, "the same for ever");
    }
}
