//! How one service dials another: the same windows and keepalive as the listening side, in the clear or under TLS.
use std::error::Error;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tonic::transport::{Channel, Endpoint};

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
    Ok(endpoint
        .tcp_nodelay(true)
        .connect_timeout(connect_timeout)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE))
}

/// A gRPC channel to `address` ("host:port"), connected, under `tls` where the peer speaks it.
///
/// # Errors
/// One line: the address is none, nobody answers in time, or the certificate is not the peer's.
pub async fn connect(
    address: &str,
    tls: Option<&PeerTls>,
    connect_timeout: Duration,
) -> Result<Channel, String> {
    let endpoint = endpoint(address, connect_timeout).map_err(|error| error.to_string())?;
    let connected = match tls {
        None => endpoint.connect().await,
        Some(tls) => {
            let (address, tls) = (address.to_owned(), tls.clone());
            let connector = tower::service_fn(move |_: http::Uri| dial(address.clone(), tls.clone()));
            endpoint.connect_with_connector(connector).await
        }
    };
    connected.map_err(|error| innermost(&error))
}

async fn dial(
    address: String,
    tls: PeerTls,
) -> std::io::Result<TokioIo<tokio_rustls::client::TlsStream<TcpStream>>> {
    let stream = TcpStream::connect(address.as_str()).await?;
    stream.set_nodelay(true)?;
    Ok(TokioIo::new(tls.connect(stream).await?))
}

fn target(address: &str, uri: &str) -> Result<(http::Uri, u16), NetError> {
    let wrong = |what: String| NetError::Address { address: address.into(), what };
    let parsed: http::Uri = uri.parse().map_err(|error: http::uri::InvalidUri| wrong(error.to_string()))?;
    match parsed.port_u16() {
        Some(port) => Ok((parsed, port)),
        None => Err(wrong("a port is missing, as in \"127.0.0.1:7001\"".into())),
    }
}

/// What a call's status says, and what the transport says below it.
pub fn words(status: &tonic::Status) -> String {
    match status.source().map(innermost) {
        Some(cause) if !status.message().contains(&cause) => format!("{}: {cause}", status.message()),
        _ => status.message().to_owned(),
    }
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
    use super::*;

    #[test]
    fn what_is_no_address_is_named() {
        let second = Duration::from_secs(1);
        assert!(endpoint("127.0.0.1:7001", second).is_ok());
        assert!(endpoint("http://ffn-0.ffn:7001", second).is_ok());
        assert!(endpoint("127.0.0.1", second).unwrap_err().to_string().contains("port"));
        assert!(endpoint("a b:1", second).unwrap_err().to_string().contains("\"a b:1\""));
    }
}
