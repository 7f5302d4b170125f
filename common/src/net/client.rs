//! How one service dials another: the same windows and keepalive as the listening side, in the clear or under TLS.
use std::error::Error;
use std::io;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint};

use super::greeting::{Goodbye, Greeted, Overheard};
use super::tls::PeerTls;
use super::{KEEPALIVE, NetError, WINDOW_BYTES};

/// A gRPC endpoint for `address` ("host:port", or with "http://" before it), not connected yet.
///
/// # Errors
/// [`NetError::Address`].
pub fn endpoint(address: &str, connect_timeout: Duration) -> Result<Endpoint, NetError> {
    let uri = if address.contains("://") { address.to_owned() } else { format!("http://{address}") };
    let (uri, _) = target(address, &uri)?;
    let endpoint = Endpoint::from_shared(uri.to_string())
        .map_err(|error| NetError::Address { address: address.into(), what: error.to_string() })?;
    let endpoint = endpoint
        .tcp_nodelay(true)
        .connect_timeout(connect_timeout)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES);
    Ok(kept_alive(endpoint, KEEPALIVE))
}

/// With a ping every so often while a call is on its way, and as long for its answer: a peer whose network has gone ends its
/// calls with an error.
fn kept_alive(endpoint: Endpoint, every: Duration) -> Endpoint {
    endpoint.http2_keep_alive_interval(every).keep_alive_timeout(every)
}

/// A gRPC channel to `address` ("host:port"), connected and [greeted](super::greeting), under `tls` where the peer speaks
/// it.
///
/// # Errors
/// [`NotConnected`], one line.
pub async fn connect(
    address: &str,
    tls: Option<&PeerTls>,
    connect_timeout: Duration,
) -> Result<Channel, NotConnected> {
    let endpoint = endpoint(address, connect_timeout);
    let endpoint = endpoint.map_err(|error| NotConnected::Unreachable(error.to_string()))?;
    let authority = endpoint.uri().authority().map_or_else(String::new, ToString::to_string);
    match tls {
        None => greeted(&endpoint, connect_timeout, move || dial(authority.clone())).await,
        Some(tls) => {
            let tls = tls.clone();
            greeted(&endpoint, connect_timeout, move || dial_tls(authority.clone(), tls.clone())).await
        }
    }
}

/// Why there is no connection. A retry may help, unless it says otherwise.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotConnected {
    /// Nobody is there, or not under this certificate; or the address is none.
    #[error("{0}")]
    Unreachable(String),
    /// Nobody answered the attempt to connect at all.
    #[error("no connection within {0:?}")]
    Late(Duration),
    /// Somebody listens and does not take requests yet.
    #[error("it listens, and said nothing within {0:?}: it may be loading, or stopped")]
    Silent(Duration),
    /// Somebody is there and wants to be asked under TLS: a retry does not help.
    #[error("{0}")]
    WantsTls(String),
    /// Somebody is there, and says why not in these words.
    #[error("{0}")]
    Goodbye(String),
}

impl From<NotConnected> for String {
    fn from(error: NotConnected) -> Self {
        error.to_string()
    }
}

/// Connects by `dial` and waits for the greeting, all within `patience`.
async fn greeted<S, F>(
    endpoint: &Endpoint,
    patience: Duration,
    dial: impl Fn() -> F + Send + 'static,
) -> Result<Channel, NotConnected>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    F: Future<Output = io::Result<S>> + Send + 'static,
{
    let (deadline, (told, mut greeting)) = (Instant::now() + patience, watch::channel(None));
    let connector = tower::service_fn(move |_: http::Uri| {
        let (dialled, told) = (dial(), told.clone());
        async move { Ok::<_, io::Error>(TokioIo::new(Overheard::new(dialled.await?, told))) }
    });
    let connected = match timeout_at(deadline, endpoint.connect_with_connector(connector)).await {
        // The endpoint's own timer may be the first of two that ring at the same moment.
        Ok(Err(_)) if Instant::now() >= deadline => return Err(NotConnected::Late(patience)),
        Ok(connected) => connected.map_err(|error| NotConnected::Unreachable(innermost(&error))),
        Err(_) => return Err(NotConnected::Late(patience)),
    };
    let said: Option<Greeted> = match &connected {
        // The sender lives as long as the channel does.
        Ok(_) => match timeout_at(deadline, greeting.wait_for(Option::is_some)).await {
            Ok(greeted) => greeted.ok().and_then(|greeted| greeted.clone()),
            Err(_) => return Err(NotConnected::Silent(patience)),
        },
        Err(_) => greeting.borrow().clone(),
    };
    match said {
        // Where the connection ended first, its goodbye says more than that.
        Some(Err(Goodbye::WantsTls(words))) => Err(NotConnected::WantsTls(words)),
        Some(Err(Goodbye::Other(words))) => Err(NotConnected::Goodbye(words)),
        _ => connected,
    }
}

async fn dial(authority: String) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(authority).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

async fn dial_tls(authority: String, tls: PeerTls) -> io::Result<TlsStream<TcpStream>> {
    tls.connect(dial(authority).await?).await
}

fn target(address: &str, uri: &str) -> Result<(http::Uri, u16), NetError> {
    let wrong = |what: String| NetError::Address { address: address.into(), what };
    let parsed: http::Uri = uri.parse().map_err(|error: http::uri::InvalidUri| wrong(error.to_string()))?;
    match parsed.port_u16() {
        Some(port) => Ok((parsed, port)),
        None => Err(wrong("a port is missing, as in \"127.0.0.1:7001\"".into())),
    }
}

/// What a call's status says to people: the other side's own words, or what became of the connection to it, without
/// what the transport calls that.
pub fn words(status: &tonic::Status) -> String {
    // Only what was not sent by the other side has a source.
    match status.source().map(io_cause) {
        Some(Some(cause)) => format!("the connection broke: {cause}"),
        Some(None) if status.source().is_some_and(went_silent) => {
            "the connection broke: pings were not answered".into()
        }
        Some(None) => "the connection broke: the other side ended it".into(),
        None if status.message().is_empty() => status.code().description().to_lowercase(),
        None => status.message().to_owned(),
    }
}

/// Whether a connection was given up because nothing came of it any more.
fn went_silent(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_timeout) {
            return true;
        }
        next = error.source();
    }
    false
}

/// The system's word for what happened, or TLS's.
fn io_cause(error: &(dyn Error + 'static)) -> Option<String> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(cause) = error.downcast_ref::<io::Error>() {
            return Some(innermost(cause));
        }
        next = error.source();
    }
    None
}

/// "transport error" says nothing; what it was made of does.
fn innermost(error: &dyn Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_client::HealthClient;

    use super::*;

    /// A call to a server that sent its settings and then nothing, pings included.
    #[tokio::test]
    async fn a_server_that_falls_silent_ends_its_calls() {
        let every = Duration::from_millis(50);
        let (near, far) = tokio::io::duplex(1 << 16);
        let mute = tokio::spawn(say_settings_only(far));
        let near = std::sync::Mutex::new(Some(near));
        let dial = tower::service_fn(move |_: http::Uri| {
            let near = near.lock().unwrap().take();
            async move { near.map(TokioIo::new).ok_or_else(|| io::Error::other("dialled twice")) }
        });
        let endpoint = kept_alive(endpoint("ffn:7001", Duration::from_secs(1)).unwrap(), every);
        let channel = endpoint.connect_with_connector(dial).await.unwrap();
        let mut health = HealthClient::new(channel);
        let answer = tokio::time::timeout(100 * every, health.check(HealthCheckRequest::default())).await;
        let status = answer.expect("a peer that answers no ping is still waited for").unwrap_err();
        assert_eq!(words(&status), "the connection broke: pings were not answered");
        mute.abort();
    }

    #[tokio::test]
    async fn who_never_takes_the_connection_is_late() {
        let patience = Duration::from_millis(50);
        let endpoint = endpoint("ffn:7001", patience).unwrap();
        let never = || std::future::pending::<io::Result<DuplexStream>>();
        let error = greeted(&endpoint, patience, never).await.unwrap_err();
        assert_eq!(error, NotConnected::Late(patience));
    }

    async fn say_settings_only(mut far: DuplexStream) {
        far.write_all(b"\0\0\0\x04\0\0\0\0\0").await.unwrap();
        let mut heard = [0; 4096];
        while far.read(&mut heard).await.is_ok_and(|bytes| bytes > 0) {}
    }

    #[test]
    fn a_status_is_told_in_words() {
        assert_eq!(words(&tonic::Status::already_exists("A0 is live")), "A0 is live");
        assert_eq!(
            words(&tonic::Status::new(tonic::Code::NotFound, "")),
            "some requested entity was not found"
        );
        let reset = io::Error::from_raw_os_error(104);
        let broken = tonic::Status::from_error(Box::new(reset));
        assert_eq!(words(&broken), "the connection broke: Connection reset by peer (os error 104)");
        let other = tonic::Status::from_error("h2 protocol error: stream no longer needed".into());
        assert_eq!(words(&other), "the connection broke: the other side ended it");
    }

    #[test]
    fn what_is_no_address_is_named() {
        let second = Duration::from_secs(1);
        assert!(endpoint("127.0.0.1:7001", second).is_ok());
        assert!(endpoint("http://ffn-0.ffn:7001", second).is_ok());
        assert!(endpoint("127.0.0.1", second).unwrap_err().to_string().contains("port"));
        assert!(endpoint("a b:1", second).unwrap_err().to_string().contains("\"a b:1\""));
    }
}
