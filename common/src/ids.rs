//! The words that identify a hop, as types that cannot be swapped for one another.
use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty), $letter:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($letter, "{}"), self.0)
            }
        }
    };
}

id!(
    /// Index of a process within its role.
    Rank(u32), "rank "
);
id!(
    /// Index of a decoder layer, from 0.
    LayerIdx(u16), "layer "
);
id!(
    /// Index of a stage (microbatch) of a step, from 0.
    StageIdx(u8), "stage "
);
id!(
    /// One scheduler iteration of an attention rank; grows, gaps are legal.
    StepId(u64), "step "
);
id!(
    /// Lifetime of one link, minted by the FFN when the link is opened.
    Epoch(u64), "epoch "
);

/// One exchange between an attention rank and the FFN: everything that matches a combine to its dispatch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HopKey {
    /// Which step.
    pub step: StepId,
    /// Which layer.
    pub layer: LayerIdx,
    /// Which stage of the step.
    pub stage: StageIdx,
}

impl fmt::Display for HopKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}, {}", self.step, self.layer, self.stage)
    }
}

/// Which part of every FFN layer a rank owns: shard `index` of `count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shard {
    index: u32,
    count: u32,
}

impl Shard {
    /// The only shard.
    pub const WHOLE: Self = Self { index: 0, count: 1 };

    /// `None` unless `index < count`.
    pub fn new(index: u32, count: u32) -> Option<Self> {
        (index < count).then_some(Self { index, count })
    }

    /// From 0.
    pub fn index(self) -> u32 {
        self.index
    }

    /// At least 1.
    pub fn count(self) -> u32 {
        self.count
    }

    /// This shard's part of `total` things: contiguous, sizes differ by at most one, together all of them.
    /// Empty when there are more shards than things.
    pub fn part_of(self, total: usize) -> std::ops::Range<usize> {
        let (index, count) = (self.index as usize, self.count as usize);
        (total * index / count)..(total * (index + 1) / count)
    }
}

/// As `--shard` takes it: "0/2".
impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::Shard;

    #[test]
    fn parts_cover_everything_once_whatever_divides() {
        for total in 0..20 {
            for count in 1..7 {
                let parts: Vec<_> =
                    (0..count).flat_map(|i| Shard::new(i, count).unwrap().part_of(total)).collect();
                assert_eq!(parts, (0..total).collect::<Vec<_>>());
            }
        }
    }
}
