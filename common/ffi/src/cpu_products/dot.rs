//! Products where the CPU multiplies bf16 itself (`vdpbf16ps`): 32 products an instruction, and no weight is widened. Both
//! sides are bf16, so the products are exact and sums are in f32, as in the other loops.
use std::arch::x86_64::{
    __m512, __m512bh, __mmask32, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_maskz_loadu_epi16,
    _mm512_reduce_add_ps, _mm512_setzero_ps,
};
use std::ops::Range;

use super::{Products, Sink, TILE_ROWS, Tile, prefetch, tiles};
use crate::simd::{Bf16, sum4};

/// Products of an instruction.
const LANES: usize = 32;

/// Whether this CPU has the instructions. The look-up is a cached load.
pub(super) fn is_here() -> bool {
    is_x86_feature_detected!("avx512bf16")
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
}

/// See [`super::multiply`].
///
/// # Safety
/// As there, for `count` inputs of `len` one after the other; [`is_here`].
#[target_feature(enable = "avx512f,avx512bw,avx512bf16,avx2,fma")]
pub(super) unsafe fn multiply<K: Sink<N>, const N: usize>(
    inputs: *const Bf16,
    weights: [*const Bf16; N],
    len: usize,
    count: usize,
    rows: Range<usize>,
    sink: &K,
) {
    // SAFETY: the caller's promise is the same, and this function has the instructions.
    unsafe { tiles(&Dots { inputs }, weights, len, count, rows, sink) }
}

/// Inputs `[count, len]`.
struct Dots {
    inputs: *const Bf16,
}

impl Products for Dots {
    type Weight = Bf16;

    #[inline(always)]
    unsafe fn tile(
        &self,
        weight: *const Bf16,
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
                1 => dots::<1>(weight, x, len, ahead, tile),
                2 => dots::<2>(weight, x, len, ahead, tile),
                3 => dots::<3>(weight, x, len, ahead, tile),
                _ if ahead.is_empty() => dots::<4>(weight, x, len, 0..0, tile),
                _ => dots::<4>(weight, x, len, ahead, tile),
            }
        }
    }

    #[inline(always)]
    unsafe fn dot(&self, weight: *const Bf16, len: usize, of: usize) -> f32 {
        // SAFETY: the caller's promise is the same.
        unsafe { dot(weight, self.inputs.add(of * len), len) }
    }
}

/// [`TILE_ROWS`] rows against `N` inputs. Rows `ahead` of the next tile are asked for on the way.
///
/// # Safety
/// `weight` is readable for [`TILE_ROWS`] rows of `len`, `inputs` for `N`; [`is_here`].
#[inline(always)]
unsafe fn dots<const N: usize>(
    weight: *const Bf16,
    inputs: *const Bf16,
    len: usize,
    ahead: Range<usize>,
    tile: &mut Tile,
) {
    // SAFETY: rows and inputs are readable for `len`, says the caller; the loop stays below it, and the last loads are
    // masked to what is left.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); TILE_ROWS]; N];
        let whole = len - len % LANES;
        let mut k = 0;
        while k < whole {
            for r in ahead.start..ahead.end {
                prefetch(weight.wrapping_add((r + TILE_ROWS) * len + k));
            }
            step(weight, inputs, len, k, None, &mut sums);
            k += LANES;
        }
        if k < len {
            step(weight, inputs, len, k, Some(mask(len - k)), &mut sums);
        }
        for i in 0..N {
            tile[i] = sum4(sums[i]);
        }
    }
}

/// One vector of each row and input, from element `k` on; `only` these elements of it where they are not all.
///
/// # Safety
/// As for [`dots`], for the elements that are loaded.
#[inline(always)]
unsafe fn step<const N: usize>(
    weight: *const Bf16,
    inputs: *const Bf16,
    len: usize,
    k: usize,
    only: Option<__mmask32>,
    sums: &mut [[__m512; TILE_ROWS]; N],
) {
    // SAFETY: the caller's promise; the CPU has the instructions. Loops, not closures, which would be compiled without.
    unsafe {
        let mut x = [load(inputs.add(k), only); N];
        for i in 1..N {
            x[i] = load(inputs.add(i * len + k), only);
        }
        for r in 0..TILE_ROWS {
            let w = load(weight.add(r * len + k), only);
            for i in 0..N {
                sums[i][r] = _mm512_dpbf16_ps(sums[i][r], w, x[i]);
            }
        }
    }
}

/// One row times one input.
///
/// # Safety
/// Both are readable for `len`; [`is_here`].
#[inline(always)]
unsafe fn dot(weight: *const Bf16, input: *const Bf16, len: usize) -> f32 {
    // SAFETY: the loop stays below `len`, and the last loads are masked to what is left.
    unsafe {
        let mut sum = _mm512_setzero_ps();
        let mut k = 0;
        while k < len {
            let only = (len - k < LANES).then(|| mask(len - k));
            sum = _mm512_dpbf16_ps(sum, load(weight.add(k), only), load(input.add(k), only));
            k += LANES;
        }
        _mm512_reduce_add_ps(sum)
    }
}

/// The first `count` elements, fewer than a vector's.
#[inline(always)]
fn mask(count: usize) -> __mmask32 {
    (1 << count) - 1
}

/// # Safety
/// `at` is readable for [`LANES`] elements, or for those of `only`; [`is_here`].
#[inline(always)]
unsafe fn load(at: *const Bf16, only: Option<__mmask32>) -> __m512bh {
    // SAFETY: the caller's promise; the two vector types are the same bits.
    unsafe {
        std::mem::transmute(match only {
            None => _mm512_loadu_si512(at.cast()),
            Some(mask) => _mm512_maskz_loadu_epi16(mask, at.cast()),
        })
    }
}
