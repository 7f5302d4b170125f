//! Clauses of the contract about large bodies.
use std::thread;
use std::time::Instant;

use super::{COLUMNS, Fixture, PATIENCE, Side, agreed, body};
use crate::link::{Limits, LinkError};

/// Bodies that go in one piece, in several, and beyond what a socket holds, there and back.
pub fn bodies_of_several_mib_arrive_whole(fixture: &dyn Fixture) {
    const SIZES: [u32; 5] = [8 << 10, (8 << 10) + 1, 1, (24 << 10) + 7, 1 << 10];
    let num_rows = SIZES[3];
    let large =
        |peer| Limits { max_rows: num_rows, max_body_bytes: num_rows * COLUMNS * 4, ..agreed(fixture, peer) };
    let (mut a, mut b) = fixture.pair(large("B"), large("A"));
    let bodies: Vec<_> = (1..).zip(SIZES).map(|(step, rows)| (step, body(rows, step))).collect();
    thread::scope(|scope| {
        scope.spawn(move || {
            for _ in SIZES {
                let frame = b.next().unwrap();
                b.answer(frame.header.hop, frame.body()).unwrap();
            }
        });
        for (step, sent) in &bodies {
            a.dispatch(*step, sent).unwrap();
            let frame = a.next().unwrap();
            assert_eq!(frame.header.hop.step.0, *step);
            assert!(frame.body() == sent, "{} bytes", sent.len());
        }
    });
}

/// A peer that does not read holds nobody up.
pub fn sending_never_blocks(fixture: &dyn Fixture) {
    let num_rows = fixture.large_rows();
    let large =
        |peer| Limits { max_rows: num_rows, max_body_bytes: num_rows * COLUMNS * 4, ..agreed(fixture, peer) };
    let sent = body(num_rows, 0);
    let at_once = |side: &mut Side| {
        let started = Instant::now();
        side.dispatch(1, &sent).unwrap();
        side.dispatch(2, &sent).unwrap();
        assert!(matches!(side.dispatch(3, &sent), Err(LinkError::NoCredit { .. })));
        side.link.close("nobody reads");
        assert!(started.elapsed() < PATIENCE / 4, "took {:?}", started.elapsed());
    };
    let (mut a, mut b) = fixture.pair(large("B"), large("A"));
    at_once(&mut a);
    assert_eq!(b.next().unwrap().body(), sent);
    assert_eq!(b.next().unwrap().body(), sent);
    assert!(matches!(b.next().unwrap_err(), LinkError::Closed { .. }));
    if let Some((mut side, _wire)) = fixture.raw(large("raw")) {
        at_once(&mut side);
        let started = Instant::now();
        drop(side);
        assert!(started.elapsed() < PATIENCE / 4, "dropping took {:?}", started.elapsed());
    }
}
