//! Which shard serves which experts of which layer, computed alike on both sides.
//!
//! Every expert of a mixture has at least one owner, and may have more: a hot one that several shards hold copies of. Who
//! of them serves a row follows from the row itself ([`row_salt`], the bytes that every shard receives alike), so no
//! message says it: an FFN shard that is given all rows leaves out what is another's, and attention with the gate sends a
//! row only to the shards that serve something of it. Both give the same sums.
//!
//! With the gate on attention shared experts are whole on every shard, and the shard that serves a row's *first* choice
//! applies them to it: a shard that the row goes to anyway, and as evenly spread as the routing itself. (They are on no shard
//! with `--shared-experts attention`.)
use std::collections::BTreeSet;

use sha2::{Digest, Sha256};

use crate::config::model::ModelConfig;
use crate::ids::Shard;
use crate::spelling::first_few;

mod file;
mod propose;
#[cfg(test)]
mod tests;

pub use file::PlacementFile;
pub use propose::{ExpertLoad, FewerCopies, LayerProposal, Proposal, ProposeError, propose};

/// What [`Placement::digest`] says of the placement that nobody asked for.
pub const CONTIGUOUS: &str = "contiguous";

/// Bytes of a row that [`row_salt`] looks at.
const SALT_BYTES: usize = 64;

/// Where the experts of every layer are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    num_shards: u32,
    /// `None` for a dense layer.
    layers: Vec<Option<LayerPlacement>>,
}

/// Where the experts of one layer are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerPlacement {
    num_shards: u32,
    /// Shards, expert by expert, ascending within an expert.
    owners: Vec<u32>,
    /// Where an expert's owners begin; one more than there are experts.
    starts: Vec<u32>,
}

/// What is wrong with a placement, by the names of its file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// Another number of shards.
    #[error("`{field}` lists {found} shards, expected {expected}")]
    Shards {
        /// "experts", or "layers.N".
        field: String,
        /// As listed.
        found: usize,
        /// Of the deployment, or of the rest of the file.
        expected: usize,
    },
    /// A layer that is not there, or has no experts.
    #[error("`layers.{layer}`: {what}")]
    Layer {
        /// As written.
        layer: String,
        /// Why not.
        what: String,
    },
    /// An expert that the layer does not have.
    #[error("`{field}`: shard {shard} lists expert {expert}; layer {layer} has {num_experts}")]
    UnknownExpert {
        /// "experts", or "layers.N".
        field: String,
        /// Which.
        layer: usize,
        /// Whose list.
        shard: usize,
        /// As listed.
        expert: usize,
        /// How many there are.
        num_experts: usize,
    },
    /// A shard lists an expert twice.
    #[error("`{field}`: shard {shard} lists expert {expert} twice")]
    Repeated {
        /// "experts", or "layers.N".
        field: String,
        /// Whose list.
        shard: usize,
        /// Which.
        expert: usize,
    },
    /// An expert that nobody has.
    #[error("`{field}`: no shard has expert {expert} of layer {layer}")]
    Unowned {
        /// "experts", or "layers.N".
        field: String,
        /// Which.
        layer: usize,
        /// Which.
        expert: usize,
    },
    /// Neither the layer itself nor a default says anything.
    #[error("layer {layer} has {num_experts} experts and neither `experts` nor `layers.{layer}` places them")]
    Missing {
        /// Which.
        layer: usize,
        /// How many there are.
        num_experts: usize,
    },
}

impl Placement {
    /// Every shard has a contiguous part of every layer's experts, sizes differing by at most one.
    pub fn contiguous(config: &ModelConfig, num_shards: u32) -> Self {
        let num_shards = num_shards.max(1);
        let layers = (0..config.num_layers()).map(|layer| {
            config.moe(layer).map(|moe| LayerPlacement::contiguous(moe.num_experts, num_shards))
        });
        Self { num_shards, layers: layers.collect() }
    }

    /// Shards, at least 1.
    pub fn num_shards(&self) -> u32 {
        self.num_shards
    }

    /// A layer's experts; `None` when it is dense or not there.
    pub fn layer(&self, layer: usize) -> Option<&LayerPlacement> {
        self.layers.get(layer)?.as_ref()
    }

    /// What to say when a shard has no expert of some layer, which is legal: its ranks then add nothing to that layer.
    pub fn warning(&self) -> Option<String> {
        let idle_layers = |shard: u32| {
            let placed = self.layers.iter().enumerate().filter_map(|(at, layer)| Some((at, layer.as_ref()?)));
            let idle = placed.filter(|(_, layer)| !layer.owners.contains(&shard));
            idle.map(|(at, _)| at.to_string()).collect::<Vec<_>>()
        };
        let idle = (0..self.num_shards).map(|shard| (shard, idle_layers(shard)));
        let said = idle.filter(|(_, layers)| !layers.is_empty()).map(|(shard, layers)| {
            let noun = if layers.len() == 1 { "layer" } else { "layers" };
            format!("shard {shard} in {noun} {}", first_few(&layers, ", "))
        });
        let said: Vec<_> = said.collect();
        (!said.is_empty())
            .then(|| format!("--placement leaves shards without an expert: {}", first_few(&said, "; ")))
    }

    /// Names the placement: [`CONTIGUOUS`], or the beginning of a hash over who owns what, which is the same for files
    /// that say the same. Two processes work together only when theirs are equal.
    pub fn digest(&self, config: &ModelConfig) -> String {
        if *self == Self::contiguous(config, self.num_shards) {
            return CONTIGUOUS.to_owned();
        }
        let mut hash = Sha256::new();
        let mut add = |number: u64| hash.update(number.to_le_bytes());
        add(self.num_shards.into());
        for layer in &self.layers {
            add(layer.as_ref().map_or(0, |layer| layer.num_experts() as u64));
            for expert in 0..layer.as_ref().map_or(0, LayerPlacement::num_experts) {
                let owners = layer.as_ref().map_or(&[][..], |layer| layer.owners(expert));
                add(owners.len() as u64);
                owners.iter().for_each(|owner| add((*owner).into()));
            }
        }
        let digest = hash.finalize();
        digest[..8].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl LayerPlacement {
    /// See [`Placement::contiguous`].
    pub fn contiguous(num_experts: usize, num_shards: u32) -> Self {
        let shards = (0..num_shards).filter_map(|index| Shard::new(index, num_shards));
        let lists: Vec<Vec<usize>> = shards.map(|shard| shard.part_of(num_experts).collect()).collect();
        Self::of(&lists, num_experts)
    }

    /// From lists that were checked.
    fn of(lists: &[Vec<usize>], num_experts: usize) -> Self {
        let mut by_expert = vec![BTreeSet::new(); num_experts];
        for (shard, experts) in lists.iter().enumerate() {
            for &expert in experts {
                by_expert[expert].insert(shard as u32);
            }
        }
        let mut starts = vec![0];
        let mut owners = Vec::new();
        for of_expert in by_expert {
            owners.extend(of_expert);
            starts.push(owners.len() as u32);
        }
        Self { num_shards: lists.len() as u32, owners, starts }
    }

    /// From one list of experts a shard. `field` and `layer` are for messages.
    fn checked(
        lists: &[Vec<usize>],
        num_experts: usize,
        field: &str,
        layer: usize,
    ) -> Result<Self, PlacementError> {
        let field = || field.to_owned();
        for (shard, experts) in lists.iter().enumerate() {
            let mut seen = BTreeSet::new();
            for &expert in experts {
                if expert >= num_experts {
                    let field = field();
                    return Err(PlacementError::UnknownExpert { field, layer, shard, expert, num_experts });
                }
                if !seen.insert(expert) {
                    return Err(PlacementError::Repeated { field: field(), shard, expert });
                }
            }
        }
        let placed = Self::of(lists, num_experts);
        match (0..num_experts).find(|expert| placed.owners(*expert).is_empty()) {
            Some(expert) => Err(PlacementError::Unowned { field: field(), layer, expert }),
            None => Ok(placed),
        }
    }

    /// Experts of the layer.
    pub fn num_experts(&self) -> usize {
        self.starts.len() - 1
    }

    /// Shards of the deployment.
    pub fn num_shards(&self) -> u32 {
        self.num_shards
    }

    /// The shards that have an expert, ascending; at least one.
    ///
    /// # Panics
    /// When the layer has no such expert.
    pub fn owners(&self, expert: usize) -> &[u32] {
        &self.owners[self.starts[expert] as usize..self.starts[expert + 1] as usize]
    }

    /// The experts of a shard, ascending.
    pub fn experts_of(&self, shard: u32) -> Vec<usize> {
        (0..self.num_experts()).filter(|expert| self.owners(*expert).contains(&shard)).collect()
    }

    /// Whether some expert has more than one owner. Without, nobody need compute a [`row_salt`]: 0 will do.
    pub fn has_copies(&self) -> bool {
        self.owners.len() > self.num_experts()
    }

    /// The shard that serves `expert` for a row of this [salt](row_salt): the only owner, or one of several.
    ///
    /// # Panics
    /// When the layer has no such expert.
    pub fn server(&self, expert: usize, salt: u32) -> u32 {
        match self.owners(expert) {
            [only] => *only,
            owners => {
                // Another draw for every expert of a row; the high bits of a product are its best mixed ones.
                let draw =
                    u64::from(salt ^ (expert as u32).wrapping_mul(0x9e37_79b9)).wrapping_mul(0x9e37_79b9);
                owners[(((draw & 0xffff_ffff) * owners.len() as u64) >> 32) as usize]
            }
        }
    }

    /// The shard that applies the shared experts to a row with this first choice, the gate being on attention: the one
    /// that serves that choice. A row without a choice (padding) is the first shard's.
    ///
    /// # Panics
    /// When the layer has no such expert.
    pub fn shared_server(&self, first_choice: i64, salt: u32) -> u32 {
        usize::try_from(first_choice).map_or(0, |expert| self.server(expert, salt))
    }
}

/// A number that spreads rows over the owners of copied experts. From the first bytes of a row as it travels, so that
/// attention and every shard come to the same one.
pub fn row_salt(row: &[u8]) -> u32 {
    let words = row[..row.len().min(SALT_BYTES)].chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    let mixed = words.fold(0xcbf2_9ce4_8422_2325u64, |hash, word| {
        (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23)
    });
    (mixed ^ (mixed >> 32)) as u32
}
