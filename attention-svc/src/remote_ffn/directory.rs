//! Finds the FFN ranks behind `--ffn` and keeps one control task per address.
//!
//! A name may stand for several addresses, and for others later (a replacement, a replica): names are resolved again
//! every few seconds and at once when a rank was lost.
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::control::{self, PeerState, Shared};
use super::stats::FfnStats;

const RESOLVE_EVERY: Duration = Duration::from_secs(5);
const FIRST_WORD: Duration = Duration::from_secs(2);
const WORD_EVERY: Duration = Duration::from_secs(5);

/// The control tasks of every known FFN rank.
pub struct Directory {
    names: Vec<String>,
    shared: Arc<Shared>,
    stats: Arc<FfnStats>,
    peers: Mutex<BTreeMap<SocketAddr, watch::Receiver<PeerState>>>,
    unresolved: Mutex<BTreeMap<String, String>>,
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
    #[error("no FFN rank for every shard within {waited_s} s (--join-timeout): {peers}")]
    Timeout {
        /// The limit.
        waited_s: u64,
        /// How each rank stands.
        peers: String,
    },
}

impl Directory {
    /// `names` as given to `--ffn`: `host:port` each.
    pub fn new(names: Vec<String>, shared: Arc<Shared>, stats: Arc<FfnStats>) -> Self {
        Self { names, shared, stats, peers: Mutex::default(), unresolved: Mutex::default() }
    }

    /// Resolves and serves until `stop`, then joins every control task.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let mut tasks = JoinSet::new();
        while !stop.is_cancelled() {
            for address in self.resolve().await {
                if self.lock_peers().contains_key(&address) {
                    continue;
                }
                let (sender, receiver) = watch::channel(PeerState::Connecting { last_error: String::new() });
                self.lock_peers().insert(address, receiver);
                tasks.spawn(control::run(address, Arc::clone(&self.shared), sender, stop.clone()));
            }
            tokio::select! {
                () = tokio::time::sleep(RESOLVE_EVERY) => {}
                () = stop.cancelled() => {}
            }
        }
        while tasks.join_next().await.is_some() {}
    }

    /// How every known rank stands.
    pub fn peers(&self) -> Vec<(SocketAddr, PeerState)> {
        self.lock_peers().iter().map(|(address, state)| (*address, state.borrow().clone())).collect()
    }

    /// Waits until every shard has a rank, saying for whom every few seconds.
    ///
    /// # Errors
    /// [`DirectoryError`]: a refusal at once, a timeout after `limit`.
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
            for (address, state) in self.peers() {
                if let PeerState::Refused { why } = state {
                    return Err(DirectoryError::Refused { address, why });
                }
            }
            let waited = begun.elapsed();
            if waited >= limit {
                return Err(DirectoryError::Timeout { waited_s: limit.as_secs(), peers: self.describe() });
            }
            if waited >= next_word {
                next_word += WORD_EVERY;
                tracing::info!(
                    waited_s = waited.as_secs(),
                    gives_up_after_s = limit.as_secs(),
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

    /// One line that says how every rank stands.
    pub fn describe(&self) -> String {
        let mut line = String::new();
        for (address, state) in self.peers() {
            let separator = if line.is_empty() { "" } else { ", " };
            let _ = match state {
                PeerState::Connecting { last_error } if last_error.is_empty() => {
                    write!(line, "{separator}{address} (connecting)")
                }
                PeerState::Connecting { last_error } => write!(line, "{separator}{address} ({last_error})"),
                PeerState::Refused { why } => write!(line, "{separator}{address} (refused: {why})"),
                PeerState::Up { shard, .. } => write!(line, "{separator}{address} (up, {shard})"),
            };
        }
        for (name, why) in self.unresolved.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).iter() {
            let separator = if line.is_empty() { "" } else { ", " };
            let _ = write!(line, "{separator}{name} (not resolved: {why})");
        }
        line
    }

    async fn resolve(&self) -> Vec<SocketAddr> {
        let mut found = Vec::new();
        for name in &self.names {
            let resolved = tokio::time::timeout(RESOLVE_EVERY, tokio::net::lookup_host(name.as_str())).await;
            let failure = match resolved {
                Ok(Ok(addresses)) => {
                    found.extend(addresses);
                    None
                }
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some("no answer".to_owned()),
            };
            let mut unresolved = self.unresolved.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            match failure {
                Some(why) => drop(unresolved.insert(name.clone(), why)),
                None => drop(unresolved.remove(name)),
            }
        }
        found
    }

    fn lock_peers(&self) -> std::sync::MutexGuard<'_, BTreeMap<SocketAddr, watch::Receiver<PeerState>>> {
        self.peers.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
