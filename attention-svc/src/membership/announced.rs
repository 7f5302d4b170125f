//! FFN ranks that have announced themselves, for as long as they go on doing so.
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use afd_common::proto::v1;
use tokio::sync::Notify;

/// An announcement that is not repeated is forgotten after this time.
pub const FORGOTTEN_AFTER: Duration = Duration::from_secs(15);
/// Most ranks that are remembered.
const MAX_ANNOUNCED: usize = 1024;

/// See the module's head.
#[derive(Debug, Default)]
pub struct Announced {
    by_address: Mutex<BTreeMap<String, (v1::AnnouncedPeer, Instant)>>,
    /// Notified when a rank is new, or has left.
    pub changed: Notify,
}

/// Too many ranks are remembered already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{MAX_ANNOUNCED} FFN ranks are announced, which is the limit")]
pub struct Full;

impl Announced {
    /// A rank says where it is. Returns whether that is news.
    ///
    /// # Errors
    /// [`Full`].
    pub fn handle_announce(&self, peer: v1::AnnouncedPeer, now: Instant) -> Result<bool, Full> {
        let mut known = self.lock(now);
        if known.len() >= MAX_ANNOUNCED && !known.contains_key(&peer.address) {
            return Err(Full);
        }
        let before = known.insert(peer.address.clone(), (peer.clone(), now + FORGOTTEN_AFTER));
        drop(known);
        let is_news = before.is_none_or(|(before, _)| before != peer);
        if is_news {
            self.changed.notify_waiters();
        }
        Ok(is_news)
    }

    /// A rank leaves; one that took over its address since stays. Returns whether it was known.
    pub fn handle_leave(&self, address: &str, identity: Option<&v1::Identity>, now: Instant) -> bool {
        let mut known = self.lock(now);
        let is_it = known.get(address).is_some_and(|(peer, _)| peer.identity.as_ref() == identity);
        if is_it {
            known.remove(address);
            drop(known);
            self.changed.notify_waiters();
        }
        is_it
    }

    /// Those that are remembered.
    pub fn peers(&self, now: Instant) -> Vec<v1::AnnouncedPeer> {
        self.lock(now).values().map(|(peer, _)| peer.clone()).collect()
    }

    /// Where they are: `host:port` each.
    pub fn addresses(&self, now: Instant) -> Vec<String> {
        self.lock(now).keys().cloned().collect()
    }

    /// Without those that are to be forgotten by now.
    fn lock(&self, now: Instant) -> MutexGuard<'_, BTreeMap<String, (v1::AnnouncedPeer, Instant)>> {
        let mut known = self.by_address.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        known.retain(|_, (_, until)| *until > now);
        known
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(address: &str, incarnation: u64) -> v1::AnnouncedPeer {
        let role = v1::Role::Ffn.into();
        let identity = Some(v1::Identity { deployment: "d".into(), role, rank: 0, incarnation });
        v1::AnnouncedPeer { identity, address: address.into(), shard: None }
    }

    #[test]
    fn what_is_not_repeated_is_forgotten() {
        let (known, now) = (Announced::default(), Instant::now());
        assert_eq!(known.handle_announce(peer("a:1", 1), now), Ok(true));
        let later = now + FORGOTTEN_AFTER / 2;
        assert_eq!(known.handle_announce(peer("a:1", 1), later), Ok(false), "nothing new");
        assert_eq!(known.handle_announce(peer("b:1", 1), later), Ok(true));
        assert_eq!(known.addresses(now + FORGOTTEN_AFTER), ["a:1", "b:1"]);
        assert!(known.addresses(later + FORGOTTEN_AFTER).is_empty());
    }

    #[test]
    fn the_leave_of_an_older_process_does_not_take_a_newer_one_along() {
        let (known, now) = (Announced::default(), Instant::now());
        known.handle_announce(peer("a:1", 1), now).unwrap();
        assert_eq!(known.handle_announce(peer("a:1", 2), now), Ok(true));
        assert!(!known.handle_leave("a:1", peer("a:1", 1).identity.as_ref(), now));
        assert!(known.handle_leave("a:1", peer("a:1", 2).identity.as_ref(), now));
        assert!(known.peers(now).is_empty());
    }

    #[test]
    fn memory_is_bounded() {
        let (known, now) = (Announced::default(), Instant::now());
        for n in 0..MAX_ANNOUNCED {
            known.handle_announce(peer(&format!("a:{n}"), 1), now).unwrap();
        }
        assert_eq!(known.handle_announce(peer("b:1", 1), now), Err(Full));
        assert_eq!(known.handle_announce(peer("a:1", 1), now), Ok(false));
    }
}
