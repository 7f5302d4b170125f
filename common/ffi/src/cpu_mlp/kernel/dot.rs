//! Gate and up where the CPU multiplies bf16 itself (`vdpbf16ps`): 32 products an instruction, and no weight is widened.
//! Rows come in bf16, so the products are exact and sums are in f32, as in the other loops. Down's inputs are f32, which
//! would have to be rounded: it stays with the others.
use std::arch::x86_64::{
    __m512, __m512bh, __mmask32, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_maskz_loadu_epi16,
    _mm512_reduce_add_ps, _mm512_setzero_ps,
};
use std::ops::Range;

use super::{Products, Rows, TILE_INPUTS, TILE_ROWS, Tile, activate_tiles, prefetch};
use crate::cpu_attention::simd::{Bf16, Element};

/// Products of an instruction.
const LANES: usize = 32;

/// Whether this CPU has the instructions. The look-up is a cached load.
pub(crate) fn is_here() -> bool {
    std::env::var_os("AFD_NO_DOT").is_none()
        && is_x86_feature_detected!("avx512bf16")
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
}

/// Inputs `[count, len]` that are bf16 numbers, one after the other.
pub(crate) struct Bf16Rows {
    items: Vec<Bf16>,
    count: usize,
    len: usize,
}

impl Bf16Rows {
    /// Of rows of the layer's input.
    pub(crate) fn new(inputs: &Rows) -> Self {
        let mut items = Vec::with_capacity(inputs.first.len() * inputs.len);
        for row in inputs.rows() {
            items.extend(row.iter().map(|&x| Bf16::from_f32(x)));
        }
        Self { items, count: inputs.first.len(), len: inputs.len }
    }
}

impl Products for Bf16Rows {
    type Weight = Bf16;

    #[inline(always)]
    fn num_inputs(&self) -> usize {
        self.count
    }

    #[inline(always)]
    unsafe fn tile(
        &self,
        weight: *const Bf16,
        count: usize,
        len: usize,
        from: usize,
        num: usize,
        first: bool,
    ) -> Tile {
        let inputs = self.items[from * len..(from + num) * len].as_ptr();
        // SAFETY: the caller's promise for the weights; the slice above is `num` inputs of `len`.
        unsafe { tile_of(weight, count, inputs, num, len, first) }
    }
}

/// See [`super::activate`].
///
/// # Safety
/// As there; [`is_here`].
#[target_feature(enable = "avx512f,avx512bw,avx512bf16,avx2,fma")]
pub(crate) unsafe fn activate(
    gate_up: [*const Bf16; 2],
    rows: Range<usize>,
    inputs: &Bf16Rows,
    out: *mut f32,
    width: usize,
) {
    // SAFETY: the caller's promise is the same, and this function has the instructions.
    unsafe { activate_tiles(inputs, gate_up, inputs.len, rows, out, width) }
}

/// # Safety
/// `weight` is readable for `count` rows of `len`, `inputs` for `num` rows of `len`; [`is_here`].
#[inline(always)]
unsafe fn tile_of(
    weight: *const Bf16,
    count: usize,
    inputs: *const Bf16,
    num: usize,
    len: usize,
    ahead: bool,
) -> Tile {
    let mut tile = [[0.0; TILE_INPUTS]; TILE_ROWS];
    // SAFETY: the caller's promise, for the rows and inputs that each call names.
    unsafe {
        match (count, num) {
            (TILE_ROWS, 1) => dots::<4, 1>(weight, inputs, len, ahead, &mut tile),
            (TILE_ROWS, 2) => dots::<4, 2>(weight, inputs, len, ahead, &mut tile),
            (TILE_ROWS, 3) => dots::<4, 3>(weight, inputs, len, ahead, &mut tile),
            (TILE_ROWS, _) => dots::<4, 4>(weight, inputs, len, ahead, &mut tile),
            // The last rows of a matrix whose height is not a multiple of the tile's.
            (count, num) => {
                for i in 0..num {
                    for r in 0..count {
                        let mut one = [[0.0; TILE_INPUTS]; TILE_ROWS];
                        dots::<1, 1>(weight.add(r * len), inputs.add(i * len), len, false, &mut one);
                        tile[r][i] = one[0][0];
                    }
                }
            }
        }
    }
    tile
}

/// `R` rows against `N` inputs. With `ahead` the rows of the next tile are asked for on the way.
///
/// # Safety
/// As for [`tile_of`].
#[inline(always)]
unsafe fn dots<const R: usize, const N: usize>(
    weight: *const Bf16,
    inputs: *const Bf16,
    len: usize,
    ahead: bool,
    tile: &mut Tile,
) {
    // SAFETY: rows and inputs are readable for `len`, says the caller; the loop stays below it, and the last loads are
    // masked to what is left.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); N]; R];
        let whole = len - len % LANES;
        let mut k = 0;
        while k < whole {
            if ahead {
                for r in 0..R {
                    prefetch(weight.wrapping_add((r + TILE_ROWS) * len + k));
                }
            }
            step(weight, inputs, len, k, None, &mut sums);
            k += LANES;
        }
        if k < len {
            let left: __mmask32 = (1 << (len - k)) - 1;
            step(weight, inputs, len, k, Some(left), &mut sums);
        }
        for r in 0..R {
            for i in 0..N {
                tile[r][i] = _mm512_reduce_add_ps(sums[r][i]);
            }
        }
    }
}

/// One vector of each row and input, from element `k` on; `only` these elements of it where they are not all.
///
/// # Safety
/// As for [`tile_of`], for the elements that are loaded.
#[inline(always)]
unsafe fn step<const R: usize, const N: usize>(
    weight: *const Bf16,
    inputs: *const Bf16,
    len: usize,
    k: usize,
    only: Option<__mmask32>,
    sums: &mut [[__m512; N]; R],
) {
    // SAFETY: the caller's promise; the CPU has the instructions. Loops, not closures, which would be compiled without.
    unsafe {
        let mut x = [load(inputs.add(k), only); N];
        for i in 1..N {
            x[i] = load(inputs.add(i * len + k), only);
        }
        for r in 0..R {
            let w = load(weight.add(r * len + k), only);
            for i in 0..N {
                sums[r][i] = _mm512_dpbf16_ps(sums[r][i], w, x[i]);
            }
        }
    }
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
