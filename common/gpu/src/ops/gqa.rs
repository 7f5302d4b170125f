//! Decode attention of a batch over a paged cache of keys and values, several query heads sharing one head of the cache.
use crate::{Device, GpuError, Kernel, Launch, Module, Region, Source, Stream};

/// What changes from step to step but not from layer to layer.
#[derive(Clone, Debug)]
pub struct GqaStep {
    /// Sequences, padded.
    pub batch: usize,
    /// Blocks of each, `[batch, max_blocks]` i32.
    pub block_table: Region,
    /// Columns of the block table.
    pub max_blocks: usize,
    /// Tokens in the cache of each, `[batch]` i32; 0 for padding.
    pub seq_lens: Region,
}

/// The kernels for some heads, with the memory between them.
#[derive(Debug)]
pub struct GqaDecode {
    heads: usize,
    kv: usize,
    dim: usize,
    max_batch: usize,
    /// Blocks that keep the device busy.
    enough: usize,
    decode: Kernel,
    combine: Kernel,
    part_out: Region,
    part_max_sum: Region,
}

const WARPS: usize = 4;
const TILE: usize = 16;
const STAGES: usize = 3;
const MAX_SPLITS: usize = 32;

impl GqaDecode {
    /// Compiles for these heads and up to `max_batch` sequences.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`] for other sizes than the kernel's; otherwise as [`Module::load`].
    pub fn new(
        device: &Device,
        heads: usize,
        kv: usize,
        dim: usize,
        block_size: usize,
        max_batch: usize,
    ) -> Result<Self, GpuError> {
        if kv == 0 || !heads.is_multiple_of(kv) || !(1..=16).contains(&(heads / kv)) {
            return Err(GpuError::unsupported(format!("{heads} heads over {kv} of the cache")));
        }
        if dim == 0 || !dim.is_multiple_of(16) || dim > 256 || block_size == 0 || max_batch == 0 {
            return Err(GpuError::unsupported(format!("heads of {dim}, blocks of {block_size}")));
        }
        let group = heads / kv;
        let constants = [
            ("DIM", dim as i64),
            ("GROUP", group as i64),
            ("BLOCK_SIZE", block_size as i64),
            ("STAGES", STAGES as i64),
        ];
        let module = Module::load(device, Source::Gqa, &constants)?;
        let rings = WARPS * STAGES * 2 * TILE * (dim * 2 + 16);
        let joined = WARPS * group * dim * 4;
        let enough = device.num_multiprocessors() as usize * 2;
        let parts = enough.max(max_batch * kv);
        Ok(Self {
            heads,
            kv,
            dim,
            max_batch,
            enough,
            decode: module.kernel("gqa_decode", rings.max(joined))?,
            combine: module.kernel("gqa_combine", 0)?,
            part_out: Region::alloc(device, parts * group * dim * 4)?,
            part_max_sum: Region::alloc(device, parts * group * 8)?,
        })
    }

    /// Enqueues one layer: `qkv` `[batch, heads + 2 kv, dim]`, of which the queries are read, `(keys, values)`
    /// `[blocks, block_size, kv, dim]`, `out` `[batch, heads, dim]`, all bf16. Scores are scaled by `scale`. Every entry of
    /// the block table that the lengths reach names a block of the cache.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`], [`GpuError::Unsupported`], [`GpuError::Driver`].
    pub fn decode(
        &self,
        stream: &Stream,
        step: &GqaStep,
        qkv: &Region,
        (keys, values): (&Region, &Region),
        scale: f32,
        out: &Region,
    ) -> Result<(), GpuError> {
        let Self { heads, kv, dim, .. } = *self;
        if step.batch == 0 || step.batch > self.max_batch {
            return Err(GpuError::unsupported(format!("batch {} of {}", step.batch, self.max_batch)));
        }
        step.seq_lens.expect("lengths", step.batch * 4)?;
        step.block_table.expect("block table", step.batch * step.max_blocks * 4)?;
        qkv.expect("queries", step.batch * (heads + 2 * kv) * dim * 2)?;
        out.expect("attention result", step.batch * heads * dim * 2)?;
        let splits = (self.enough / (step.batch * kv)).clamp(1, MAX_SPLITS);
        let grid = (splits as u32, (step.batch * kv) as u32);
        let launch = Launch::new(&self.decode, grid, WARPS as u32 * 32).overlap(true);
        let launch = launch.region(qkv).region(keys).region(values).region(&step.block_table);
        let launch = launch.region(&step.seq_lens).region(&self.part_out).region(&self.part_max_sum);
        let launch = launch.size(kv)?.size(step.max_blocks)?.f32(scale * std::f32::consts::LOG2_E);
        // SAFETY: gqa_decode's arguments; sizes were checked or chosen in `new`; block ids are the caller's.
        unsafe { launch.enqueue(stream)? };
        let grid = (step.batch as u32, heads as u32);
        let launch = Launch::new(&self.combine, grid, dim as u32 / 2).overlap(true);
        let launch = launch.region(&self.part_out).region(&self.part_max_sum).region(out);
        // SAFETY: gqa_combine's arguments; sizes were checked or chosen in `new`.
        unsafe { launch.size(kv)?.size(splits)?.enqueue(stream) }
    }
}
