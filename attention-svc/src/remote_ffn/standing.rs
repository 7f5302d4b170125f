//! How the FFN ranks stand right now, and that in a sentence: which shard is missing for how long, and what was last
//! heard from every address. Pure, so that nothing it says can be older than the question.
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use afd_common::ids::Shard;
use afd_common::spelling::{FEW, first_few, span};

use super::peer::{Peer, PeerState};
use super::roster::TWICE;

/// Everything known at one moment.
pub struct Standing<'a> {
    /// By address.
    pub peers: &'a [(SocketAddr, Peer)],
    /// Whether there are names to look at (`--ffn`), or only those that announce themselves.
    pub is_named: bool,
    /// Names that could not be resolved, and why.
    pub unresolved: &'a BTreeMap<String, String>,
    /// Shards of the deployment; 0 before the first rank has joined.
    pub shard_count: u32,
    /// When this process began to look for ranks.
    pub started: Instant,
    /// Now.
    pub now: Instant,
}

impl Standing<'_> {
    /// The sentence. Of more ranks than a sentence has room for it names a few, those that are not up before the others.
    pub fn sentence(&self) -> String {
        let peer = |(address, peer): &(SocketAddr, Peer)| {
            let mut how = format!("{address} ");
            self.describe(&mut how, peer);
            (urgency(peer), how)
        };
        let unresolved =
            self.unresolved.iter().map(|(name, why)| (1, format!("{name} cannot be resolved: {why}")));
        let mut ranks: Vec<_> = self.peers.iter().map(peer).chain(unresolved).collect();
        if ranks.len() > FEW {
            ranks.sort_by_key(|(urgency, _)| *urgency);
        }
        let ranks: Vec<_> = ranks.into_iter().map(|(_, how)| how).collect();
        match ranks.is_empty() {
            true => self.missing(),
            false => format!("{}: {}", self.missing(), first_few(&ranks, "; ")),
        }
    }

    /// Those that are looked for and not in use, with how they stand. While an address of a name (`names` has those of the
    /// peers) is in use, another one of it is no loss at which nobody ever was, or the same process is: a host may have
    /// several.
    pub fn absent(&self, names: &BTreeMap<SocketAddr, String>) -> Vec<(String, String)> {
        let used: BTreeSet<_> = self
            .peers
            .iter()
            .filter(|(_, peer)| peer.in_use().is_some())
            .map(|(at, _)| names.get(at))
            .collect();
        let is_absent = |(address, peer): &&(SocketAddr, Peer)| {
            let is_other_way = match &peer.state {
                PeerState::Connecting { .. } => peer.served.is_none(),
                PeerState::Refused { why, .. } => why.ends_with(TWICE),
                _ => false,
            };
            peer.in_use().is_none() && !(is_other_way && used.contains(&names.get(address)))
        };
        let how = |(address, peer): &(SocketAddr, Peer)| {
            let mut how = String::new();
            self.describe(&mut how, peer);
            (address.to_string(), how)
        };
        let unresolved =
            self.unresolved.iter().map(|(name, why)| (name.clone(), format!("cannot be resolved: {why}")));
        self.peers.iter().filter(is_absent).map(how).chain(unresolved).collect()
    }

    fn missing(&self) -> String {
        if self.shard_count == 0 {
            let waited = span(self.now - self.started);
            return match self.is_named || !self.peers.is_empty() {
                true => format!("no FFN rank has joined, for {waited}"),
                false => {
                    format!("no FFN rank has announced itself here, for {waited} (ffn-svc --announce)")
                }
            };
        }
        let shards = (0..self.shard_count).filter_map(|index| Shard::new(index, self.shard_count));
        let missing = shards.filter_map(|shard| self.missing_for(shard).map(|gone| (shard, gone)));
        let each: Vec<_> =
            missing.map(|(shard, gone)| format!("shard {shard} has no rank, for {}", span(gone))).collect();
        if !each.is_empty() {
            return first_few(&each, ", ");
        }
        let mut shards = (0..self.shard_count).filter_map(|index| Shard::new(index, self.shard_count));
        match shards.find(|shard| self.only_drains(*shard)) {
            Some(shard) => format!("shard {shard} has only ranks that are about to stop"),
            // Between a rank's return and the engine's taking it in.
            None => "every FFN shard has a rank again".into(),
        }
    }

    /// Whether every rank of a shard that is up said that it is about to stop.
    fn only_drains(&self, shard: Shard) -> bool {
        let mut up = self.peers.iter().filter_map(|(_, peer)| match &peer.state {
            PeerState::Up { shard: own, life, .. } if *own == shard => Some(life),
            _ => None,
        });
        up.all(|life| life.is_draining())
    }

    /// For how long a shard has had no rank; `None` while it has one.
    fn missing_for(&self, shard: Shard) -> Option<Duration> {
        let mut since = self.started;
        for (_, peer) in self.peers {
            let lost = match &peer.state {
                PeerState::Up { shard: own, life, .. } if *own == shard => Some(life.lost_at()?),
                // Whatever it does now, it may have been this shard's last rank.
                _ => peer.lost_at(shard),
            };
            since = lost.map_or(since, |at| since.max(at));
        }
        Some(self.now.saturating_duration_since(since))
    }

    fn describe(&self, line: &mut String, peer: &Peer) {
        let ago = |at: Instant| span(self.now.saturating_duration_since(at));
        let _ = match (&peer.state, peer.served) {
            (PeerState::Up { shard, life, .. }, _) => match life.lost_at() {
                None if life.is_draining() => write!(line, "is up, shard {shard}, and about to stop"),
                None => write!(line, "is up, shard {shard}"),
                Some(at) => write!(line, "was up, shard {shard}, and was lost {} ago", ago(at)),
            },
            (PeerState::Refused { why, .. }, _) => {
                write!(line, "refuses, for {}: {why}", ago(peer.since))
            }
            (PeerState::Apart { last_error }, None) => {
                write!(line, "is there, and has not been joined, for {}: {last_error}", ago(peer.since))
            }
            (PeerState::Apart { last_error }, Some(shard)) => {
                let (since, parted) = (ago(peer.since), parted(peer, last_error));
                write!(
                    line,
                    "was up, shard {shard}, and has no session any more, for {since}: {last_error}{parted}"
                )
            }
            (PeerState::Connecting { last_error }, None) if last_error.is_empty() => {
                write!(line, "is being connected to, for {}", ago(peer.since))
            }
            (PeerState::Connecting { last_error }, None) => {
                write!(line, "is not there, for {}: {last_error}", ago(peer.since))
            }
            (PeerState::Connecting { last_error }, Some(shard)) => {
                let (since, parted) = (ago(peer.since), parted(peer, last_error));
                write!(line, "was up, shard {shard}, and is not there, for {since}: {last_error}{parted}")
            }
        };
    }
}

/// Whom to look at first: who refuses says what is to be done, and of who is up there is nothing to do.
fn urgency(peer: &Peer) -> u8 {
    match &peer.state {
        PeerState::Refused { .. } => 0,
        PeerState::Up { life, .. } if life.lost_at().is_none() => 2,
        PeerState::Up { .. } | PeerState::Apart { .. } | PeerState::Connecting { .. } => 1,
    }
}

/// What ended its last session, unless that is said already.
fn parted(peer: &Peer, last_error: &str) -> String {
    match peer.parted.as_str() {
        "" => String::new(),
        parted if parted == last_error => String::new(),
        parted => format!(", and before that {parted}"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use afd_common::link::LinkKind;

    use super::super::life::Life;
    use super::*;

    fn shard(index: u32) -> Shard {
        Shard::new(index, 2).unwrap()
    }

    fn up(index: u32, since: Instant, life: &Arc<Life>) -> Peer {
        let state = PeerState::Up { shard: shard(index), link: LinkKind::Tcp, life: Arc::clone(life) };
        Peer { state, since, served: Some(shard(index)), ..Peer::unknown(since) }
    }

    fn sentence(peers: &[Peer], shard_count: u32, started: Instant, after_ms: u64) -> String {
        let address = |n: usize| SocketAddr::from(([10, 0, 0, 1], 1 + n as u16));
        let peers: Vec<_> = peers.iter().cloned().enumerate().map(|(n, peer)| (address(n), peer)).collect();
        let unresolved = BTreeMap::from([("ffn-9:1".to_owned(), "no such host".to_owned())]);
        let now = started + Duration::from_millis(after_ms);
        Standing { peers: &peers, is_named: true, unresolved: &unresolved, shard_count, started, now }
            .sentence()
    }

    #[test]
    fn who_is_missing_is_said_with_what_every_address_said_last() {
        let started = Instant::now();
        let gone = started + Duration::from_secs(4);
        let life = Arc::new(Life::new(started));
        let refused = PeerState::Refused { why: "model.fingerprint differs".into(), for_good: true };
        let peers = [
            up(0, started, &life),
            Peer {
                state: refused,
                since: gone,
                served: Some(shard(1)),
                lost: vec![(shard(1), gone)],
                ..Peer::unknown(gone)
            },
            Peer::unknown(started),
        ];
        assert_eq!(
            sentence(&peers, 2, started, 6500),
            "shard 1/2 has no rank, for 2.5 s: 10.0.0.1:1 is up, shard 0/2; \
             10.0.0.1:2 refuses, for 2.5 s: model.fingerprint differs; \
             10.0.0.1:3 is being connected to, for 6.5 s; ffn-9:1 cannot be resolved: no such host"
        );
    }

    #[test]
    fn of_many_ranks_a_few_are_named_and_none_that_is_up_before_one_that_is_not() {
        let (started, life) = (Instant::now(), Arc::new(Life::new(Instant::now())));
        let refused = PeerState::Refused { why: "model.fingerprint differs".into(), for_good: true };
        let mut peers = vec![up(0, started, &life); 12];
        peers.extend(vec![Peer::unknown(started); 20]);
        peers.push(Peer { state: refused, ..Peer::unknown(started) });
        let said = sentence(&peers, 2, started, 1500);
        assert!(
            said.starts_with(
                "shard 1/2 has no rank, for 1.5 s: 10.0.0.1:33 refuses, for 1.5 s: model.fingerprint differs; \
                 10.0.0.1:13 is being connected to, for 1.5 s; 10.0.0.1:14 is"
            ) && said.ends_with("; and 26 more"),
            "{said}"
        );
        assert!(!said.contains("is up"), "{said}");
        // So are shards.
        let said = sentence(&peers[12..14], 30, started, 1500);
        assert!(said.contains("shard 7/30 has no rank, for 1.5 s, and 22 more: 10.0.0.1:1 is"), "{said}");
    }

    #[test]
    fn a_rank_that_the_engine_has_lost_is_not_called_up() {
        let started = Instant::now();
        let life = Arc::new(Life::new(started));
        let peers = [up(0, started, &life), up(1, started, &Arc::new(Life::new(started)))];
        assert!(sentence(&peers, 2, started, 9000).starts_with("every FFN shard has a rank again"));
        life.handle_lost(started + Duration::from_secs(8));
        let said = sentence(&peers, 2, started, 9000);
        assert!(
            said.starts_with(
                "shard 0/2 has no rank, for 1.0 s: 10.0.0.1:1 was up, shard 0/2, and was lost 1.0 s ago"
            ),
            "{said}"
        );
    }

    #[test]
    fn a_shard_whose_rank_came_back_as_another_one_is_missing_since_the_loss() {
        let started = Instant::now();
        let at = |seconds| started + Duration::from_secs(seconds);
        let is_up = |index| up(index, started, &Arc::new(Life::new(started))).state;
        let failed = || PeerState::Connecting { last_error: "Connection refused".into() };
        let mut peer = Peer::unknown(started);
        for (state, after) in [(is_up(1), 1), (failed(), 500), (is_up(0), 505)] {
            peer.handle(state, at(after));
        }
        let other = up(0, started, &Arc::new(Life::new(started)));
        let said = sentence(&[other.clone(), peer.clone()], 2, started, 511_500);
        assert!(said.starts_with("shard 1/2 has no rank, for 11.5 s: "), "{said}");
        // Neither a second loss as the other shard nor the return of the first changes what is true of it.
        peer.handle(failed(), at(508));
        let said = sentence(&[other, peer.clone()], 2, started, 511_500);
        assert!(said.starts_with("shard 1/2 has no rank, for 11.5 s: "), "{said}");
        peer.handle(is_up(1), at(511));
        let said = sentence(&[peer], 2, started, 511_500);
        assert!(said.starts_with("shard 0/2 has no rank, for 3.5 s: "), "{said}");
    }

    #[test]
    fn who_is_looked_for_in_vain_is_named_even_while_a_replica_serves() {
        let started = Instant::now();
        let gone = Peer {
            state: PeerState::Connecting { last_error: "Connection refused".into() },
            served: Some(shard(0)),
            ..Peer::unknown(started)
        };
        let never = Peer {
            state: PeerState::Connecting { last_error: "Connection refused".into() },
            ..Peer::unknown(started)
        };
        let at = |port: u16| SocketAddr::from(([10, 0, 0, 1], port));
        let peers = [
            (at(1), up(0, started, &Arc::new(Life::new(started)))),
            (at(2), gone),
            // The other address of the first one's name, and one by itself.
            (at(3), never.clone()),
            (at(4), never),
        ];
        let names = [(1, "ffn-0:1"), (2, "ffn-1:2"), (3, "ffn-0:1"), (4, "ffn-2:4")];
        let names = names.map(|(port, name)| (at(port), name.to_owned())).into();
        let unresolved = BTreeMap::from([("ffn-9:1".to_owned(), "no such host".to_owned())]);
        let now = started + Duration::from_secs(2);
        let standing =
            Standing { peers: &peers, is_named: true, unresolved: &unresolved, shard_count: 2, started, now };
        let absent = standing.absent(&names);
        let addresses: Vec<_> = absent.iter().map(|(address, _)| address.as_str()).collect();
        assert_eq!(addresses, ["10.0.0.1:2", "10.0.0.1:4", "ffn-9:1"]);
        assert_eq!(absent[0].1, "was up, shard 0/2, and is not there, for 2.0 s: Connection refused");
    }

    #[test]
    fn whoever_answers_is_there() {
        let started = Instant::now();
        let live = PeerState::Apart { last_error: "join: A0 is live as incarnation 7".into() };
        let mut peer = Peer { state: live.clone(), ..Peer::unknown(started) };
        let said = sentence(&[peer.clone()], 0, started, 1900);
        assert!(
            said.contains("10.0.0.1:1 is there, and has not been joined, for 1.9 s: join: A0 is live"),
            "{said}"
        );
        peer.handle(up(0, started, &Arc::new(Life::new(started))).state, started);
        peer.handle(live, started + Duration::from_secs(1));
        let said = sentence(&[peer], 2, started, 1900);
        assert!(said.contains("was up, shard 0/2, and has no session any more, for 900 ms: join"), "{said}");
    }

    #[test]
    fn what_ended_the_session_is_said_beside_what_joining_again_meets() {
        let started = Instant::now();
        let (mut peer, apart) =
            (Peer::unknown(started), |what: &str| PeerState::Apart { last_error: what.into() });
        peer.handle(up(0, started, &Arc::new(Life::new(started))).state, started);
        peer.handle(apart("it said nothing for 5.0 s"), started + Duration::from_secs(5));
        let said = sentence(&[peer.clone()], 2, started, 6000);
        assert!(said.contains("any more, for 1.0 s: it said nothing for 5.0 s; ffn-9:1"), "{said}");
        peer.handle(apart("connecting: no word"), started + Duration::from_secs(9));
        let said = sentence(&[peer], 2, started, 9000);
        assert!(
            said.contains("for 4.0 s: connecting: no word, and before that it said nothing for 5.0 s"),
            "{said}"
        );
    }

    #[test]
    fn nobody_has_joined_yet() {
        let started = Instant::now();
        let failed = PeerState::Connecting { last_error: "Connection refused".into() };
        let said = sentence(&[Peer { state: failed, ..Peer::unknown(started) }], 0, started, 2000);
        assert!(
            said.starts_with(
                "no FFN rank has joined, for 2.0 s: 10.0.0.1:1 is not there, for 2.0 s: Connection refused"
            ),
            "{said}"
        );
    }

    #[test]
    fn where_nobody_is_named_the_option_is_by_which_they_come() {
        let (started, unresolved) = (Instant::now(), BTreeMap::new());
        let now = started + Duration::from_secs(2);
        let nobody =
            Standing { peers: &[], is_named: false, unresolved: &unresolved, shard_count: 0, started, now };
        let expected = "no FFN rank has announced itself here, for 2.0 s (ffn-svc --announce)";
        assert_eq!(nobody.sentence(), expected);
    }
}
