//! Certificates for tests, and the port under TLS: every protocol, with and without a client certificate, replaced ones.
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::routing::get;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;

use super::*;
use crate::link::contract::PATIENCE;
use crate::link::grants::{LinkId, Secret, Ticket};
use crate::link::{Doorbell, attach, contract};
use crate::net::{Access, Gate, LinkAcceptor, Listener, NetStats, Options, add_reflection, client};

/// A certificate authority in a folder that goes with it.
pub(crate) struct Authority {
    folder: tempfile::TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let (mut params, key) = (CertificateParams::default(), KeyPair::generate().unwrap());
        params.distinguished_name.push(DnType::CommonName, "a test's authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("ca.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
        Self { folder, issuer: Issuer::new(params, key) }
    }

    pub(crate) fn ca(&self) -> PathBuf {
        self.folder.path().join("ca.pem")
    }

    /// Writes a certificate for `hosts` and its key, in place of what was there under that name.
    pub(crate) fn issue(&self, name: &str, hosts: &[&str]) -> Identity {
        let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
        let (params, key) = (CertificateParams::new(hosts).unwrap(), KeyPair::generate().unwrap());
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let identity = Identity {
            certificate: self.folder.path().join(format!("{name}.pem")),
            key: self.folder.path().join(format!("{name}.key")),
        };
        std::fs::write(&identity.certificate, certificate.pem()).unwrap();
        std::fs::write(&identity.key, key.serialize_pem()).unwrap();
        identity
    }

    /// A server on 127.0.0.1 and what reaches it, each with a certificate of this authority.
    pub(crate) fn both_ends(&self) -> (ServerTls, PeerTls) {
        let server = ServerTls::load(self.issue("server", &["127.0.0.1"]), Some(self.ca())).unwrap();
        let client = ClientTls::load(self.ca(), Some(self.issue("client", &["client"]))).unwrap();
        (server, client.peer("127.0.0.1").unwrap())
    }
}

#[test]
fn files_that_hold_something_else_are_named() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let (good, other) = (ours.issue("a", &["a"]), theirs.issue("b", &["b"]));
    let load = |certificate: &PathBuf, key: &PathBuf, ca: Option<PathBuf>| {
        let identity = Identity { certificate: certificate.clone(), key: key.clone() };
        ServerTls::load(identity, ca).map(|_| ()).unwrap_err()
    };
    assert!(load(&good.key, &good.key, None).contains("a.key holds no certificate"));
    assert!(load(&good.certificate, &good.certificate, None).contains("a.pem: no private key"));
    let error = load(&good.certificate, &other.key, None);
    assert!(error.contains("a.pem and") && error.contains("b.key"), "{error}");
    assert!(load(&good.certificate, &good.key, Some("/nowhere".into())).contains("/nowhere"));
    assert!(ClientTls::load(ours.ca(), None).unwrap().peer("not a host").is_err());
}

#[test]
fn half_an_identity_says_which_half_is_missing() {
    let of = |certificate: Option<&str>, key: Option<&str>| {
        Identity::of(certificate.map(Into::into), key.map(Into::into), ["--cert", "--key"])
    };
    assert_eq!(of(None, None), Ok(None));
    assert_eq!(of(Some("c"), None).unwrap_err().0, "--key");
    assert_eq!(of(None, Some("k")).unwrap_err().0, "--cert");
}

/// A port that serves health, reflection, a page and links. It ends with the test's runtime.
struct Served {
    address: SocketAddr,
    stats: Arc<NetStats>,
    links: Arc<AtomicUsize>,
}

async fn serve(access: Access) -> Served {
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_service_status("", tonic_health::ServingStatus::Serving).await;
    let grpc = add_reflection(tonic::service::Routes::new(health), &["grpc.health.v1.Health"]).unwrap();
    let page = |at: &str| Router::new().route(at, get(|| async { "hello" }));
    let router = grpc.into_axum_router().merge(page("/hello")).merge(page("/live"));
    let links = Arc::new(AtomicUsize::new(0));
    let attached = Arc::clone(&links);
    let acceptor: LinkAcceptor = Arc::new(move |stream, _| {
        let answer = |_: &Ticket| Ok((contract::limits("A0"), Doorbell::default(), ()));
        if attach::answer(stream, PATIENCE, answer).is_ok() {
            attached.fetch_add(1, Ordering::SeqCst);
        }
    });
    let listener = Listener::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let (address, stats) = (listener.address(), listener.stats());
    let options = Options { access, ..Options::default() };
    tokio::spawn(listener.serve(router, Some(acceptor), options, CancellationToken::new()));
    Served { address, stats, links }
}

impl Served {
    async fn channel(&self, tls: &PeerTls) -> Result<Channel, String> {
        Ok(client::connect(&self.address.to_string(), Some(tls), PATIENCE).await?)
    }

    /// GET over HTTP/1.1 as curl would: the whole answer.
    async fn get(&self, tls: &ClientTls, path: &str) -> String {
        let mut config = rustls::ClientConfig::clone(&tls.config());
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let stream = TcpStream::connect(self.address).await.unwrap();
        let name = rustls::pki_types::ServerName::try_from("127.0.0.1").unwrap();
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let mut stream = connector.connect(name, stream).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    /// The acceptor's end of an attachment comes after the dialer's.
    async fn wait_for_link(&self) {
        let deadline = Instant::now() + PATIENCE;
        while self.links.load(Ordering::SeqCst) == 0 {
            assert!(Instant::now() < deadline, "no link was attached");
            tokio::task::yield_now().await;
        }
    }

    async fn attach(&self, tls: Option<PeerTls>) -> Result<(), attach::AttachError> {
        let (address, secret) = (self.address, Secret::from_slice(&[3; 16]).unwrap());
        let ticket = Ticket { link_id: LinkId(1), secret };
        let dial = move || {
            let bell = Doorbell::default();
            attach::dial(address, tls.as_ref(), &ticket, contract::limits("F0"), bell, PATIENCE).map(|_| ())
        };
        tokio::task::spawn_blocking(dial).await.unwrap()
    }
}

async fn is_healthy(channel: Channel) -> bool {
    HealthClient::new(channel).check(HealthCheckRequest::default()).await.is_ok()
}

async fn reflection(channel: Channel) -> Result<(), tonic::Status> {
    let asked = futures::stream::iter([ServerReflectionRequest::default()]);
    ServerReflectionClient::new(channel).server_reflection_info(asked).await.map(|_| ())
}

/// With a client CA, as `--tls-client-ca` makes it.
fn mutual(tls: ServerTls) -> Access {
    Access { tls: Some(tls), gate: Gate::default().certificates() }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_protocol_goes_through_one_port_under_tls() {
    let authority = Authority::new();
    let tls = ServerTls::load(authority.issue("server", &["127.0.0.1"]), None).unwrap();
    let served = serve(Access { tls: Some(tls), gate: Gate::default() }).await;
    let client = ClientTls::load(authority.ca(), None).unwrap();
    let peer = client.peer("127.0.0.1").unwrap();

    assert!(served.get(&client, "/hello").await.ends_with("hello"));
    let channel = served.channel(&peer).await.unwrap();
    assert!(is_healthy(channel.clone()).await);
    reflection(channel).await.unwrap();
    served.attach(Some(peer)).await.unwrap();
    served.wait_for_link().await;
    assert_eq!(served.stats.counts().handshakes_failed, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_comes_in_the_clear_is_told_or_closed() {
    let authority = Authority::new();
    let tls = ServerTls::load(authority.issue("server", &["127.0.0.1"]), None).unwrap();
    let served = serve(Access { tls: Some(tls), gate: Gate::default() }).await;
    let mut stream = TcpStream::connect(served.address).await.unwrap();
    stream.write_all(b"GET /hello HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.0 400") && answer.contains("this port speaks TLS"), "{answer}");
    assert!(served.attach(None).await.is_err());
    assert_eq!(served.links.load(Ordering::SeqCst), 0);
    assert_eq!(served.stats.counts().handshakes_failed, 2);

    let open = serve(Access::default()).await;
    let client = ClientTls::load(authority.ca(), None).unwrap();
    let error = open.channel(&client.peer("127.0.0.1").unwrap()).await.unwrap_err();
    assert!(error.contains("does not speak TLS"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_client_certificate_there_is_health_and_nothing_else() {
    let authority = Authority::new();
    let (server, certified) = authority.both_ends();
    let served = serve(mutual(server)).await;
    let anonymous = ClientTls::load(authority.ca(), None).unwrap();
    let peer = anonymous.peer("127.0.0.1").unwrap();

    assert!(served.get(&anonymous, "/live").await.starts_with("HTTP/1.1 200"));
    let refused = served.get(&anonymous, "/hello").await;
    assert!(refused.starts_with("HTTP/1.1 401") && refused.contains("certificate_required"), "{refused}");
    let channel = served.channel(&peer).await.unwrap();
    assert!(is_healthy(channel.clone()).await);
    let status = reflection(channel).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unauthenticated);
    assert!(status.message().contains("--tls-client-ca"), "{status:?}");
    assert!(served.attach(Some(peer)).await.is_err());
    assert_eq!((served.links.load(Ordering::SeqCst), served.stats.counts().unauthenticated), (0, 3));

    reflection(served.channel(&certified).await.unwrap()).await.unwrap();
    served.attach(Some(certified)).await.unwrap();
    served.wait_for_link().await;

    // A certificate of somebody else's does not even get through the handshake.
    let stranger = Authority::new();
    let identity = Some(stranger.issue("client", &["client"]));
    let stranger = ClientTls::load(authority.ca(), identity).unwrap().peer("127.0.0.1").unwrap();
    let refused = match served.channel(&stranger).await {
        Ok(channel) => reflection(channel).await.is_err(),
        Err(_) => true,
    };
    assert!(refused);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_somebody_else_is_not_talked_to() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let tls =
        |authority: &Authority, host| ServerTls::load(authority.issue("server", &[host]), None).unwrap();
    let client = ClientTls::load(ours.ca(), None).unwrap().peer("127.0.0.1").unwrap();
    for (tls, part) in [
        (tls(&theirs, "127.0.0.1"), "invalid peer certificate"),
        (tls(&ours, "127.0.0.2"), "not valid for name"),
    ] {
        let served = serve(Access { tls: Some(tls), gate: Gate::default() }).await;
        let error = served.channel(&client).await.unwrap_err();
        assert!(error.contains(part), "{error}");
        assert!(served.attach(Some(client.clone())).await.is_err());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn replaced_certificates_are_taken_up_on_both_sides() {
    let (old, new) = (Authority::new(), Authority::new());
    let (server, client) = old.both_ends();
    let served = serve(mutual(server)).await;
    reflection(served.channel(&client).await.unwrap()).await.unwrap();

    // Everything moves to another authority, file by file, in place.
    let copy = |from: PathBuf, to: PathBuf| {
        std::fs::copy(from, to).unwrap();
    };
    for (name, hosts) in [("server", ["127.0.0.1"]), ("client", ["client"])] {
        let (from, to) = (new.issue(name, &hosts), old.folder.path());
        copy(from.certificate, to.join(format!("{name}.pem")));
        copy(from.key, to.join(format!("{name}.key")));
    }
    copy(new.ca(), old.ca());
    // What has only the old files is refused once the port has seen the new ones.
    let fresh = ClientTls::load(new.ca(), Some(new.issue("other", &["other"]))).unwrap();
    let (fresh, deadline) = (fresh.peer("127.0.0.1").unwrap(), Instant::now() + PATIENCE);
    let works = async |peer: &PeerTls| match served.channel(peer).await {
        Ok(channel) => reflection(channel).await.is_ok(),
        Err(_) => false,
    };
    while !(works(&fresh).await && works(&client).await) {
        assert!(Instant::now() < deadline, "the new certificates are not taken up");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
