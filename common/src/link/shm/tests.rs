//! The contract through real shared memory, and the handshake.
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use super::*;
use crate::frame::Checksum;
use crate::link::LinkKind;
use crate::link::attach::{accept, dial};
use crate::link::contract::{self, Fixture, PATIENCE, Wire};
use crate::link::grants::{LinkId, Secret, Ticket};

struct Shm {
    checksum: Checksum,
    /// Kept while the test runs.
    sockets: Mutex<Vec<TcpStream>>,
}

impl Shm {
    fn new(checksum: Checksum) -> Self {
        Self { checksum, sockets: Mutex::default() }
    }
}

fn ticket() -> Ticket {
    Ticket { link_id: LinkId(7), secret: Secret::from_slice(b"0123456789abcdef").unwrap() }
}

fn shm(limits: Limits) -> Limits {
    Limits { kind: LinkKind::Shm, ..limits }
}

type Attached = (Result<Box<dyn HopLink>, AttachError>, Result<Box<dyn HopLink>, AttachError>);

fn attach(a: (Limits, Doorbell), b: (Limits, Doorbell)) -> Attached {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address: SocketAddr = listener.local_addr().unwrap();
    let accepting = thread::spawn(move || {
        accept(listener.accept().unwrap().0, PATIENCE, |_| Ok((b.0, b.1, ()))).map(|(link, ())| link)
    });
    let dialed = dial(address, None, &ticket(), a.0, a.1, PATIENCE);
    (dialed, accepting.join().unwrap())
}

impl Fixture for Shm {
    fn checksum(&self) -> Checksum {
        self.checksum
    }

    fn pair(&self, a: Limits, b: Limits) -> (contract::Side, contract::Side) {
        let bells = (Doorbell::default(), Doorbell::default());
        let (left, right) = attach((shm(a), bells.0.clone()), (shm(b), bells.1.clone()));
        (contract::Side::boxed(left.unwrap(), bells.0), contract::Side::boxed(right.unwrap(), bells.1))
    }

    fn raw(&self, limits: Limits) -> Option<(contract::Side, Box<dyn Wire>)> {
        let (limits, bell) = (shm(limits), Doorbell::default());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        let joining = thread::spawn({
            let shape = shape(&limits);
            move || {
                let mut socket = Socket::accepted(near.into(), PATIENCE);
                socket.read_answer().unwrap();
                handshake::join(socket, shape).unwrap()
            }
        });
        let link = ShmLink::offer(Socket::accepted(far.into(), PATIENCE), limits, bell.clone()).unwrap();
        let (segment, socket) = joining.join().unwrap();
        self.sockets.lock().unwrap().push(socket.stream.socket().try_clone().unwrap());
        let (out, _) = segment.lanes(Side::First);
        Some((contract::Side::new(link, bell), Box::new(RawLane { out, socket: socket.stream })))
    }

    fn large_rows(&self) -> u32 {
        1 << 12
    }
}

struct RawLane {
    out: Sender,
    socket: LinkStream,
}

impl Wire for RawLane {
    fn write(&mut self, bytes: &[u8]) {
        self.out.push(bytes, &[]).unwrap();
    }

    /// A frame that is not announced does not exist; the connection ends instead.
    fn cut_within(&mut self, _: &[u8]) {
        self.socket.socket().shutdown(Shutdown::Write).unwrap();
    }
}

contract::contract_tests!(Shm::new(Checksum::Crc32c));

mod sum64 {
    use super::{Checksum, Shm, contract};

    contract::contract_tests!(Shm::new(Checksum::Sum64));
}

/// Ends whose bells had no place left for their lanes when they were attached.
fn pair_with_ringers(a: Limits, b: Limits) -> (contract::Side, contract::Side) {
    let path = std::env::temp_dir().join(format!("afd-places-{}", std::process::id()));
    let (_, into) = Segment::create(&path, Shape::new(1, 1).unwrap(), &[0; 16]).unwrap().lanes(Side::First);
    std::fs::remove_file(&path).unwrap();
    let bells = [Doorbell::default(), Doorbell::default()];
    let mut places = Vec::new();
    for bell in &bells {
        places.extend(std::iter::from_fn(|| bell.watch(into.watch())));
    }
    let [bell_a, bell_b] = bells;
    let (a, b) = attach((shm(a), bell_a.clone()), (shm(b), bell_b.clone()));
    (contract::Side::boxed(a.unwrap(), bell_a), contract::Side::boxed(b.unwrap(), bell_b))
}

#[test]
fn the_contract_holds_where_a_thread_rings() {
    struct Rung;

    impl Fixture for Rung {
        fn pair(&self, a: Limits, b: Limits) -> (contract::Side, contract::Side) {
            pair_with_ringers(a, b)
        }

        fn raw(&self, _: Limits) -> Option<(contract::Side, Box<dyn Wire>)> {
            None
        }
    }

    contract::two_threads_exchange_ten_thousand_hops(&Rung);
    contract::close_is_seen_with_its_reason_after_earlier_frames(&Rung);
    contract::dropping_an_end_closes_the_link(&Rung);
}

#[test]
fn nothing_is_left_behind_in_the_folder() {
    let bell = Doorbell::default();
    let (a, b) = attach((shm(contract::limits("B")), bell.clone()), (shm(contract::limits("A")), bell));
    let _links = (a.unwrap(), b.unwrap());
    // The mapping stays, its name is gone.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let names: Vec<_> = maps.lines().filter(|line| line.contains("/dev/shm/afd-")).collect();
    assert!(!names.is_empty() && names.iter().all(|line| line.ends_with("(deleted)")), "{names:?}");
}

#[test]
fn ends_that_do_not_share_memory_say_so_and_hang_nowhere() {
    let bell = Doorbell::default();
    let fewer = Limits { credits: 1, ..shm(contract::limits("B")) };
    let (a, b) = attach((fewer, bell.clone()), (shm(contract::limits("A")), bell.clone()));
    let (a, b) = (a.err().unwrap(), b.err().unwrap());
    assert!(matches!(&a, AttachError::NotShared { what, .. } if what.contains("were agreed")), "{a}");
    assert!(matches!(&b, AttachError::NotShared { .. }), "{b}");
    let huge =
        Limits { credits: 4, max_body_bytes: u32::MAX, max_rows: u32::MAX, ..shm(contract::limits("A")) };
    let far = Limits { credits: u32::MAX, ..huge.clone() };
    let (a, b) = attach((huge, bell.clone()), (far, bell));
    assert!(a.is_err() && matches!(b.err().unwrap(), AttachError::NotShared { .. }));
}

#[test]
fn a_ringer_stands_in_where_the_engine_cannot_watch_a_lane() {
    let path = std::env::temp_dir().join(format!("afd-ringer-{}", std::process::id()));
    let shape = Shape::new(2, 128).unwrap();
    let (_, into) = Segment::create(&path, shape, &[0; 16]).unwrap().lanes(Side::First);
    let (mut out, _) = Segment::open(&path, shape).unwrap().lanes(Side::Second);
    std::fs::remove_file(&path).unwrap();
    let bell = Doorbell::default();
    let ringer = ringer::Ringer::start(&into, bell.clone()).unwrap();
    let deadline = std::time::Instant::now() + PATIENCE;
    assert!(bell.wait(0, Some(deadline)), "rings once when it starts");
    for _ in 0..2 {
        let seen = bell.count();
        out.push(b"x", &[]).unwrap();
        assert!(bell.wait(seen, Some(deadline)));
    }
    let stopping = std::time::Instant::now();
    drop(ringer);
    assert!(stopping.elapsed() < Duration::from_secs(5));
}
