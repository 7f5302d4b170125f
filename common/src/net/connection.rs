//! One connection from its first byte to its last: TLS where the port has certificates, a look at what it speaks, then a
//! link for the role's acceptor, or HTTP. Everything behind the handshake is generic over the stream.
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::TcpConnectInfo;
use tower::ServiceExt;

use super::body::TimedBody;
use super::http1::Http1;
use super::idle::{Activity, Watched};
use super::prefixed::Prefixed;
use super::sniff::{self, Speaks};
use super::{LinkAcceptor, NetStats, Options};
use crate::link::LinkStream;

/// What every connection of a port needs.
pub(super) struct Port {
    pub(super) http: auto::Builder<TokioExecutor>,
    pub(super) router: Router,
    pub(super) links: Option<LinkAcceptor>,
    pub(super) options: Options,
    pub(super) stop: CancellationToken,
}

impl Port {
    /// The request with deadlines on its body, unless that is a stream.
    fn timed(&self, request: http::Request<hyper::body::Incoming>) -> http::Request<Body> {
        let path = request.uri().path();
        if path.ends_with("/ServerReflectionInfo") || (self.options.is_stream)(path) {
            return request.map(Body::new);
        }
        request.map(|body| Body::new(TimedBody::new(body, self.options.body)))
    }
}

pub(super) async fn serve_connection(port: &Port, stats: &NetStats, stream: TcpStream, peer: SocketAddr) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%peer, %error, "connection is gone");
        return;
    }
    let from = From {
        peer,
        info: TcpConnectInfo { local_addr: stream.local_addr().ok(), remote_addr: Some(peer) },
        certified: false,
    };
    let Some(tls) = &port.options.access.tls else { return serve_stream(port, stats, stream, from).await };
    let handshake = async {
        if begins_tls(&stream).await? {
            return TlsAcceptor::from(tls.config()).accept(stream).await.map(Some);
        }
        stats.handshake_failed();
        tracing::debug!(%peer, "it began in the clear, and this port speaks TLS");
        explain_tls(stream).await;
        Ok(None)
    };
    let accepted = tokio::select! {
        accepted = timeout(port.options.header_timeout, handshake) => accepted,
        () = port.stop.cancelled() => return,
    };
    match accepted {
        Ok(Ok(None)) => {}
        Ok(Ok(Some(stream))) => {
            let certified = stream.get_ref().1.peer_certificates().is_some();
            serve_stream(port, stats, stream, From { certified, ..from }).await;
        }
        Ok(Err(error)) => {
            stats.handshake_failed();
            tracing::debug!(%peer, %error, "no TLS handshake");
        }
        Err(_) => tracing::debug!(%peer, "no TLS handshake in time"),
    }
}

/// Who is at the other end.
struct From {
    peer: SocketAddr,
    info: TcpConnectInfo,
    /// It showed a certificate, and TLS has verified it.
    certified: bool,
}

async fn begins_tls(stream: &TcpStream) -> io::Result<bool> {
    const HANDSHAKE: u8 = 22;
    let mut first = [0];
    match stream.peek(&mut first).await? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(first[0] == HANDSHAKE),
    }
}

/// Tells a client that speaks HTTP in the clear what it has found, in the version it speaks.
async fn explain_tls(mut stream: TcpStream) {
    const WORDS: &str = "this port speaks TLS: use https, or a gRPC channel with TLS";
    // What it sent is read first: closing over unread bytes would take the answer back.
    let mut sent = [0; 4096];
    let read = stream.try_read(&mut sent).unwrap_or(0);
    let answer = if sent[..read].starts_with(b"PRI ") {
        // Empty SETTINGS, then GOAWAY: length, type 7, no flags, stream 0; last stream 0, INADEQUATE_SECURITY, a word.
        let length = 8 + WORDS.len() as u8;
        let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
        let goaway = [0, 0, length, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12];
        [&settings[..], &goaway, WORDS.as_bytes()].concat()
    } else {
        format!("HTTP/1.0 400 Bad Request\r\ncontent-type: text/plain\r\n\r\n{WORDS}\n").into_bytes()
    };
    if stream.write_all(&answer).await.is_err() || stream.shutdown().await.is_err() {
        return;
    }
    // And what it goes on to send, until it has seen the answer; the handshake's deadline is around all of this.
    let linger = async { while stream.read(&mut sent).await.is_ok_and(|read| read > 0) {} };
    let _ = timeout(Duration::from_secs(1), linger).await;
}

/// A stream that can become a link's.
trait IntoLinkStream {
    fn into_link_stream(self) -> io::Result<LinkStream>;
}

impl IntoLinkStream for TcpStream {
    fn into_link_stream(self) -> io::Result<LinkStream> {
        Ok(self.into_std()?.into())
    }
}

impl IntoLinkStream for TlsStream<TcpStream> {
    fn into_link_stream(self) -> io::Result<LinkStream> {
        let (stream, session) = self.into_inner();
        Ok(LinkStream::under_tls(stream.into_std()?, session))
    }
}

async fn serve_stream<S>(port: &Port, stats: &NetStats, mut stream: S, from: From)
where
    S: AsyncRead + AsyncWrite + IntoLinkStream + Unpin + Send + 'static,
{
    let peer = from.peer;
    let first = tokio::select! {
        first = timeout(port.options.header_timeout, sniff::first_bytes(&mut stream)) => first,
        () = port.stop.cancelled() => return,
    };
    match first {
        Ok(Ok((Speaks::Http2, read))) => {
            let stream = Prefixed::new(stream, read);
            serve_http(port, stats, stream, from, &Activity::new()).await;
        }
        Ok(Ok((Speaks::Http1, read))) => {
            let activity = Activity::new();
            let stream = Http1::new(Prefixed::new(stream, read), activity.clone());
            tokio::select! {
                () = serve_http(port, stats, stream, from, &activity) => {}
                () = activity.head_overdue(port.options.header_timeout) => {
                    tracing::debug!(%peer, "closed: the headers of a request did not come in time");
                }
            }
        }
        Ok(Ok((Speaks::Link, _))) if !port.options.access.gate.admits_link(from.certified) => {
            stats.unauthenticated();
            tracing::warn!(%peer, "closed: a link without a client certificate (--tls-client-ca)");
        }
        Ok(Ok((Speaks::Link, _))) => {
            stats.link();
            hand_over(port, stream.into_link_stream(), peer).await;
        }
        Ok(Err(error)) => tracing::debug!(%peer, %error, "connection ended before it said anything"),
        Err(_) => tracing::debug!(%peer, "connection said nothing in time"),
    }
}

async fn serve_http<S>(port: &Port, stats: &NetStats, stream: S, from: From, activity: &Activity)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let peer = from.peer;
    let service = service_fn(|mut request: http::Request<hyper::body::Incoming>| {
        let refused = refusal(port, stats, &request, from.certified);
        request.extensions_mut().insert(ConnectInfo(peer));
        request.extensions_mut().insert(from.info.clone());
        let (running, activity) = (activity.begin(), activity.clone());
        let answered = port.router.clone().oneshot(port.timed(request));
        async move {
            let answer = match refused {
                Some(refusal) => refusal,
                None => answered.await?,
            };
            activity.handle_answer();
            Ok::<_, Infallible>(answer.map(|inner| Watched::new(inner, running)))
        }
    });
    let connection = port.http.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let served = tokio::select! {
        served = connection.as_mut() => served,
        () = activity.idle_for(port.options.idle_timeout) => {
            connection.as_mut().graceful_shutdown();
            // A peer that does not say goodbye either is left alone; one that began a request meanwhile is served.
            let farewell = port.options.idle_timeout + port.options.header_timeout;
            tokio::select! {
                served = connection.as_mut() => served,
                () = activity.idle_for(farewell) => return,
            }
        }
        () = port.stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = served {
        tracing::debug!(%peer, error, "connection failed");
    }
}

/// What a request is told that does not get to any route.
fn refusal<B>(
    port: &Port,
    stats: &NetStats,
    request: &http::Request<B>,
    certified: bool,
) -> Option<Response> {
    // HTTP/1.1 counts headers and lets up to twice the bytes through, HTTP/2 counts bytes only.
    let bytes: usize = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    let options = &port.options;
    if request.headers().len() > options.max_headers || bytes > options.max_header_bytes as usize {
        return Some(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE.into_response());
    }
    let refused = port.options.access.gate.check(request, certified)?;
    stats.unauthenticated();
    tracing::debug!(path = request.uri().path(), why = %refused, "refused");
    Some(refused.answer(request))
}

async fn hand_over(port: &Port, stream: io::Result<LinkStream>, peer: SocketAddr) {
    let Some(acceptor) = port.links.clone() else {
        tracing::warn!(%peer, "closed: this role has no links to attach to");
        return;
    };
    match stream {
        Ok(stream) => {
            if let Err(error) = tokio::task::spawn_blocking(move || acceptor(stream, peer)).await {
                tracing::error!(%peer, %error, "the link acceptor failed");
            }
        }
        Err(error) => tracing::debug!(%peer, %error, "connection is gone"),
    }
}
