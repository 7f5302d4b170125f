//! Row-wise steps of a decoder layer: norms, rope and cache write, argmax.
use crate::{Device, GpuError, Kernel, Launch, Module, Region, Source, Stream};

/// The kernels of `rows.cu`.
#[derive(Clone, Debug)]
pub struct Rows {
    rms_norm: Kernel,
    mla_write: Kernel,
    argmax: Kernel,
}

/// Sizes and inputs of [`Rows::mla_write`].
#[derive(Clone, Debug)]
pub struct MlaWrite<'a> {
    /// `[rows, latent + rope]` bf16, as projected.
    pub kv: &'a Region,
    /// `[latent]` bf16
    pub latent_norm: &'a Region,
    /// `[rows, heads, query_stride]` bf16; its rope part is rotated in place.
    pub query: &'a Region,
    /// `[positions, rope]` f32: of each position `rope / 2` cosines, then as many sines.
    pub cos_sin: &'a Region,
    /// `[rows]` i32
    pub positions: &'a Region,
    /// `[rows]` i64: block * block_size + offset; negative for padding, which is not written.
    pub slots: &'a Region,
    /// `[blocks, block_size, latent + rope]` bf16
    pub cache: &'a Region,
    /// Elements of the latent.
    pub latent: usize,
    /// Elements of the rope key.
    pub rope: usize,
    /// Query heads.
    pub heads: usize,
    /// Elements of a query head.
    pub query_stride: usize,
    /// Where its rope part begins.
    pub query_rope: usize,
    /// The norm's.
    pub epsilon: f32,
}

impl Rows {
    /// # Errors
    /// As [`Module::load`].
    pub fn new(device: &Device) -> Result<Self, GpuError> {
        let module = Module::load(device, Source::Rows, &[])?;
        let kernel = |name| module.kernel(name, 0);
        Ok(Self { rms_norm: kernel("rms_norm")?, mla_write: kernel("mla_write")?, argmax: kernel("argmax")? })
    }

    /// `residual += delta` (when there is one), then `out = rms_norm(residual) * weight`; all `[rows, hidden]` bf16.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`]; [`GpuError::Unsupported`] unless `hidden` is a multiple of 256 up to 8192.
    #[allow(clippy::too_many_arguments)] // an operation's operands
    pub fn rms_norm(
        &self,
        stream: &Stream,
        delta: Option<&Region>,
        residual: &Region,
        weight: &Region,
        out: &Region,
        (rows, hidden): (usize, usize),
        epsilon: f32,
    ) -> Result<(), GpuError> {
        if !hidden.is_multiple_of(256) || hidden > 8192 {
            return Err(GpuError::unsupported(format!("hidden size {hidden}")));
        }
        for (what, region) in [("residual", residual), ("norm result", out)] {
            region.expect(what, rows * hidden * 2)?;
        }
        if let Some(delta) = delta {
            delta.expect("what is added", rows * hidden * 2)?;
        }
        weight.expect("norm", hidden * 2)?;
        let launch = Launch::new(&self.rms_norm, (rows as u32, 1), (hidden / 8) as u32).overlap(true);
        let launch =
            launch.maybe(delta).region(residual).region(weight).region(out).size(hidden)?.f32(epsilon);
        // SAFETY: rms_norm's arguments; sizes were checked.
        unsafe { launch.enqueue(stream) }
    }

    /// Norms the latent, rotates the rope key, writes both into the cache, and rotates the queries.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`]; [`GpuError::Unsupported`] unless the rope part is 64 wide and the latent a multiple of
    /// 128. Slots and positions are the caller's to check.
    pub fn mla_write(&self, stream: &Stream, rows: usize, write: &MlaWrite<'_>) -> Result<(), GpuError> {
        let MlaWrite { latent, rope, heads, query_stride, query_rope, .. } = *write;
        if rope != 64 || !latent.is_multiple_of(128) || latent > 4096 || query_rope + rope > query_stride {
            return Err(GpuError::unsupported(format!("latent {latent} + {rope}")));
        }
        write.kv.expect("latents", rows * (latent + rope) * 2)?;
        write.latent_norm.expect("latent norm", latent * 2)?;
        write.query.expect("queries", rows * heads * query_stride * 2)?;
        write.positions.expect("positions", rows * 4)?;
        write.slots.expect("slots", rows * 8)?;
        let launch = Launch::new(&self.mla_write, (rows as u32, 1), (latent / 4) as u32).overlap(true);
        let launch =
            launch.region(write.kv).region(write.latent_norm).region(write.query).region(write.cos_sin);
        let launch = launch.region(write.positions).region(write.slots).region(write.cache);
        let launch = launch.size(latent)?.size(rope)?.size(heads)?.size(query_stride)?.size(query_rope)?;
        // SAFETY: mla_write's arguments; sizes were checked; slots and positions are the caller's.
        unsafe { launch.f32(write.epsilon).enqueue(stream) }
    }

    /// Greedy tokens: the index of each row's largest logit. `logits` `[rows, vocab]` bf16, `out` `[rows]` i32.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`]; [`GpuError::Unsupported`] unless `vocab` is a multiple of 8.
    pub fn argmax(
        &self,
        stream: &Stream,
        logits: &Region,
        out: &Region,
        rows: usize,
        vocab: usize,
    ) -> Result<(), GpuError> {
        if !vocab.is_multiple_of(8) {
            return Err(GpuError::unsupported(format!("vocabulary of {vocab}")));
        }
        logits.expect("logits", rows * vocab * 2)?;
        out.expect("tokens", rows * 4)?;
        let launch = Launch::new(&self.argmax, (rows as u32, 1), 1024).overlap(true);
        let launch = launch.region(logits).region(out).size(vocab)?;
        // SAFETY: argmax's arguments; sizes were checked.
        unsafe { launch.enqueue(stream) }
    }
}
