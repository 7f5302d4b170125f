//! The loops: one row's queries against a range of its tokens, with the online softmax of FlashAttention (arXiv
//! 2205.14135). Blocks are read where they lie, once for all heads that share them.
//!
//! Tokens go by in tiles. For a tile, [`products`] keeps scores of a few heads and tokens at a time in registers, then the
//! weights are applied to the values the same way, so that each key and value is loaded once per four heads.
use std::ops::Range;

use crate::exp::exponentials;
use crate::simd::{Element, Isa, Portable, Simd, for_each_isa};

mod products;

use products::{Ahead, score_all, weigh_all};

/// Tokens whose scores are held at once.
pub(super) const TILE: usize = 64;

/// Heads that share a load of a key.
const HEADS: usize = 4;

/// Shapes of an attention call, elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dims {
    pub(super) num_kv_heads: usize,
    /// Query heads per key/value head.
    pub(super) group: usize,
    pub(super) key_dim: usize,
    pub(super) value_dim: usize,
    /// From one token's keys to the next one's.
    pub(super) key_stride: usize,
    pub(super) value_stride: usize,
    pub(super) block_size: usize,
}

/// One row's queries, scaled, and where its result grows: unnormalised, with the maximum and the sum of its weights.
pub(super) struct RowState {
    /// `[num_heads, key_dim]`
    pub(super) queries: Vec<f32>,
    /// `[num_heads, value_dim]`
    pub(super) acc: Vec<f32>,
    /// `[num_heads]`
    pub(super) max: Vec<f32>,
    /// `[num_heads]`
    pub(super) sum: Vec<f32>,
    scores: Vec<f32>,
}

impl RowState {
    pub(super) fn new(dims: &Dims) -> Self {
        let heads = dims.num_kv_heads * dims.group;
        Self {
            queries: vec![0.0; heads * dims.key_dim],
            acc: vec![0.0; heads * dims.value_dim],
            max: vec![f32::NEG_INFINITY; heads],
            sum: vec![0.0; heads],
            scores: vec![0.0; dims.group * TILE],
        }
    }

    pub(super) fn reset(&mut self) {
        self.acc.fill(0.0);
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
    }
}

for_each_isa! {
    /// Attends to tokens `from..to` of the sequence whose blocks are `table`.
    ///
    /// # Safety
    /// `keys` and `values` are readable for every token of every block in `table` (strides in `dims`), `to` is at most
    /// `table.len() * block_size`, and the state was made for `dims`.
    pub(super) fn attend(
        dims: &Dims,
        keys: *const E,
        values: *const E,
        table: &[u32],
        tokens: Range<usize>,
        state: &mut RowState,
    ) = attend_with
}

/// # Safety
/// As for [`attend`], and the CPU has the instructions of `S`.
#[inline(always)]
unsafe fn attend_with<S: Simd, E: Element>(
    dims: &Dims,
    keys: *const E,
    values: *const E,
    table: &[u32],
    tokens: Range<usize>,
    state: &mut RowState,
) {
    let mut now = Addresses { keys: [keys; TILE], values: [values; TILE], count: 0 };
    let mut next = now;
    let fill = |to: &mut Addresses<E>, from: usize| {
        to.count = TILE.min(tokens.end.saturating_sub(from));
        for t in 0..to.count {
            let token = from + t;
            let slot = table[token / dims.block_size] as usize * dims.block_size + token % dims.block_size;
            // SAFETY: the block is in the cache, says the caller.
            unsafe {
                to.keys[t] = keys.add(slot * dims.key_stride);
                to.values[t] = values.add(slot * dims.value_stride);
            }
        }
    };
    fill(&mut now, tokens.start);
    let mut from = tokens.start;
    while now.count > 0 {
        from += now.count;
        fill(&mut next, from);
        for kv_head in 0..dims.num_kv_heads {
            // What will be read after this head of this tile.
            let ahead = match kv_head + 1 < dims.num_kv_heads {
                true => (&now.keys[..now.count], (kv_head + 1) * dims.key_dim),
                false => (&next.keys[..next.count], 0),
            };
            // SAFETY: the addresses are the tile's tokens; heads lie one after the other within a token.
            unsafe { tile::<S, E>(dims, kv_head, &now, ahead, state) };
        }
        std::mem::swap(&mut now, &mut next);
    }
}

/// Where the tokens of a tile begin, for the first `count` of them.
#[derive(Clone, Copy)]
struct Addresses<E> {
    keys: [*const E; TILE],
    values: [*const E; TILE],
    count: usize,
}

/// One tile of tokens for the query heads of one key/value head.
///
/// # Safety
/// As for [`attend_with`]; the addresses are those of tokens of the cache.
#[inline(always)]
unsafe fn tile<S: Simd, E: Element>(
    dims: &Dims,
    kv_head: usize,
    now: &Addresses<E>,
    ahead: (&[*const E], usize),
    state: &mut RowState,
) {
    let (group, count) = (dims.group, now.count);
    let (key_of, value_of) = (&now.keys[..count], &now.values[..count]);
    let first = kv_head * group;
    let queries = state.queries[first * dims.key_dim..][..group * dims.key_dim].as_ptr();
    let acc = state.acc[first * dims.value_dim..][..group * dims.value_dim].as_mut_ptr();
    let scores = state.scores[..group * TILE].as_mut_ptr();

    // Values that are part of the keys come with them.
    let values_ahead = match std::ptr::eq(key_of[0], value_of[0]) {
        true => &[],
        false => value_of,
    };
    let parts = group.div_ceil(HEADS);
    let mut h = 0;
    while h < group {
        // SAFETY: heads h.. of this group have `key_dim` queries and TILE scores each.
        unsafe {
            let (q, s) = (queries.add(h * dims.key_dim), scores.add(h * TILE));
            let offset = kv_head * dims.key_dim;
            let ahead = Ahead::part(values_ahead, kv_head * dims.value_dim, h / HEADS, parts);
            match (group - h).min(HEADS) {
                1 => score_all::<S, E, 1, 4>(q, dims, key_of, offset, ahead, s),
                2 => score_all::<S, E, 2, 4>(q, dims, key_of, offset, ahead, s),
                3 => score_all::<S, E, 3, 4>(q, dims, key_of, offset, ahead, s),
                _ => score_all::<S, E, 4, 2>(q, dims, key_of, offset, ahead, s),
            }
        }
        h += HEADS;
    }

    let mut keep = [1.0f32; HEADS];
    let mut h = 0;
    while h < group {
        let heads = (group - h).min(HEADS);
        for (i, keep) in keep.iter_mut().enumerate().take(heads) {
            // SAFETY: the scores of head h + i, of which nothing else holds a reference.
            let row = unsafe { std::slice::from_raw_parts_mut(scores.add((h + i) * TILE), count) };
            let head = first + h + i;
            let max = row.iter().fold(state.max[head], |a, &b| a.max(b));
            *keep = (state.max[head] - max).exp();
            state.max[head] = max;
            state.sum[head] = state.sum[head] * *keep + exponentials(row, max);
        }
        // SAFETY: heads h.. of this group have TILE weights and `value_dim` accumulators each.
        unsafe {
            let (p, a) = (scores.add(h * TILE), acc.add(h * dims.value_dim));
            let offset = kv_head * dims.value_dim;
            let ahead = Ahead::part(ahead.0, ahead.1, h / HEADS, parts);
            match heads {
                1 => weigh_all::<S, E, 1>(p, &keep, value_of, offset, ahead, dims.value_dim, a),
                2 => weigh_all::<S, E, 2>(p, &keep, value_of, offset, ahead, dims.value_dim, a),
                3 => weigh_all::<S, E, 3>(p, &keep, value_of, offset, ahead, dims.value_dim, a),
                _ => weigh_all::<S, E, 4>(p, &keep, value_of, offset, ahead, dims.value_dim, a),
            }
        }
        h += HEADS;
    }
}
