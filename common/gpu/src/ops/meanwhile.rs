//! What a device that waits for another one does meanwhile: it brings into its second-level cache what it will read then.
use super::Ahead;
use crate::{Device, GpuError, Kernel, Launch, Module, Region, Source, Stream};

/// Part of a layer's paged cache: whatever there is room for of the tokens of all sequences, evenly spread over them.
#[derive(Clone, Copy, Debug)]
pub struct CachePart<'a> {
    /// `[blocks, block_size, row_bytes]`
    pub cache: &'a Region,
    /// The same once more, of the same sizes: values where the first has keys.
    pub second: Option<&'a Region>,
    /// What a token takes in each, a multiple of 16.
    pub row_bytes: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// Blocks of each sequence, `[batch, max_blocks]` i32. Every entry that the lengths reach names a block of the cache.
    pub block_table: &'a Region,
    /// Columns of the block table.
    pub max_blocks: usize,
    /// Tokens in the cache of each sequence, `[batch]` i32; 0 for padding.
    pub seq_lens: &'a Region,
    /// Sequences, padded.
    pub batch: usize,
    /// Most bytes to bring.
    pub room: usize,
}

/// The kernel of `meanwhile.cu`.
#[derive(Clone, Debug)]
pub struct Meanwhile {
    fetch: Kernel,
}

/// Most tokens that are taken together.
const MOST_TOKENS: usize = 32;
/// One-warp blocks that ask: about one for each multiprocessor, so that all ask at once.
const BLOCKS: usize = 128;

impl Meanwhile {
    /// # Errors
    /// As [`Module::load`].
    pub fn new(device: &Device) -> Result<Self, GpuError> {
        Self::load(device, false)
    }

    fn load(device: &Device, is_listed: bool) -> Result<Self, GpuError> {
        let module = Module::load(device, Source::Meanwhile, &[("LISTED", i64::from(is_listed))])?;
        let fetch = module.kernel("fetch_meanwhile", 0)?;
        // As a channel's wait: one split of memory for all that overlap.
        fetch.prefer_shared_memory()?;
        Ok(Self { fetch })
    }

    /// Enqueues: `weights`, and part of a cache, are asked for once everything before has ended; who waits behind this may begin
    /// to wait at once. For a device that has nothing else to do meanwhile.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`], [`GpuError::Unsupported`], [`GpuError::Driver`].
    pub fn fetch(
        &self,
        stream: &Stream,
        weights: Ahead<'_>,
        cache: Option<&CachePart<'_>>,
    ) -> Result<(), GpuError> {
        self.enqueue(stream, weights, cache, None)
    }

    fn enqueue(
        &self,
        stream: &Stream,
        weights: Ahead<'_>,
        cache: Option<&CachePart<'_>>,
        list: Option<&Region>,
    ) -> Result<(), GpuError> {
        let batch = cache.map_or(1, |part| part.batch);
        let grid = (batch as u32, BLOCKS.div_ceil(batch.max(1)) as u32);
        let launch = Launch::new(&self.fetch, grid, 32).overlap(true).opens_late();
        let launch = match cache {
            Some(part) => {
                part.check()?;
                let launch = launch.region(part.cache).maybe(part.second).region(part.block_table);
                let launch = launch.region(part.seq_lens).size(batch)?.size(part.max_blocks)?;
                let launch = launch.size(part.block_size)?.size(part.unit_tokens())?;
                launch.size(part.row_bytes)?.size(part.room_units())?
            }
            None => (0..6).try_fold((0..4).fold(launch, |l, _| l.maybe(None)), |l, _| l.size(0))?,
        };
        let launch = weights.arguments(launch.maybe(list))?;
        // SAFETY: fetch_meanwhile's arguments; sizes were checked, block ids are the caller's. It writes nothing but a list that is
        // as long as the caller of this made it.
        unsafe { launch.enqueue(stream) }
    }
}

impl CachePart<'_> {
    /// Tokens that are taken together: as many as divide a block.
    fn unit_tokens(&self) -> usize {
        1 << self.block_size.trailing_zeros().min(MOST_TOKENS.ilog2())
    }

    fn room_units(&self) -> usize {
        let caches = 1 + usize::from(self.second.is_some());
        self.room / (self.unit_tokens() * self.row_bytes * caches).max(1)
    }

    fn check(&self) -> Result<(), GpuError> {
        let Self { row_bytes, block_size, batch, max_blocks, .. } = *self;
        if row_bytes == 0 || !row_bytes.is_multiple_of(16) || block_size == 0 || batch == 0 {
            return Err(GpuError::unsupported(format!(
                "{batch} sequences of {row_bytes} bytes a token, {block_size} tokens a block"
            )));
        }
        self.seq_lens.expect("lengths", batch * 4)?;
        self.block_table.expect("block table", batch * max_blocks * 4)?;
        if let Some(second) = self.second {
            second.expect("second cache", self.cache.len())?;
        }
        self.cache.expect("cache", block_size * row_bytes)?;
        Ok(())
    }
}

/// Which units are taken, as (sequence, unit of it), of sequences of so many tokens: what the kernel is checked against.
#[cfg(test)]
fn taken(lens: &[usize], unit_tokens: usize, room: usize) -> Vec<(usize, usize)> {
    let units = |&len: &usize| len.div_ceil(unit_tokens);
    let all =
        || (0..).zip(lens).flat_map(|(sequence, len)| (0..units(len)).map(move |unit| (sequence, unit)));
    let total: usize = lens.iter().map(units).sum();
    let taken = room.min(total);
    let wanted: Vec<usize> = (0..taken).map(|i| i * total / taken).collect();
    (0..).zip(all()).filter(|(at, _)| wanted.binary_search(at).is_ok()).map(|(_, unit)| unit).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    const LENS: [usize; 7] = [0, 1, 63, 64, 65, 1000, 17];

    #[test]
    fn what_is_taken_is_spread_evenly_and_is_all_there_is_where_there_is_room() {
        let total: usize = LENS.iter().map(|len| len.div_ceil(32)).sum();
        for room in [0, 1, 5, total - 1, total, 10 * total] {
            let found = taken(&LENS, 32, room);
            assert_eq!(found.len(), room.min(total));
            assert!(found.windows(2).all(|pair| pair[0] < pair[1]), "{found:?}");
            assert!(found.iter().all(|(sequence, unit)| unit * 32 < LENS[*sequence]), "{found:?}");
            // The long sequence's part, to within one unit.
            let part = found.iter().filter(|(sequence, _)| *sequence == 5).count();
            let wanted = room.min(total) as f64 * 32.0 / total as f64;
            assert!((part as f64 - wanted).abs() <= 1.0, "{part} of {wanted}");
        }
    }

    #[test]
    fn the_kernel_asks_for_those_and_for_nothing_else() {
        if let Some(why) = Device::missing(1) {
            return eprintln!("{why}");
        }
        let device = Device::open(0).unwrap();
        let (stream, listed) = (device.stream().unwrap(), Meanwhile::load(&device, true).unwrap());
        let list = Region::alloc(&device, 8 + 16 * (64 << 10)).unwrap();
        for (block_size, row_bytes, has_second) in [(64, 1152, false), (16, 1024, true), (48, 16, false)] {
            let max_blocks = 1000usize.div_ceil(block_size) + 1;
            let num_blocks = LENS.len() * max_blocks;
            // Blocks lie in the opposite order; what no length reaches names none.
            let block_of = |sequence: usize, block: usize| num_blocks - 1 - (sequence * max_blocks + block);
            let mut table = vec![i32::MAX; num_blocks];
            for (sequence, len) in LENS.iter().enumerate() {
                for block in 0..len.div_ceil(block_size) {
                    table[sequence * max_blocks + block] = block_of(sequence, block) as i32;
                }
            }
            let table = Region::from_slice(&device, &table).unwrap();
            let lens = Region::from_slice(&device, &LENS.map(|len| len as i32)).unwrap();
            let cache = || Region::zeroed(&device, num_blocks * block_size * row_bytes).unwrap();
            let (cache, second) = (cache(), has_second.then(cache));
            for room in [0, 100_000, 300_000, 100 << 20] {
                let part = CachePart {
                    cache: &cache,
                    second: second.as_ref(),
                    row_bytes,
                    block_size,
                    block_table: &table,
                    max_blocks,
                    seq_lens: &lens,
                    batch: LENS.len(),
                    room,
                };
                let unit = part.unit_tokens();
                let mut wanted = HashMap::new();
                let mut want = |address: u64, bytes: usize| {
                    for at in (0..bytes).step_by(4096) {
                        wanted.insert(address + at as u64, (bytes - at).min(4096) as u64);
                    }
                };
                for (sequence, of) in taken(&LENS, unit, part.room_units()) {
                    let token = of * unit;
                    let row = block_of(sequence, token / block_size) * block_size + token % block_size;
                    for region in std::iter::once(&cache).chain(&second) {
                        want(region.address() + (row * row_bytes) as u64, unit * row_bytes);
                    }
                }
                list.fill(0).unwrap();
                listed.enqueue(&stream, Ahead::default(), Some(&part), Some(&list)).unwrap();
                stream.synchronize().unwrap();
                let asked = list.read::<u64>().unwrap();
                assert_eq!(asked[0] as usize, wanted.len(), "{block_size} tokens, room {room}");
                let asked = asked[1..].as_chunks::<2>().0.iter().take(wanted.len());
                let found: HashMap<u64, u64> = asked.map(|[address, bytes]| (*address, *bytes)).collect();
                assert_eq!(found, wanted, "{block_size} tokens, room {room}");
            }
        }
    }
}
