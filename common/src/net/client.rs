//! How one service dials another: the same windows and keepalive as the listening side.
use std::time::Duration;

use tonic::transport::Endpoint;

use super::{KEEPALIVE, NetError, WINDOW_BYTES};

/// A gRPC endpoint for `address` ("host:port", or with "http://" before it), not connected yet.
///
/// # Errors
/// [`NetError::Address`].
pub fn endpoint(address: &str, connect_timeout: Duration) -> Result<Endpoint, NetError> {
    let wrong = |what: String| NetError::Address { address: address.into(), what };
    let uri = if address.contains("://") { address.to_owned() } else { format!("http://{address}") };
    let parsed: http::Uri = uri.parse().map_err(|error: http::uri::InvalidUri| wrong(error.to_string()))?;
    if parsed.port().is_none() {
        return Err(wrong("a port is missing, as in \"127.0.0.1:7001\"".into()));
    }
    let endpoint = Endpoint::from_shared(uri).map_err(|error| wrong(error.to_string()))?;
    Ok(endpoint
        .tcp_nodelay(true)
        .connect_timeout(connect_timeout)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE))
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
