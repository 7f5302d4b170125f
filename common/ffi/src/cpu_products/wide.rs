//! Products of weights that are widened to f32 as they are loaded, by the vectors that the CPU has.
#![allow(clippy::needless_range_loop)] // Indices of register tiles are the maths here, as on paper.
use std::marker::PhantomData;
use std::ops::Range;

use super::{LINE_BYTES, Products, Sink, TILE_ROWS, Tile, prefetch, tiles};
use crate::simd::{Element, Isa, Portable, Simd};

/// See [`super::multiply`].
///
/// # Safety
/// As there, for `count` inputs of `len` one after the other.
pub(super) unsafe fn multiply<E: Element, K: Sink<N>, const N: usize>(
    isa: Isa,
    inputs: *const f32,
    weights: [*const E; N],
    len: usize,
    count: usize,
    rows: Range<usize>,
    sink: &K,
) {
    // SAFETY: the caller's promise is the same; `Isa` is only made after the CPU was asked.
    unsafe {
        match isa {
            Isa::Portable => tiles(&Wide::<Portable, E>::new(inputs), weights, len, count, rows, sink),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => x86::avx2(inputs, weights, len, count, rows, sink),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => x86::avx512(inputs, weights, len, count, rows, sink),
        }
    }
}

/// The loops over widened weights, compiled for each kind of vectors.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::ops::Range;

    use super::{Sink, Wide, tiles};
    use crate::simd::{Avx2, Avx512, Element};

    /// # Safety
    /// As for [`tiles`]; the CPU has the instructions.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn avx2<E: Element, K: Sink<N>, const N: usize>(
        inputs: *const f32,
        weights: [*const E; N],
        len: usize,
        count: usize,
        rows: Range<usize>,
        sink: &K,
    ) {
        // SAFETY: the caller's promise is the same.
        unsafe { tiles(&Wide::<Avx2, E>::new(inputs), weights, len, count, rows, sink) }
    }

    /// # Safety
    /// As for [`tiles`]; the CPU has the instructions.
    #[target_feature(enable = "avx512f,avx2,fma")]
    pub(super) unsafe fn avx512<E: Element, K: Sink<N>, const N: usize>(
        inputs: *const f32,
        weights: [*const E; N],
        len: usize,
        count: usize,
        rows: Range<usize>,
        sink: &K,
    ) {
        // SAFETY: the caller's promise is the same.
        unsafe { tiles(&Wide::<Avx512, E>::new(inputs), weights, len, count, rows, sink) }
    }
}

/// Weights widened to f32 as they are loaded.
struct Wide<S, E> {
    inputs: *const f32,
    kind: PhantomData<(S, E)>,
}

impl<S, E> Wide<S, E> {
    fn new(inputs: *const f32) -> Self {
        Self { inputs, kind: PhantomData }
    }
}

impl<S: Simd, E: Element> Products for Wide<S, E> {
    type Weight = E;

    #[inline(always)]
    unsafe fn tile(
        &self,
        weight: *const E,
        len: usize,
        from: usize,
        num: usize,
        ahead: Range<usize>,
        tile: &mut Tile,
    ) {
        // SAFETY: the caller's promise, for the rows and inputs that each call names.
        unsafe {
            let x = self.inputs.add(from * len);
            match num {
                1 => dots::<S, E, 1>(weight, x, len, ahead, tile),
                2 => dots::<S, E, 2>(weight, x, len, ahead, tile),
                // As many sums as leave registers for what is loaded.
                _ if S::LANES <= 8 => {
                    let (mut first, mut rest) = (*tile, *tile);
                    dots::<S, E, 2>(weight, x, len, ahead, &mut first);
                    (tile[0], tile[1]) = (first[0], first[1]);
                    match num {
                        3 => dots::<S, E, 1>(weight, x.add(2 * len), len, 0..0, &mut rest),
                        _ => dots::<S, E, 2>(weight, x.add(2 * len), len, 0..0, &mut rest),
                    }
                    (tile[2], tile[3]) = (rest[0], rest[1]);
                }
                3 => dots::<S, E, 3>(weight, x, len, ahead, tile),
                _ => dots::<S, E, 4>(weight, x, len, ahead, tile),
            }
        }
    }

    #[inline(always)]
    unsafe fn dot(&self, weight: *const E, len: usize, of: usize) -> f32 {
        // SAFETY: the caller's promise is the same.
        unsafe { dot::<S, E>(weight, self.inputs.add(of * len), len) }
    }
}

/// [`TILE_ROWS`] rows against `N` inputs. Rows `ahead` of the next tile are asked for on the way: hardware prefetching
/// stops at every page, and a loop that only waits for memory is then half as fast.
///
/// # Safety
/// `weight` is readable for [`TILE_ROWS`] rows of `len`, `inputs` for `N`; the CPU has the instructions of `S`.
#[inline(always)]
unsafe fn dots<S: Simd, E: Element, const N: usize>(
    weight: *const E,
    inputs: *const f32,
    len: usize,
    ahead: Range<usize>,
    tile: &mut Tile,
) {
    // SAFETY: rows and inputs are readable for `len`, says the caller, and `k + LANES <= len` in the vector loop.
    unsafe {
        // Loops, not closures: a closure is compiled without the CPU's features and then called.
        let mut sums = [[S::splat(0.0); TILE_ROWS]; N];
        let mut k = 0;
        while k + S::LANES <= len {
            if k.is_multiple_of(LINE_BYTES / size_of::<E>()) {
                for r in ahead.start..ahead.end {
                    prefetch(weight.wrapping_add((r + TILE_ROWS) * len + k));
                }
            }
            let mut x = [S::splat(0.0); N];
            for i in 0..N {
                x[i] = S::load(inputs.add(i * len + k));
            }
            for r in 0..TILE_ROWS {
                let w = E::load::<S>(weight.add(r * len + k));
                for i in 0..N {
                    sums[i][r] = S::fma(w, x[i], sums[i][r]);
                }
            }
            k += S::LANES;
        }
        for i in 0..N {
            tile[i] = S::sum4(sums[i]);
        }
        while k < len {
            for i in 0..N {
                for r in 0..TILE_ROWS {
                    tile[i][r] += (*weight.add(r * len + k)).to_f32() * *inputs.add(i * len + k);
                }
            }
            k += 1;
        }
    }
}

/// One row times one input.
///
/// # Safety
/// Both are readable for `len`; the CPU has the instructions of `S`.
#[inline(always)]
unsafe fn dot<S: Simd, E: Element>(weight: *const E, input: *const f32, len: usize) -> f32 {
    // SAFETY: `k + LANES <= len` in the vector loop, then `k < len`.
    unsafe {
        let mut sums = S::splat(0.0);
        let mut k = 0;
        while k + S::LANES <= len {
            sums = S::fma(E::load::<S>(weight.add(k)), S::load(input.add(k)), sums);
            k += S::LANES;
        }
        let mut sum = S::sum(sums);
        while k < len {
            sum += (*weight.add(k)).to_f32() * *input.add(k);
            k += 1;
        }
        sum
    }
}
