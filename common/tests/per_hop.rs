//! Once a link has warmed up, neither end asks for memory to move rows there and back.
use std::thread;
use std::time::Duration;

use afd_common::frame::{FrameHeader, FrameKind, RowType, SideKind};
use afd_common::ids::Epoch;
use afd_common::link::pairs::{End, Pairs};
use afd_common::link::{Limits, LinkKind, features};
use afd_ffi::allocations::{Counted, of_this_thread};

#[global_allocator]
static ALLOCATOR: Counted = Counted;

const PATIENCE: Duration = Duration::from_secs(20);
const COLUMNS: u32 = 2048;
/// Of a body that goes over TCP in more than one piece.
const MAX_ROWS: u32 = 128;
const WARM_UP: u64 = 50;
const HOPS: u64 = 200;

fn limits(kind: LinkKind, peer: &str) -> Limits {
    let max_body_bytes = MAX_ROWS * 2 * COLUMNS;
    let checksum = features::checksum(kind, &features::offered());
    Limits {
        kind,
        peer: peer.into(),
        epoch: Epoch(1),
        credits: 2,
        max_rows: MAX_ROWS,
        max_body_bytes,
        checksum,
    }
}

fn dispatch(step: u64, rows: u32) -> FrameHeader {
    FrameHeader {
        kind: FrameKind::Dispatch,
        dtype: RowType::Bf16,
        side: SideKind::None,
        epoch: Epoch(0),
        hop: FrameHeader::key(step, 0, 0),
        rows,
        columns: COLUMNS,
        side_columns: 0,
        body_bytes: rows * 2 * COLUMNS,
    }
}

/// Answers every hop with its own rows. Returns how often it asked for memory behind the warm-up, and the end: a farewell
/// would be told in words.
fn answer(mut far: End) -> (u64, End) {
    let mut before = 0;
    for step in 0..WARM_UP + HOPS {
        if step == WARM_UP {
            before = of_this_thread();
        }
        let frame = far.next(PATIENCE).unwrap();
        let header = FrameHeader { kind: FrameKind::Combine, ..frame.header };
        let (left, right) = frame.body().split_at(frame.body().len() / 2);
        far.link.send(header, &[left, &[], right]).unwrap();
    }
    (of_this_thread() - before, far)
}

#[test]
fn a_hop_asks_for_no_memory_at_either_end() {
    let pairs = Pairs::new().unwrap();
    let body = vec![1u8; (MAX_ROWS * 2 * COLUMNS) as usize];
    for kind in [LinkKind::Loopback, LinkKind::Shm, LinkKind::Tcp] {
        let (mut near, far) = pairs.open(kind, limits(kind, "F0"), limits(kind, "A0")).unwrap();
        let far = thread::spawn(move || answer(far));
        let mut before = 0;
        for step in 0..WARM_UP + HOPS {
            if step == WARM_UP {
                before = of_this_thread();
            }
            let header = dispatch(step, [1, MAX_ROWS][step as usize % 2]);
            near.link.send(header, &[&body[..header.body_bytes as usize]]).unwrap();
            assert_eq!(near.next(PATIENCE).unwrap().header.rows, header.rows);
        }
        let asked = of_this_thread() - before;
        let (asked_there, _far) = far.join().unwrap();
        assert_eq!((asked, asked_there), (0, 0), "{kind}: at the near and at the far end");
    }
}
