//! The live edges of every shard, and which of them this attention rank uses.
use afd_common::ids::Shard;
use afd_common::spelling;

use super::edge::Edge;
use super::hop_table::EdgeId;
use super::stream_edge::StreamEdge;

/// What is kept by shard: an edge whose link the host drives, or one that a stream drives.
pub trait OfShard {
    /// Never reused.
    fn id(&self) -> EdgeId;
    /// Which part of every layer its rank owns.
    fn shard(&self) -> Shard;
    /// Its rank said that it is about to stop.
    fn is_draining(&self) -> bool;
    /// It joined late and is being warmed up.
    fn is_cold(&self) -> bool;
}

impl OfShard for Edge {
    fn id(&self) -> EdgeId {
        self.id
    }

    fn shard(&self) -> Shard {
        self.shard
    }

    fn is_draining(&self) -> bool {
        self.draining
    }

    fn is_cold(&self) -> bool {
        self.warm_up.is_some()
    }
}

impl OfShard for StreamEdge {
    fn id(&self) -> EdgeId {
        self.id
    }

    fn shard(&self) -> Shard {
        self.shard
    }

    fn is_draining(&self) -> bool {
        self.draining
    }

    /// It is warmed up with the decode steps' graphs.
    fn is_cold(&self) -> bool {
        false
    }
}

/// Edges by shard; without shards until the first rank has joined and said how many there are.
pub struct Edges<E = Edge> {
    shards: Vec<Vec<E>>,
    rank: usize,
    /// Were there when the warm-up began, and have had no whole round of it yet.
    cold: Vec<EdgeId>,
    /// The present step goes to cold edges.
    is_warming: bool,
    /// One of the present round was taken out in the middle: whoever took its place had only a part.
    is_disturbed: bool,
}

impl<E: OfShard> Edges<E> {
    /// None yet. Attention ranks are spread over the replicas of a shard by their own `rank`.
    pub fn new(rank: u32) -> Self {
        let shards = Vec::new();
        Self { shards, rank: rank as usize, cold: Vec::new(), is_warming: false, is_disturbed: false }
    }

    /// Shards of the deployment; 0 while no rank has joined.
    pub fn num_shards(&self) -> usize {
        self.shards.len()
    }

    /// Whether every shard has an edge.
    pub fn is_complete(&self) -> bool {
        !self.shards.is_empty() && self.first_bereft().is_none()
    }

    /// The first shard without an edge.
    pub fn first_bereft(&self) -> Option<usize> {
        if self.shards.is_empty() { Some(0) } else { self.shards.iter().position(Vec::is_empty) }
    }

    /// All edges.
    pub fn iter(&self) -> impl Iterator<Item = &E> + Clone {
        self.shards.iter().flatten()
    }

    /// Those that are not cold.
    pub fn warm(&self) -> impl Iterator<Item = &E> + Clone {
        self.iter().filter(|edge| !edge.is_cold())
    }

    /// All edges.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut E> {
        self.shards.iter_mut().flatten()
    }

    /// Takes an edge in, or gives it back with the reason when it belongs to another arrangement.
    pub fn adopt(&mut self, edge: E) -> Result<(), (E, String)> {
        let count = edge.shard().count() as usize;
        if self.shards.is_empty() {
            self.shards.resize_with(count, Vec::new);
        }
        if self.shards.len() != count {
            return Err((
                edge,
                format!(
                    "this deployment has {}, the rank says {count}",
                    spelling::count(self.shards.len() as u64, "shard")
                ),
            ));
        }
        let index = edge.shard().index() as usize;
        self.shards[index].push(edge);
        Ok(())
    }

    /// Takes an edge out.
    pub fn remove(&mut self, id: EdgeId) -> Option<E> {
        self.shards.iter_mut().find_map(|edges| {
            let index = edges.iter().position(|edge| edge.id() == id)?;
            self.cold.retain(|cold| *cold != id);
            self.is_disturbed |= self.is_warming;
            Some(edges.remove(index))
        })
    }

    /// Every edge that is there now is cold.
    pub fn begin_warm_up(&mut self) {
        self.cold = self.iter().map(OfShard::id).collect();
        self.is_disturbed = false;
    }

    /// Whether the steps from now on go to edges that are cold, where a shard has one.
    pub fn set_warming(&mut self, is_warming: bool) {
        self.is_warming = is_warming;
    }

    /// A round of warm-up steps is over: its edges are warm, unless one of them was lost. Whether others are cold.
    pub fn handle_warm(&mut self) -> bool {
        if !std::mem::take(&mut self.is_disturbed) {
            let Self { shards, cold, .. } = self;
            for edges in shards {
                let warmed = edges.iter().map(OfShard::id).find(|id| cold.contains(id));
                cold.retain(|id| Some(*id) != warmed);
            }
        }
        !self.cold.is_empty()
    }

    /// Whether some shard has edges, and the rank of each of them is about to stop.
    pub fn is_leaving(&self) -> bool {
        self.shards.iter().any(|edges| !edges.is_empty() && edges.iter().all(OfShard::is_draining))
    }

    /// Whether a shard has an edge.
    pub fn has(&self, shard: usize) -> bool {
        self.shards.get(shard).is_some_and(|edges| !edges.is_empty())
    }

    /// The edge of a shard that this attention rank uses. One that drains, and after it one that is cold, is the last resort.
    pub fn choose(&mut self, shard: usize) -> Option<&mut E> {
        let at = self.choice(shard)?;
        self.shards.get_mut(shard)?.get_mut(at)
    }

    /// The same, to look at.
    pub fn chosen(&self, shard: usize) -> Option<&E> {
        self.shards.get(shard)?.get(self.choice(shard)?)
    }

    fn choice(&self, shard: usize) -> Option<usize> {
        let edges = self.shards.get(shard)?;
        if self.is_warming
            && let Some(at) = edges.iter().position(|edge| self.cold.contains(&edge.id()))
        {
            return Some(at);
        }
        let misgivings = |edge: &E| (edge.is_cold(), edge.is_draining());
        let fewest = edges.iter().map(misgivings).min()?;
        let best = || edges.iter().enumerate().filter(|(_, edge)| misgivings(edge) == fewest);
        best().nth(self.rank % best().count()).map(|(at, _)| at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Named(u64, Shard, Misgiving);

    #[derive(Clone, Copy, PartialEq)]
    enum Misgiving {
        None,
        Drains,
        Cold,
    }

    impl OfShard for Named {
        fn id(&self) -> EdgeId {
            EdgeId(self.0)
        }

        fn shard(&self) -> Shard {
            self.1
        }

        fn is_draining(&self) -> bool {
            self.2 == Misgiving::Drains
        }

        fn is_cold(&self) -> bool {
            self.2 == Misgiving::Cold
        }
    }

    /// Three replicas of shard 0 and one of shard 1; the warm-up has begun.
    fn cold() -> Edges<Named> {
        let mut edges = Edges::new(0);
        for (id, shard) in [(1, 0), (2, 0), (3, 0), (4, 1)] {
            assert!(edges.adopt(Named(id, Shard::new(shard, 2).unwrap(), Misgiving::None)).is_ok());
        }
        edges.begin_warm_up();
        edges.set_warming(true);
        edges
    }

    fn chosen(edges: &mut Edges<Named>) -> [u64; 2] {
        [0, 1].map(|shard| edges.choose(shard).unwrap().0)
    }

    #[test]
    fn every_edge_has_its_round_of_the_warm_up_and_later_ones_have_none() {
        let mut edges = cold();
        assert!(edges.adopt(Named(5, Shard::new(1, 2).unwrap(), Misgiving::None)).is_ok());
        for (round, is_any_left) in [([1, 4], true), ([2, 4], true), ([3, 4], false)] {
            assert_eq!(chosen(&mut edges), round);
            assert_eq!(edges.handle_warm(), is_any_left);
        }
        edges.set_warming(false);
        assert_eq!(chosen(&mut edges), [1, 4]);
    }

    #[test]
    fn a_cold_edge_is_used_only_while_nothing_else_serves_its_shard() {
        let mut edges = Edges::new(1);
        let mut adopt = |id, misgiving| assert!(edges.adopt(Named(id, Shard::WHOLE, misgiving)).is_ok());
        adopt(1, Misgiving::Cold);
        adopt(2, Misgiving::Drains);
        adopt(3, Misgiving::None);
        adopt(4, Misgiving::None);
        for (used, then_lost) in [(4, 4), (3, 3), (2, 2), (1, 1)] {
            assert_eq!(edges.choose(0).unwrap().0, used);
            assert_eq!(edges.chosen(0).unwrap().0, used);
            assert!(edges.remove(EdgeId(then_lost)).is_some());
        }
        assert!(edges.choose(0).is_none());
    }

    #[test]
    fn a_shard_is_left_when_the_last_of_its_ranks_that_stays_is_gone() {
        let mut edges = Edges::new(0);
        for (id, misgiving) in [(1, Misgiving::None), (2, Misgiving::Drains), (3, Misgiving::Drains)] {
            assert!(edges.adopt(Named(id, Shard::WHOLE, misgiving)).is_ok());
            assert!(!edges.is_leaving());
        }
        assert!(edges.remove(EdgeId(1)).is_some());
        assert!(edges.is_leaving());
        assert!(edges.remove(EdgeId(2)).is_some() && edges.remove(EdgeId(3)).is_some());
        assert!(!edges.is_leaving(), "it is bereft");
    }

    #[test]
    fn a_round_in_which_an_edge_was_lost_is_run_again_by_the_others() {
        let mut edges = cold();
        assert_eq!(chosen(&mut edges), [1, 4]);
        assert!(edges.remove(EdgeId(1)).is_some());
        assert_eq!(chosen(&mut edges), [2, 4]);
        assert!(edges.handle_warm(), "2 has had a part of a round only");
        assert_eq!(chosen(&mut edges), [2, 4]);
        assert!(edges.handle_warm());
        assert_eq!(chosen(&mut edges), [3, 4]);
        assert!(!edges.handle_warm());
    }
}
