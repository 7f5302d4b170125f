//! How an operator's command gets to a rank: in the clear or under TLS, with a token or without.
use std::path::{Path, PathBuf};
use std::time::Duration;

use afd_common::config::option::{OptionError, client_tls, own_certificate, refuse};
use afd_common::net::client::{NotConnected, words};
use afd_common::net::tls::ClientTls;
use afd_common::net::{TlsFiles, client, is_address};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

/// A channel whose every call carries the token, if there is one.
pub type DialedChannel = InterceptedService<Channel, Token>;

/// Files of TLS, alike for every command.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct TlsOptions {
    /// CA of the certificates on the other side, PEM: it is asked under TLS
    #[arg(long, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// Certificate to show, PEM
    #[arg(long, value_name = "FILE", requires = "tls_ca")]
    pub tls_cert: Option<PathBuf>,
    /// Key of --tls-cert, PEM
    #[arg(long, value_name = "FILE", requires = "tls_ca")]
    pub tls_key: Option<PathBuf>,
}

impl TlsOptions {
    /// Reads the files; `None` for dialing in the clear.
    ///
    /// # Errors
    /// Names the option and the file.
    pub fn load(&self) -> Result<Option<ClientTls>, OptionError> {
        let files =
            TlsFiles { certificate: self.tls_cert.clone(), key: self.tls_key.clone(), client_ca: None };
        client_tls("--tls-ca", self.tls_ca.as_deref(), own_certificate(&files)?)
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
    pub fn read(option: &'static str, path: Option<&Path>) -> Result<Self, OptionError> {
        let Some(path) = path else { return Ok(Self::default()) };
        let token = std::fs::read_to_string(path).map_err(|error| error.to_string()).and_then(|text| {
            let header = format!("Bearer {}", text.trim()).parse();
            header.map_err(|_| "no header can carry what is in it".to_owned())
        });
        let named = |what| refuse(option, format!("{}: {what}", path.display()));
        token.map(|token| Self(Some(token))).or_else(named)
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

/// What a rank's refusal is, as a sentence goes on behind its address; `token_option` names the token it may want.
pub fn refusal(status: &Status, token_option: &str) -> String {
    match (status.code(), words(status)) {
        (Code::Unauthenticated, words) if words.contains("authorization") => {
            format!("tells nothing without a token: {words} ({token_option})")
        }
        (Code::Unauthenticated, words) => format!("tells nothing: {words}"),
        (_, words) => format!("answers with an error: {words}"),
    }
}

/// An address on a command line.
///
/// # Errors
/// What would do.
pub fn address(text: &str) -> Result<String, String> {
    if is_address(text) {
        Ok(text.to_owned())
    } else {
        Err("expected host:port, such as 127.0.0.1:7001".into())
    }
}

/// Connects to `address`, host:port, and waits for its greeting.
///
/// # Errors
/// [`NotConnected`], one line.
pub async fn dial(
    address: &str,
    tls: Option<&ClientTls>,
    token: &Token,
    patience: Duration,
) -> Result<DialedChannel, NotConnected> {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let peer = tls.map(|tls| tls.peer(host)).transpose();
    let peer = peer.map_err(|error| NotConnected::Unreachable(error.to_string()))?;
    let channel = client::connect(address, peer.as_ref(), patience).await?;
    Ok(InterceptedService::new(channel, token.clone()))
}
