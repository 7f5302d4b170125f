//! Scores of a tile, and its values times their weights: a few heads, tokens and vectors at a time in registers.
#![allow(clippy::needless_range_loop)] // Indices of register tiles are the maths here, as on paper.
#![allow(clippy::too_many_arguments)] // The terms of one equation; they are all inlined.
use super::{Dims, HEADS, TILE};
use crate::simd::{Element, Simd};

/// Rows to fetch while others are computed: cores wait for memory, not for arithmetic, when contexts are long.
#[derive(Clone, Copy)]
pub(super) struct Ahead<'a, E> {
    rows: &'a [*const E],
    offset: usize,
    /// Which of them; the others have their turn with other heads.
    first: usize,
    count: usize,
}

impl<E: Element> Ahead<'_, E> {
    /// Part `part` of `parts` of the rows.
    pub(super) fn part(rows: &[*const E], offset: usize, part: usize, parts: usize) -> Ahead<'_, E> {
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

/// `scores[h][t] = queries[h] · keys[t]` for `H` heads and all tokens, `T` tokens at a time.
///
/// # Safety
/// `queries` has `H` rows of `key_dim`, `scores` `H` rows of `TILE`, every key `key_dim` elements from `offset` on.
#[inline(always)]
pub(super) unsafe fn score_all<S: Simd, E: Element, const H: usize, const T: usize>(
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
pub(super) unsafe fn weigh_all<S: Simd, E: Element, const H: usize>(
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
