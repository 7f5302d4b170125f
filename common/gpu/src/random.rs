//! Seeded numbers, made where they are used: the same on the device and here.
use half::bf16;

use crate::ops::Ahead;
use crate::{Device, GpuError, HostWords, Kernel, Launch, Module, Region, Source, Stream};

/// The kernels of `random.cu`.
#[derive(Clone, Debug)]
pub struct Random {
    fill: Kernel,
    check: Kernel,
    read: Kernel,
    stamp: Kernel,
    pause: Kernel,
    blocks: u32,
}

impl Random {
    /// # Errors
    /// As [`Module::load`].
    pub fn new(device: &Device) -> Result<Self, GpuError> {
        let module = Module::load(device, Source::Random, &[])?;
        let blocks = device.num_multiprocessors() * 8;
        let kernel = |name| module.kernel(name, 0);
        let (fill, check, read) = (kernel("fill_uniform")?, kernel("check_uniform")?, kernel("read_all")?);
        let (stamp, pause) = (kernel("stamp")?, kernel("pause")?);
        // As a channel's put and wait: one split of memory for all that overlap.
        stamp.prefer_shared_memory()?;
        pause.prefer_shared_memory()?;
        Ok(Self { fill, check, read, stamp, pause, blocks })
    }

    /// Fills `out` with bf16 numbers, uniform in `[-scale, scale)`: element i is [`uniform`]`(seed, i, scale)`.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn fill(&self, stream: &Stream, out: &Region, seed: u64, scale: f32) -> Result<(), GpuError> {
        let launch = Launch::new(&self.fill, (self.blocks, 1), 256);
        let launch = launch.region(out).u64(out.len() as u64 / 2).u64(seed).f32(scale);
        // SAFETY: fill_uniform(bf16*, u64, u64, float) writes as many elements as the region has.
        unsafe { launch.enqueue(stream) }
    }

    /// Compares `found` with what [`fill`](Self::fill) makes of `seed`, and the i32 in `rows` with the number beside it,
    /// without a copy: word `index` of `verdicts` becomes one more than the number of differences.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`] when there is no such word; [`GpuError::Driver`].
    pub fn check(
        &self,
        stream: &Stream,
        (found, seed, scale): (&Region, u64, f32),
        rows: Option<(&Region, i32)>,
        (verdicts, index): (&HostWords, usize),
    ) -> Result<(), GpuError> {
        let word = verdicts.address_of(index)?;
        let launch = Launch::new(&self.check, (1, 1), 1024);
        let launch = launch.region(found).u64(found.len() as u64 / 2).u64(seed).f32(scale);
        let launch = launch.maybe(rows.map(|(region, _)| region));
        let launch = launch.u32(rows.map_or(0, |(_, wanted)| wanted as u32)).u64(word);
        // SAFETY: check_uniform's arguments; it reads the region and one int, and writes one word, which its owner keeps.
        unsafe { launch.enqueue(stream) }
    }

    /// Reads all of `from` and nothing else: for measuring what the device can.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn read(&self, stream: &Stream, from: &Region, sink: &Region) -> Result<(), GpuError> {
        sink.expect("sink", 4)?;
        let launch = Launch::new(&self.read, (self.blocks, 1), 256);
        let launch = launch.region(from).u64(from.len() as u64 / 16).region(sink);
        // SAFETY: read_all(uint4*, u64, u32*) reads as many units as the region has and writes one word.
        unsafe { launch.enqueue(stream) }
    }

    /// Does nothing for `us` behind what is there, as a channel that waits for its peer: kernels behind it take their places, and
    /// what is `ahead` is fetched.
    ///
    /// # Errors
    /// [`GpuError::Driver`]; [`GpuError::Unsupported`] for what cannot be fetched.
    pub fn pause(&self, stream: &Stream, us: u64, ahead: Ahead<'_>) -> Result<(), GpuError> {
        let launch = Launch::new(&self.pause, (1 + ahead.blocks(32), 1), 32).overlap(true).u64(us * 1000);
        let launch = ahead.arguments(launch.maybe(None))?;
        // SAFETY: pause's arguments; it reads nothing but for the cache.
        unsafe { launch.enqueue(stream) }
    }

    /// Notes the device's time in `time`, behind what is there, as a channel's put comes: for [`pause_since`](Self::pause_since).
    ///
    /// # Errors
    /// [`GpuError::TooSmall`]; [`GpuError::Driver`].
    pub fn stamp(&self, stream: &Stream, time: &Region) -> Result<(), GpuError> {
        let launch = Launch::new(&self.stamp, (1, 1), 1).overlap(true).opens_late();
        // SAFETY: stamp(u64*) writes one word, which is there.
        unsafe { launch.region(time.expect("time", 8)?).enqueue(stream) }
    }

    /// The same pause, over `us` after the last [`stamp`](Self::stamp) into `time`, whatever was enqueued between.
    ///
    /// # Errors
    /// As there.
    pub fn pause_since(&self, stream: &Stream, time: &Region, us: u64) -> Result<(), GpuError> {
        let launch = Launch::new(&self.pause, (1, 1), 32).overlap(true).u64(us * 1000);
        let launch = Ahead::default().arguments(launch.region(time.expect("time", 8)?))?;
        // SAFETY: pause's arguments; it reads one word, which is there.
        unsafe { launch.enqueue(stream) }
    }
}

/// Element `index` of what [`Random::fill`] makes.
pub fn uniform(seed: u64, index: u64, scale: f32) -> bf16 {
    let mut x = seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x ^= x >> 33;
    x = x.wrapping_mul(0xff51_afd7_ed55_8ccd);
    x ^= x >> 33;
    x = x.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^= x >> 33;
    let bits = (x >> 40) as u32; // 24 bits: exact in f32
    bf16::from_f32((bits as f32 * (2.0 / 16_777_216.0) - 1.0) * scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_evenly_and_different_by_seed() {
        let values: Vec<f32> = (0..4096).map(|i| uniform(7, i, 2.0).to_f32()).collect();
        let mean = values.iter().sum::<f32>() / 4096.0;
        let variance = values.iter().map(|v| v * v).sum::<f32>() / 4096.0;
        assert!(mean.abs() < 0.1, "{mean}");
        assert!((variance - 4.0 / 3.0).abs() < 0.1, "{variance}");
        assert_ne!(uniform(8, 0, 2.0), uniform(7, 0, 2.0));
    }
}
