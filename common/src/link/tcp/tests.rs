//! The contract over real sockets, in the clear and under TLS, and the handshake.
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::link::LinkKind;
use crate::link::attach::{AttachError, accept, dial};
use crate::link::contract::{self, Fixture, PATIENCE, Side, Wire};
use crate::link::grants::{GrantSpec, Grants, LinkId, Refusal, Secret, Ticket};
use crate::net::tls::ServerTls;
use crate::net::tls::tests::Authority;

struct Tcp(Checksum);

fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

fn ticket() -> Ticket {
    Ticket { link_id: LinkId(7), secret: Secret::from_slice(b"0123456789abcdef").unwrap() }
}

impl Fixture for Tcp {
    fn checksum(&self) -> Checksum {
        self.0
    }

    fn has_trailers(&self) -> bool {
        true
    }

    fn pair(&self, a: Limits, b: Limits) -> (Side, Side) {
        let (listener, address) = listen();
        let bells = (Doorbell::default(), Doorbell::default());
        let bell = bells.1.clone();
        let accepting = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            accept(stream, PATIENCE, |_| Ok((b, bell, ()))).unwrap().0
        });
        let left = dial(address, None, &ticket(), a, bells.0.clone(), PATIENCE).unwrap();
        (Side::boxed(left, bells.0), Side::boxed(accepting.join().unwrap(), bells.1))
    }

    fn raw(&self, limits: Limits) -> Option<(Side, Box<dyn Wire>)> {
        let (listener, address) = listen();
        let wire = TcpStream::connect(address).unwrap();
        let bell = Doorbell::default();
        let link = TcpLink::new(listener.accept().unwrap().0, limits, bell.clone()).unwrap();
        Some((Side::new(link, bell), Box::new(wire)))
    }
}

impl Wire for TcpStream {
    fn write(&mut self, bytes: &[u8]) {
        self.write_all(bytes).unwrap();
    }

    fn cut_within(&mut self, frame: &[u8]) {
        self.write_all(&frame[..frame.len() / 2]).unwrap();
        self.shutdown(Shutdown::Write).unwrap();
    }
}

contract::contract_tests!(Tcp(Checksum::Crc32c));

mod sum64 {
    use super::{Checksum, Tcp, contract};

    contract::contract_tests!(Tcp(Checksum::Sum64));
}

/// As the port hands it over, but blocking: after the handshake.
fn accept_tls(stream: TcpStream, tls: &ServerTls) -> LinkStream {
    let mut session = rustls::ServerConnection::new(tls.config()).unwrap();
    while session.is_handshaking() {
        session.complete_io(&mut &stream).unwrap();
    }
    LinkStream::under_tls(stream, session)
}

pub(in crate::link) struct TcpUnderTls(pub(in crate::link) Checksum);

impl Fixture for TcpUnderTls {
    fn checksum(&self) -> Checksum {
        self.0
    }

    fn has_trailers(&self) -> bool {
        true
    }

    fn pair(&self, a: Limits, b: Limits) -> (Side, Side) {
        let ((listener, address), (server, peer)) = (listen(), Authority::new().both_ends());
        let bells = (Doorbell::default(), Doorbell::default());
        let bell = bells.1.clone();
        let accepting = thread::spawn(move || {
            let stream = accept_tls(listener.accept().unwrap().0, &server);
            accept(stream, PATIENCE, |_| Ok((b, bell, ()))).unwrap().0
        });
        let left = dial(address, Some(&peer), &ticket(), a, bells.0.clone(), PATIENCE).unwrap();
        (Side::boxed(left, bells.0), Side::boxed(accepting.join().unwrap(), bells.1))
    }

    fn raw(&self, limits: Limits) -> Option<(Side, Box<dyn Wire>)> {
        let ((listener, address), (server, peer)) = (listen(), Authority::new().both_ends());
        let dialing = thread::spawn(move || {
            let stream = TcpStream::connect(address).unwrap();
            let session = peer.handshake(&stream).unwrap();
            LinkStream::under_tls(stream, session)
        });
        let (stream, bell) = (accept_tls(listener.accept().unwrap().0, &server), Doorbell::default());
        let link = TcpLink::new(stream, limits, bell.clone()).unwrap();
        Some((Side::new(link, bell), Box::new(dialing.join().unwrap())))
    }
}

impl Wire for LinkStream {
    fn write(&mut self, bytes: &[u8]) {
        (&*self).write_all(bytes).unwrap();
    }

    fn cut_within(&mut self, frame: &[u8]) {
        (&*self).write_all(&frame[..frame.len() / 2]).unwrap();
        self.socket().shutdown(Shutdown::Write).unwrap();
    }
}

mod under_tls {
    use super::{Checksum, TcpUnderTls, contract};

    contract::contract_tests!(TcpUnderTls(Checksum::Crc32c));

    mod sum64 {
        use super::*;

        contract::contract_tests!(TcpUnderTls(Checksum::Sum64));
    }
}

#[test]
fn a_link_attaches_with_a_granted_ticket_and_with_no_other() {
    let mut grants = Grants::new(crate::ids::Epoch(5), PATIENCE, 4);
    let checksum = Checksum::Sum64;
    let (kind, peer) = (LinkKind::Tcp, "A0".into());
    let spec = GrantSpec { kind, peer, credits: 1, max_rows: 1, max_body_bytes: 64, checksum };
    let grant = grants.grant(spec, "session", Instant::now(), &mut rand::rng()).unwrap();
    let (listener, address) = listen();
    let serving = thread::spawn(move || {
        let mut served = || {
            accept(listener.accept().unwrap().0, PATIENCE, |ticket| {
                let (limits, session) = grants.attach(ticket, &[LinkKind::Tcp], Instant::now())?;
                Ok((limits, Doorbell::default(), session))
            })
            .map(|(link, session)| (link.limits().epoch, session))
        };
        [served(), served(), served()].map(|result| result.map_err(|error| error.to_string()))
    });
    let limits = Limits { peer: "F0".into(), ..grant.limits.clone() };
    let dial = |ticket| dial(address, None, ticket, limits.clone(), Doorbell::default(), PATIENCE);
    let wrong = Ticket { link_id: grant.ticket.link_id, ..ticket() };
    let refused = dial(&wrong).err().unwrap();
    assert!(matches!(refused, AttachError::Refused { refusal: Refusal::Unknown, .. }), "{refused}");
    dial(&grant.ticket).unwrap();
    assert!(dial(&grant.ticket).is_err(), "a ticket works once");
    let [first, second, third] = serving.join().unwrap();
    assert!(first.unwrap_err().contains("no link is granted"));
    assert_eq!(second.unwrap(), (grant.limits.epoch, "session"));
    assert!(third.is_err());
}

#[test]
fn both_ends_of_the_handshake_have_a_deadline() {
    let (listener, address) = listen();
    let timeout = Duration::from_millis(50);
    let limits = contract::limits("silent");
    let silent = dial(address, None, &ticket(), limits.clone(), Doorbell::default(), timeout).err().unwrap();
    assert!(matches!(silent, AttachError::Timeout { .. }), "{silent}");
    let (stream, _) = listener.accept().unwrap();
    let _dialer = TcpStream::connect(address).unwrap();
    drop(stream);
    let (stream, _) = listener.accept().unwrap();
    let error = accept(stream, timeout, |_| Ok((limits, Doorbell::default(), ()))).err().unwrap();
    assert!(matches!(error, AttachError::Timeout { .. }), "{error}");
}

#[test]
fn what_is_no_link_is_named() {
    let (listener, address) = listen();
    let mut dialer = TcpStream::connect(address).unwrap();
    dialer.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let error = accept(listener.accept().unwrap().0, PATIENCE, |_| {
        Ok((contract::limits("x"), Doorbell::default(), ()))
    });
    assert!(matches!(error.err().unwrap(), AttachError::Protocol { .. }));
    let mut rest = Vec::new();
    let _ = dialer.read_to_end(&mut rest);
    assert!(rest.is_empty());
}
