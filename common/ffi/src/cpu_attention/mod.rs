//! Attention of single rows over a paged KV cache, on the CPU: what decode does, and short pieces of a prompt.
//!
//! libtorch can only do this by copying every block of the context into one tensor first, which moves three times the
//! bytes. Here the blocks are read where they lie. Grouped-query attention and DeepSeek's latent attention (absorbed:
//! one key/value head whose values are the first part of its keys) are the same loops with other [`CacheView`]s.
//!
//! This file checks shapes and bounds and splits the work over threads; `kernel` has the loops.
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use tch::{Kind, Tensor};

use crate::Crew;
use crate::simd::{Bf16, Element, Isa};
use crate::views::{Rows3, ShapeError, check_cpu, ensure};

mod kernel;

use kernel::{Dims, RowState};

/// Multiply-adds of one share of the work: some microseconds, so that handing it over costs less than it takes.
const WORK_PER_SHARE: usize = 128 << 10;

/// More than one, so that a thread that comes late leaves the others something to take over.
const SHARES_PER_THREAD: usize = 2;

/// One layer of a paged cache.
#[derive(Clone, Copy)]
pub struct CacheView<'a> {
    /// `[num_blocks, block_size, ..]`, contiguous, f32 or bf16; a token starts with its keys, `[num_kv_heads, key_dim]`.
    pub keys: &'a Tensor,
    /// The same for values, `[num_kv_heads, value_dim]`; may be the tensor of the keys.
    pub values: &'a Tensor,
    /// Heads in the cache.
    pub num_kv_heads: usize,
    /// Elements of a key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
}

/// Which rows attend to what.
#[derive(Clone, Debug, Default)]
pub struct PagedRows {
    /// Blocks of all sequences, one table after the other.
    pub blocks: Vec<u32>,
    /// The rows.
    pub rows: Vec<PagedRow>,
}

/// One row.
#[derive(Clone, Debug)]
pub struct PagedRow {
    /// Its index in the queries and in the output.
    pub row: usize,
    /// Its sequence's table within [`PagedRows::blocks`].
    pub table: Range<usize>,
    /// How many tokens it attends to, from the first on; at least 1.
    pub num_tokens: usize,
}

/// `out[row] = softmax(scale * queries[row] · keys) · values`, per head, for every row of `rows`.
///
/// `queries` are parts `[num_rows, num_heads, len]` whose lengths add up to `key_dim` (so that the latent and the rope
/// part of a query need not be joined); `out` is `[num_rows, num_heads, value_dim]`. Both may be strided views; all
/// tensors have the cache's dtype. Sums are in f32. The crew shares rows, and long contexts of one, between its threads.
///
/// # Errors
/// [`ShapeError`] when something does not fit; nothing was written then.
pub fn paged_attention(
    queries: &[&Tensor],
    cache: &CacheView<'_>,
    rows: &PagedRows,
    scale: f64,
    out: &Tensor,
    crew: &Crew,
) -> Result<(), ShapeError> {
    match cache.keys.kind() {
        Kind::Float => run::<f32>(Kind::Float, queries, cache, rows, scale, out, crew),
        Kind::BFloat16 => run::<Bf16>(Kind::BFloat16, queries, cache, rows, scale, out, crew),
        other => Err(ShapeError(format!("a {other:?} cache; f32 and bf16 are served"))),
    }
}

/// Everything the threads share.
struct Job<'a, E> {
    isa: Isa,
    dims: Dims,
    keys: *const E,
    values: *const E,
    queries: Vec<Rows3<E>>,
    scale: f32,
    rows: &'a PagedRows,
    out: Rows3<E>,
}

// SAFETY: threads only read through `keys`, `values` and `queries`, and write disjoint rows of `out`; the tensors that
// own the memory are borrowed by `paged_attention`, which ends no sooner than every thread's work on this.
unsafe impl<E: Element> Sync for Job<'_, E> {}

impl<'a, E: Element> Job<'a, E> {
    /// Compares everything with everything.
    fn new(
        kind: Kind,
        queries: &[&Tensor],
        cache: &CacheView<'_>,
        rows: &'a PagedRows,
        scale: f64,
        out: &Tensor,
    ) -> Result<Self, ShapeError> {
        let (num_blocks, dims) = cache_dims(cache, kind)?;
        let queries =
            queries.iter().map(|q| Rows3::<E>::new("queries", q, kind)).collect::<Result<Vec<_>, _>>()?;
        let out = Rows3::new("out", out, kind)?;
        let heads = out.heads;
        ensure!(
            heads > 0 && heads % dims.num_kv_heads == 0,
            "{heads} query heads for {} key/value heads",
            dims.num_kv_heads
        );
        let dims = Dims { group: heads / dims.num_kv_heads, ..dims };
        let len: usize = queries.iter().map(|q| q.len).sum();
        ensure!(len == dims.key_dim, "queries of {len} elements, keys of {}", dims.key_dim);
        ensure!(out.len == dims.value_dim, "results of {} elements, values of {}", out.len, dims.value_dim);
        for q in &queries {
            ensure!(
                q.heads == heads && q.rows == out.rows,
                "queries for {} rows of {} heads, results for {} of {heads}",
                q.rows,
                q.heads,
                out.rows
            );
        }
        ensure!(out.is_injective(), "results overlap one another");
        let span = out.span();
        ensure!(
            queries.iter().map(Rows3::span).all(|q| q.end <= span.start || span.end <= q.start),
            "results overlap the queries"
        );
        check_rows(rows, out.rows, num_blocks, dims.block_size)?;

        let (keys, values) = (cache.keys.data_ptr().cast_const(), cache.values.data_ptr().cast_const());
        let (keys, values) = (keys.cast(), values.cast());
        Ok(Self { isa: Isa::best(), dims, keys, values, queries, scale: scale as f32, rows, out })
    }
}

/// A range of one row's tokens: the unit that threads share out.
struct Piece {
    index: usize,
    tokens: Range<usize>,
}

fn run<E: Element>(
    kind: Kind,
    queries: &[&Tensor],
    cache: &CacheView<'_>,
    rows: &PagedRows,
    scale: f64,
    out: &Tensor,
    crew: &Crew,
) -> Result<(), ShapeError> {
    if rows.rows.is_empty() {
        return Ok(());
    }
    let job = Job::<E>::new(kind, queries, cache, rows, scale, out)?;
    let work_per_token = job.out.heads * (job.dims.key_dim + job.dims.value_dim);
    let tokens: usize = rows.rows.iter().map(|row| row.num_tokens).sum();
    let most = if crew.num_threads() == 1 { 1 } else { SHARES_PER_THREAD * crew.num_threads() };
    let shares = (tokens * work_per_token / WORK_PER_SHARE).clamp(1, most);
    let shares = share_out(rows, tokens.div_ceil(shares));
    if let [only] = &shares[..] {
        attend_share(&job, only);
        return Ok(());
    }
    // Each share has a place of its own: nobody waits for another's.
    let cut: Vec<Mutex<Vec<(usize, RowState)>>> = shares.iter().map(|_| Mutex::default()).collect();
    crew.run(shares.len(), &|index| {
        let parts = attend_share(&job, &shares[index]);
        *cut[index].lock().unwrap_or_else(PoisonError::into_inner) = parts;
    });
    let parts = cut.into_iter().flat_map(|parts| parts.into_inner().unwrap_or_else(PoisonError::into_inner));
    merge(&job, parts.collect());
    Ok(())
}

fn cache_dims(cache: &CacheView<'_>, kind: Kind) -> Result<(usize, Dims), ShapeError> {
    let mut strides = [0; 2];
    for (stride, (what, tensor, dim)) in strides
        .iter_mut()
        .zip([("keys", cache.keys, cache.key_dim), ("values", cache.values, cache.value_dim)])
    {
        check_cpu(what, tensor, kind)?;
        let size = tensor.size();
        ensure!(tensor.is_contiguous() && size.len() >= 3, "{what}: shape {size:?}, expected whole blocks");
        ensure!(size[..2] == cache.keys.size()[..2], "{what}: other blocks than the keys");
        *stride = size[2..].iter().product::<i64>() as usize;
        ensure!(
            dim > 0 && cache.num_kv_heads > 0 && cache.num_kv_heads * dim <= *stride,
            "{what}: {} heads of {dim} in {} elements a token",
            cache.num_kv_heads,
            *stride
        );
    }
    let size = cache.keys.size();
    let dims = Dims {
        num_kv_heads: cache.num_kv_heads,
        group: 1,
        key_dim: cache.key_dim,
        value_dim: cache.value_dim,
        key_stride: strides[0],
        value_stride: strides[1],
        block_size: size[1] as usize,
    };
    Ok((size[0] as usize, dims))
}

fn check_rows(
    rows: &PagedRows,
    num_rows: usize,
    num_blocks: usize,
    block_size: usize,
) -> Result<(), ShapeError> {
    if let Some(block) = rows.blocks.iter().find(|&&block| block as usize >= num_blocks) {
        return Err(ShapeError(format!("block {block} of {num_blocks}")));
    }
    let mut seen = vec![false; num_rows];
    for row in &rows.rows {
        ensure!(row.row < num_rows, "row {} of {num_rows}", row.row);
        ensure!(!std::mem::replace(&mut seen[row.row], true), "row {} twice", row.row);
        ensure!(
            row.table.start <= row.table.end && row.table.end <= rows.blocks.len(),
            "row {}: no such block table",
            row.row
        );
        ensure!(
            row.num_tokens >= 1 && row.num_tokens <= row.table.len() * block_size,
            "row {}: {} tokens in {} blocks of {block_size}",
            row.row,
            row.num_tokens,
            row.table.len()
        );
    }
    Ok(())
}

/// Cuts the rows, in order, into shares of `per_share` tokens; a row may be cut too.
fn share_out(rows: &PagedRows, per_share: usize) -> Vec<Vec<Piece>> {
    let mut shares = vec![Vec::new()];
    let mut room = per_share;
    for (index, row) in rows.rows.iter().enumerate() {
        let mut from = 0;
        while from < row.num_tokens {
            if room == 0 {
                shares.push(Vec::new());
                room = per_share;
            }
            let to = row.num_tokens.min(from + room);
            room -= to - from;
            shares.last_mut().expect("never empty").push(Piece { index, tokens: from..to });
            from = to;
        }
    }
    shares
}

/// Does one thread's share: whole rows are written, cut ones returned.
fn attend_share<E: Element>(job: &Job<'_, E>, share: &[Piece]) -> Vec<(usize, RowState)> {
    let mut parts = Vec::new();
    let mut state = RowState::new(&job.dims);
    for piece in share {
        let row = &job.rows.rows[piece.index];
        load_queries(job, row.row, &mut state);
        state.reset();
        let table = &job.rows.blocks[row.table.clone()];
        // SAFETY: `check_rows` compared every block and the number of tokens with the cache, whose shape `cache_dims`
        // took from the tensors; the state was made for these dims.
        unsafe {
            kernel::attend(job.isa, &job.dims, job.keys, job.values, table, piece.tokens.clone(), &mut state);
        }
        if piece.tokens.len() == row.num_tokens {
            write_row(job, row.row, &state);
        } else {
            parts.push((row.row, std::mem::replace(&mut state, RowState::new(&job.dims))));
        }
    }
    parts
}

fn load_queries<E: Element>(job: &Job<'_, E>, row: usize, state: &mut RowState) {
    for (head, to) in state.queries.chunks_exact_mut(job.dims.key_dim).enumerate() {
        let mut to = &mut to[..];
        for part in &job.queries {
            // SAFETY: row and head are within the shape, which `Job::new` compared; the last dimension is contiguous.
            let from = unsafe { std::slice::from_raw_parts(part.at(row, head), part.len) };
            let (now, rest) = to.split_at_mut(part.len);
            for (to, from) in now.iter_mut().zip(from) {
                *to = from.to_f32() * job.scale;
            }
            to = rest;
        }
    }
}

fn write_row<E: Element>(job: &Job<'_, E>, row: usize, state: &RowState) {
    for (head, from) in state.acc.chunks_exact(job.dims.value_dim).enumerate() {
        let norm = 1.0 / state.sum[head];
        // SAFETY: row and head are within the shape, which `Job::new` compared; no other thread has this row, and nothing
        // else refers to the memory of `out` while the engine's thread is in this call.
        let to = unsafe { std::slice::from_raw_parts_mut(job.out.at(row, head), job.dims.value_dim) };
        for (to, from) in to.iter_mut().zip(from) {
            *to = E::from_f32(from * norm);
        }
    }
}

/// Joins the parts of each row that was cut; a row's parts are neighbours.
fn merge<E: Element>(job: &Job<'_, E>, mut parts: Vec<(usize, RowState)>) {
    while let Some((row, mut whole)) = parts.pop() {
        while let Some((_, part)) = parts.pop_if(|(other, _)| *other == row) {
            for head in 0..whole.max.len() {
                let max = whole.max[head].max(part.max[head]);
                let (a, b) = ((whole.max[head] - max).exp(), (part.max[head] - max).exp());
                whole.max[head] = max;
                whole.sum[head] = whole.sum[head] * a + part.sum[head] * b;
                let range = head * job.dims.value_dim..(head + 1) * job.dims.value_dim;
                for (x, y) in whole.acc[range.clone()].iter_mut().zip(&part.acc[range]) {
                    *x = *x * a + *y * b;
                }
            }
        }
        write_row(job, row, &whole);
    }
}

#[cfg(test)]
mod tests;
