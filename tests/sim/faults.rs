//! What goes wrong in one run: how often frames are harmed, and which mishaps happen when.
use crate::dice::Dice;

/// Decided by the seed, once.
#[derive(Clone, Debug)]
pub(crate) struct Faults {
    /// Per mille of the frames; so below.
    pub(crate) drop: u64,
    pub(crate) duplicate: u64,
    pub(crate) delay: u64,
    pub(crate) corrupt: u64,
    pub(crate) truncate: u64,
    /// A frame of an earlier life of the link arrives: the same hop, other numbers, sound checksums.
    pub(crate) stale: u64,
    /// What happens to whole ranks and links, and when.
    pub(crate) mishaps: Vec<(u64, Mishap)>,
    pub(crate) death: Option<Death>,
}

/// The attention rank is killed in the middle of a step, and starts again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Death {
    pub(crate) calls_left: u32,
    /// Its host is gone with it: nobody hears that its connections have ended.
    pub(crate) is_silent: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Mishap {
    /// kill -9, and a new process at the same address after a while.
    Crash { rank: usize, down_us: u64 },
    /// SIGSTOP, and SIGCONT after a while.
    Stop { rank: usize, for_us: u64 },
    /// The connection of the rank's link breaks.
    Cut { rank: usize },
    /// Nothing gets through, in one direction or both.
    Partition { rank: usize, to_ffn: bool, to_attention: bool, for_us: u64 },
    /// SIGTERM: it says that it drains, and is gone after a while, for good until `down_us` later.
    Drain { rank: usize, grace_us: u64, down_us: u64 },
}

impl Faults {
    pub(crate) fn none() -> Self {
        let (mishaps, death) = (Vec::new(), None);
        Self { drop: 0, duplicate: 0, delay: 0, corrupt: 0, truncate: 0, stale: 0, mishaps, death }
    }

    pub(crate) fn are_none(&self) -> bool {
        let Self { drop, duplicate, delay, corrupt, truncate, stale, mishaps, death } = self;
        let often = drop + duplicate + delay + corrupt + truncate + stale;
        often == 0 && mishaps.is_empty() && death.is_none()
    }

    /// For `num_ranks` ranks and about `span_us` of work. A run has some kinds of fault and is spared others: where all
    /// happen at once nothing gets far enough to be wrong.
    pub(crate) fn throw(dice: &mut Dice, num_ranks: usize, span_us: u64) -> Self {
        let mut often = || dice.pick(&[0, 0, 0, 2, 10, 50]);
        let mut faults = Self {
            drop: often(),
            duplicate: often(),
            delay: often(),
            corrupt: often(),
            truncate: often(),
            stale: often(),
            ..Self::none()
        };
        for _ in 0..dice.pick(&[0, 1, 1, 2, 4]) {
            let rank = dice.index(num_ranks);
            let for_us = dice.pick(&[3_000, 30_000, 200_000, 600_000, 2_500_000]);
            let mishap = match dice.index(6) {
                0 | 1 => Mishap::Crash { rank, down_us: for_us },
                2 => Mishap::Stop { rank, for_us },
                3 => Mishap::Cut { rank },
                4 => {
                    let grace_us = dice.pick(&[100, 2_000, 20_000, 2_000_000]);
                    Mishap::Drain { rank, grace_us, down_us: for_us }
                }
                _ => {
                    let way = dice.index(3);
                    Mishap::Partition { rank, to_ffn: way != 0, to_attention: way != 1, for_us }
                }
            };
            faults.mishaps.push((dice.between(0, span_us), mishap));
        }
        let death = Death { calls_left: dice.between(0, 60) as u32, is_silent: dice.chance(500) };
        faults.death = dice.chance(200).then_some(death);
        faults
    }
}
