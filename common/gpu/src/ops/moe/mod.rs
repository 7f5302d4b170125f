//! A mixture-of-experts layer: all of it for few rows ([`Moe`]), and for many the products
//! ([`MoeProducts`]) and what stands around them ([`MoeMany`]).
mod few;
mod many;
mod parts;
mod plan;
mod product;
mod whole;

pub use few::{Moe, MoeTuning, MoeWeights};
pub use many::{MoeMany, Places};
use plan::Ring;
pub use product::{MoeProducts, ProductRooms, ProductWeights};

/// Dimensions of a layer and how its router chooses: the best `top_k` scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MoeShape {
    /// Elements of a row.
    pub hidden: usize,
    /// Inner size of one expert.
    pub intermediate: usize,
    /// Routed experts of the whole layer; none in a dense one, which has shared ones only.
    pub num_experts: usize,
    /// Routed experts that each row goes to.
    pub top_k: usize,
    /// Shared experts of the same inner size, stored behind the routed ones. A shared expert of twice the size is two:
    /// its gate and up rows, and its down columns, cut in halves.
    pub num_shared: usize,
    /// From logits to scores.
    pub scoring: MoeScoring,
    /// Whether the chosen weights are scaled to sum to one.
    pub normalize: bool,
    /// Whether logits are rounded to bf16, as a model does whose router computes in its own dtype.
    pub round_logits: bool,
}

/// From router logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MoeScoring {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each; [`MoeWeights::bias`] has a say in the choice, none in the weight.
    Sigmoid,
}

impl MoeShape {
    /// What every kernel of a layer is compiled with.
    fn constants(&self, output: MoeOutput) -> [(&'static str, i64); 9] {
        [
            ("HIDDEN", self.hidden as i64),
            ("INTER", self.intermediate as i64),
            ("EXPERTS", self.num_experts as i64),
            ("TOP_K", self.top_k as i64),
            ("SHARED", self.num_shared as i64),
            ("SIGMOID", i64::from(self.scoring == MoeScoring::Sigmoid)),
            ("NORMALIZE", i64::from(self.normalize)),
            ("ROUND_LOGITS", i64::from(self.round_logits)),
            ("OUT_F32", i64::from(output == MoeOutput::F32)),
        ]
    }

    /// How a dense MLP of this inner size is cut into equal shared experts that the kernels can take: how many, and the
    /// size of each; what they have more in all is to be filled with zeros. `None` when there is no way.
    pub fn cut(hidden: usize, intermediate: usize) -> Option<(usize, usize)> {
        const ROWS: [usize; 3] = [1, 9, 17];
        // Of a large call, whose parts of the sum are written and read again, f32.
        const PARTS_ROWS: usize = 128;
        let fits = |width: usize, most: usize, stages: usize| {
            let ring = |rows: usize| Ring::of(width, Moe::row_class(rows), most, 12);
            ROWS.iter().all(|&rows| ring(rows).is_ok_and(|ring| ring.stages >= stages))
        };
        fits(hidden, 8, 2).then_some(())?;
        let cuts = (1..=32).filter_map(|count| {
            let least = intermediate.div_ceil(count).next_multiple_of(32);
            let size = (least..=least + 512).step_by(32).find(|&size| fits(size, 12, 3))?;
            Some((count, size))
        });
        cuts.min_by_key(|&(count, size)| count * (size * 3 * 2 + PARTS_ROWS * 2 * 4))
    }
}

/// What the combined rows are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MoeOutput {
    /// Rounded: the whole layer's result.
    Bf16,
    /// Partial sums of one of several shards.
    F32,
}
