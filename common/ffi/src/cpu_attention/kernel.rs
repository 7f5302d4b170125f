//! The loops: one row's queries against a range of its tokens, with the online softmax of FlashAttention (arXiv
//! 2205.14135). Blocks are read where they lie, once for all heads that share them.
//!
//! Tokens go by in tiles. For a tile, scores of a few heads and tokens at a time are kept in registers, then the
//! weights are applied to the values the same way, so that each key and value is loaded once per four heads.
#![allow(clippy::needless_range_loop)] // Indices of register tiles are the maths here, as on paper.
#![allow(clippy::too_many_arguments)] // The terms of one equation; they are all inlined.
use super::simd::{Element, Isa, Portable, Simd};

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

/// Attends to tokens `from..to` of the sequence whose blocks are `table`.
///
/// # Safety
/// `keys` and `values` are readable for every token of every block in `table` (strides in `dims`), `to` is at most
/// `table.len() * block_size`, and the state was made for `dims`.
pub(super) unsafe fn attend<E: Element>(
    isa: Isa,
    dims: &Dims,
    keys: *const E,
    values: *const E,
    table: &[u32],
    tokens: std::ops::Range<usize>,
    state: &mut RowState,
) {
    match isa {
        // SAFETY: the caller's promise is the same; the portable loops need no special instruction.
        Isa::Portable => unsafe { attend_with::<Portable, E>(dims, keys, values, table, tokens, state) },
        // SAFETY: as above, and `Isa` is only made after the CPU was asked.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { attend_avx2(dims, keys, values, table, tokens, state) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { attend_avx512(dims, keys, values, table, tokens, state) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn attend_avx2<E: Element>(
    dims: &Dims,
    keys: *const E,
    values: *const E,
    table: &[u32],
    tokens: std::ops::Range<usize>,
    state: &mut RowState,
) {
    // SAFETY: the caller's promise is the same, and this function has the instructions.
    unsafe { attend_with::<super::simd::Avx2, E>(dims, keys, values, table, tokens, state) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
unsafe fn attend_avx512<E: Element>(
    dims: &Dims,
    keys: *const E,
    values: *const E,
    table: &[u32],
    tokens: std::ops::Range<usize>,
    state: &mut RowState,
) {
    // SAFETY: the caller's promise is the same, and this function has the instructions.
    unsafe { attend_with::<super::simd::Avx512, E>(dims, keys, values, table, tokens, state) }
}

/// # Safety
/// As for [`attend`], and the CPU has the instructions of `S`.
#[inline(always)]
unsafe fn attend_with<S: Simd, E: Element>(
    dims: &Dims,
    keys: *const E,
    values: *const E,
    table: &[u32],
    tokens: std::ops::Range<usize>,
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

/// Rows to fetch while others are computed: cores wait for memory, not for arithmetic, when contexts are long.
#[derive(Clone, Copy)]
struct Ahead<'a, E> {
    rows: &'a [*const E],
    offset: usize,
    /// Which of them; the others have their turn with other heads.
    first: usize,
    count: usize,
}

impl<E: Element> Ahead<'_, E> {
    /// Part `part` of `parts` of the rows.
    fn part(rows: &[*const E], offset: usize, part: usize, parts: usize) -> Ahead<'_, E> {
        let first = rows.len() * part / parts;
        Ahead { rows, offset, first, count: rows.len() * (part + 1) / parts - first }
    }

    /// Asks for `len` elements of row `t`, from `d` on, if it is its turn.
    #[inline(always)]
    fn fetch<S: Simd>(&self, t: usize, d: usize, len: usize) {
        if t.wrapping_sub(self.first) < self.count {
            for i in (0..len).step_by(64 / size_of::<E>()) {
                S::prefetch(self.rows[t].wrapping_add(self.offset + d + i));
            }
        }
    }
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

/// `scores[h][t] = queries[h] · keys[t]` for `H` heads and all tokens, `T` tokens at a time.
///
/// # Safety
/// `queries` has `H` rows of `key_dim`, `scores` `H` rows of `TILE`, every key `key_dim` elements from `offset` on.
#[inline(always)]
unsafe fn score_all<S: Simd, E: Element, const H: usize, const T: usize>(
    queries: *const f32,
    dims: &Dims,
    key_of: &[*const E],
    offset: usize,
    ahead: Ahead<'_, E>,
    scores: *mut f32,
) {
    let dim = dims.key_dim;
    let mut t = 0;
    while t + T <= key_of.len() {
        for i in 0..T {
            ahead.fetch::<S>(t + i, 0, dims.value_dim);
        }
        // SAFETY: the tokens t..t + T exist, and so do their scores; the rest is the caller's promise.
        unsafe { score::<S, E, H, T>(queries, dim, &key_of[t..], offset, scores.add(t)) };
        t += T;
    }
    while t < key_of.len() {
        // SAFETY: as above, for one token.
        unsafe { score::<S, E, H, 1>(queries, dim, &key_of[t..], offset, scores.add(t)) };
        t += 1;
    }
}

/// # Safety
/// As for [`score_all`], for the first `T` of `key_of`.
#[inline(always)]
unsafe fn score<S: Simd, E: Element, const H: usize, const T: usize>(
    queries: *const f32,
    dim: usize,
    key_of: &[*const E],
    offset: usize,
    scores: *mut f32,
) {
    let key: [*const E; T] = std::array::from_fn(|t| key_of[t]);
    let whole = dim - dim % S::LANES;
    // SAFETY: d stays below `whole` in steps of a vector, then below `dim`; see the caller's promise for the rest.
    unsafe {
        let mut acc = [[S::splat(0.0); T]; H];
        let mut d = 0;
        while d < whole {
            let mut k = [S::splat(0.0); T];
            for t in 0..T {
                k[t] = E::load::<S>(key[t].add(offset + d));
            }
            for h in 0..H {
                let q = S::load(queries.add(h * dim + d));
                for t in 0..T {
                    acc[h][t] = S::fma(q, k[t], acc[h][t]);
                }
            }
            d += S::LANES;
        }
        for h in 0..H {
            for t in 0..T {
                let mut sum = S::sum(acc[h][t]);
                for d in whole..dim {
                    sum += *queries.add(h * dim + d) * (*key[t].add(offset + d)).to_f32();
                }
                *scores.add(h * TILE + t) = sum;
            }
        }
    }
}

/// `acc[h] = acc[h] * keep[h] + Σ_t weights[h][t] * values[t]` for `H` heads.
///
/// # Safety
/// `weights` has `H` rows of `TILE`, `acc` `H` rows of `dim`, every value `dim` elements from `offset` on.
#[inline(always)]
unsafe fn weigh_all<S: Simd, E: Element, const H: usize>(
    weights: *const f32,
    keep: &[f32; HEADS],
    value_of: &[*const E],
    offset: usize,
    ahead: Ahead<'_, E>,
    dim: usize,
    acc: *mut f32,
) {
    // SAFETY: d stays below `dim` with what is read and written from it; the rest is the caller's promise.
    unsafe {
        let mut d = 0;
        if H <= 2 {
            while d + 4 * S::LANES <= dim {
                weigh::<S, E, H, 4>(weights, keep, value_of, offset, d, ahead, dim, acc);
                d += 4 * S::LANES;
            }
        }
        while d + 2 * S::LANES <= dim {
            weigh::<S, E, H, 2>(weights, keep, value_of, offset, d, ahead, dim, acc);
            d += 2 * S::LANES;
        }
        while d + S::LANES <= dim {
            weigh::<S, E, H, 1>(weights, keep, value_of, offset, d, ahead, dim, acc);
            d += S::LANES;
        }
        while d < dim {
            for h in 0..H {
                let mut sum = *acc.add(h * dim + d) * keep[h];
                for (t, value) in value_of.iter().enumerate() {
                    sum += *weights.add(h * TILE + t) * (*value.add(offset + d)).to_f32();
                }
                *acc.add(h * dim + d) = sum;
            }
            d += 1;
        }
    }
}

/// `C` vectors of [`weigh_all`], from element `d` on.
///
/// # Safety
/// As for [`weigh_all`]; `d` and `C` vectors are within `dim`.
#[inline(always)]
unsafe fn weigh<S: Simd, E: Element, const H: usize, const C: usize>(
    weights: *const f32,
    keep: &[f32; HEADS],
    value_of: &[*const E],
    offset: usize,
    d: usize,
    ahead: Ahead<'_, E>,
    dim: usize,
    acc: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let (offset, acc) = (offset + d, acc.add(d));
        let mut sum = [[S::splat(0.0); C]; H];
        for h in 0..H {
            for c in 0..C {
                sum[h][c] = S::mul(S::load(acc.add(h * dim + c * S::LANES)), S::splat(keep[h]));
            }
        }
        for (t, value) in value_of.iter().enumerate() {
            ahead.fetch::<S>(t, d, C * S::LANES);
            let mut v = [S::splat(0.0); C];
            for c in 0..C {
                v[c] = E::load::<S>(value.add(offset + c * S::LANES));
            }
            for h in 0..H {
                let w = S::splat(*weights.add(h * TILE + t));
                for c in 0..C {
                    sum[h][c] = S::fma(w, v[c], sum[h][c]);
                }
            }
        }
        for h in 0..H {
            for c in 0..C {
                S::store(acc.add(h * dim + c * S::LANES), sum[h][c]);
            }
        }
    }
}

/// Replaces each x by e^(x - max), and returns their sum. Written so that the compiler vectorises it.
#[inline(always)]
fn exponentials(row: &mut [f32], max: f32) -> f32 {
    let mut sums = [0.0f32; 16];
    let (chunks, rest) = row.as_chunks_mut::<16>();
    for chunk in chunks {
        for (x, sum) in chunk.iter_mut().zip(&mut sums) {
            *x = exp(*x - max);
            *sum += *x;
        }
    }
    for (x, sum) in rest.iter_mut().zip(&mut sums) {
        *x = exp(*x - max);
        *sum += *x;
    }
    sums.iter().sum()
}

/// e^x for x ≤ 0, relative error below 2e-7: 2^n times a polynomial on [-ln2/2, ln2/2].
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// Adding it makes a float below 2^22 round to an integer in its lowest bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = x.max(-87.0);
    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    // Taylor's coefficients up to r^7 / 7!: the remainder is below 1e-8 on this interval.
    let mut p = 1.0 / 5040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = p * r + c;
    }
    let power = (rounded.to_bits() << 23).wrapping_add(127 << 23);
    p * f32::from_bits(power)
}

#[cfg(test)]
mod tests {
    use super::exp;

    #[test]
    fn exp_is_within_a_few_ulp_for_every_weight_a_softmax_can_have() {
        for i in 0..=870_000 {
            let x = -(i as f32) * 1e-4;
            let exact = f64::from(x).exp();
            let relative = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(relative < 3e-7, "exp({x}): {relative:e}");
        }
        assert!(exp(-1e30) < 2e-38 && exp(f32::NEG_INFINITY) < 2e-38);
        assert_eq!(exp(0.0), 1.0);
    }
}
