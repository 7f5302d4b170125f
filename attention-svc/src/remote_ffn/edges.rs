//! The live edges of every shard, and which of them this attention rank uses.
use afd_common::ids::Shard;
use afd_common::spelling;

use super::edge::Edge;
use super::hop_table::EdgeId;

/// What is kept by shard: an edge whose link the host drives, or one that a stream drives.
pub trait OfShard {
    /// Never reused.
    fn id(&self) -> EdgeId;
    /// Which part of every layer its rank owns.
    fn shard(&self) -> Shard;
    /// Its rank said that it is about to stop.
    fn is_draining(&self) -> bool;
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
}

/// Edges by shard; without shards until the first rank has joined and said how many there are.
pub struct Edges<E = Edge> {
    shards: Vec<Vec<E>>,
    rank: usize,
}

impl<E: OfShard> Edges<E> {
    /// None yet. Attention ranks are spread over the replicas of a shard by their own `rank`.
    pub fn new(rank: u32) -> Self {
        Self { shards: Vec::new(), rank: rank as usize }
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
            Some(edges.remove(index))
        })
    }

    /// Whether a shard has an edge.
    pub fn has(&self, shard: usize) -> bool {
        self.shards.get(shard).is_some_and(|edges| !edges.is_empty())
    }

    /// The edge of a shard that this attention rank uses. One that drains is the last resort.
    pub fn choose(&mut self, shard: usize) -> Option<&mut E> {
        let edges = self.shards.get_mut(shard)?;
        let staying = edges.iter().filter(|edge| !edge.is_draining()).count();
        if staying == 0 {
            let nth = self.rank.checked_rem(edges.len())?;
            return edges.get_mut(nth);
        }
        edges.iter_mut().filter(|edge| !edge.is_draining()).nth(self.rank % staying)
    }
}
