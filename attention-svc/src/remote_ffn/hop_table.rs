//! Which shard still owes its part of which hop: a plain state machine, without clock, sockets or tensors (`P` is one
//! shard's partial result).
//!
//! Every hop has one part per shard; a shard that serves nothing of it is *left out*. A part is *unsent* (no edge took
//! it yet, or the edge that had it was lost), *waiting* on one edge, or *done*. An answer counts only when it comes
//! from the edge the part is waiting on, so a late answer of a lost edge can never be taken for the replay's.
use afd_common::ids::HopKey;

/// Names one connection to an FFN rank; never reused within a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EdgeId(pub u64);

/// Times a part may be sent: once, and twice again after losses.
pub const MAX_SENDS: u8 = 3;

/// The outstanding hops of a step.
#[derive(Debug, Default)]
pub struct HopTable<P> {
    hops: Vec<Hop<P>>,
    /// Lists of hops that are over, for the next ones: once every stage has had a hop, none allocates.
    spare: Vec<Vec<Part<P>>>,
}

#[derive(Debug)]
struct Hop<P> {
    key: HopKey,
    parts: Vec<Part<P>>,
}

#[derive(Debug)]
struct Part<P> {
    sends: u8,
    state: PartState<P>,
}

#[derive(Debug)]
enum PartState<P> {
    LeftOut,
    Unsent,
    Waiting { edge: EdgeId, since_us: u64 },
    Done(P),
}

/// What became of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Taken.
    Accepted,
    /// No such hop is outstanding: it was given up, or never sent.
    Unknown,
    /// The part was answered already, or waits on another edge.
    Stale,
}

/// A part that no edge holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsent {
    /// Which hop.
    pub key: HopKey,
    /// Which shard.
    pub shard: usize,
    /// Times it was sent before.
    pub sends: u8,
}

impl<P> HopTable<P> {
    /// Hops that are outstanding.
    pub fn len(&self) -> usize {
        self.hops.len()
    }

    /// Whether no hop is outstanding.
    pub fn is_empty(&self) -> bool {
        self.hops.is_empty()
    }

    /// Whether every shard that takes part has answered the hop. False for an unknown one.
    pub fn is_complete(&self, key: HopKey) -> bool {
        let over = |part: &Part<P>| matches!(part.state, PartState::Done(_) | PartState::LeftOut);
        self.find(key).is_some_and(|hop| hop.parts.iter().all(over))
    }

    /// The parts that no edge holds, oldest hop first.
    pub fn unsent(&self) -> impl Iterator<Item = Unsent> + '_ {
        self.hops.iter().flat_map(|hop| {
            hop.parts
                .iter()
                .enumerate()
                .filter(|(_, part)| matches!(part.state, PartState::Unsent))
                .map(|(shard, part)| Unsent { key: hop.key, shard, sends: part.sends })
        })
    }

    /// The part that has waited longest on an edge: the edge, and since when.
    pub fn oldest_wait(&self) -> Option<(EdgeId, u64)> {
        let waits = self.hops.iter().flat_map(|hop| &hop.parts).filter_map(|part| match part.state {
            PartState::Waiting { edge, since_us } => Some((edge, since_us)),
            _ => None,
        });
        waits.min_by_key(|(_, since_us)| *since_us)
    }

    /// Since when a part has waited on an edge, if it does.
    pub fn waiting_since(&self, key: HopKey, shard: usize) -> Option<u64> {
        match self.find(key)?.parts.get(shard)?.state {
            PartState::Waiting { since_us, .. } => Some(since_us),
            _ => None,
        }
    }

    /// Opens a hop. Each shard says whether it takes part: then its part is unsent.
    pub fn handle_open(&mut self, key: HopKey, takes_part: impl Iterator<Item = bool>) {
        let mut parts = self.spare.pop().unwrap_or_default();
        let part = |takes_part| Part {
            sends: 0,
            state: if takes_part { PartState::Unsent } else { PartState::LeftOut },
        };
        parts.extend(takes_part.map(part));
        self.hops.push(Hop { key, parts });
    }

    /// An edge took a part.
    pub fn handle_sent(&mut self, key: HopKey, shard: usize, edge: EdgeId, now_us: u64) {
        if let Some(part) = self.part_mut(key, shard) {
            part.sends += 1;
            part.state = PartState::Waiting { edge, since_us: now_us };
        }
    }

    /// A shard's answer came from an edge.
    pub fn handle_arrival(&mut self, key: HopKey, shard: usize, from: EdgeId, result: P) -> Arrival {
        let Some(part) = self.part_mut(key, shard) else { return Arrival::Unknown };
        match part.state {
            PartState::Waiting { edge, .. } if edge == from => {
                part.state = PartState::Done(result);
                Arrival::Accepted
            }
            _ => Arrival::Stale,
        }
    }

    /// An edge is gone: what it held is unsent again. Returns how many parts that are.
    pub fn handle_loss(&mut self, lost: EdgeId) -> usize {
        let mut count = 0;
        for part in self.hops.iter_mut().flat_map(|hop| &mut hop.parts) {
            if matches!(part.state, PartState::Waiting { edge, .. } if edge == lost) {
                part.state = PartState::Unsent;
                count += 1;
            }
        }
        count
    }

    /// Takes a complete hop out: its partial results with their shards, in shard order, are appended to `results`. `false`,
    /// and nothing changes, while a part is missing.
    pub fn take(&mut self, key: HopKey, results: &mut Vec<(usize, P)>) -> bool {
        if !self.is_complete(key) {
            return false;
        }
        let Some(index) = self.hops.iter().position(|hop| hop.key == key) else { return false };
        let mut parts = self.hops.remove(index).parts;
        results.extend(parts.drain(..).enumerate().filter_map(|(shard, part)| match part.state {
            PartState::Done(result) => Some((shard, result)),
            _ => None,
        }));
        self.spare.push(parts);
        true
    }

    /// Forgets everything outstanding.
    pub fn clear(&mut self) {
        for mut hop in self.hops.drain(..) {
            hop.parts.clear();
            self.spare.push(hop.parts);
        }
    }

    fn find(&self, key: HopKey) -> Option<&Hop<P>> {
        self.hops.iter().find(|hop| hop.key == key)
    }

    fn part_mut(&mut self, key: HopKey, shard: usize) -> Option<&mut Part<P>> {
        self.hops.iter_mut().find(|hop| hop.key == key)?.parts.get_mut(shard)
    }
}

#[cfg(test)]
mod tests {
    use afd_common::ids::{LayerIdx, StageIdx, StepId};

    use super::*;

    fn key(stage: u8) -> HopKey {
        HopKey { step: StepId(1), layer: LayerIdx(0), stage: StageIdx(stage) }
    }

    fn open(num_shards: usize) -> HopTable<u32> {
        let mut table = HopTable::default();
        table.handle_open(key(0), (0..num_shards).map(|_| true));
        table
    }

    fn taken(table: &mut HopTable<u32>) -> Vec<(usize, u32)> {
        let mut results = Vec::new();
        assert!(table.take(key(0), &mut results));
        results
    }

    #[test]
    fn parts_come_back_in_shard_order_whatever_order_they_arrive_in() {
        let mut table = open(3);
        for shard in 0..3 {
            table.handle_sent(key(0), shard, EdgeId(shard as u64), 0);
        }
        for shard in [2, 0, 1] {
            assert!(!table.is_complete(key(0)));
            assert!(!table.take(key(0), &mut Vec::new()));
            let arrival = table.handle_arrival(key(0), shard, EdgeId(shard as u64), shard as u32);
            assert_eq!(arrival, Arrival::Accepted);
        }
        assert_eq!(taken(&mut table), [(0, 0), (1, 1), (2, 2)]);
        assert!(table.is_empty());
    }

    #[test]
    fn who_is_left_out_is_neither_sent_to_nor_waited_for() {
        let mut table = HopTable::default();
        table.handle_open(key(0), [false, true, false].into_iter());
        assert_eq!(table.unsent().map(|part| part.shard).collect::<Vec<_>>(), [1]);
        table.handle_sent(key(0), 1, EdgeId(4), 0);
        assert_eq!(table.handle_arrival(key(0), 0, EdgeId(3), 9), Arrival::Stale);
        assert_eq!(table.handle_arrival(key(0), 1, EdgeId(4), 5), Arrival::Accepted);
        assert_eq!(taken(&mut table), [(1, 5)]);
        table.handle_open(key(1), [false, false].into_iter());
        assert!(table.take(key(1), &mut Vec::new()), "without rows nobody is asked");
    }

    #[test]
    fn a_lost_edge_leaves_its_parts_to_be_sent_again_and_its_late_answer_is_stale() {
        let mut table = open(2);
        table.handle_sent(key(0), 0, EdgeId(7), 10);
        table.handle_sent(key(0), 1, EdgeId(8), 10);
        assert_eq!(table.handle_loss(EdgeId(7)), 1);
        let unsent: Vec<_> = table.unsent().collect();
        assert_eq!(unsent, [Unsent { key: key(0), shard: 0, sends: 1 }]);
        assert_eq!(table.handle_arrival(key(0), 0, EdgeId(7), 99), Arrival::Stale);
        table.handle_sent(key(0), 0, EdgeId(9), 20);
        assert_eq!(table.handle_arrival(key(0), 0, EdgeId(7), 99), Arrival::Stale);
        assert_eq!(table.handle_arrival(key(0), 0, EdgeId(9), 1), Arrival::Accepted);
        assert_eq!(table.handle_arrival(key(0), 1, EdgeId(8), 2), Arrival::Accepted);
        assert_eq!(taken(&mut table), [(0, 1), (1, 2)]);
    }

    #[test]
    fn the_oldest_wait_names_the_edge_that_owes_longest() {
        let mut table = open(2);
        table.handle_open(key(1), [true; 2].into_iter());
        table.handle_sent(key(0), 0, EdgeId(1), 30);
        table.handle_sent(key(0), 1, EdgeId(2), 20);
        table.handle_sent(key(1), 0, EdgeId(1), 40);
        assert_eq!(table.oldest_wait(), Some((EdgeId(2), 20)));
    }

    #[test]
    fn answers_to_forgotten_hops_are_unknown() {
        let mut table = open(1);
        table.handle_sent(key(0), 0, EdgeId(1), 0);
        table.clear();
        assert_eq!(table.handle_arrival(key(0), 0, EdgeId(1), 1), Arrival::Unknown);
        assert_eq!(table.handle_arrival(key(1), 0, EdgeId(1), 1), Arrival::Unknown);
    }
}
