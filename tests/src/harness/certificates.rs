//! Certificates of a test's own authority.
use std::path::{Path, PathBuf};

use afd_common::net::tls::Identity;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

/// A certificate authority whose files lie in a folder of the test's.
pub struct Authority {
    folder: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// Makes one and writes its certificate.
    ///
    /// # Errors
    /// When the folder cannot be written to.
    pub fn new(folder: &Path) -> anyhow::Result<Self> {
        let (mut params, key) = (CertificateParams::default(), KeyPair::generate()?);
        params.distinguished_name.push(DnType::CommonName, "a test's authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        std::fs::create_dir_all(folder)?;
        std::fs::write(folder.join("ca.pem"), params.self_signed(&key)?.pem())?;
        Ok(Self { folder: folder.to_owned(), issuer: Issuer::new(params, key) })
    }

    /// Its certificate.
    pub fn ca(&self) -> PathBuf {
        self.folder.join("ca.pem")
    }

    /// Writes a certificate for `hosts` (names or addresses) and its key.
    ///
    /// # Errors
    /// When the folder cannot be written to.
    pub fn issue(&self, name: &str, hosts: &[&str]) -> anyhow::Result<Identity> {
        let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
        let (params, key) = (CertificateParams::new(hosts)?, KeyPair::generate()?);
        let certificate = self.folder.join(format!("{name}.pem"));
        let identity = Identity { certificate, key: self.folder.join(format!("{name}.key")) };
        std::fs::write(&identity.certificate, params.signed_by(&key, &self.issuer)?.pem())?;
        std::fs::write(&identity.key, key.serialize_pem())?;
        Ok(identity)
    }
}
