//! Row-wise steps of a decoder layer: embedding, norms, rope and cache write, argmax.
use super::Ahead;
use crate::{Device, GpuError, Kernel, Launch, Module, Region, Source, Stream};

/// The kernels of `rows.cu`.
#[derive(Clone, Debug)]
pub struct Rows {
    rms_norm: Kernel,
    rms_norm_parts: Kernel,
    embed_norm: Kernel,
    mla_write: Kernel,
    gqa_write: Kernel,
    argmax: Kernel,
    pub(super) carry: Kernel,
}

/// Rows on their way through a norm.
#[derive(Clone, Copy, Debug)]
pub struct NormRows<'a> {
    /// `[rows, hidden]` bf16, changed.
    pub residual: &'a Region,
    /// `[hidden]` bf16
    pub weight: &'a Region,
    /// `[rows, hidden]` bf16
    pub out: &'a Region,
    /// The same rows once more, by [`Rows::rms_norm`] alone: for who reads them here, where `out` is another device's memory.
    pub also: Option<&'a Region>,
    /// `[rows, hidden]` f32, added to what is added to the residual, before that is rounded.
    pub more: Option<&'a Region>,
    /// How many.
    pub rows: usize,
    /// Elements of each.
    pub hidden: usize,
    /// Added to the mean of the squares.
    pub epsilon: f32,
    /// Fetched beside it, by [`Rows::rms_norm`] alone.
    pub ahead: Ahead<'a>,
}

impl NormRows<'_> {
    fn check(&self) -> Result<(), GpuError> {
        let Self { residual, weight, out, rows, hidden, .. } = *self;
        if !hidden.is_multiple_of(256) || hidden > 8192 || rows == 0 {
            return Err(GpuError::unsupported(format!("{rows} rows of hidden size {hidden}")));
        }
        residual.expect("residual", rows * hidden * 2)?;
        out.expect("norm result", rows * hidden * 2)?;
        weight.expect("norm", hidden * 2)?;
        if let Some(also) = self.also {
            also.expect("norm result", rows * hidden * 2)?;
        }
        if let Some(more) = self.more {
            more.expect("what is added besides", rows * hidden * 4)?;
        }
        Ok(())
    }

    fn launch<'k>(&self, kernel: &'k Kernel, more_blocks: u32) -> Launch<'k> {
        Launch::new(kernel, (self.rows as u32 + more_blocks, 1), (self.hidden / 8) as u32).overlap(true)
    }
}

/// Which token a row is, for rope and cache.
#[derive(Clone, Copy, Debug)]
pub struct RowPlaces<'a> {
    /// `[rows]` i32
    pub positions: &'a Region,
    /// `[rows]` i64: block * block_size + offset; negative for padding, which is not written.
    pub slots: &'a Region,
    /// `[positions, turned]` f32: of each position `turned / 2` cosines, then as many sines.
    pub cos_sin: &'a Region,
    /// How many rows.
    pub rows: usize,
}

impl RowPlaces<'_> {
    fn check(&self) -> Result<(), GpuError> {
        self.positions.expect("positions", self.rows * 4)?;
        self.slots.expect("slots", self.rows * 8)?;
        Ok(())
    }
}

/// Sizes and operands of [`Rows::mla_write`].
#[derive(Clone, Debug)]
pub struct MlaWrite<'a> {
    /// `[rows, stride]` bf16, of which the first are a row's queries `[heads, nope + rope]`, then its latent and rope key.
    pub projected: &'a Region,
    /// Elements from row to row.
    pub stride: usize,
    /// `[latent]` bf16
    pub latent_norm: &'a Region,
    /// Where the turned rope parts of the queries go.
    pub query: MlaQueries<'a>,
    /// `[blocks, block_size, latent + rope]` bf16
    pub cache: &'a Region,
    /// Elements of the latent.
    pub latent: usize,
    /// Elements of a projected query before its rope part.
    pub nope: usize,
    /// Elements of the rope key.
    pub rope: usize,
    /// Query heads.
    pub heads: usize,
    /// Whether neighbours turn together; otherwise halves do.
    pub interleaved: bool,
    /// The norm's.
    pub epsilon: f32,
    /// Fetched beside it.
    pub ahead: Ahead<'a>,
}

/// Queries of latent attention, whose rope parts [`Rows::mla_write`] turns.
#[derive(Clone, Copy, Debug)]
pub enum MlaQueries<'a> {
    /// To the ends of rows `[rows, heads, latent + rope]` bf16, whose beginnings are the absorbed queries' business.
    Absorbed(&'a Region),
    /// Where they are, in the projected rows.
    InPlace,
}

/// Sizes and operands of [`Rows::gqa_write`].
#[derive(Clone, Debug)]
pub struct GqaWrite<'a> {
    /// `[rows, heads + 2 kv, dim]` bf16: queries, which are changed in place, keys, values.
    pub qkv: &'a Region,
    /// `[dim]` bf16 each, for queries and for keys.
    pub norms: Option<(&'a Region, &'a Region)>,
    /// `[blocks, block_size, kv, dim]` bf16
    pub keys: &'a Region,
    /// The same.
    pub values: &'a Region,
    /// Query heads.
    pub heads: usize,
    /// Heads of the cache.
    pub kv: usize,
    /// Elements of a head.
    pub dim: usize,
    /// Elements of a head that turn, halves together.
    pub rotary: usize,
    /// The norms'.
    pub epsilon: f32,
}

impl Rows {
    /// # Errors
    /// As [`Module::load`].
    pub fn new(device: &Device) -> Result<Self, GpuError> {
        let module = Module::load(device, Source::Rows, &[])?;
        let kernel = |name| {
            let kernel = module.kernel(name, 0)?;
            // One split for all that overlap.
            kernel.prefer_shared_memory()?;
            Ok::<_, GpuError>(kernel)
        };
        Ok(Self {
            rms_norm: kernel("rms_norm")?,
            rms_norm_parts: kernel("rms_norm_parts")?,
            embed_norm: kernel("embed_norm")?,
            mla_write: kernel("mla_write")?,
            gqa_write: kernel("gqa_write")?,
            argmax: kernel("argmax")?,
            carry: kernel("carry")?,
        })
    }

    /// `residual += delta` (when there is one, `[rows, hidden]` bf16; [`more`](NormRows::more) goes with it), then
    /// `out = rms_norm(residual) * weight`.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`]; [`GpuError::Unsupported`] for `more` without a delta, or unless `hidden` is a multiple of 256 up to 8192.
    pub fn rms_norm(
        &self,
        stream: &Stream,
        delta: Option<&Region>,
        norm: &NormRows<'_>,
    ) -> Result<(), GpuError> {
        norm.check()?;
        if delta.is_none() && norm.more.is_some() {
            return Err(GpuError::unsupported("more to add, without a delta"));
        }
        if let Some(delta) = delta {
            delta.expect("what is added", norm.rows * norm.hidden * 2)?;
        }
        let launch = norm
            .launch(&self.rms_norm, norm.ahead.blocks(norm.hidden / 8))
            .maybe(delta)
            .maybe(norm.more)
            .region(norm.residual)
            .region(norm.weight);
        let launch =
            launch.region(norm.out).maybe(norm.also).size(norm.hidden)?.f32(norm.epsilon).size(norm.rows)?;
        let launch = norm.ahead.arguments(launch)?;
        // SAFETY: rms_norm's arguments; sizes were checked.
        unsafe { launch.enqueue(stream) }
    }

    /// The same with several partial sums, `[rows, hidden]` f32 each: `addresses` holds where they are, u64 each, in the
    /// order in which they are added.
    ///
    /// # Errors
    /// As for [`rms_norm`](Self::rms_norm).
    pub fn rms_norm_parts(
        &self,
        stream: &Stream,
        addresses: &Region,
        parts: &[Region],
        norm: &NormRows<'_>,
    ) -> Result<(), GpuError> {
        norm.check()?;
        addresses.expect("addresses of the partial sums", parts.len() * 8)?;
        for part in parts {
            part.expect("partial sum", norm.rows * norm.hidden * 4)?;
            stream.keep(part);
        }
        let launch = norm.launch(&self.rms_norm_parts, 0).region(addresses).size(parts.len())?;
        let launch = launch.maybe(norm.more).region(norm.residual).region(norm.weight).region(norm.out);
        // SAFETY: rms_norm_parts' arguments; sizes were checked; the addresses are the caller's, of the parts it gave.
        unsafe { launch.size(norm.hidden)?.f32(norm.epsilon).enqueue(stream) }
    }

    /// `residual = table[ids]`, then `out = rms_norm(residual) * weight`. `ids` `[rows]` i32, `table` `[vocab, hidden]`
    /// bf16.
    ///
    /// # Errors
    /// As for [`rms_norm`](Self::rms_norm).
    pub fn embed_norm(
        &self,
        stream: &Stream,
        ids: &Region,
        (table, vocab): (&Region, usize),
        norm: &NormRows<'_>,
    ) -> Result<(), GpuError> {
        norm.check()?;
        ids.expect("token ids", norm.rows * 4)?;
        table.expect("embedding", vocab * norm.hidden * 2)?;
        let launch = norm.launch(&self.embed_norm, 0).region(ids).region(table).region(norm.residual);
        let launch = launch.region(norm.weight).region(norm.out).size(vocab)?.size(norm.hidden)?;
        // SAFETY: embed_norm's arguments; sizes were checked; ids are kept inside the table by the kernel.
        unsafe { launch.f32(norm.epsilon).enqueue(stream) }
    }

    /// Norms the latent, turns the rope key, writes both into the cache, and turns the queries.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`]; [`GpuError::Unsupported`] for odd sizes. Slots and positions are the caller's to check.
    pub fn mla_write(
        &self,
        stream: &Stream,
        rows: &RowPlaces<'_>,
        write: &MlaWrite<'_>,
    ) -> Result<(), GpuError> {
        let MlaWrite { stride, latent, nope, rope, heads, .. } = *write;
        let projected = heads * (nope + rope) + latent + rope;
        if !latent.is_multiple_of(4)
            || latent > 1024
            || !rope.is_multiple_of(2)
            || !stride.is_multiple_of(4)
            || stride < projected
        {
            return Err(GpuError::unsupported(format!("latent {latent} + {rope}, rows of {stride}")));
        }
        if !(heads * (nope + rope)).is_multiple_of(4) {
            return Err(GpuError::unsupported(format!("{heads} heads of {nope} + {rope}")));
        }
        rows.check()?;
        write.projected.expect("projected rows", ((rows.rows - 1) * stride + projected) * 2)?;
        write.latent_norm.expect("latent norm", latent * 2)?;
        let (query, query_row, query_head, query_at) = match write.query {
            MlaQueries::Absorbed(query) => (query, heads * (latent + rope), latent + rope, latent),
            MlaQueries::InPlace => (write.projected, stride, nope + rope, nope),
        };
        if matches!(write.query, MlaQueries::Absorbed(_)) {
            query.expect("queries", rows.rows * query_row * 2)?;
        }
        let parts = 1 + heads.div_ceil(4);
        let grid = (rows.rows as u32 + write.ahead.blocks(parts * 128), parts as u32);
        let launch = Launch::new(&self.mla_write, grid, 128).overlap(true);
        let launch = launch.region(write.projected).region(write.latent_norm).region(query);
        let launch =
            launch.region(rows.cos_sin).region(rows.positions).region(rows.slots).region(write.cache);
        let launch = launch.size(stride)?.size(query_row)?.size(query_head)?.size(query_at)?;
        let launch = launch.size(latent)?.size(nope)?.size(rope)?.size(heads)?;
        let launch = launch.u32(u32::from(write.interleaved)).f32(write.epsilon).size(rows.rows)?;
        let launch = write.ahead.arguments(launch)?;
        // SAFETY: mla_write's arguments; sizes were checked; slots and positions are the caller's.
        unsafe { launch.enqueue(stream) }
    }

    /// Norms (where there are norms) and turns queries and keys, and writes keys and values into the cache.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`]; [`GpuError::Unsupported`] for heads beyond 256 elements. Slots and positions are the
    /// caller's to check.
    pub fn gqa_write(
        &self,
        stream: &Stream,
        rows: &RowPlaces<'_>,
        write: &GqaWrite<'_>,
    ) -> Result<(), GpuError> {
        let GqaWrite { heads, kv, dim, rotary, .. } = *write;
        if dim > 256 || rotary > dim || !rotary.is_multiple_of(2) || heads == 0 || kv == 0 {
            return Err(GpuError::unsupported(format!("heads of {dim}, of which {rotary} turn")));
        }
        rows.check()?;
        write.qkv.expect("queries, keys and values", rows.rows * (heads + 2 * kv) * dim * 2)?;
        if let Some((query, key)) = write.norms {
            query.expect("query norm", dim * 2)?;
            key.expect("key norm", dim * 2)?;
        }
        let grid = (rows.rows as u32, (heads + 2 * kv) as u32);
        let launch = Launch::new(&self.gqa_write, grid, 32).overlap(true).region(write.qkv);
        let launch = launch.maybe(write.norms.map(|n| n.0)).maybe(write.norms.map(|n| n.1));
        let launch = launch.region(rows.cos_sin).region(rows.positions).region(rows.slots);
        let launch = launch.region(write.keys).region(write.values).size(heads)?.size(kv)?.size(dim)?;
        // SAFETY: gqa_write's arguments; sizes were checked; slots and positions are the caller's.
        unsafe { launch.size(rotary)?.f32(write.epsilon).enqueue(stream) }
    }

    /// Greedy tokens: the index of each row's largest logit, or -1 when the row has one that is not a number or is
    /// infinitely large. `logits` `[rows, vocab]` bf16, `out` `[rows]` i32.
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
        // As many blocks a row as all run at once.
        let blocks = if rows <= 64 { 8 } else { 4 };
        let launch = Launch::new(&self.argmax, (blocks, rows as u32), 512).overlap(true).cluster(blocks);
        let launch = launch.region(logits).region(out).size(vocab)?;
        // SAFETY: argmax's arguments; sizes were checked.
        unsafe { launch.enqueue(stream) }
    }
}
