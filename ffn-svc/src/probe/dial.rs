//! How an operator's command gets to a rank: in the clear or under TLS, with a token or without.
use std::path::{Path, PathBuf};
use std::time::Duration;

use afd_common::net::client;
use afd_common::net::tls::{ClientTls, Identity};
use anyhow::{Context, anyhow};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Request, Status};

/// A channel whose every call carries the token, if there is one.
pub type DialedChannel = InterceptedService<Channel, Token>;

/// Files of TLS, alike for every command.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct TlsOptions {
    /// CA of the certificates on the other side, PEM: it is asked under TLS
    #[arg(long, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// Certificate to show, PEM
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// Key of --tls-cert, PEM
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
}

impl TlsOptions {
    /// Reads the files; `None` for dialing in the clear.
    ///
    /// # Errors
    /// Names the option and the file.
    pub fn load(&self) -> anyhow::Result<Option<ClientTls>> {
        let options = ["--tls-cert", "--tls-key"];
        let named = |(option, what): (&str, String)| anyhow!("{option}: {what}");
        let identity = Identity::of(self.tls_cert.clone(), self.tls_key.clone(), options).map_err(named)?;
        let Some(ca) = &self.tls_ca else { return Ok(None) };
        ClientTls::load(ca.clone(), identity).map(Some).map_err(|what| anyhow!("--tls-ca: {what}"))
    }
}

/// A bearer token to send along, or none.
#[derive(Clone, Debug, Default)]
pub struct Token(Option<MetadataValue<Ascii>>);

impl Token {
    /// From the file that `option` names.
    ///
    /// # Errors
    /// Names the option and the file.
    pub fn read(option: &str, path: Option<&Path>) -> anyhow::Result<Self> {
        let Some(path) = path else { return Ok(Self::default()) };
        let named = || format!("{option} {}", path.display());
        let token = std::fs::read_to_string(path).with_context(named)?;
        Ok(Self(Some(format!("Bearer {}", token.trim()).parse().with_context(named)?)))
    }
}

impl Interceptor for Token {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(token) = &self.0 {
            request.metadata_mut().insert("authorization", token.clone());
        }
        Ok(request)
    }
}

/// Connects to `address`, host:port.
///
/// # Errors
/// One line that says why not.
pub async fn dial(
    address: &str,
    tls: Option<&ClientTls>,
    token: &Token,
    patience: Duration,
) -> Result<DialedChannel, String> {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let peer = tls.map(|tls| tls.peer(host)).transpose().map_err(|error| error.to_string())?;
    let channel = client::connect(address, peer.as_ref(), patience).await?;
    Ok(InterceptedService::new(channel, token.clone()))
}
