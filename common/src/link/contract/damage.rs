//! The clauses about peers that do not keep to the contract, and wires that harm what is on them.
use super::{EPOCH, Fixture, MAX_ROWS, Side, agreed, body, encoded, rows};
use crate::frame::{BodySum, Checksum, FrameHeader, FrameKind, HEADER_BYTES, body_sum};
use crate::ids::HopKey;
use crate::link::{Limits, LinkError};

/// A frame that is on the wire twice reaches the engine once.
pub fn a_duplicate_is_dropped_and_counted(fixture: &dyn Fixture) {
    let Some((mut side, mut wire)) = fixture.raw(agreed(fixture, "raw")) else { return };
    let unasked = FrameHeader { epoch: EPOCH, ..rows(FrameKind::Combine, FrameHeader::key(5, 0, 0), &[]) };
    wire.write(&encoded(fixture, EPOCH, 1, &body(1, 1)));
    wire.write(&encoded(fixture, EPOCH, 1, &body(1, 1)));
    assert_eq!(side.next().unwrap().header.hop.step.0, 1);
    wire.write(&unasked.encode(body_sum(fixture.checksum(), &[])));
    wire.write(&encoded(fixture, EPOCH, 2, &[]));
    assert_eq!(side.next().unwrap().header.hop.step.0, 2);
    let counts = side.link.stats().counts();
    assert_eq!((counts.dropped_duplicate, counts.dropped_unasked), (1, 1));
}

/// Damage on the wire ends the link after what came before it, and no damaged row is ever seen.
pub fn a_corrupt_frame_breaks_the_link(fixture: &dyn Fixture) {
    let good = encoded(fixture, EPOCH, 1, &body(2, 1));
    let oversized =
        FrameHeader { epoch: EPOCH, ..rows(FrameKind::Dispatch, HopKey::default(), &body(MAX_ROWS + 1, 0)) };
    let flipped = |at: usize| {
        let mut bytes = encoded(fixture, EPOCH, 2, &body(2, 2));
        bytes[at] ^= 1;
        bytes
    };
    for bad in [
        flipped(0),
        flipped(17),
        flipped(63),
        flipped(64),
        flipped(300),
        oversized.encode(body_sum(fixture.checksum(), &[])).to_vec(),
    ] {
        let Some((mut side, mut wire)) = fixture.raw(agreed(fixture, "raw")) else { return };
        wire.write(&good);
        wire.write(&bad);
        assert_eq!(side.next().unwrap().body(), body(2, 1));
        let error = side.next().unwrap_err();
        assert!(matches!(error, LinkError::Corrupt { .. }), "{error}");
        assert_eq!(side.link.poll_recv().unwrap_err(), error, "the same for ever");
        assert_eq!(side.dispatch(7, &[]).unwrap_err(), error);
    }
}

/// Whatever happens to a body that keeps its length: bits flipped, pieces zeroed, repeated, swapped, moved.
pub fn any_damage_to_a_body_breaks_the_link(fixture: &dyn Fixture) {
    type Damage = fn(&mut [u8]);
    let damages: [(&str, Damage); 8] = [
        ("the first bit flipped", |body| body[0] ^= 1),
        ("the last bit flipped", |body| body[body.len() - 1] ^= 0x80),
        ("eight bytes zeroed", |body| body[256..][..8].fill(0)),
        ("half of it zeroed", |body| body[1..].fill(0)),
        ("a row repeated", |body| body.copy_within(..256, 256)),
        ("two rows swapped", |body| {
            let (left, right) = body.split_at_mut(256);
            left.swap_with_slice(&mut right[..256]);
        }),
        ("moved by a byte", |body| body.rotate_left(1)),
        ("moved by a kilobyte", |body| body.rotate_right(1024)),
    ];
    for num_rows in [5, MAX_ROWS] {
        for (what, damage) in damages {
            let Some((mut side, mut wire)) = fixture.raw(agreed(fixture, "raw")) else { return };
            // Without a row like another.
            let sent: Vec<u8> =
                (0..num_rows * 64).flat_map(|i| i.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
            let mut bytes = encoded(fixture, EPOCH, 1, &sent);
            damage(&mut bytes[HEADER_BYTES..]);
            wire.write(&bytes);
            let error = side.next().unwrap_err();
            assert!(matches!(error, LinkError::Corrupt { .. }), "{what} of {num_rows} rows: {error}");
        }
    }
}

/// A frame says how its body is summed, and only what was agreed is taken.
pub fn another_checksum_than_agreed_breaks_the_link(fixture: &dyn Fixture) {
    let other = match fixture.checksum() {
        Checksum::Crc32c => Checksum::Sum64,
        Checksum::Sum64 => Checksum::Crc32c,
    };
    let Some((mut side, mut wire)) = fixture.raw(agreed(fixture, "raw")) else { return };
    let (sound, sent) = (encoded(fixture, EPOCH, 1, &body(2, 1)), body(2, 2));
    let header = FrameHeader { epoch: EPOCH, ..rows(FrameKind::Dispatch, FrameHeader::key(2, 0, 0), &sent) };
    wire.write(&sound);
    wire.write(&[&header.encode(body_sum(other, &[&sent]))[..], &sent].concat());
    assert_eq!(side.next().unwrap().body(), body(2, 1));
    let error = side.next().unwrap_err();
    assert!(matches!(error, LinkError::Corrupt { .. }), "{error}");
    let says = format!("summed by {other}, agreed is {}", fixture.checksum());
    assert!(error.to_string().contains(&says), "{error}");
}

/// On a stream of bytes a sum may stand behind its body; elsewhere there is no such place.
pub fn a_sum_behind_a_body_counts_as_one_before_it(fixture: &dyn Fixture) {
    if fixture.checksum() != Checksum::Sum64 {
        return;
    }
    let sent = body(MAX_ROWS, 1);
    let header = FrameHeader { epoch: EPOCH, ..rows(FrameKind::Dispatch, FrameHeader::key(1, 0, 0), &sent) };
    let BodySum::Sum64(sum) = body_sum(Checksum::Sum64, &[&sent]) else { unreachable!("asked for") };
    let trailing = [&header.encode_before()[..], &sent, &sum.to_le_bytes()].concat();
    let last = trailing.len() - 1;
    for flipped in [None, Some(HEADER_BYTES), Some(last - 8), Some(last - 7), Some(last)] {
        let Some((mut side, mut wire)) = fixture.raw(agreed(fixture, "raw")) else { return };
        let mut bytes = trailing.clone();
        flipped.into_iter().for_each(|at| bytes[at] ^= 1);
        wire.write(&if fixture.has_trailers() { bytes } else { bytes[..last - 7].to_vec() });
        match side.next() {
            Ok(frame) => {
                assert!(flipped.is_none() && fixture.has_trailers(), "flipped {flipped:?}");
                assert_eq!(frame.body(), sent);
                wire.write(&encoded(fixture, EPOCH, 2, &[]));
                assert_eq!(side.next().unwrap().header.hop.step.0, 2, "the stream keeps its place");
            }
            Err(error) => {
                assert!(flipped.is_some() || !fixture.has_trailers(), "{error}");
                assert!(matches!(error, LinkError::Corrupt { .. }), "{error}");
            }
        }
    }
}

/// Whoever sent what is not as agreed is told what was wrong with it when the other end gives the link up, whichever end that is.
pub fn whoever_sent_a_corrupt_frame_is_told_so(fixture: &dyn Fixture) {
    // Where nothing is encoded, nothing is compared with what was agreed.
    if fixture.raw(agreed(fixture, "raw")).is_none() {
        return;
    }
    let strict = |peer| Limits { max_rows: 2, ..agreed(fixture, peer) };
    let (dialed, answered) = fixture.pair(agreed(fixture, "B"), strict("A"));
    is_told(dialed, answered);
    let (dialed, answered) = fixture.pair(strict("B"), agreed(fixture, "A"));
    is_told(answered, dialed);
}

/// `strict` takes two rows at the most, and `told` sends it three.
fn is_told(mut told: Side, mut strict: Side) {
    told.dispatch(1, &body(2, 1)).unwrap();
    told.dispatch(2, &body(3, 1)).unwrap();
    assert_eq!(strict.next().unwrap().body(), body(2, 1));
    let error = strict.next().unwrap_err();
    let LinkError::Corrupt { what, .. } = &error else { panic!("{error}") };
    drop(strict);
    let says = told.next().unwrap_err().to_string();
    assert!(says.contains(what.as_str()), "{what:?} is not in: {says}");
}

/// More dispatches than credits allow for are the peer's mistake.
pub fn a_peer_beyond_its_credits_breaks_the_link(fixture: &dyn Fixture) {
    let Some((mut side, mut wire)) = fixture.raw(agreed(fixture, "raw")) else { return };
    (1..=3).for_each(|step| wire.write(&encoded(fixture, EPOCH, step, &[])));
    for step in 1..=2 {
        assert_eq!(side.next().unwrap().header.hop.step.0, step);
    }
    assert!(matches!(side.next().unwrap_err(), LinkError::Corrupt { .. }));
}

/// A transport that ends without a word is a loss, after what had arrived whole.
pub fn a_truncated_stream_is_lost(fixture: &dyn Fixture) {
    for cut_frame in [encoded(fixture, EPOCH, 2, &body(4, 2)), Vec::new()] {
        let Some((mut side, mut wire)) = fixture.raw(agreed(fixture, "raw")) else { return };
        wire.write(&encoded(fixture, EPOCH, 1, &body(2, 1)));
        wire.cut_within(&cut_frame);
        assert_eq!(side.next().unwrap().body(), body(2, 1));
        let error = side.next().unwrap_err();
        assert!(matches!(error, LinkError::Lost { .. }), "{error}");
        assert_eq!(side.link.poll_recv().unwrap_err(), error, "the same for ever");
    }
}
