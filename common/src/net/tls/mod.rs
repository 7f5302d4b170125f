//! TLS for a port and for dialing one: certificates in PEM files, read again when they change; TLS 1.2 and 1.3 by rustls.
//!
//! A [`ServerTls`] serves gRPC, HTTP/1.1 and links on one port. With a client CA it verifies the certificates that clients
//! show; that there is one is the [gate](super::gate)'s to ask for, so that health probes need none. A [`ClientTls`] trusts
//! the one CA it was given and nothing of the system's.
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

mod client;
mod server;

pub use client::{ClientTls, PeerTls};
pub use server::ServerTls;

/// A certificate, with what lies between it and its CA, and its private key: two PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Certificates, the own one first.
    pub certificate: PathBuf,
    /// PKCS #8, PKCS #1 or SEC 1.
    pub key: PathBuf,
}

impl Identity {
    /// Both files or neither, and each holds what it should.
    ///
    /// # Errors
    /// The option that is missing or names the wrong file, of the two named.
    pub fn of(
        certificate: Option<PathBuf>,
        key: Option<PathBuf>,
        options: [&'static str; 2],
    ) -> Result<Option<Self>, (&'static str, String)> {
        match (certificate, key) {
            (Some(certificate), Some(key)) => {
                certificates(&certificate).map_err(|what| (options[0], what))?;
                private_key(&key).map_err(|what| (options[1], what))?;
                Ok(Some(Self { certificate, key }))
            }
            (None, None) => Ok(None),
            (Some(_), None) => Err((options[1], format!("is missing: {} needs its key", options[0]))),
            (None, Some(_)) => Err((options[0], format!("is missing: {} needs its certificate", options[1]))),
        }
    }

    fn files(&self) -> [PathBuf; 2] {
        [self.certificate.clone(), self.key.clone()]
    }

    fn load(&self) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), String> {
        Ok((certificates(&self.certificate)?, private_key(&self.key)?))
    }

    fn does_not_fit(&self, error: &rustls::Error) -> String {
        format!("{} and {}: {error}", self.certificate.display(), self.key.display())
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn read(file: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(file).map_err(|error| format!("{}: {error}", file.display()))
}

fn private_key(file: &Path) -> Result<PrivateKeyDer<'static>, String> {
    let wrong = |error| format!("{}: no private key: {error}", file.display());
    PrivateKeyDer::from_pem_slice(&read(file)?).map_err(wrong)
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let pem = read(file)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    match found {
        Ok(certificates) if certificates.is_empty() => {
            Err(format!("{} holds no certificate", file.display()))
        }
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(format!("{}: {error}", file.display())),
    }
}

/// A CA's certificates, to be trusted.
///
/// # Errors
/// One line that names the file.
pub(super) fn roots(file: &Path) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(file)? {
        roots.add(certificate).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(roots)
}

#[cfg(test)]
pub(crate) mod tests;
