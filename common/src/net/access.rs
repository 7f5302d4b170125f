//! What the options of both roles say about who may reach a port: certificates, tokens, and the refusal to listen where
//! strangers are with none of them.
use std::net::SocketAddr;
use std::path::PathBuf;

use super::gate::Gate;
use super::tls::{Identity, ServerTls, roots};

/// An option that cannot be used as it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{option} {what}")]
pub struct AccessError {
    /// As on the command line.
    pub option: &'static str,
    /// What is wrong and what would do.
    pub what: String,
}

/// Files of a port's TLS, as options name them.
#[derive(Clone, Debug, Default)]
pub struct TlsFiles {
    /// `--tls-cert`
    pub certificate: Option<PathBuf>,
    /// `--tls-key`
    pub key: Option<PathBuf>,
    /// `--tls-client-ca`
    pub client_ca: Option<PathBuf>,
}

/// How a port is guarded.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// In the clear without.
    pub tls: Option<ServerTls>,
    /// What is asked of whoever calls.
    pub gate: Gate,
}

impl Access {
    /// A port on `listen` with these files, and `gate` for tokens. Off loopback something must guard it, which
    /// `token_option` could be, unless the network is trusted (`insecure`).
    ///
    /// # Errors
    /// [`AccessError`] names the option.
    pub fn new(
        listen: SocketAddr,
        files: TlsFiles,
        gate: Gate,
        token_option: &'static str,
        insecure: bool,
    ) -> Result<Self, AccessError> {
        let refuse = |option, what| Err(AccessError { option, what });
        let identity = match Identity::of(files.certificate, files.key, ["--tls-cert", "--tls-key"]) {
            Ok(identity) => identity,
            Err((option, what)) => return refuse(option, what),
        };
        let access = match (identity, files.client_ca) {
            (None, None) => Self { tls: None, gate },
            (None, Some(_)) => {
                return refuse(
                    "--tls-client-ca",
                    "needs --tls-cert and --tls-key: without TLS nobody shows one".into(),
                );
            }
            (Some(identity), client_ca) => {
                if let Some(Err(what)) = client_ca.as_deref().map(roots) {
                    return refuse("--tls-client-ca", what);
                }
                let gate = if client_ca.is_some() { gate.certificates() } else { gate };
                match ServerTls::load(identity, client_ca) {
                    Ok(tls) => Self { tls: Some(tls), gate },
                    Err(what) => return refuse("--tls-cert", what),
                }
            }
        };
        if !listen.ip().is_loopback() && !access.gate.is_closed() && !insecure {
            let what = format!(
                "{listen} can be reached from other machines and nothing guards it: give {token_option}, or --tls-cert, \
                 --tls-key and --tls-client-ca; --insecure if everybody who reaches it may use it"
            );
            return refuse("--listen", what);
        }
        Ok(access)
    }

    /// Says what an operator should know before strangers do.
    pub fn warn(&self, listen: SocketAddr) {
        if listen.ip().is_loopback() {
            return;
        }
        if !self.gate.is_closed() {
            tracing::warn!(%listen, "INSECURE: everybody who reaches this address may use it (--insecure)");
        } else if self.gate.wants_tokens() && self.tls.is_none() {
            tracing::warn!(%listen, "tokens, and everything else, travel in the clear here: give --tls-cert and --tls-key");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::Tokens;
    use crate::net::tls::tests::Authority;

    const PUBLIC: &str = "0.0.0.0:8000";

    fn access(listen: &str, gate: Gate, insecure: bool) -> Result<Access, String> {
        let made = Access::new(listen.parse().unwrap(), TlsFiles::default(), gate, "--token-file", insecure);
        made.map_err(|error| error.to_string())
    }

    #[test]
    fn a_port_for_strangers_must_be_guarded() {
        for listen in ["127.0.0.1:1", "127.8.8.8:1", "[::1]:1"] {
            assert!(access(listen, Gate::default(), false).is_ok(), "{listen}");
        }
        for listen in [PUBLIC, "10.0.0.1:1", "[::]:1"] {
            let error = access(listen, Gate::default(), false).unwrap_err();
            for part in ["--listen", listen, "--token-file", "--tls-client-ca", "--insecure"] {
                assert!(error.contains(part), "{error}");
            }
        }
        assert!(access(PUBLIC, Gate::default(), true).is_ok());
        assert!(access(PUBLIC, Gate::default().tokens(Tokens::one("t")), false).is_ok());
    }

    #[test]
    fn a_file_of_tls_that_cannot_be_used_is_blamed_on_its_own_option() {
        let ours = Authority::new();
        let Identity { certificate, key } = ours.issue("a", &["a"]);
        let (nowhere, said) = (PathBuf::from("/nowhere"), "/nowhere: No such file");
        let cases = [
            ([&nowhere, &key, &ours.ca()], "--tls-cert", said),
            ([&key, &key, &ours.ca()], "--tls-cert", "a.key holds no certificate"),
            ([&certificate, &nowhere, &ours.ca()], "--tls-key", said),
            ([&certificate, &certificate, &ours.ca()], "--tls-key", "a.pem: no private key"),
            ([&certificate, &key, &nowhere], "--tls-client-ca", said),
            ([&certificate, &key, &key], "--tls-client-ca", "a.key holds no certificate"),
        ];
        for (files, option, said) in cases {
            let [certificate, key, client_ca] = files.map(|file| Some(file.clone()));
            let files = TlsFiles { certificate, key, client_ca };
            let made = Access::new(PUBLIC.parse().unwrap(), files, Gate::default(), "--token-file", true);
            let error = made.unwrap_err();
            assert_eq!(error.option, option, "{error}");
            assert!(error.what.contains(said), "{error}");
        }
    }

    #[test]
    fn half_of_tls_is_named() {
        let files = |certificate: Option<&str>, key: Option<&str>, client_ca: Option<&str>| TlsFiles {
            certificate: certificate.map(Into::into),
            key: key.map(Into::into),
            client_ca: client_ca.map(Into::into),
        };
        for (files, option) in [
            (files(Some("c"), None, None), "--tls-key"),
            (files(None, Some("k"), None), "--tls-cert"),
            (files(None, None, Some("a")), "--tls-client-ca"),
        ] {
            let made = Access::new(PUBLIC.parse().unwrap(), files, Gate::default(), "--token-file", true);
            assert_eq!(made.unwrap_err().option, option);
        }
    }
}
