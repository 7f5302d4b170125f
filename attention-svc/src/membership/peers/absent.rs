//! Addresses of `--peers` that nothing is forwarded to, and why: for the log, and for whoever asks (`doctor`).
use std::collections::BTreeSet;
use std::sync::{MutexGuard, PoisonError};

use afd_common::proto::v1;

use super::{BTreeMap, Peer, Peers, State};

/// Why a peer cannot be forwarded to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Away {
    /// It has not been asked yet.
    Unasked,
    /// It may yet come, or come back.
    ForNow(String),
    /// Somebody answers there, and a retry does not help: an option has to change.
    ForGood(String),
}

impl Peers {
    /// Those that `--peers` names and that nothing can be forwarded to now. An address of a name at which nobody ever was is
    /// no loss while somebody is at another one of it: a host may have several.
    pub fn absent(&self) -> Vec<v1::AttentionAbsence> {
        let known = self.lock();
        let is_somebody = |peer: &&Peer| !matches!(peer.state, State::Away(Away::Unasked | Away::ForNow(_)));
        let found: BTreeSet<&str> =
            known.values().filter(is_somebody).map(|peer| peer.name.as_str()).collect();
        let absence = |address: String, why: String| v1::AttentionAbsence { address, why };
        let why = |peer: &Peer| match &peer.state {
            State::Own | State::Here { ready: true, .. } | State::Away(Away::Unasked) => None,
            State::Here { ready: false, .. } => Some("it is not ready".to_owned()),
            State::Away(Away::ForGood(why)) => Some(why.clone()),
            State::Away(Away::ForNow(why)) => {
                (peer.was_here || !found.contains(peer.name.as_str())).then(|| why.clone())
            }
        };
        let away = known.iter().filter_map(|(at, peer)| Some(absence(at.to_string(), why(peer)?)));
        let unresolved = self.lock_unresolved();
        let unresolved = unresolved
            .iter()
            .map(|(name, why)| absence(name.clone(), format!("it cannot be resolved: {why}")));
        away.chain(unresolved).collect()
    }

    /// A name stands for addresses, or for none because of `failure`.
    pub(super) fn handle_resolved(&self, name: &str, failure: Option<String>) {
        let mut unresolved = self.lock_unresolved();
        match failure {
            None => drop(unresolved.remove(name)),
            Some(why) => {
                if unresolved.insert(name.to_owned(), why.clone()).is_none() {
                    tracing::info!(name, why, "a name of --peers cannot be resolved");
                }
            }
        }
    }

    fn lock_unresolved(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.unresolved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
