//! Who has joined. Pure: the clock is passed in. One live session per (deployment, role, rank): a process that joins
//! again replaces its own session; another process is let in once the older one's session has ended, and must be newer
//! than every process seen in that place, so that one that was stopped for a while cannot come back. That nothing was
//! heard for a lease ends a session only by the [judgement](afd_common::lease) of whoever watches it: when this process
//! itself did not run for long, a lease may seem to be over whose words are there, unread.
use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

use afd_common::proto::v1;
use afd_common::spelling;

/// Live sessions at once, over all deployments.
const MAX_SESSIONS: usize = 1024;
/// Places whose last incarnation is remembered. A place beyond that is still served; only its memory is short.
const MAX_PLACES: usize = 8192;

/// Names a session; unguessable, since whoever knows it may speak for the session.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SessionId(String);

impl SessionId {
    /// From 128 random bits.
    pub fn from_bits(bits: u128) -> Self {
        Self(format!("{bits:032x}"))
    }

    /// As a peer sent it.
    pub fn from_wire(text: &str) -> Self {
        Self(text.to_owned())
    }

    /// As on the wire.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A place in a deployment: what is unique among live processes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// Deployment's name.
    pub deployment: String,
    /// Number of the role in the protocol.
    pub role: i32,
    /// Rank within the role.
    pub rank: u32,
}

impl Place {
    /// Of a process.
    pub fn of(identity: &v1::Identity) -> Self {
        Self { deployment: identity.deployment.clone(), role: identity.role, rank: identity.rank }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match v1::Role::try_from(self.role) {
            Ok(v1::Role::Attention) => write!(f, "A{}", self.rank)?,
            Ok(v1::Role::Ffn) => write!(f, "F{}", self.rank)?,
            _ => write!(f, "rank {} of role {}", self.rank, spelling::role(self.role))?,
        }
        write!(f, " of `{}`", self.deployment)
    }
}

/// Why a process is not let in.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAdmitted {
    /// Two live processes claim one place. A retry helps once the older one is gone.
    #[error(
        "`identity.incarnation`: {place} is live as incarnation {live}, its lease ends in {left_ms} ms unless it is \
         renewed; the caller is incarnation {caller}: give one of the two another --rank"
    )]
    Live {
        /// Which place.
        place: Place,
        /// Who holds it.
        live: u64,
        /// Who asks.
        caller: u64,
        /// Until the lease ends, milliseconds.
        left_ms: u64,
    },
    /// A newer process has been in this place: the caller must not come back.
    #[error(
        "`identity.incarnation`: {place} was taken over by incarnation {newer}; the caller is incarnation {caller}"
    )]
    Fenced {
        /// Which place.
        place: Place,
        /// Newest seen.
        newer: u64,
        /// Who asks.
        caller: u64,
    },
    /// Too many sessions. A retry helps once some are gone.
    #[error("{MAX_SESSIONS} sessions are open")]
    Full,
}

#[derive(Debug)]
struct Member {
    id: SessionId,
    incarnation: u64,
    lease_ends: Instant,
}

/// See the module's head.
#[derive(Debug, Default)]
pub struct Registry {
    live: HashMap<Place, Member>,
    newest: HashMap<Place, u64>,
}

impl Registry {
    /// Sessions that have not ended.
    pub fn len(&self) -> usize {
        self.live.len()
    }

    /// Whether nobody has joined.
    pub fn is_empty(&self) -> bool {
        self.live.is_empty()
    }

    /// Lets a process in under a fresh `id`, with a lease from `now`. Returns the session it replaces, which is over: its own
    /// earlier one.
    ///
    /// # Errors
    /// [`NotAdmitted`] with both incarnations; nothing changes.
    pub fn admit(
        &mut self,
        identity: &v1::Identity,
        id: SessionId,
        now: Instant,
        lease: Duration,
    ) -> Result<Option<SessionId>, NotAdmitted> {
        let (place, caller) = (Place::of(identity), identity.incarnation);
        if let Some(&newer) = self.newest.get(&place)
            && newer > caller
        {
            return Err(match self.live.get(&place) {
                Some(member) => live(place, member, caller, now),
                None => NotAdmitted::Fenced { place, newer, caller },
            });
        }
        match self.live.get(&place) {
            Some(member) if member.incarnation != caller => {
                return Err(live(place, member, caller, now));
            }
            None if self.live.len() >= MAX_SESSIONS => return Err(NotAdmitted::Full),
            _ => {}
        }
        if self.newest.len() < MAX_PLACES || self.newest.contains_key(&place) {
            self.newest.insert(place.clone(), caller);
        }
        let member = Member { id, incarnation: caller, lease_ends: now + lease };
        Ok(self.live.insert(place, member).map(|replaced| replaced.id))
    }

    /// Extends a session's lease; `false` when it has ended.
    pub fn renew(&mut self, place: &Place, id: &SessionId, until: Instant) -> bool {
        match self.live.get_mut(place) {
            Some(member) if member.id == *id => {
                member.lease_ends = until;
                true
            }
            _ => false,
        }
    }

    /// When a session's lease ends, if it is live.
    pub fn lease_ends(&self, place: &Place, id: &SessionId) -> Option<Instant> {
        self.live.get(place).filter(|member| member.id == *id).map(|member| member.lease_ends)
    }

    /// Ends a session; one that was replaced is left alone.
    pub fn end(&mut self, place: &Place, id: &SessionId) {
        if self.live.get(place).is_some_and(|member| member.id == *id) {
            self.live.remove(place);
        }
    }
}

fn live(place: Place, member: &Member, caller: u64, now: Instant) -> NotAdmitted {
    let left_ms = member.lease_ends.saturating_duration_since(now).as_millis() as u64;
    NotAdmitted::Live { place, live: member.incarnation, caller, left_ms }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(5);

    fn identity(deployment: &str, rank: u32, incarnation: u64) -> v1::Identity {
        v1::Identity { deployment: deployment.into(), role: v1::Role::Attention.into(), rank, incarnation }
    }

    fn id(bits: u128) -> SessionId {
        SessionId::from_bits(bits)
    }

    #[test]
    fn ranks_and_deployments_do_not_meet() {
        let (mut registry, now) = (Registry::default(), Instant::now());
        for (n, (deployment, rank)) in [("a", 0), ("a", 1), ("b", 0)].into_iter().enumerate() {
            registry.admit(&identity(deployment, rank, 1), id(n as u128), now, LEASE).unwrap();
        }
        assert_eq!(registry.len(), 3);
    }

    #[test]
    fn two_live_processes_in_one_place_are_refused_with_both_incarnations() {
        let (mut registry, now) = (Registry::default(), Instant::now());
        registry.admit(&identity("a", 0, 10), id(1), now, LEASE).unwrap();
        for caller in [11, 9] {
            let refused = registry.admit(&identity("a", 0, caller), id(2), now, LEASE).unwrap_err();
            let place = Place::of(&identity("a", 0, 0));
            assert_eq!(refused, NotAdmitted::Live { place, live: 10, caller, left_ms: 5000 });
            assert!(refused.to_string().contains("A0 of `a` is live as incarnation 10"), "{refused}");
        }
    }

    #[test]
    fn a_newer_process_takes_over_once_the_session_has_ended_and_the_older_stays_out() {
        let (mut registry, now) = (Registry::default(), Instant::now());
        registry.admit(&identity("a", 0, 10), id(1), now, LEASE).unwrap();
        let (later, place) = (now + LEASE, Place::of(&identity("a", 0, 0)));
        let refused = registry.admit(&identity("a", 0, 11), id(2), later, LEASE).unwrap_err();
        let live = NotAdmitted::Live { place: place.clone(), live: 10, caller: 11, left_ms: 0 };
        assert_eq!(refused, live, "nobody has judged yet that nothing was heard");
        registry.end(&place, &id(1));
        assert_eq!(registry.admit(&identity("a", 0, 11), id(2), later, LEASE), Ok(None));
        assert!(!registry.renew(&place, &id(1), later + LEASE), "the older one's lease is no longer its own");
        registry.end(&place, &id(1));
        assert_eq!(registry.len(), 1, "nor can it end the newer one's session");
        registry.end(&place, &id(2));
        let refused = registry.admit(&identity("a", 0, 10), id(3), later + LEASE, LEASE).unwrap_err();
        assert_eq!(refused, NotAdmitted::Fenced { place, newer: 11, caller: 10 });
    }

    #[test]
    fn the_same_process_may_join_again_at_once() {
        let (mut registry, now) = (Registry::default(), Instant::now());
        registry.admit(&identity("a", 0, 10), id(1), now, LEASE).unwrap();
        assert_eq!(registry.admit(&identity("a", 0, 10), id(2), now, LEASE), Ok(Some(id(1))));
        assert_eq!(registry.len(), 1);
    }

    #[test]
    fn a_session_that_ended_leaves_its_place_to_a_newer_process() {
        let (mut registry, now) = (Registry::default(), Instant::now());
        let place = Place::of(&identity("a", 0, 10));
        registry.admit(&identity("a", 0, 10), id(1), now, LEASE).unwrap();
        assert!(registry.renew(&place, &id(1), now + 2 * LEASE));
        assert_eq!(registry.lease_ends(&place, &id(1)), Some(now + 2 * LEASE));
        registry.end(&place, &id(1));
        assert_eq!(registry.admit(&identity("a", 0, 12), id(2), now, LEASE), Ok(None));
    }
}
