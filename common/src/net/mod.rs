//! The one listening port of a process, for both services: HTTP/1.1, HTTP/2 (gRPC) and links side by side.
//!
//! The accept loop sets nodelay and hands every [connection] on: TLS where the port has [certificates](tls), a look at what
//! it speaks, then a link to the role's acceptor and everything else to hyper, behind the [gate] that asks who it is; which
//! of the options say so is [`Access`]. What a request may do, and how large its body may be, is the router's business;
//! that its headers and its body come in time, and that connections which only stand there are closed, is this module's.
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::link::LinkStream;

mod access;
mod body;
pub mod client;
mod connection;
pub mod gate;
mod greeting;
pub mod health;
mod http1;
mod idle;
mod json_error;
pub mod messages;
mod prefixed;
mod reflection;
mod reread;
mod sniff;
mod stats;
pub mod tls;

pub use access::{Access, AccessError, TlsFiles};
pub use body::{BodyTimeout, BodyTimes};
use connection::{Port, serve_connection};
pub use gate::{Gate, Tokens};
pub use idle::Watched;
pub use json_error::json_error;
pub use reflection::add_reflection;
pub use stats::{NetCounts, NetStats};

/// Flow-control window of an HTTP/2 stream and of a connection, bytes: a hop of rows in one go.
pub(crate) const WINDOW_BYTES: u32 = 4 << 20;
/// Largest HTTP/2 frame, bytes.
const FRAME_BYTES: u32 = 1 << 20;
/// Between pings of an idle HTTP/2 connection, and for their answer.
pub(crate) const KEEPALIVE: Duration = Duration::from_secs(20);

/// Whether a text is `host:port`, the host a name or an address: what a process may be told to dial.
pub fn is_address(text: &str) -> bool {
    text.rsplit_once(':').is_some_and(|(host, port)| {
        let is_host = !host.is_empty() && !host.contains(|c: char| c == '/' || c.is_whitespace());
        is_host && port.parse::<u16>().is_ok_and(|port| port > 0)
    })
}

/// Takes a connection that began with a link's magic, which was read already. Runs on a thread that may block, counts
/// as a connection until it returns, and does the handshake ([`crate::link::attach::answer`]) within its own deadline.
pub type LinkAcceptor = Arc<dyn Fn(LinkStream, SocketAddr) + Send + Sync>;

/// Why the port cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// Another process listens there.
    #[error(
        "{address} is in use by another process; choose another listen address, or port 0 for a free one"
    )]
    InUse {
        /// What was asked for.
        address: SocketAddr,
    },
    /// The system does not let this process listen there.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// What was asked for.
        address: SocketAddr,
        /// The system's own words.
        source: io::Error,
    },
    /// An address to dial is no address.
    #[error("{address:?} is not an address: {what}")]
    Address {
        /// As given.
        address: String,
        /// What is wrong with it.
        what: String,
    },
}

/// Bounds of a port.
#[derive(Clone, Debug)]
pub struct Options {
    /// Connections open at once; more are closed as soon as they are accepted.
    pub max_connections: usize,
    /// Requests in flight on one HTTP/2 connection.
    pub max_streams: u32,
    /// Bytes of all headers of a request.
    pub max_header_bytes: u32,
    /// Headers of a request.
    pub max_headers: usize,
    /// Time for a connection's first bytes, and for the headers of a request that has begun.
    pub header_timeout: Duration,
    /// Time for each request's body.
    pub body: BodyTimes,
    /// Whether a path's request body is a stream that lasts as long as its call: it has no deadline.
    pub is_stream: fn(&str) -> bool,
    /// Time that a connection may be open with no request on it.
    pub idle_timeout: Duration,
    /// Silence after which the other end of an HTTP/2 connection is asked whether it is there, and time for its answer. Both
    /// ends of a connection between services ask alike.
    pub keepalive: Duration,
    /// Time for what is running when the port is stopped.
    pub drain: Duration,
    /// Who may connect and ask.
    pub access: Access,
}

/// Time without a piece of a body after which the rest is not waited for.
const BODY_IDLE: Duration = Duration::from_secs(10);

impl Default for Options {
    fn default() -> Self {
        Self {
            max_connections: 4096,
            max_streams: 1024,
            max_header_bytes: 32 << 10,
            max_headers: 100,
            header_timeout: Duration::from_secs(10),
            body: BodyTimes { idle: BODY_IDLE, whole: Duration::from_secs(60) },
            is_stream: |_| false,
            idle_timeout: Duration::from_secs(300),
            keepalive: KEEPALIVE,
            drain: Duration::from_secs(30),
            access: Access::default(),
        }
    }
}

/// How a stop went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// Connections that were cut because they did not end in time.
    pub cut: usize,
}

/// A bound port.
pub struct Listener {
    inner: TcpListener,
    address: SocketAddr,
    stats: Arc<NetStats>,
}

impl Listener {
    /// Takes the port; clients that connect from now on wait until it is served.
    ///
    /// # Errors
    /// [`NetError::InUse`] or [`NetError::Listen`].
    pub async fn bind(address: SocketAddr) -> Result<Self, NetError> {
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::AddrInUse => NetError::InUse { address },
            _ => NetError::Listen { address, source },
        };
        let inner = TcpListener::bind(address).await.map_err(failed)?;
        let address = inner.local_addr().map_err(failed)?;
        Ok(Self { inner, address, stats: Arc::default() })
    }

    /// Where it listens: the real port when 0 was asked for.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What happened on this port; outlives it.
    pub fn stats(&self) -> Arc<NetStats> {
        Arc::clone(&self.stats)
    }

    /// Serves `router` (gRPC services join it through `tonic::service::Routes::into_axum_router`) and links until `stop`;
    /// then accepts nothing new, tells HTTP/2 clients to go away, and waits for what is running. A role without links
    /// closes connections that want one.
    pub async fn serve(
        self,
        router: Router,
        links: Option<LinkAcceptor>,
        options: Options,
        stop: CancellationToken,
    ) -> Drained {
        let permits = Arc::new(Semaphore::new(options.max_connections));
        let mut connections = JoinSet::new();
        let drain = options.drain;
        let port =
            Arc::new(Port { http: http_builder(&options), router, links, options, stop: stop.clone() });
        loop {
            // Finished connections are reaped as the loop turns.
            while connections.try_join_next().is_some() {}
            let (stream, peer) = tokio::select! {
                accepted = self.inner.accept() => match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        tracing::warn!(%error, "accepting a connection failed");
                        pause_after(&error).await;
                        continue;
                    }
                },
                () = stop.cancelled() => break,
            };
            let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else {
                self.stats.refused();
                tracing::debug!(%peer, "closed: too many connections");
                continue;
            };
            let (port, stats) = (Arc::clone(&port), Arc::clone(&self.stats));
            connections.spawn(async move {
                stats.opened();
                serve_connection(&port, &stats, stream, peer).await;
                stats.closed();
                drop(permit);
            });
        }
        drop(self.inner);
        let cut = match timeout(drain, async { while connections.join_next().await.is_some() {} }).await {
            Ok(()) => 0,
            Err(_) => connections.len(),
        };
        connections.shutdown().await;
        Drained { cut }
    }
}

/// When the process is out of descriptors only time helps; other failures concern one connection.
async fn pause_after(error: &io::Error) {
    if !matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset) {
        sleep(Duration::from_millis(50)).await;
    }
}

fn http_builder(options: &Options) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        // It would run between requests too: a begun head has its deadline in `connection`.
        .header_read_timeout(None)
        .max_headers(options.max_headers)
        .max_buf_size((options.max_header_bytes as usize).max(16 << 10));
    builder
        .http2()
        .timer(TokioTimer::new())
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .max_send_buf_size(WINDOW_BYTES as usize)
        .max_concurrent_streams(options.max_streams)
        .max_header_list_size(options.max_header_bytes)
        .keep_alive_interval(options.keepalive)
        .keep_alive_timeout(options.keepalive);
    builder
}

/// Whether a request is gRPC's, so that it is answered in its language.
pub fn is_grpc<B>(request: &http::Request<B>) -> bool {
    let kind = request.headers().get(http::header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

#[cfg(test)]
mod tests;
