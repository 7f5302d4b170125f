//! Memory that a later operation will read whatever comes, asked for while the device's memory is idle.
use crate::{GpuError, Launch, Region};

/// Up to three regions that a kernel brings into the second-level cache beside its own work.
///
/// Worth it where a product of few rows follows kernels that are bound by latency, or a wait for another device: its
/// weights then come from the cache. Sizes are multiples of 16 bytes; together they should fit into the cache.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ahead<'a>(pub [Option<&'a Region>; 3]);

impl<'a> Ahead<'a> {
    /// The first three of some.
    pub fn of(regions: impl IntoIterator<Item = &'a Region>) -> Self {
        let mut regions = regions.into_iter();
        Self([regions.next(), regions.next(), regions.next()])
    }

    /// Whether there is nothing to fetch.
    pub fn is_empty(&self) -> bool {
        self.0.iter().flatten().all(|region| region.is_empty())
    }

    /// Threads that ask for all of it, a few pieces each.
    const THREADS: usize = 4096;

    /// Blocks that are needed beside a kernel's own, each of `threads`.
    pub(crate) fn blocks(&self, threads: usize) -> u32 {
        if self.is_empty() { 0 } else { Self::THREADS.div_ceil(threads) as u32 }
    }

    /// The kernel's last arguments.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`] for regions of other sizes.
    pub(crate) fn arguments(self, launch: Launch<'a>) -> Result<Launch<'a>, GpuError> {
        self.0.into_iter().try_fold(launch, |launch, region| {
            let bytes = region.map_or(0, Region::len);
            if !bytes.is_multiple_of(16) {
                return Err(GpuError::unsupported(format!("{bytes} bytes ahead")));
            }
            launch.maybe(region).size(bytes)
        })
    }
}
