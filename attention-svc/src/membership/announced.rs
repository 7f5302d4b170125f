//! FFN ranks that have announced themselves, for as long as they go on doing so. Where anybody may announce, what comes from
//! one address and leads to no rank in use is bounded: it must not keep the ranks of others out. Whoever has the join token
//! belongs to the deployment, and any number of its ranks may be behind one address.
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use afd_common::proto::v1;
use tokio::sync::Notify;

/// An announcement that is not repeated is forgotten after this time.
pub const FORGOTTEN_AFTER: Duration = Duration::from_secs(15);
/// Most ranks that are remembered.
const MAX_ANNOUNCED: usize = 1024;
/// Most of them from one address that is not known to be the deployment's, ranks in use not counted.
const MAX_OF_STRANGER: usize = 64;

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
    caller: Caller,
    until: Instant,
}

/// Who announces a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// It has shown the join token.
    Member,
    /// Somebody at this address: nothing was asked for.
    Stranger(IpAddr),
}

/// Too many ranks are remembered already; it helps to try again once some of them are forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{MAX_ANNOUNCED} FFN ranks are announced, which is the limit")]
pub struct Full;

impl Announced {
    /// A rank says where it is; `caller` is who says so, and `in_use` tells the addresses whose ranks are. Of a stranger that
    /// has announced as many as one may, the oldest that is not in use gives way. Returns whether the rank is news.
    ///
    /// # Errors
    /// [`Full`].
    pub fn handle_announce(
        &self,
        peer: v1::AnnouncedPeer,
        caller: Caller,
        in_use: impl FnOnce() -> BTreeSet<String>,
        now: Instant,
    ) -> Result<bool, Full> {
        let caller = match caller {
            Caller::Member => Caller::Member,
            Caller::Stranger(address) => Caller::Stranger(network(address)),
        };
        let mut known = self.lock(now);
        if !known.contains_key(&peer.address) {
            match caller {
                Caller::Member => {}
                Caller::Stranger(_) => bound(&mut known, caller, in_use),
            }
            if known.len() >= MAX_ANNOUNCED {
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

/// Makes room for one more of this caller.
fn bound(known: &mut Known, caller: Caller, in_use: impl FnOnce() -> BTreeSet<String>) {
    let own = known.iter().filter(|(_, announcement)| announcement.caller == caller);
    if own.clone().count() < MAX_OF_STRANGER {
        return;
    }
    let in_use = in_use();
    let idle = own.filter(|(address, _)| !in_use.contains(*address));
    if idle.clone().count() >= MAX_OF_STRANGER
        && let Some((address, _)) = idle.min_by_key(|(_, announcement)| announcement.until)
    {
        let address = address.clone();
        known.remove(&address);
    }
}

/// Who counts as one caller: whoever has an IPv6 address has 2^64 of them.
pub(super) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(last: u8) -> Caller {
        Caller::Stranger([10, 0, 0, last].into())
    }

    /// While nobody is in use.
    fn announce(known: &Announced, address: &str, caller: Caller, now: Instant) -> Result<bool, Full> {
        known.handle_announce(peer(address, 1), caller, BTreeSet::new, now)
    }

    fn peer(address: &str, incarnation: u64) -> v1::AnnouncedPeer {
        let role = v1::Role::Ffn.into();
        let identity = Some(v1::Identity { deployment: "d".into(), role, rank: 0, incarnation });
        v1::AnnouncedPeer { identity, address: address.into(), shard: None }
    }

    #[test]
    fn what_is_not_repeated_is_forgotten() {
        let (known, now) = (Announced::default(), Instant::now());
        assert_eq!(announce(&known, "a:1", caller(1), now), Ok(true));
        let later = now + FORGOTTEN_AFTER / 2;
        assert_eq!(announce(&known, "a:1", caller(1), later), Ok(false), "nothing new");
        assert_eq!(announce(&known, "b:1", caller(1), later), Ok(true));
        assert_eq!(known.addresses(now + FORGOTTEN_AFTER), ["a:1", "b:1"]);
        assert!(known.addresses(later + FORGOTTEN_AFTER).is_empty());
    }

    #[test]
    fn the_leave_of_an_older_process_does_not_take_a_newer_one_along() {
        let (known, now) = (Announced::default(), Instant::now());
        announce(&known, "a:1", caller(1), now).unwrap();
        assert_eq!(known.handle_announce(peer("a:1", 2), caller(1), BTreeSet::new, now), Ok(true));
        assert!(!known.handle_leave("a:1", peer("a:1", 1).identity.as_ref(), now));
        assert!(known.handle_leave("a:1", peer("a:1", 2).identity.as_ref(), now));
        assert!(known.peers(now).is_empty());
    }

    #[test]
    fn memory_is_bounded() {
        let (known, now) = (Announced::default(), Instant::now());
        for n in 0..MAX_ANNOUNCED {
            let from = caller((n / MAX_OF_STRANGER) as u8);
            assert_eq!(announce(&known, &format!("a:{n}"), from, now), Ok(true));
        }
        for from in [caller(200), Caller::Member] {
            assert_eq!(announce(&known, "b:1", from, now), Err(Full));
            assert_eq!(announce(&known, "a:1", from, now), Ok(false));
        }
    }

    #[test]
    fn a_stranger_keeps_nobody_else_out_and_its_oldest_gives_way() {
        let (known, now) = (Announced::default(), Instant::now());
        announce(&known, "other:1", caller(2), now).unwrap();
        for n in 0..=MAX_ANNOUNCED {
            let at = now + Duration::from_millis(n as u64);
            assert_eq!(announce(&known, &format!("a:{n}"), caller(1), at), Ok(true));
        }
        let addresses = known.addresses(now + Duration::from_secs(2));
        assert_eq!(addresses.len(), 1 + MAX_OF_STRANGER);
        let last = format!("a:{MAX_ANNOUNCED}");
        assert!(addresses.contains(&last) && addresses.contains(&"other:1".into()), "{addresses:?}");
        assert!(!addresses.contains(&"a:0".into()), "the oldest has given way");
    }

    #[test]
    fn any_number_of_ranks_in_use_may_be_behind_one_address() {
        let (known, now, mut used) = (Announced::default(), Instant::now(), BTreeSet::new());
        for n in 0..3 * MAX_OF_STRANGER {
            let address = format!("a:{n}");
            known.handle_announce(peer(&address, 1), caller(1), || used.clone(), now).unwrap();
            used.insert(address);
        }
        for n in 0..2 * MAX_OF_STRANGER {
            known.handle_announce(peer(&format!("b:{n}"), 1), caller(1), || used.clone(), now).unwrap();
        }
        let addresses = known.addresses(now);
        assert_eq!(addresses.len(), 4 * MAX_OF_STRANGER);
        assert!(used.iter().all(|address| addresses.contains(address)));
    }

    #[test]
    fn any_number_of_a_deployments_ranks_may_be_behind_one_address() {
        let (known, now) = (Announced::default(), Instant::now());
        for n in 0..MAX_ANNOUNCED {
            assert_eq!(announce(&known, &format!("a:{n}"), Caller::Member, now), Ok(true), "{n}");
        }
        assert_eq!(known.addresses(now).len(), MAX_ANNOUNCED);
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
