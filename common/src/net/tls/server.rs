//! The listening side.
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::server::WebPkiClientVerifier;

use super::{Identity, provider, roots};
use crate::net::reread::Reread;

/// Certificates of a port. Clones share them.
#[derive(Clone, Debug)]
pub struct ServerTls {
    config: Arc<Reread<ServerConfig>>,
    asks_for_certificates: bool,
}

impl ServerTls {
    /// Reads the files. With a `client_ca`, certificates that clients show are verified against it.
    ///
    /// # Errors
    /// One line that names the file.
    pub fn load(identity: Identity, client_ca: Option<PathBuf>) -> Result<Self, String> {
        let files = identity.files().into_iter().chain(client_ca.clone()).collect();
        let asks_for_certificates = client_ca.is_some();
        let read = move || config(&identity, client_ca.as_deref());
        Ok(Self { config: Arc::new(Reread::new(files, read)?), asks_for_certificates })
    }

    /// Whether there is a client CA.
    pub fn asks_for_certificates(&self) -> bool {
        self.asks_for_certificates
    }

    /// For the next handshake.
    pub(crate) fn config(&self) -> Arc<ServerConfig> {
        self.config.get()
    }
}

fn config(identity: &Identity, client_ca: Option<&Path>) -> Result<ServerConfig, String> {
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let builder = match client_ca {
        None => builder.with_no_client_auth(),
        Some(file) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(file)?), provider())
                .allow_unauthenticated()
                .build()
                .map_err(|error| format!("{}: {error}", file.display()))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let (certificates, key) = identity.load()?;
    let mut config =
        builder.with_single_cert(certificates, key).map_err(|error| identity.does_not_fit(&error))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}
