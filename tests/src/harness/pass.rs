//! What a test shows to attention ranks that do not talk to everybody, over HTTP and gRPC.
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use afd_common::net::client;
use afd_common::net::tls::{ClientTls, Identity};
use tonic::transport::Channel;

use super::deployment::START_LIMIT;

/// What a test shows to attention ranks that do not talk to everybody.
#[derive(Clone, Debug, Default)]
pub struct Pass {
    /// They speak TLS, under certificates of this authority.
    pub ca: Option<PathBuf>,
    /// To be shown.
    pub identity: Option<Identity>,
    /// To be sent along.
    pub token: Option<String>,
}

impl Pass {
    fn tls(&self) -> anyhow::Result<Option<ClientTls>> {
        let load =
            |ca: &PathBuf| ClientTls::load(ca.clone(), self.identity.clone()).map_err(anyhow::Error::msg);
        self.ca.as_ref().map(load).transpose()
    }

    /// Puts the token into a gRPC request.
    pub fn show<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        if let Some(token) = self.token.as_ref().and_then(|token| format!("Bearer {token}").parse().ok()) {
            request.metadata_mut().insert("authorization", token);
        }
        request
    }

    /// An HTTP client that shows it all.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn http(&self) -> anyhow::Result<reqwest::Client> {
        let mut builder = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(120));
        if let Some(tls) = self.tls()? {
            builder = builder.use_preconfigured_tls(rustls::ClientConfig::clone(&tls.config()));
        }
        if let Some(token) = &self.token {
            let value = format!("Bearer {token}").parse()?;
            builder =
                builder.default_headers([(reqwest::header::AUTHORIZATION, value)].into_iter().collect());
        }
        Ok(builder.build()?)
    }

    /// A gRPC channel to an address.
    ///
    /// # Errors
    /// When nobody answers there, or not under this CA.
    pub async fn grpc(&self, address: SocketAddr) -> anyhow::Result<Channel> {
        let peer = self.tls()?.map(|tls| tls.peer(&address.ip().to_string())).transpose()?;
        let connected = client::connect(&address.to_string(), peer.as_ref(), START_LIMIT).await;
        connected.map_err(anyhow::Error::msg)
    }
}
