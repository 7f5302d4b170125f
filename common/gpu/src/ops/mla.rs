//! Decode attention of a batch over a paged latent cache, with the projections absorbed: 16 heads, one row each.
use crate::tensor_map::{MapArgument, MapShape};
use crate::{Device, GpuError, Kernel, Launch, Module, Region, Source, Stream};

/// Dimensions of the cache. Heads are 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MlaShape {
    /// Rank of the latent, also the size of a head's result.
    pub latent: usize,
    /// Size of the rope key behind it.
    pub rope: usize,
    /// Tokens of a cache block.
    pub block_size: usize,
}

/// What changes from step to step but not from layer to layer.
#[derive(Clone, Debug)]
pub struct MlaStep {
    /// Sequences, padded.
    pub batch: usize,
    /// Blocks of each, `[batch, max_blocks]` i32.
    pub block_table: Region,
    /// Columns of the block table.
    pub max_blocks: usize,
    /// Tokens in the cache of each, `[batch]` i32; 0 for padding.
    pub seq_lens: Region,
}

/// The kernels for a shape, with the memory between them.
#[derive(Debug)]
pub struct Mla {
    shape: MlaShape,
    max_batch: usize,
    blocks: u32,
    plan: Kernel,
    decode: Kernel,
    combine: Kernel,
    combine_few: Kernel,
    shares: Region,
    part_out: Region,
    part_max_sum: Region,
}

const HEADS: usize = 16;
const WARPS: u32 = 16;
const TILE: usize = 32;
/// More on its way than memory delivers meanwhile makes queries and parts of others wait behind it.
const STAGES: usize = 4;
/// Up to so many sequences, each is spread over many blocks.
const FEW: usize = 16;

impl Mla {
    /// Compiles for `shape` and up to `max_batch` sequences.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`] for other sizes than the kernel's; otherwise as [`Module::load`].
    pub fn new(device: &Device, shape: MlaShape, max_batch: usize) -> Result<Self, GpuError> {
        Self::with_parts(device, shape, max_batch, 0)
    }

    /// With parts left out, for the benchmark: see `mla.cu`.
    #[doc(hidden)]
    pub fn with_parts(
        device: &Device,
        shape: MlaShape,
        max_batch: usize,
        left_out: u32,
    ) -> Result<Self, GpuError> {
        if !shape.latent.is_multiple_of(256)
            || !(shape.latent + shape.rope).is_multiple_of(64)
            || shape.latent > 512
        {
            return Err(GpuError::unsupported(format!("latent {} + {}", shape.latent, shape.rope)));
        }
        if !shape.block_size.is_power_of_two() || max_batch == 0 || max_batch > 1024 {
            return Err(GpuError::unsupported(format!("blocks of {}, batch {max_batch}", shape.block_size)));
        }
        let constants = [
            ("LATENT", shape.latent as i64),
            ("ROPE", shape.rope as i64),
            ("BLOCK_SIZE", shape.block_size as i64),
            ("STAGES", STAGES as i64),
            ("VARIANT", i64::from(left_out)),
        ];
        let module = Module::load(device, Source::Mla, &constants)?;
        // A query, each head a little longer, and what aligns the ring.
        let row = (shape.latent + shape.rope) * 2;
        let ring = STAGES * TILE * row + HEADS * (row + 16) + 1024;
        let blocks = device.num_multiprocessors() as usize;
        let parts = blocks + max_batch;
        Ok(Self {
            shape,
            max_batch,
            blocks: device.num_multiprocessors(),
            plan: module.kernel("mla_plan", 0)?,
            decode: module.kernel("mla_decode", ring)?,
            combine: module.kernel("mla_combine", 0)?,
            combine_few: module.kernel("mla_combine_few", 0)?,
            shares: Region::zeroed(device, (2 * blocks + max_batch) * 16)?,
            part_out: Region::alloc(device, parts * HEADS * shape.latent * 4)?,
            part_max_sum: Region::alloc(device, parts * HEADS * 8)?,
        })
    }

    /// Enqueues what all layers of a step share: who does which part of which sequence.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`], [`GpuError::Unsupported`], [`GpuError::Driver`].
    pub fn plan(&self, stream: &Stream, step: &MlaStep) -> Result<(), GpuError> {
        self.check(step)?;
        let launch = Launch::new(&self.plan, (1, 1), 1024);
        let launch = launch.region(&step.seq_lens).region(&self.shares).size(step.batch)?.u32(self.blocks);
        // SAFETY: mla_plan's arguments; sizes were checked or chosen in `new`.
        unsafe { launch.enqueue(stream) }
    }

    /// Enqueues one layer behind its step's [`plan`](Self::plan): `query` `[batch, 16, latent + rope]`, `cache`
    /// `[blocks, block_size, latent + rope]`, `out` `[batch, 16, latent]`, all bf16. Scores are scaled by `scale`.
    /// Every entry of the block table that the lengths reach names a block of the cache. `early` says that all of this but
    /// the queries and the last token of each sequence was written before the kernel ahead began, so that reading may
    /// begin while that one runs: true for all layers of a step but the first.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`], [`GpuError::Unsupported`], [`GpuError::Driver`].
    #[allow(clippy::too_many_arguments)] // an operation's operands
    pub fn decode(
        &self,
        stream: &Stream,
        step: &MlaStep,
        query: &Region,
        cache: &Region,
        scale: f32,
        out: &Region,
        early: bool,
    ) -> Result<(), GpuError> {
        self.check(step)?;
        let MlaShape { latent, rope, block_size } = self.shape;
        let width = latent + rope;
        query.expect("queries", step.batch * HEADS * width * 2)?;
        out.expect("attention result", step.batch * HEADS * latent * 2)?;
        // Slabs of 64 elements of all tokens.
        let cache_map = MapShape {
            sizes: &[64, cache.len() / (width * 2), width / 64],
            strides: &[width * 2, 128],
            box_sizes: &[64, block_size.min(TILE), 1],
        };
        let cache_map = MapArgument::new(stream.device(), cache, cache_map)?;
        let launch = Launch::new(&self.decode, (self.blocks, 1), (WARPS + 1) * 32).overlap(true);
        let launch =
            launch.map(cache_map, cache).region(query).region(&step.block_table).region(&self.shares);
        let launch = launch.region(&self.part_out).region(&self.part_max_sum).size(step.max_blocks)?;
        let launch = launch.f32(scale * std::f32::consts::LOG2_E).u32(u32::from(early));
        // SAFETY: mla_decode's arguments; sizes were checked or chosen in `new`; block ids are the caller's.
        unsafe { launch.enqueue(stream)? };
        let (combine, heads) =
            if step.batch <= FEW { (&self.combine_few, HEADS) } else { (&self.combine, HEADS / 4) };
        let launch = Launch::new(combine, (step.batch as u32, heads as u32), 256).overlap(true);
        let launch =
            launch.region(&self.part_out).region(&self.part_max_sum).region(&self.shares).region(out);
        let launch = launch.u32(self.blocks).u32(u32::from(early));
        // SAFETY: mla_combine's and mla_combine_few's arguments; sizes were checked or chosen in `new`.
        unsafe { launch.enqueue(stream) }
    }

    /// Makes what steps leave behind unusable, for the check that none reads it.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    #[doc(hidden)]
    pub fn spoil(&self) -> Result<(), GpuError> {
        self.part_out.fill(0xff)?;
        self.part_max_sum.fill(0xff)
    }

    fn check(&self, step: &MlaStep) -> Result<(), GpuError> {
        if step.batch == 0 || step.batch > self.max_batch {
            return Err(GpuError::unsupported(format!("batch {} of {}", step.batch, self.max_batch)));
        }
        step.seq_lens.expect("lengths", step.batch * 4)?;
        step.block_table.expect("block table", step.batch * step.max_blocks * 4)?;
        Ok(())
    }
}
