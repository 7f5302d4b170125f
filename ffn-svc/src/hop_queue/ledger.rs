//! Remembers which hops of one link were accepted, exactly and in constant memory, so that none ever runs twice.
//!
//! A link carries a few steps at a time and their ids grow, so a bit per (layer, stage) of the newest steps is enough:
//! a hop of a step that fell out of that window is refused as stale instead of being guessed about.
use afd_common::ids::{HopKey, StepId};

use super::{Refused, SourceId};

/// Most stages of a step.
pub const MAX_STAGES: u8 = 4;

/// Steps of a link that may be under way at once: one runs, one is planned ahead, the rest is slack for callers that
/// drive single layers.
pub(super) const WINDOW: usize = 8;

/// See the module's head.
#[derive(Debug)]
pub struct HopLedger {
    num_layers: u16,
    /// The newest steps seen, oldest first; once it is full, anything older than its first entry is stale.
    steps: Vec<StepBits>,
}

#[derive(Debug)]
struct StepBits {
    step: StepId,
    bits: Vec<u64>,
}

impl HopLedger {
    /// For a model of `num_layers` layers.
    pub fn new(num_layers: u16) -> Self {
        Self { num_layers, steps: Vec::with_capacity(WINDOW) }
    }

    /// Notes a hop of `link`.
    ///
    /// # Errors
    /// [`Refused`] when it was noted before, when its step is too old to know, or when it is out of range.
    pub fn accept(&mut self, source: SourceId, key: HopKey) -> Result<(), Refused> {
        if key.layer.0 >= self.num_layers {
            return Err(Refused::Layer { found: key.layer.0, num_layers: self.num_layers });
        }
        if key.stage.0 >= MAX_STAGES {
            return Err(Refused::Stage { found: key.stage.0 });
        }
        let Some(slot) = self.slot_of(key.step) else {
            return Err(Refused::Stale { link: source, key, window: WINDOW });
        };
        let index = usize::from(key.layer.0) * usize::from(MAX_STAGES) + usize::from(key.stage.0);
        let (word, bit) = (&mut self.steps[slot].bits[index / 64], 1 << (index % 64));
        if *word & bit != 0 {
            return Err(Refused::Duplicate { link: source, key });
        }
        *word |= bit;
        Ok(())
    }

    /// Where the bits of a step are. A new step takes an empty slot, or the oldest step's bits; `None`: it is older
    /// than all of a full window.
    fn slot_of(&mut self, step: StepId) -> Option<usize> {
        let at = match self.steps.binary_search_by_key(&step, |bits| bits.step) {
            Ok(found) => return Some(found),
            Err(at) => at,
        };
        if self.steps.len() < WINDOW {
            let words = (usize::from(self.num_layers) * usize::from(MAX_STAGES)).div_ceil(64);
            self.steps.insert(at, StepBits { step, bits: vec![0; words] });
            return Some(at);
        }
        let at = at.checked_sub(1)?;
        self.steps[..=at].rotate_left(1);
        self.steps[at].step = step;
        self.steps[at].bits.fill(0);
        Some(at)
    }
}
