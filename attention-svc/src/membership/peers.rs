//! The other attention ranks of the deployment (`--peers`): how busy each is, asked a few times a second, and which of them
//! should serve the next request.
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use afd_common::net::client;
use afd_common::net::tls::ClientTls;
use afd_common::proto::v1;
use afd_common::proto::v1::membership_service_client::MembershipServiceClient;
use tokio_util::sync::CancellationToken;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;

const ASK_EVERY: Duration = Duration::from_millis(200);
/// For connecting to a peer and for its answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// Rounds of asking between two resolutions of the names.
const RESOLVE_ROUNDS: u32 = 25;

/// What stays the same.
#[derive(Clone, Debug, Default)]
pub struct PeerSettings {
    /// Other attention ranks: `host:port` each; this one may be among them.
    pub names: Vec<String>,
    /// Dialled in the clear without.
    pub tls: Option<ClientTls>,
    /// `Bearer TOKEN`, where joining is guarded.
    pub token: Option<MetadataValue<Ascii>>,
    /// This process.
    pub identity: v1::Identity,
    /// Of what is served.
    pub fingerprint: String,
}

/// See the module's head.
pub struct Peers {
    settings: PeerSettings,
    known: Mutex<BTreeMap<SocketAddr, Peer>>,
    /// Requests that this rank serves itself.
    local: Arc<AtomicU32>,
}

/// A peer that may be forwarded to.
struct Peer {
    host: String,
    /// Requests that it serves: what it last said, and what has been forwarded to it or come back since.
    num_requests: Arc<AtomicU32>,
    state: State,
}

enum State {
    /// Not asked yet, or it does not answer; the last reason.
    Away(String),
    Here {
        channel: Channel,
        rank: u32,
        ready: bool,
    },
    /// It is this process.
    Own,
}

/// A request that this rank serves itself; dropped at its end.
pub struct Serving(Arc<AtomicU32>);

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A request that a peer serves for this rank; dropped at its end.
pub struct Forwarded(Arc<AtomicU32>);

impl Drop for Forwarded {
    fn drop(&mut self) {
        // The peer may have said in the meantime that it is gone.
        let one_less = |num_requests: u32| num_requests.checked_sub(1);
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_less);
    }
}

/// Where a request goes.
pub struct Chosen {
    /// Which peer.
    pub address: SocketAddr,
    /// Its rank.
    pub rank: u32,
    /// The way to it.
    pub channel: Channel,
    /// To be kept until the request's end.
    pub forwarded: Forwarded,
}

impl Peers {
    /// Nobody has been asked yet.
    pub fn new(settings: PeerSettings) -> Self {
        Self { settings, known: Mutex::default(), local: Arc::default() }
    }

    /// Whether there may be anybody.
    pub fn is_empty(&self) -> bool {
        self.settings.names.is_empty()
    }

    /// Requests that this rank serves itself.
    pub fn num_local(&self) -> u32 {
        self.local.load(Ordering::Acquire)
    }

    /// This rank serves a request from now on.
    pub fn serve(&self) -> Serving {
        self.local.fetch_add(1, Ordering::AcqRel);
        Serving(Arc::clone(&self.local))
    }

    /// This process.
    pub fn identity(&self) -> &v1::Identity {
        &self.settings.identity
    }

    /// The peer that should serve the next request, if this rank should not; it counts as one more there until its end.
    pub fn choose(&self, own_ready: bool) -> Option<Chosen> {
        let known = self.lock();
        let ready = known.iter().filter_map(|(address, peer)| match &peer.state {
            State::Here { channel, rank, ready: true } => Some((address, channel, *rank, &peer.num_requests)),
            _ => None,
        });
        let (address, channel, rank, num_requests) =
            ready.min_by_key(|(.., num_requests)| num_requests.load(Ordering::Acquire))?;
        let own = if own_ready { self.num_local() } else { u32::MAX };
        if num_requests.load(Ordering::Acquire) >= own {
            return None;
        }
        num_requests.fetch_add(1, Ordering::AcqRel);
        let forwarded = Forwarded(Arc::clone(num_requests));
        Some(Chosen { address: *address, rank, channel: channel.clone(), forwarded })
    }

    /// A forwarded request did not get through: the peer is away until it has been asked again.
    pub fn handle_failure(&self, address: SocketAddr, why: &str) {
        if let Some(peer) = self.lock().get_mut(&address) {
            tracing::warn!(peer = %address, why, "a request could not be forwarded");
            peer.state = State::Away(why.to_owned());
        }
    }

    /// Those that can be forwarded to.
    pub fn addresses(&self) -> Vec<String> {
        let known = self.lock();
        let here = known.iter().filter(|(_, peer)| matches!(peer.state, State::Here { ready: true, .. }));
        here.map(|(address, _)| address.to_string()).collect()
    }

    /// The ways to all that are there.
    pub fn channels(&self) -> Vec<Channel> {
        let here = |peer: &Peer| match &peer.state {
            State::Here { channel, .. } => Some(channel.clone()),
            _ => None,
        };
        self.lock().values().filter_map(here).collect()
    }

    /// Asks everybody, again and again, until `stop`.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let asking = async {
            for round in 0u32.. {
                if round % RESOLVE_ROUNDS == 0 {
                    self.resolve().await;
                }
                let all: Vec<_> = self.lock().keys().copied().collect();
                futures::future::join_all(all.into_iter().map(|address| self.ask(address))).await;
                tokio::time::sleep(ASK_EVERY).await;
            }
        };
        tokio::select! {
            () = asking => {}
            () = stop.cancelled() => {}
        }
    }

    async fn resolve(&self) {
        let mut found = BTreeMap::new();
        for name in &self.settings.names {
            let resolved = tokio::time::timeout(PATIENCE, tokio::net::lookup_host(name.as_str())).await;
            let Ok(Ok(addresses)) = resolved else {
                tracing::debug!(name, "a name of --peers cannot be resolved");
                continue;
            };
            let host = name.rsplit_once(':').map_or(name.as_str(), |(host, _)| host);
            found.extend(addresses.map(|address| (address, host.to_owned())));
        }
        let mut known = self.lock();
        known.retain(|address, _| found.contains_key(address));
        for (address, host) in found {
            known.entry(address).or_insert_with(|| Peer {
                host,
                num_requests: Arc::default(),
                state: State::Away(String::new()),
            });
        }
    }

    async fn ask(&self, address: SocketAddr) {
        let (host, channel) = match self.lock().get(&address) {
            Some(Peer { state: State::Own, .. }) | None => return,
            Some(Peer { state: State::Here { channel, .. }, host, .. }) => {
                (host.clone(), Some(channel.clone()))
            }
            Some(Peer { state: State::Away(_), host, .. }) => (host.clone(), None),
        };
        let answered = tokio::time::timeout(PATIENCE, self.listed(address, &host, channel)).await;
        let state = answered.unwrap_or_else(|_| Err(format!("no answer within {PATIENCE:?}")));
        let mut known = self.lock();
        let Some(peer) = known.get_mut(&address) else { return };
        match (&peer.state, &state) {
            (State::Away(before), Err(why)) if before == why => {}
            (_, Err(why)) => tracing::info!(peer = %address, why, "no attention rank to forward to"),
            (State::Away(_), Ok((State::Here { rank, .. }, _))) => {
                tracing::info!(peer = %address, rank, "requests may be forwarded to this attention rank");
            }
            _ => {}
        }
        peer.state = match state {
            Ok((state, num_requests)) => {
                peer.num_requests.store(num_requests, Ordering::Release);
                state
            }
            Err(why) => State::Away(why),
        };
    }

    /// What a peer is, and how many requests it serves.
    async fn listed(
        &self,
        address: SocketAddr,
        host: &str,
        channel: Option<Channel>,
    ) -> Result<(State, u32), String> {
        let settings = &self.settings;
        let channel = match channel {
            Some(channel) => channel,
            None => {
                let tls = settings.tls.as_ref().map(|tls| tls.peer(host)).transpose();
                let tls = tls.map_err(|error| error.to_string())?;
                client::connect(&address.to_string(), tls.as_ref(), PATIENCE).await?
            }
        };
        let mut request = tonic::Request::new(v1::ListPeersRequest {});
        if let Some(token) = &settings.token {
            request.metadata_mut().insert("authorization", token.clone());
        }
        let answer = MembershipServiceClient::new(channel.clone()).list_peers(request).await;
        let answer = answer.map_err(|status| client::words(&status))?.into_inner();
        let identity = answer.identity.unwrap_or_default();
        if identity == settings.identity {
            return Ok((State::Own, 0));
        }
        for (field, own, other) in [
            ("identity.deployment", &settings.identity.deployment, &identity.deployment),
            ("fingerprint", &settings.fingerprint, &answer.fingerprint),
        ] {
            if own != other {
                return Err(format!("`{field}` differs: {own} here, {other} there (--peers)"));
            }
        }
        let state = State::Here { channel, rank: identity.rank, ready: answer.ready };
        Ok((state, answer.num_requests))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<SocketAddr, Peer>> {
        self.known.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use tonic::transport::Endpoint;

    use super::*;

    fn here(ready: bool, num_requests: u32) -> Peer {
        let channel = Endpoint::from_static("http://127.0.0.1:1").connect_lazy();
        let state = State::Here { channel, rank: 0, ready };
        Peer { host: "h".into(), num_requests: Arc::new(num_requests.into()), state }
    }

    fn peers(all: Vec<Peer>) -> Peers {
        let peers = Peers::new(PeerSettings::default());
        let address = |n: usize| SocketAddr::from(([10, 0, 0, 1], n as u16));
        peers.lock().extend(all.into_iter().enumerate().map(|(n, peer)| (address(n), peer)));
        peers
    }

    fn port(chosen: &Option<Chosen>) -> Option<u16> {
        chosen.as_ref().map(|chosen| chosen.address.port())
    }

    #[tokio::test]
    async fn the_least_loaded_rank_serves_and_this_one_when_it_is_a_tie() {
        let peers = peers(vec![here(true, 1), here(true, 0), here(false, 0)]);
        assert_eq!(port(&peers.choose(true)), None, "nothing runs here");
        let serving = (peers.serve(), peers.serve());
        let forwarded = [(); 4].map(|()| peers.choose(true));
        assert_eq!(
            forwarded.each_ref().map(port),
            [Some(1), Some(0), Some(1), None],
            "a forwarded one counts there at once, until there are two everywhere"
        );
        drop(serving);
        assert_eq!(peers.num_local(), 0);
    }

    #[tokio::test]
    async fn a_forwarded_request_that_has_ended_counts_no_more() {
        let peers = peers(vec![here(true, 0)]);
        let _serving = peers.serve();
        let first = peers.choose(true);
        assert_eq!((port(&first), port(&peers.choose(true))), (Some(0), None));
        drop(first);
        let next = peers.choose(true);
        assert_eq!(port(&next), Some(0), "without the peer having been asked again");
        // Asked in the meantime, it did not have the request any more.
        peers.lock().values().for_each(|peer| peer.num_requests.store(0, Ordering::Release));
        drop(next);
        assert_eq!(port(&peers.choose(true)), Some(0));
    }

    #[tokio::test]
    async fn a_rank_without_ffn_forwards_whatever_it_can() {
        let peers = peers(vec![here(true, 9)]);
        assert_eq!(port(&peers.choose(false)), Some(0));
        peers.handle_failure(SocketAddr::from(([10, 0, 0, 1], 0)), "gone");
        assert_eq!(port(&peers.choose(false)), None);
    }
}
