//! FFN ranks that have announced themselves, for as long as they go on doing so. What one caller can announce is bounded: it
//! must not keep the ranks of others out.
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use afd_common::proto::v1;
use tokio::sync::Notify;

/// An announcement that is not repeated is forgotten after this time.
pub const FORGOTTEN_AFTER: Duration = Duration::from_secs(15);
/// Most ranks that are remembered.
const MAX_ANNOUNCED: usize = 1024;
/// Most of them that one caller has announced: more ranks than a host has.
const MAX_OF_CALLER: usize = 64;

/// See the module's head.
#[derive(Debug, Default)]
pub struct Announced {
    by_address: Mutex<Known>,
    /// Notified when a rank is new, or has left.
    pub changed: Notify,
}

type Known = BTreeMap<String, Announcement>;

#[derive(Debug)]
struct Announcement {
    peer: v1::AnnouncedPeer,
    caller: IpAddr,
    until: Instant,
}

/// Too many ranks are remembered already, of too many callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{MAX_ANNOUNCED} FFN ranks are announced, which is the limit")]
pub struct Full;

impl Announced {
    /// A rank says where it is; `caller` is who says so. Of a caller that has announced as many as one may, the announcement
    /// that is oldest gives way. Returns whether the rank is news.
    ///
    /// # Errors
    /// [`Full`].
    pub fn handle_announce(
        &self,
        peer: v1::AnnouncedPeer,
        caller: IpAddr,
        now: Instant,
    ) -> Result<bool, Full> {
        let caller = network(caller);
        let mut known = self.lock(now);
        if !known.contains_key(&peer.address) {
            let own = known.iter().filter(|(_, announcement)| announcement.caller == caller);
            if own.clone().count() >= MAX_OF_CALLER {
                let oldest = own.min_by_key(|(_, announcement)| announcement.until);
                let oldest = oldest.map(|(address, _)| address.clone());
                oldest.and_then(|address| known.remove(&address));
            } else if known.len() >= MAX_ANNOUNCED {
                return Err(Full);
            }
        }
        let (address, until) = (peer.address.clone(), now + FORGOTTEN_AFTER);
        let before = known.insert(address, Announcement { peer: peer.clone(), caller, until });
        drop(known);
        let is_news = before.is_none_or(|before| before.peer != peer);
        if is_news {
            self.changed.notify_waiters();
        }
        Ok(is_news)
    }

    /// A rank leaves; one that took over its address since stays. Returns whether it was known.
    pub fn handle_leave(&self, address: &str, identity: Option<&v1::Identity>, now: Instant) -> bool {
        let mut known = self.lock(now);
        let is_it = known.get(address).is_some_and(|known| known.peer.identity.as_ref() == identity);
        if is_it {
            known.remove(address);
            drop(known);
            self.changed.notify_waiters();
        }
        is_it
    }

    /// Those that are remembered.
    pub fn peers(&self, now: Instant) -> Vec<v1::AnnouncedPeer> {
        self.lock(now).values().map(|known| known.peer.clone()).collect()
    }

    /// Where they are: `host:port` each.
    pub fn addresses(&self, now: Instant) -> Vec<String> {
        self.lock(now).keys().cloned().collect()
    }

    /// Without those that are to be forgotten by now.
    fn lock(&self, now: Instant) -> MutexGuard<'_, Known> {
        let mut known = self.by_address.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        known.retain(|_, announcement| announcement.until > now);
        known
    }
}

/// Who counts as one caller: whoever has an IPv6 address has 2^64 of them.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    fn peer(address: &str, incarnation: u64) -> v1::AnnouncedPeer {
        let role = v1::Role::Ffn.into();
        let identity = Some(v1::Identity { deployment: "d".into(), role, rank: 0, incarnation });
        v1::AnnouncedPeer { identity, address: address.into(), shard: None }
    }

    #[test]
    fn what_is_not_repeated_is_forgotten() {
        let (known, now) = (Announced::default(), Instant::now());
        assert_eq!(known.handle_announce(peer("a:1", 1), caller(1), now), Ok(true));
        let later = now + FORGOTTEN_AFTER / 2;
        assert_eq!(known.handle_announce(peer("a:1", 1), caller(1), later), Ok(false), "nothing new");
        assert_eq!(known.handle_announce(peer("b:1", 1), caller(1), later), Ok(true));
        assert_eq!(known.addresses(now + FORGOTTEN_AFTER), ["a:1", "b:1"]);
        assert!(known.addresses(later + FORGOTTEN_AFTER).is_empty());
    }

    #[test]
    fn the_leave_of_an_older_process_does_not_take_a_newer_one_along() {
        let (known, now) = (Announced::default(), Instant::now());
        known.handle_announce(peer("a:1", 1), caller(1), now).unwrap();
        assert_eq!(known.handle_announce(peer("a:1", 2), caller(1), now), Ok(true));
        assert!(!known.handle_leave("a:1", peer("a:1", 1).identity.as_ref(), now));
        assert!(known.handle_leave("a:1", peer("a:1", 2).identity.as_ref(), now));
        assert!(known.peers(now).is_empty());
    }

    #[test]
    fn memory_is_bounded() {
        let (known, now) = (Announced::default(), Instant::now());
        for n in 0..MAX_ANNOUNCED {
            let from = caller((n / MAX_OF_CALLER) as u8);
            assert_eq!(known.handle_announce(peer(&format!("a:{n}"), 1), from, now), Ok(true));
        }
        assert_eq!(known.handle_announce(peer("b:1", 1), caller(200), now), Err(Full));
        assert_eq!(known.handle_announce(peer("a:1", 1), caller(200), now), Ok(false));
    }

    #[test]
    fn one_caller_keeps_nobody_else_out_and_its_oldest_gives_way() {
        let (known, now) = (Announced::default(), Instant::now());
        known.handle_announce(peer("other:1", 1), caller(2), now).unwrap();
        for n in 0..=MAX_ANNOUNCED {
            let at = now + Duration::from_millis(n as u64);
            assert_eq!(known.handle_announce(peer(&format!("a:{n}"), 1), caller(1), at), Ok(true));
        }
        let addresses = known.addresses(now + Duration::from_secs(2));
        assert_eq!(addresses.len(), 1 + MAX_OF_CALLER);
        let last = format!("a:{MAX_ANNOUNCED}");
        assert!(addresses.contains(&last) && addresses.contains(&"other:1".into()), "{addresses:?}");
        assert!(!addresses.contains(&"a:0".into()), "the oldest has given way");
    }

    #[test]
    fn addresses_of_one_network_are_one_caller() {
        let of = |text: &str| network(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:0:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }
}
