//! Finds the FFN ranks behind `--ffn` and keeps one control task per address.
//!
//! A name may stand for several addresses, and for others later (a replacement, a replica): names are resolved again
//! every few seconds and at once when a rank was lost.
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use afd_common::spelling::span;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::control;
use super::peer::{Peer, PeerState};
use super::session::Shared;
use super::standing::Standing;
use super::stats::FfnStats;
use crate::membership::announced::Announced;

const RESOLVE_EVERY: Duration = Duration::from_secs(5);
/// Least time between two resolutions, however many ranks are lost.
const RESOLVE_PAUSE: Duration = Duration::from_millis(200);
const FIRST_WORD: Duration = Duration::from_secs(2);
const WORD_EVERY: Duration = Duration::from_secs(5);

/// The control tasks of every known FFN rank.
pub struct Directory {
    names: Vec<String>,
    announced: Arc<Announced>,
    shared: Arc<Shared>,
    stats: Arc<FfnStats>,
    peers: Mutex<BTreeMap<SocketAddr, Tracked>>,
    unresolved: Mutex<BTreeMap<String, String>>,
}

/// A control task as the directory sees it.
struct Tracked {
    /// The first that stands for the address.
    name: String,
    peer: watch::Receiver<Peer>,
    /// Somebody's option names it: what it refuses for good is a mistake of the command line.
    is_listed: bool,
    stop: CancellationToken,
}

/// Why attention cannot start.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// A rank answered and said no.
    #[error("FFN rank at {address} refused: {why}")]
    Refused {
        /// Which.
        address: SocketAddr,
        /// Its own words.
        why: String,
    },
    /// Not every shard had a rank in time.
    #[error("no FFN rank for every shard within {} (--join-timeout): {peers}", span(*.limit))]
    Timeout {
        /// How long it was waited for.
        limit: Duration,
        /// How each rank stands.
        peers: String,
    },
}

impl Directory {
    /// `names` as given to `--ffn`: `host:port` each.
    pub fn new(names: Vec<String>, shared: Arc<Shared>, stats: Arc<FfnStats>) -> Self {
        let announced = Arc::default();
        Self { names, announced, shared, stats, peers: Mutex::default(), unresolved: Mutex::default() }
    }

    /// Where ranks that announce themselves are noted: they are found as if they were named.
    pub fn announced(&self) -> &Arc<Announced> {
        &self.announced
    }

    /// Resolves and serves until `stop`, then joins every control task.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let mut tasks = JoinSet::new();
        while !stop.is_cancelled() {
            // Before resolving, so that no loss during it is missed.
            let vacated = self.shared.vacated.notified();
            let announced = self.announced.changed.notified();
            let found = tokio::select! {
                found = self.resolve() => found,
                () = stop.cancelled() => break,
            };
            self.forget_all_but(&found);
            for (address, name) in found {
                if self.lock_peers().contains_key(&address) {
                    continue;
                }
                let (sender, peer) = watch::channel(Peer::unknown(Instant::now()));
                let own = stop.child_token();
                let is_listed = self.names.contains(&name);
                let host = name.rsplit_once(':').map_or(name.as_str(), |(host, _)| host).to_owned();
                self.lock_peers().insert(address, Tracked { name, peer, is_listed, stop: own.clone() });
                tasks.spawn(control::run(address, host, Arc::clone(&self.shared), sender, own));
            }
            while tasks.try_join_next().is_some() {}
            tokio::select! {
                () = tokio::time::sleep(RESOLVE_EVERY) => {}
                () = announced => {}
                () = async { vacated.await; tokio::time::sleep(RESOLVE_PAUSE).await } => {}
                () = stop.cancelled() => {}
            }
        }
        while tasks.join_next().await.is_some() {}
    }

    /// How every known rank stands.
    pub fn peers(&self) -> Vec<(SocketAddr, Peer)> {
        self.lock_peers().iter().map(|(address, tracked)| (*address, tracked.peer.borrow().clone())).collect()
    }

    /// Names whose ranks are in use.
    pub fn used_names(&self) -> BTreeSet<String> {
        let peers = self.lock_peers();
        let used = peers.values().filter(|tracked| tracked.peer.borrow().in_use().is_some());
        used.map(|tracked| tracked.name.clone()).collect()
    }

    /// Ends the tasks of addresses that no name stands for any more, unless the rank there is in use: it may outlive its
    /// entry. While a name cannot be resolved nothing is known, and nothing is forgotten.
    fn forget_all_but(&self, found: &BTreeMap<SocketAddr, String>) {
        if !self.lock_unresolved().is_empty() {
            return;
        }
        self.lock_peers().retain(|address, tracked| {
            let stays = found.contains_key(address) || tracked.peer.borrow().in_use().is_some();
            if !stays {
                tracing::info!(peer = %address, "no name of --ffn and no announcement stands for this address any more");
                tracked.stop.cancel();
            }
            stays
        });
    }

    /// Waits until every shard has a rank, saying for whom every few seconds.
    ///
    /// # Errors
    /// [`DirectoryError`]: a refusal that nobody makes good at once, a timeout after `limit`.
    pub async fn wait_ready(&self, limit: Duration) -> Result<(), DirectoryError> {
        let begun = Instant::now();
        let mut ready = self.stats.watch_ready();
        let mut next_word = FIRST_WORD;
        loop {
            // Before looking, so that no change between looking and waiting is missed.
            let changed = self.shared.changed.notified();
            if *ready.borrow_and_update() {
                return Ok(());
            }
            if let Some((address, why)) = self.refused_in_vain() {
                return Err(DirectoryError::Refused { address, why });
            }
            let waited = begun.elapsed();
            if waited >= limit {
                return Err(DirectoryError::Timeout { limit, peers: self.describe() });
            }
            if waited >= next_word {
                next_word += WORD_EVERY;
                tracing::info!(
                    waited_s = waited.as_secs(),
                    gives_up_after_s = limit.as_secs_f64(),
                    option = "--join-timeout",
                    "waiting for FFN ranks: {}",
                    self.describe()
                );
            }
            tokio::select! {
                _ = ready.changed() => {}
                () = changed => {}
                () = tokio::time::sleep(next_word.min(limit).saturating_sub(waited)) => {}
            }
        }
    }

    /// A rank that an option names and that refuses for good, if nobody else can make it good: neither do the others serve
    /// every shard, nor is one of them still to come.
    fn refused_in_vain(&self) -> Option<(SocketAddr, String)> {
        let (mut refused, mut served) = (None, BTreeSet::new());
        for (address, tracked) in self.lock_peers().iter() {
            match &tracked.peer.borrow().state {
                PeerState::Up { shard, .. } => drop(served.insert(shard.index())),
                PeerState::Refused { why, for_good: true } => {
                    if tracked.is_listed && refused.is_none() {
                        refused = Some((*address, why.clone()));
                    }
                }
                PeerState::Refused { .. } | PeerState::Apart { .. } | PeerState::Connecting { .. } => {
                    return None;
                }
            }
        }
        let is_complete = !served.is_empty() && served.len() == self.shard_count() as usize;
        refused.filter(|_| !is_complete)
    }

    /// Shards of this deployment; 0 before the first rank has joined.
    pub fn shard_count(&self) -> u32 {
        self.shared.shard_count.load(Ordering::Acquire)
    }

    /// One line that says which shards are missing and how every rank stands, now.
    pub fn describe(&self) -> String {
        self.standing(|standing| standing.sentence())
    }

    /// Ranks that are looked for and not in use, as address (or name, where that has none) and how they stand.
    pub fn absent(&self) -> Vec<(String, String)> {
        let names = self.lock_peers().iter().map(|(at, tracked)| (*at, tracked.name.clone())).collect();
        self.standing(|standing| standing.absent(&names))
    }

    fn standing<T>(&self, say: impl FnOnce(&Standing<'_>) -> T) -> T {
        let (peers, unresolved) = (self.peers(), self.lock_unresolved());
        say(&Standing {
            peers: &peers,
            is_named: !self.names.is_empty(),
            unresolved: &unresolved,
            shard_count: self.shard_count(),
            started: self.shared.started,
            now: Instant::now(),
        })
    }

    /// The addresses behind all names, each with the first name that stands for it.
    async fn resolve(&self) -> BTreeMap<SocketAddr, String> {
        let mut found = BTreeMap::new();
        let announced = self.announced.addresses(Instant::now());
        let unlisted = announced.iter().filter(|name| !self.names.contains(name));
        let names: Vec<_> = self.names.iter().chain(unlisted).collect();
        self.lock_unresolved().retain(|name, _| names.contains(&name));
        for name in names {
            let resolved = tokio::time::timeout(RESOLVE_EVERY, tokio::net::lookup_host(name.as_str())).await;
            let failure = match resolved {
                Ok(Ok(addresses)) => {
                    addresses.for_each(|address| self.note(name, address, &mut found));
                    None
                }
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some("no answer".to_owned()),
            };
            let mut unresolved = self.lock_unresolved();
            match failure {
                Some(why) => drop(unresolved.insert(name.clone(), why)),
                None => drop(unresolved.remove(name)),
            }
        }
        found
    }

    fn note(&self, name: &str, address: SocketAddr, found: &mut BTreeMap<SocketAddr, String>) {
        let first = found.entry(address).or_insert_with(|| name.to_owned());
        // Said once: when the address is new.
        if first != name && !self.lock_peers().contains_key(&address) {
            tracing::warn!(%address, first, second = name, "two names of --ffn stand for one address, which counts once");
        }
    }

    fn lock_peers(&self) -> MutexGuard<'_, BTreeMap<SocketAddr, Tracked>> {
        self.peers.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn lock_unresolved(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.unresolved.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
