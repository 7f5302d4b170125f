//! How long a hop takes on each link, beside what the transport alone costs. Prints a table, asserts nothing:
//! `cargo test -p afd-common --lib -- --ignored --nocapture link::timing`
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use afd_ffi::futex::{self, Scope};

use super::contract::{self, Fixture, Side};
use super::{Limits, inline, loopback, shm, tcp};
use crate::frame::{FrameHeader, FrameKind, RowType, SideKind};
use crate::ids::Epoch;

const COLUMNS: u32 = 2048;
const ROW_BYTES: usize = 2 * COLUMNS as usize;
const ROWS: [u32; 5] = [1, 8, 64, 256, 1024];
const TIME_EACH: Duration = Duration::from_millis(400);

fn limits(peer: &str) -> Limits {
    Limits { max_rows: 1024, max_body_bytes: 1024 * ROW_BYTES as u32, ..contract::limits(peer) }
}

/// The median of as many round trips as fit into a moment, after some that warm up.
fn median(mut round_trip: impl FnMut()) -> Duration {
    (0..20).for_each(|_| round_trip());
    let (mut times, begun) = (Vec::new(), Instant::now());
    while begun.elapsed() < TIME_EACH || times.len() < 20 {
        let started = Instant::now();
        round_trip();
        times.push(started.elapsed());
    }
    times.sort();
    times[times.len() / 2]
}

fn header(kind: FrameKind, step: u64, rows: u32) -> FrameHeader {
    FrameHeader {
        kind,
        dtype: RowType::Bf16,
        side: SideKind::None,
        epoch: Epoch(0),
        hop: FrameHeader::key(step, 0, 0),
        rows,
        columns: COLUMNS,
        side_columns: 0,
        body_bytes: rows * ROW_BYTES as u32,
    }
}

fn of_link((mut a, mut b): (Side, Side)) -> Vec<Duration> {
    thread::scope(|scope| {
        scope.spawn(move || {
            while let Ok(frame) = b.next() {
                let answer = FrameHeader { kind: FrameKind::Combine, ..frame.header };
                b.link.send(answer, &[frame.body()]).unwrap();
            }
        });
        let mut step = 0;
        let times = ROWS.map(|rows| {
            let body = vec![1; rows as usize * ROW_BYTES];
            median(|| {
                step += 1;
                a.link.send(header(FrameKind::Dispatch, step, rows), &[&body]).unwrap();
                assert_eq!(a.next().unwrap().header.rows, rows);
            })
        });
        a.link.close("done");
        times.to_vec()
    })
}

/// The same bytes on a plain socket, read and written by the two threads that use them.
fn of_raw_tcp() -> Vec<Duration> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut far = listener.accept().unwrap().0;
    near.set_nodelay(true).unwrap();
    far.set_nodelay(true).unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            for rows in ROWS {
                let mut buf = vec![0; 64 + rows as usize * ROW_BYTES];
                loop {
                    far.read_exact(&mut buf).unwrap();
                    far.write_all(&buf).unwrap();
                    if buf[0] == 1 {
                        break;
                    }
                }
            }
        });
        let mut times = Vec::new();
        for rows in ROWS {
            let mut buf = vec![0; 64 + rows as usize * ROW_BYTES];
            let mut exchange = |buf: &mut [u8]| {
                near.write_all(buf).unwrap();
                near.read_exact(buf).unwrap();
            };
            times.push(median(|| exchange(&mut buf)));
            buf[0] = 1;
            exchange(&mut buf);
        }
        times
    })
}

/// Two threads that wake each other, and copy the rows once a way.
fn of_raw_futex() -> Vec<Duration> {
    let words = [AtomicU32::new(0), AtomicU32::new(0)];
    let wait_for = |word: &AtomicU32, value: u32| {
        loop {
            let seen = word.load(SeqCst);
            if seen == value || seen == u32::MAX {
                return seen;
            }
            futex::wait(word, seen, Scope::Shared, None);
        }
    };
    let set = |word: &AtomicU32, value: u32| {
        word.store(value, SeqCst);
        futex::wake(word, Scope::Shared);
    };
    let times = ROWS.map(|rows| {
        words.iter().for_each(|word| word.store(0, SeqCst));
        let body = vec![1u8; rows as usize * ROW_BYTES];
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut copy = body.clone();
                for turn in 1.. {
                    if wait_for(&words[0], turn) == u32::MAX {
                        return;
                    }
                    copy.copy_from_slice(&body);
                    set(&words[1], turn);
                }
            });
            let (mut turn, mut copy) = (0, body.clone());
            let time = median(|| {
                turn += 1;
                copy.copy_from_slice(&body);
                set(&words[0], turn);
                wait_for(&words[1], turn);
            });
            set(&words[0], u32::MAX);
            time
        })
    });
    times.to_vec()
}

#[test]
#[ignore = "a measurement"]
fn round_trips_of_every_link() {
    let bytes = vec![7u8; 4 << 20];
    let time = median(|| {
        std::hint::black_box(crate::frame::body_crc(&[std::hint::black_box(&bytes)]));
    });
    println!("CRC-32C of 4 MiB: {:.1} GB/s", bytes.len() as f64 / time.as_secs_f64() / 1e9);
    println!("median round trip, microseconds; rows of {COLUMNS} bf16, both ways");
    println!("{:<22}{}", "", ROWS.map(|rows| format!("{rows:>9}")).concat());
    let inline = inline::tests::Inline::new();
    let pair = |fixture: &dyn Fixture| of_link(fixture.pair(limits("B"), limits("A")));
    for (name, times) in [
        ("raw futex and copy", of_raw_futex()),
        ("loopback", pair(&loopback::tests::Loopback)),
        ("shm", pair(&shm::tests::Shm::new())),
        ("shm, ringing thread", of_link(shm::tests::pair_with_ringers(limits("B"), limits("A")))),
        ("raw tcp", of_raw_tcp()),
        ("tcp", pair(&tcp::tests::Tcp)),
        ("inline", pair(&inline)),
    ] {
        let columns = times.iter().map(|time| format!("{:>9.1}", time.as_secs_f64() * 1e6));
        println!("{name:<22}{}", columns.collect::<String>());
    }
}
