//! The dialing side.
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::{Identity, provider, roots};
use crate::net::NetError;
use crate::net::reread::Reread;

/// What a process trusts when it dials, and shows. Clones share it.
#[derive(Clone, Debug)]
pub struct ClientTls(Arc<Reread<ClientConfig>>);

impl ClientTls {
    /// Reads the files: the CA that peers' certificates must come from, and the own certificate where peers ask for one.
    ///
    /// # Errors
    /// One line that names the file.
    pub fn load(ca: PathBuf, identity: Option<Identity>) -> Result<Self, String> {
        let own = identity.as_ref().map(Identity::files).into_iter().flatten();
        let files = std::iter::once(ca.clone()).chain(own).collect();
        let read = move || config(&ca, identity.as_ref());
        Ok(Self(Arc::new(Reread::new(files, read)?)))
    }

    /// For a client of another make.
    pub fn config(&self) -> Arc<ClientConfig> {
        self.0.get()
    }

    /// For the peer whose certificate must be for `host`: a DNS name or an IP address.
    ///
    /// # Errors
    /// [`NetError::Address`] when it is neither.
    pub fn peer(&self, host: &str) -> Result<PeerTls, NetError> {
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(bare.to_owned())
            .map_err(|error| NetError::Address { address: host.into(), what: error.to_string() })?;
        Ok(PeerTls { tls: self.clone(), name })
    }
}

/// How to reach one peer under TLS.
#[derive(Clone)]
pub struct PeerTls {
    tls: ClientTls,
    name: ServerName<'static>,
}

impl PeerTls {
    /// Under TLS, for gRPC.
    pub(crate) async fn connect(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let mut config = ClientConfig::clone(&self.tls.0.get());
        config.alpn_protocols = vec![b"h2".to_vec()];
        let connector = TlsConnector::from(Arc::new(config));
        connector.connect(self.name.clone(), stream).await.map_err(explained)
    }

    /// A handshake on a blocking socket whose timeouts are set, for a link.
    pub(crate) fn handshake(&self, mut stream: &std::net::TcpStream) -> io::Result<ClientConnection> {
        let config = self.tls.0.get();
        let mut session = ClientConnection::new(config, self.name.clone()).map_err(io::Error::other)?;
        while session.is_handshaking() {
            session.complete_io(&mut stream).map_err(explained)?;
        }
        Ok(session)
    }
}

/// What rustls says to an answer in the clear tells nobody what to do.
fn explained(error: io::Error) -> io::Error {
    let cause = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match cause {
        Some(rustls::Error::InvalidMessage(_)) => {
            io::Error::new(error.kind(), "the peer does not speak TLS here")
        }
        _ => error,
    }
}

impl fmt::Debug for PeerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PeerTls").field(&self.name).finish()
    }
}

fn config(ca: &Path, identity: Option<&Identity>) -> Result<ClientConfig, String> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots(ca)?);
    match identity {
        None => Ok(builder.with_no_client_auth()),
        Some(identity) => {
            let (certificates, key) = identity.load()?;
            builder.with_client_auth_cert(certificates, key).map_err(|error| identity.does_not_fit(&error))
        }
    }
}
