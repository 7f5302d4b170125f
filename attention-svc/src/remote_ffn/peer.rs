//! How the rank at one address stands, and what is remembered of it. Pure.
use std::sync::Arc;
use std::time::Instant;

use afd_common::ids::Shard;
use afd_common::link::LinkKind;

use super::life::Life;

/// One address, for people and for readiness.
#[derive(Clone, Debug)]
pub struct Peer {
    /// How it stands.
    pub state: PeerState,
    /// Since when it has been up, refusing, or neither.
    pub since: Instant,
    /// Which shard it served when it was up last.
    pub served: Option<Shard>,
    /// What ended its last session; empty when it had none.
    pub parted: String,
    /// Every shard that it has served, and when it was lost the last time that it did.
    pub lost: Vec<(Shard, Instant)>,
}

/// How one rank stands.
#[derive(Clone, Debug)]
pub enum PeerState {
    /// Trying; what went wrong last.
    Connecting {
        /// "connection refused", or empty before the first attempt has ended.
        last_error: String,
    },
    /// Somebody is there, and there is no session with it; what went wrong last. Another try may help.
    Apart {
        /// "join: no answer from 10.0.0.1:7001 within 5.0 s (--link-timeout)", or its own words.
        last_error: String,
    },
    /// It answered and said no: another model, another shard count, a rank twice.
    Refused {
        /// The rank's own words, or this one's.
        why: String,
        /// Only a change of somebody's options can help.
        for_good: bool,
    },
    /// In use.
    Up {
        /// Which part of every layer it owns.
        shard: Shard,
        /// How rows travel.
        link: LinkKind,
        /// Tells when the engine has lost it, which may be before its control stream says so.
        life: Arc<Life>,
    },
}

impl PeerState {
    /// Empty while nothing has.
    fn what_went_wrong(&self) -> &str {
        match self {
            Self::Connecting { last_error: what }
            | Self::Apart { last_error: what }
            | Self::Refused { why: what, .. } => what,
            Self::Up { .. } => "",
        }
    }
}

impl Peer {
    /// Nothing is known yet.
    pub fn unknown(now: Instant) -> Self {
        let state = PeerState::Connecting { last_error: String::new() };
        Self { state, since: now, served: None, parted: String::new(), lost: Vec::new() }
    }

    /// The rank's shard and link, while it is in use.
    pub fn in_use(&self) -> Option<(Shard, LinkKind)> {
        match &self.state {
            PeerState::Up { shard, link, life } if life.lost_at().is_none() => Some((*shard, *link)),
            _ => None,
        }
    }

    /// When it was lost the last time that it served a shard.
    pub fn lost_at(&self, shard: Shard) -> Option<Instant> {
        self.lost.iter().find(|(other, _)| *other == shard).map(|(_, at)| *at)
    }

    /// Takes a new state in. Returns whether it says anything new.
    pub(super) fn handle(&mut self, state: PeerState, now: Instant) -> bool {
        let news = match (&self.state, &state) {
            (PeerState::Connecting { last_error: old }, PeerState::Connecting { last_error: new })
            | (PeerState::Apart { last_error: old }, PeerState::Apart { last_error: new }) => old != new,
            (PeerState::Refused { why: old, .. }, PeerState::Refused { why: new, .. }) => old != new,
            _ => true,
        };
        if std::mem::discriminant(&self.state) != std::mem::discriminant(&state) {
            self.since = now;
        }
        if let PeerState::Up { shard, life, .. } = &self.state {
            self.lost.retain(|(other, _)| other != shard);
            self.lost.push((*shard, life.lost_at().unwrap_or(now)));
            state.what_went_wrong().clone_into(&mut self.parted);
        }
        if let PeerState::Up { shard, .. } = state {
            self.served = Some(shard);
        }
        self.state = state;
        news
    }
}
