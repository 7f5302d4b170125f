//! Sampled tokens: temperature, top-k, top-p, min-p and the draw, from logits that stay where they are.
use crate::{Device, GpuError, Kernel, Launch, Module, Region, Source, Stream};

/// 32-bit words of a rule, as the kernel reads it.
pub const RULE_WORDS: usize = 8;
/// As in the kernel: a sum of each digit for each thread.
const THREADS: usize = 1024;
/// So that each warp's part of a row has a thread for every eight logits.
const MAX_VOCAB: usize = 8 * THREADS * (THREADS / 32);
const SHARED_BYTES: usize = 16 * THREADS * 4;

/// How a row's token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DrawRule {
    /// The best.
    Best,
    /// Drawn from the most probable ones, laid out in order of id.
    Draw {
        /// 1 / temperature, above 0; infinite for temperatures that are hardly above 0.
        scale: f32,
        /// At most so many; 0: all.
        top_k: u32,
        /// The fewest that together have this probability, after `top_k`; 1: all.
        top_p: f32,
        /// None below this part of the best one's probability.
        min_p: f32,
        /// In [0, 1): where in the sum of what is left.
        uniform: f64,
    },
}

impl DrawRule {
    /// For the kernel's `Rule`.
    pub fn words(self) -> [u32; RULE_WORDS] {
        match self {
            Self::Best => [0; RULE_WORDS],
            Self::Draw { scale, top_k, top_p, min_p, uniform } => {
                let uniform = uniform.to_bits();
                let (low, high) = (uniform as u32, (uniform >> 32) as u32);
                [scale.to_bits(), top_k, top_p.to_bits(), min_p.to_bits(), low, high, 0, 0]
            }
        }
    }
}

/// The kernel of `sample.cu`.
#[derive(Clone, Debug)]
pub struct Sample {
    kernel: Kernel,
}

impl Sample {
    /// Compiles it.
    ///
    /// # Errors
    /// As [`Module::load`].
    pub fn new(device: &Device) -> Result<Self, GpuError> {
        let module = Module::load(device, Source::Sample, &[])?;
        Ok(Self { kernel: module.kernel("sample", SHARED_BYTES)? })
    }

    /// Replaces the tokens of the rows that are to be drawn. `logits` `[rows, vocab]` bf16; `rules` `[rows, RULE_WORDS]`
    /// u32, of [`DrawRule::words`]; `tokens` `[rows]` i32 the best of each, as [`Rows::argmax`](super::Rows::argmax) says;
    /// `intervals` `[rows, 2]` f64, of drawn tokens where their interval begins and ends in the sum of what could be drawn.
    /// A token becomes -1 when every one is ruled out.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`]; [`GpuError::Unsupported`] unless `vocab` is a multiple of 8 and at most 262144.
    pub fn enqueue(
        &self,
        stream: &Stream,
        logits: &Region,
        rules: &Region,
        (tokens, intervals): (&Region, &Region),
        rows: usize,
        vocab: usize,
    ) -> Result<(), GpuError> {
        if !vocab.is_multiple_of(8) || vocab > MAX_VOCAB {
            return Err(GpuError::unsupported(format!("vocabulary of {vocab}")));
        }
        logits.expect("logits", rows * vocab * 2)?;
        rules.expect("rules", rows * RULE_WORDS * 4)?;
        tokens.expect("tokens", rows * 4)?;
        intervals.expect("intervals", rows * 16)?;
        let launch = Launch::new(&self.kernel, (rows as u32, 1), THREADS as u32).overlap(true);
        let launch = launch.region(logits).region(rules).region(tokens).region(intervals).size(vocab)?;
        // SAFETY: sample's arguments; sizes were checked.
        unsafe { launch.enqueue(stream) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_is_a_rule_without_a_scale() {
        assert_eq!(DrawRule::Best.words()[0], 0);
        let uniform = 0.625;
        let words = DrawRule::Draw { scale: 2.0, top_k: 7, top_p: 0.5, min_p: 0.25, uniform }.words();
        assert_eq!((f32::from_bits(words[0]), words[1]), (2.0, 7));
        assert_eq!(f64::from_bits(u64::from(words[5]) << 32 | u64::from(words[4])), uniform);
    }
}
