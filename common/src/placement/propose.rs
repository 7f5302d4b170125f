//! Proposes a placement from how often experts were chosen: copies for the hottest, then the largest load first onto the
//! shard with the least of it (Graham, 1969), no shard holding more experts than an even share. Pure.
use std::collections::BTreeMap;

use super::{LayerPlacement, PlacementFile};

/// How often the experts of one layer were chosen, by expert.
pub type ExpertLoad = Vec<u64>;

/// A placement, and what it would have done to the loads it was made from.
#[derive(Clone, Debug, PartialEq)]
pub struct Proposal {
    /// For `--placement`.
    pub file: PlacementFile,
    /// What came of it, by layer.
    pub layers: BTreeMap<usize, LayerProposal>,
}

/// One layer of a [`Proposal`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerProposal {
    /// The fullest shard's load over the mean, placed contiguously.
    pub contiguous: f64,
    /// The same, placed as proposed: never more.
    pub proposed: f64,
    /// Copies that were placed beside every expert's first.
    pub copies: usize,
    /// Why they are fewer than were asked for.
    pub fewer: Option<FewerCopies>,
}

/// Why a layer has fewer copies than were asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FewerCopies {
    /// Nobody knows which expert is hot.
    #[error("no row of this layer was counted")]
    NoRows,
    /// An expert has no second copy on one shard.
    #[error("there is one shard, which has every expert")]
    OneShard,
    /// Whatever was chosen is everywhere.
    #[error("with {most} every expert that was ever chosen is on every shard")]
    Everywhere {
        /// Copies that this takes.
        most: usize,
    },
    /// Those that there is room for leave the fullest shard at least as full.
    #[error("with them the fullest shard would have no less")]
    NoBetter,
}

/// Why nothing can be proposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// There is nothing to choose from.
    #[error("no layer has counts")]
    NoCounts,
    /// Nobody knows which expert is hot.
    #[error("no row was counted in any layer")]
    NoRows,
    /// Zero, or no meaning.
    #[error("{shards} shards; expected at least 1")]
    Shards {
        /// As asked for.
        shards: u32,
    },
    /// Some shard would have no expert of a layer.
    #[error("{shards} shards; layer {layer} has {num_experts} experts")]
    TooManyShards {
        /// As asked for.
        shards: u32,
        /// The first such layer.
        layer: usize,
        /// Of it.
        num_experts: usize,
    },
}

/// Places the experts of every layer onto `shards` shards with `copies` further copies a layer (as many as fit: an expert
/// has at most one on each shard). Where that is no better than the same without copies, or than contiguous parts, a layer
/// is placed like those.
///
/// # Errors
/// [`ProposeError`].
pub fn propose(
    loads: &BTreeMap<usize, ExpertLoad>,
    shards: u32,
    copies: usize,
) -> Result<Proposal, ProposeError> {
    if shards == 0 {
        return Err(ProposeError::Shards { shards });
    }
    if loads.values().all(Vec::is_empty) {
        return Err(ProposeError::NoCounts);
    }
    let (mut file, mut layers) = (PlacementFile::default(), BTreeMap::new());
    for (&layer, load) in loads.iter().filter(|(_, load)| !load.is_empty()) {
        let num_experts = load.len();
        if shards as usize > num_experts {
            return Err(ProposeError::TooManyShards { shards, layer, num_experts });
        }
        let parts = LayerPlacement::contiguous(num_experts, shards);
        let contiguous = imbalance_of(&parts, load);
        let parts = (0..shards).map(|shard| parts.experts_of(shard)).collect();
        let candidates = [place(load, shards as usize, copies), place(load, shards as usize, 0), parts];
        let num_copies = |lists: &[Vec<usize>]| lists.iter().map(Vec::len).sum::<usize>() - num_experts;
        let most = num_copies(&candidates[0]);
        let judged =
            candidates.map(|lists| (imbalance_of(&LayerPlacement::of(&lists, num_experts), load), lists));
        // The first of equals. There are three, so there is a least one.
        let Some((proposed, lists)) = judged.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)) else { continue };
        let placed = num_copies(&lists);
        let fewer = (placed < copies).then(|| match most {
            _ if load.iter().all(|rows| *rows == 0) => FewerCopies::NoRows,
            _ if shards == 1 => FewerCopies::OneShard,
            most if placed == most => FewerCopies::Everywhere { most },
            _ => FewerCopies::NoBetter,
        });
        layers.insert(layer, LayerProposal { contiguous, proposed, copies: placed, fewer });
        file.layers.insert(layer.to_string(), lists);
    }
    if loads.values().flatten().all(|rows| *rows == 0) {
        return Err(ProposeError::NoRows);
    }
    Ok(Proposal { file, layers })
}

/// Experts of each shard, ascending.
fn place(load: &[u64], shards: usize, copies: usize) -> Vec<Vec<usize>> {
    let num_copies = share_out(load, shards, copies);
    let total: usize = num_copies.iter().sum();
    let room = total.div_ceil(shards);
    // An expert's rows are spread over its copies.
    let of_copy = |expert: usize| load[expert] as f64 / num_copies[expert] as f64;
    let mut order: Vec<usize> = (0..load.len()).collect();
    // More copies first: they need distinct shards with room. Then the heavier; then by number, to be the same every time.
    order.sort_by(|a, b| {
        num_copies[*b].cmp(&num_copies[*a]).then(of_copy(*b).total_cmp(&of_copy(*a))).then(a.cmp(b))
    });
    let mut lists = vec![Vec::new(); shards];
    let mut held = vec![0.0f64; shards];
    for expert in order {
        let mut by_load: Vec<usize> = (0..shards).collect();
        by_load.sort_by(|a, b| {
            let full = |shard: &usize| lists[*shard].len() >= room;
            full(a)
                .cmp(&full(b))
                .then(held[*a].total_cmp(&held[*b]))
                .then(lists[*a].len().cmp(&lists[*b].len()))
        });
        for shard in by_load.into_iter().take(num_copies[expert]) {
            lists[shard].push(expert);
            held[shard] += of_copy(expert);
        }
    }
    lists.iter_mut().for_each(|list| list.sort_unstable());
    lists
}

/// Copies of each expert, the first included: one more for whoever has the most load a copy, again and again.
fn share_out(load: &[u64], shards: usize, copies: usize) -> Vec<usize> {
    let mut num_copies = vec![1; load.len()];
    for _ in 0..copies {
        let of_copy = |expert: &usize| load[*expert] as f64 / num_copies[*expert] as f64;
        let may = (0..load.len()).filter(|expert| num_copies[*expert] < shards && load[*expert] > 0);
        // The first of equals.
        let Some(hottest) = may.max_by(|a, b| of_copy(a).total_cmp(&of_copy(b)).then(b.cmp(a))) else {
            break;
        };
        num_copies[hottest] += 1;
    }
    num_copies
}

fn imbalance_of(placed: &LayerPlacement, load: &[u64]) -> f64 {
    let mut held = vec![0.0f64; placed.num_shards() as usize];
    for (expert, rows) in load.iter().enumerate() {
        let owners = placed.owners(expert);
        owners.iter().for_each(|shard| held[*shard as usize] += *rows as f64 / owners.len() as f64);
    }
    let (most, sum) = (held.iter().copied().fold(0.0, f64::max), held.iter().sum::<f64>());
    if sum > 0.0 { most * held.len() as f64 / sum } else { 1.0 }
}
