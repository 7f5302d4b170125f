//! The other attention ranks of the deployment (`--peers`): how busy each is, asked a few times a second, and which of them
//! should serve the next request. One that does not answer is not chosen; one that says nothing for `--peer-timeout` is
//! lost, and with it whatever it serves for this rank ([`Chosen::lost`]).
use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use afd_common::net::tls::ClientTls;
use afd_common::proto::v1;
use afd_common::spelling::span;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;

use super::lease::Lease;
use super::load::{Forwarded, Forwarding, Load, Serving};

mod absent;
mod ask;
#[cfg(test)]
mod tests;

use absent::Away;
use ask::Listed;

const ASK_EVERY: Duration = Duration::from_millis(200);
/// For connecting to a peer, and for its answer before others are preferred.
pub const PATIENCE: Duration = Duration::from_secs(1);
const RESOLVE_EVERY: Duration = Duration::from_secs(5);
/// A tick that is later than this says that this process stood still.
const LATE_TICK: Duration = Duration::from_secs(1);

/// What stays the same.
#[derive(Clone, Debug, Default)]
pub struct PeerSettings {
    /// Other attention ranks: `host:port` each; this one may be among them.
    pub names: Vec<String>,
    /// Dialled in the clear without.
    pub tls: Option<ClientTls>,
    /// `Bearer TOKEN`, where joining is guarded.
    pub token: Option<MetadataValue<Ascii>>,
    /// Silence after which a peer is lost.
    pub timeout: Duration,
    /// This process.
    pub identity: v1::Identity,
    /// Of what is served.
    pub fingerprint: String,
}

/// See the module's head.
pub struct Peers {
    settings: PeerSettings,
    known: Mutex<BTreeMap<SocketAddr, Peer>>,
    /// Names that stand for no address, and why.
    unresolved: Mutex<BTreeMap<String, String>>,
    /// Requests that this rank serves itself.
    local: Arc<AtomicU32>,
    forwarding: Arc<Forwarding>,
}

/// A peer that may be forwarded to.
struct Peer {
    /// The first that stands for the address.
    name: String,
    /// Of who answered last.
    rank: u32,
    load: Arc<Load>,
    state: State,
    lease: Lease,
    asking: Option<AbortHandle>,
    /// Whether an attention rank that can be forwarded to has ever answered.
    was_here: bool,
}

enum State {
    /// Not asked yet, or it cannot be forwarded to; the last reason.
    Away(Away),
    Here {
        channel: Channel,
        ready: bool,
    },
    /// It is this process.
    Own,
}

/// Who serves a forwarded request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerName {
    /// Its rank.
    pub rank: u32,
    /// Where it is.
    pub address: SocketAddr,
}

impl fmt::Display for PeerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "A{} at {}", self.rank, self.address)
    }
}

/// Where a request goes.
pub struct Chosen {
    /// Which peer.
    pub peer: PeerName,
    /// The way to it.
    pub channel: Channel,
    /// Cancelled when the peer is lost.
    pub lost: CancellationToken,
    /// To be kept until the request's end.
    pub forwarded: Forwarded,
}

impl Peers {
    /// Nobody has been asked yet.
    pub fn new(settings: PeerSettings) -> Self {
        let (known, unresolved) = (Mutex::default(), Mutex::default());
        Self { settings, known, unresolved, local: Arc::default(), forwarding: Arc::default() }
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
        Serving::begin(&self.local)
    }

    /// This process.
    pub fn identity(&self) -> &v1::Identity {
        &self.settings.identity
    }

    /// What is said of a peer that is lost by its silence.
    pub fn silence(&self) -> String {
        format!("it said nothing for {} (--peer-timeout)", span(self.settings.timeout))
    }

    /// The peer that should serve the next request, if this rank should not; it counts as one more there until its end.
    pub fn choose(&self, own_ready: bool) -> Option<Chosen> {
        if self.forwarding.is_closed() {
            return None;
        }
        let known = self.lock();
        let ready = known.iter().filter_map(|(address, peer)| match &peer.state {
            State::Here { channel, ready: true } => Some((address, channel, peer)),
            _ => None,
        });
        let (address, channel, peer) =
            ready.min_by_key(|(.., peer)| peer.load.all.load(Ordering::Acquire))?;
        let own = if own_ready { self.num_local() } else { u32::MAX };
        if peer.load.all.load(Ordering::Acquire) >= own {
            return None;
        }
        let forwarded = Forwarded::begin(&peer.load, &self.forwarding);
        let (peer, lost) = (PeerName { rank: peer.rank, address: *address }, peer.lease.lost());
        Some(Chosen { peer, channel: channel.clone(), lost, forwarded })
    }

    /// A forwarded request did not get through, or its answer broke off: the peer is away until it has been asked again.
    /// Logged once until it answers, whatever the number of requests.
    pub fn handle_failure(&self, name: PeerName, what: &str, why: &str) {
        if let Some(peer) = self.lock().get_mut(&name.address) {
            if peer.lease.is_news() {
                let requests = peer.load.forwarded.load(Ordering::Acquire);
                tracing::warn!(peer = %name, why, requests, "{what}");
            }
            peer.state = State::Away(Away::ForNow(why.to_owned()));
        }
    }

    /// Forwards nothing more, and waits for what has been until `deadline`; what is left then is cut. Returns how much that is.
    pub async fn close(&self, deadline: Instant) -> u32 {
        self.forwarding.close(deadline).await
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
        let finding = async {
            // Who is asked on its own holds nobody else up. Dropped at the end, and they end with it.
            let mut asking = JoinSet::new();
            loop {
                for address in self.resolve().await {
                    let asked = asking.spawn(Arc::clone(&self).keep_asking(address));
                    if let Some(peer) = self.lock().get_mut(&address) {
                        peer.asking = Some(asked);
                    }
                }
                while asking.try_join_next().is_some() {}
                tokio::time::sleep(RESOLVE_EVERY).await;
            }
        };
        tokio::select! {
            () = finding => {}
            () = self.keep_watching() => {}
            () = stop.cancelled() => {}
        }
    }

    /// Gives up who says nothing, in time.
    async fn keep_watching(&self) {
        let mut last = Instant::now();
        loop {
            tokio::time::sleep(ASK_EVERY).await;
            let now = Instant::now();
            self.handle_tick(last, now);
            last = now;
        }
    }

    /// Gives up who has said nothing for too long, `last` being the tick before this one.
    fn handle_tick(&self, last: Instant, now: Instant) {
        let pause = now.saturating_duration_since(last);
        for (address, peer) in &mut *self.lock() {
            if pause >= LATE_TICK {
                peer.lease.handle_pause(pause);
            }
            let requests = peer.load.forwarded.load(Ordering::Acquire);
            if peer.lease.check(self.settings.timeout, now) && requests > 0 && peer.lease.is_news() {
                let (peer, why) = (PeerName { rank: peer.rank, address: *address }, self.silence());
                tracing::warn!(%peer, why, requests, "attention rank lost, with requests that it serves");
            }
        }
    }

    /// Looks the names up. Returns addresses that are new.
    async fn resolve(&self) -> Vec<SocketAddr> {
        let mut found = BTreeMap::new();
        for name in &self.settings.names {
            let resolved = timeout(PATIENCE, tokio::net::lookup_host(name.as_str())).await;
            let failure = match resolved {
                Ok(Ok(addresses)) => {
                    for address in addresses {
                        found.entry(address).or_insert_with(|| name.clone());
                    }
                    None
                }
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some(format!("no answer within {}", span(PATIENCE))),
            };
            self.handle_resolved(name, failure);
        }
        let mut known = self.lock();
        known.retain(|address, peer| {
            // One that still serves something has to be heard.
            let stays = found.contains_key(address) || peer.load.forwarded.load(Ordering::Acquire) > 0;
            if let (false, Some(asking)) = (stays, &peer.asking) {
                asking.abort();
            }
            stays
        });
        found.retain(|address, _| !known.contains_key(address));
        known.extend(found.iter().map(|(address, name)| (*address, Peer::unknown(name.clone()))));
        found.into_keys().collect()
    }

    /// Until the address turns out to be this process's own, or is known no more.
    async fn keep_asking(self: Arc<Self>, address: SocketAddr) {
        loop {
            let (name, channel) = match self.lock().get(&address) {
                Some(Peer { state: State::Own, .. }) | None => return,
                Some(Peer { state: State::Here { channel, .. }, name, .. }) => {
                    (name.clone(), Some(channel.clone()))
                }
                Some(Peer { state: State::Away(_), name, .. }) => (name.clone(), None),
            };
            let mut listed = pin!(ask::listed(&self.settings, address, &name, channel));
            match timeout(PATIENCE, &mut listed).await {
                Ok(listed) => self.handle_listed(address, listed),
                Err(_) => {
                    let late = Away::ForNow(format!("no answer within {}", span(PATIENCE)));
                    self.handle_listed(address, Err(late));
                    // A late answer is one: it keeps what the peer serves alive.
                    if let Ok(listed) = timeout(self.settings.timeout, listed).await {
                        self.handle_listed(address, listed);
                    }
                }
            }
            tokio::time::sleep(ASK_EVERY).await;
        }
    }

    fn handle_listed(&self, address: SocketAddr, listed: Result<Listed, Away>) {
        let mut known = self.lock();
        let Some(peer) = known.get_mut(&address) else { return };
        match (&peer.state, &listed) {
            (State::Away(before), Err(why)) if before == why => {}
            (_, Err(Away::ForNow(why))) => {
                tracing::info!(peer = %address, why, "no attention rank to forward to");
            }
            (_, Err(Away::ForGood(why))) => {
                tracing::warn!(peer = %address, why, "--peers names an address that nothing can be forwarded to");
            }
            (State::Away(_), Ok(Listed { state: State::Here { .. }, rank, .. })) => {
                tracing::info!(peer = %address, rank, "requests may be forwarded to this attention rank");
            }
            _ => {}
        }
        (peer.rank, peer.state) = match listed {
            Ok(Listed { rank, state, incarnation, num_requests }) => {
                peer.load.all.store(num_requests, Ordering::Release);
                peer.lease.handle_answer(incarnation, Instant::now());
                peer.was_here = true;
                (rank, state)
            }
            Err(why) => (peer.rank, State::Away(why)),
        };
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<SocketAddr, Peer>> {
        self.known.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Peer {
    fn unknown(name: String) -> Self {
        Self {
            name,
            rank: 0,
            load: Arc::default(),
            state: State::Away(Away::Unasked),
            lease: Lease::new(Instant::now()),
            asking: None,
            was_here: false,
        }
    }
}
