//! Where the process is reached, by whom, and where the other attention ranks are.
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use afd_common::config::option::{OptionError, addresses, client_tls, own_certificate, refuse};
use afd_common::config::units::Span;
use afd_common::net::tls::ClientTls;
use afd_common::net::{Access, Gate, TlsFiles};

use super::ServeArgs;

/// Peers are asked a few times a second: a shorter silence is none.
const LEAST_PEER_TIMEOUT: Duration = Duration::from_secs(1);

/// Where the process is reached.
#[derive(Clone, Debug)]
pub struct AddressConfig {
    /// To bind.
    pub listen: SocketAddr,
    /// For others, `host:port`.
    pub advertise: Option<String>,
    /// Where to write the address.
    pub file: Option<PathBuf>,
    /// Who may come.
    pub access: Access,
}

/// The other attention ranks.
#[derive(Clone, Debug, Default)]
pub struct PeersConfig {
    /// `host:port` each; none: nothing is forwarded.
    pub names: Vec<String>,
    /// They are dialled in the clear without.
    pub tls: Option<ClientTls>,
    /// Silence after which one of them is lost.
    pub timeout: Duration,
}

impl AddressConfig {
    pub(super) fn new(args: &ServeArgs) -> Result<Self, OptionError> {
        addresses("--advertise", &args.advertise)?;
        let listen = args.listen.unwrap_or(SocketAddr::from((Ipv4Addr::LOCALHOST, 8000)));
        let token_option = "--api-token-file";
        let gate = match &args.api_token_file {
            None => Gate::default(),
            Some(file) => match Gate::default().token_file(file) {
                Ok(gate) => gate,
                Err(what) => return refuse(token_option, what),
            },
        };
        // What guards joining guards membership.
        let gate = match args.join_token_file {
            Some(_) => gate.with_own_secret(crate::membership::PATHS),
            None => gate,
        };
        let access =
            Access::new(listen, tls_files(args), gate, token_option, args.insecure.unwrap_or(false))?;
        Ok(Self { listen, advertise: args.advertise.clone(), file: args.address_file.clone(), access })
    }
}

impl PeersConfig {
    pub(super) fn new(args: &ServeArgs) -> Result<Self, OptionError> {
        let names = args.peers.clone().unwrap_or_default();
        addresses("--peers", &names)?;
        let (ca, identity) = (args.peers_tls_ca.as_deref(), own_certificate(&tls_files(args))?);
        let timeout = args.peer_timeout.map_or(Duration::from_secs(5), |span| span.0);
        if timeout < LEAST_PEER_TIMEOUT {
            let what = format!("is {}; expected at least {}", Span(timeout), Span(LEAST_PEER_TIMEOUT));
            return refuse("--peer-timeout", what);
        }
        Ok(Self { names, tls: client_tls("--peers-tls-ca", ca, identity)?, timeout })
    }
}

/// Of this process's own port.
fn tls_files(args: &ServeArgs) -> TlsFiles {
    TlsFiles {
        certificate: args.tls_cert.clone(),
        key: args.tls_key.clone(),
        client_ca: args.tls_client_ca.clone(),
    }
}
