//! Products of stored weights with a few rows: a few weight rows and a few inputs at a time are held in registers, so that
//! each weight is loaded once per four inputs.
#![allow(clippy::needless_range_loop)] // Indices of register tiles are the maths here, as on paper.
use std::marker::PhantomData;
use std::ops::Range;

use crate::cpu_attention::simd::{Element, Isa, Portable, Simd, for_each_isa};

#[cfg(target_arch = "x86_64")]
pub(super) mod dot;

/// Weight rows that share a load of an input.
pub(super) const TILE_ROWS: usize = 4;

/// Inputs that share a load of a weight.
const TILE_INPUTS: usize = 4;

/// Inputs `[count, len]` f32, wherever they lie.
pub(super) struct Rows {
    first: Vec<*const f32>,
    len: usize,
}

// SAFETY: only read through, while the slice they were made of is borrowed by the function that runs the kernels.
unsafe impl Sync for Rows {}

impl Rows {
    /// Rows of `[_, len]` by index. Panics when one is beyond the slice.
    pub(super) fn gathered(from: &[f32], len: usize, rows: &[i64]) -> Self {
        Self { first: rows.iter().map(|&row| from[row as usize * len..][..len].as_ptr()).collect(), len }
    }

    /// The rows, one after the other.
    #[cfg(target_arch = "x86_64")]
    fn rows(&self) -> impl Iterator<Item = &[f32]> {
        // SAFETY: both ways to make one took the addresses of `len` elements of a slice that is still borrowed.
        self.first.iter().map(|&first| unsafe { std::slice::from_raw_parts(first, self.len) })
    }

    /// All rows of `[count, len]`. Panics when the slice is shorter.
    pub(super) fn consecutive(from: &[f32], len: usize, count: usize) -> Self {
        Self { first: (0..count).map(|row| from[row * len..][..len].as_ptr()).collect(), len }
    }
}

for_each_isa! {
    /// `out[input][row] = silu(gate[row] · input) * (up[row] · input)` for some rows and all inputs.
    ///
    /// # Safety
    /// `gate_up` are readable for `rows.end` rows of `len` elements, `len` is the inputs' length, and `out` is writable
    /// for `[inputs, width]` with `width >= rows.end`, columns `rows` of it by this call alone.
    pub(super) fn activate(
        gate_up: [*const E; 2],
        len: usize,
        rows: Range<usize>,
        inputs: &Rows,
        out: *mut f32,
        width: usize,
    ) = activate_with
}

for_each_isa! {
    /// `out[row_of[i]][row] += scales[i] * (weight[row] · inputs[i])` for some rows and all inputs.
    ///
    /// # Safety
    /// `weight` is readable for `rows.end` rows of `len` elements, `len` is the inputs' length, there are as many
    /// `row_of` and `scales` as inputs, and `out` is writable for `[max(row_of) + 1, width]` with `width >= rows.end`,
    /// columns `rows` of it by this call alone.
    pub(super) fn add_down(
        weight: *const E,
        len: usize,
        rows: Range<usize>,
        inputs: &Rows,
        row_of: &[i64],
        scales: &[f32],
        out: *mut f32,
        width: usize,
    ) = add_down_with
}

/// # Safety
/// As for [`activate`], and the CPU has the instructions of `S`.
#[inline(always)]
unsafe fn activate_with<S: Simd, E: Element>(
    gate_up: [*const E; 2],
    len: usize,
    rows: Range<usize>,
    inputs: &Rows,
    out: *mut f32,
    width: usize,
) {
    debug_assert_eq!(len, inputs.len);
    // SAFETY: the caller's promise is the same.
    unsafe { activate_tiles(&Widened::<S, E> { inputs, kind: PhantomData }, gate_up, len, rows, out, width) }
}

/// # Safety
/// As for [`add_down`], and the CPU has the instructions of `S`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn add_down_with<S: Simd, E: Element>(
    weight: *const E,
    len: usize,
    rows: Range<usize>,
    inputs: &Rows,
    row_of: &[i64],
    scales: &[f32],
    out: *mut f32,
    width: usize,
) {
    debug_assert_eq!(len, inputs.len);
    let products = Widened::<S, E> { inputs, kind: PhantomData };
    let mut row = rows.start;
    while row < rows.end {
        let count = TILE_ROWS.min(rows.end - row);
        let mut from = 0;
        while from < products.num_inputs() {
            let num = TILE_INPUTS.min(products.num_inputs() - from);
            // SAFETY: rows row..row + count are within `rows`; every input has `len` elements.
            let tile = unsafe { products.tile(weight.add(row * len), count, len, from, num, from == 0) };
            for i in 0..num {
                let (to, scale) = (row_of[from + i] as usize * width + row, scales[from + i]);
                for r in 0..count {
                    // SAFETY: within `[max(row_of) + 1, width]`, in this call's columns.
                    unsafe { *out.add(to + r) += scale * tile[r][i] };
                }
            }
            from += num;
        }
        row += count;
    }
}

/// Products of a tile of weight rows with a tile of inputs.
trait Products {
    type Weight: Copy;

    /// How many inputs there are.
    fn num_inputs(&self) -> usize;

    /// `count` weight rows, at most [`TILE_ROWS`], against `num` inputs from `from` on, at most [`TILE_INPUTS`]. `first`:
    /// these weights have not been read before, nor the ones after them.
    ///
    /// # Safety
    /// `weight` is readable for `count` rows of `len`, every input has `len` elements, the CPU has the instructions.
    unsafe fn tile(
        &self,
        weight: *const Self::Weight,
        count: usize,
        len: usize,
        from: usize,
        num: usize,
        first: bool,
    ) -> Tile;
}

/// Weights widened to f32 as they are loaded.
struct Widened<'a, S, E> {
    inputs: &'a Rows,
    kind: PhantomData<(S, E)>,
}

impl<S: Simd, E: Element> Products for Widened<'_, S, E> {
    type Weight = E;

    #[inline(always)]
    fn num_inputs(&self) -> usize {
        self.inputs.first.len()
    }

    #[inline(always)]
    unsafe fn tile(
        &self,
        w: *const E,
        count: usize,
        len: usize,
        from: usize,
        num: usize,
        first: bool,
    ) -> Tile {
        // SAFETY: the caller's promise is the same.
        unsafe { tile_of::<S, E>(w, count, &self.inputs.first[from..from + num], len, first) }
    }
}

/// # Safety
/// As for [`activate`], and the CPU has the instructions of `P`.
#[inline(always)]
unsafe fn activate_tiles<P: Products>(
    products: &P,
    gate_up: [*const P::Weight; 2],
    len: usize,
    rows: Range<usize>,
    out: *mut f32,
    width: usize,
) {
    let mut row = rows.start;
    while row < rows.end {
        let count = TILE_ROWS.min(rows.end - row);
        let mut from = 0;
        while from < products.num_inputs() {
            let num = TILE_INPUTS.min(products.num_inputs() - from);
            // SAFETY: rows row..row + count are within `rows`; every input has `len` elements.
            let (gate, up) = unsafe {
                let at = row * len;
                (
                    products.tile(gate_up[0].add(at), count, len, from, num, from == 0),
                    products.tile(gate_up[1].add(at), count, len, from, num, from == 0),
                )
            };
            for i in 0..num {
                for r in 0..count {
                    let x = gate[r][i];
                    let silu = x / (1.0 + (-x).exp());
                    // SAFETY: within `[inputs, width]`, in this call's columns.
                    unsafe { *out.add((from + i) * width + row + r) = silu * up[r][i] };
                }
            }
            from += num;
        }
        row += count;
    }
}

/// `[row][input]` products of up to [`TILE_ROWS`] weight rows and [`TILE_INPUTS`] inputs.
type Tile = [[f32; TILE_INPUTS]; TILE_ROWS];

/// `first`: these weights have not been read before, nor the ones after them.
///
/// # Safety
/// `weight` is readable for `count` rows of `len`, every input for `len`; the CPU has the instructions of `S`.
#[inline(always)]
unsafe fn tile_of<S: Simd, E: Element>(
    weight: *const E,
    count: usize,
    inputs: &[*const f32],
    len: usize,
    first: bool,
) -> Tile {
    let mut tile = [[0.0; TILE_INPUTS]; TILE_ROWS];
    // SAFETY: the caller's promise, for the rows and inputs that each call names.
    unsafe {
        match (count, inputs.len()) {
            (TILE_ROWS, 1) => dots::<S, E, 4, 1, true>(weight, inputs, len, &mut tile, 0),
            (TILE_ROWS, 2) => dots::<S, E, 4, 2, true>(weight, inputs, len, &mut tile, 0),
            (TILE_ROWS, 3) => dots::<S, E, 4, 3, true>(weight, inputs, len, &mut tile, 0),
            // As many sums as leave registers for what is loaded.
            (TILE_ROWS, TILE_INPUTS) if S::LANES > 8 && first => {
                dots::<S, E, 4, 4, true>(weight, inputs, len, &mut tile, 0);
            }
            (TILE_ROWS, TILE_INPUTS) if S::LANES > 8 => {
                dots::<S, E, 4, 4, false>(weight, inputs, len, &mut tile, 0);
            }
            (TILE_ROWS, TILE_INPUTS) => {
                dots::<S, E, 2, 4, true>(weight, inputs, len, &mut tile, 0);
                dots::<S, E, 2, 4, true>(weight, inputs, len, &mut tile, 2);
            }
            // The last rows of a matrix whose height is not a multiple of the tile's.
            (count, num_inputs) => {
                for i in 0..num_inputs {
                    for r in 0..count {
                        let mut one = [[0.0; TILE_INPUTS]; TILE_ROWS];
                        dots::<S, E, 1, 1, false>(weight.add(r * len), &inputs[i..=i], len, &mut one, 0);
                        tile[r][i] = one[0][0];
                    }
                }
            }
        }
    }
    tile
}

/// Rows `first_row..first_row + R` against the first `N` inputs. With `AHEAD` the rows of the next tile are asked for on
/// the way: hardware prefetching stops at every page, and a loop that only waits for memory is then half as fast.
///
/// # Safety
/// As for [`tile_of`].
#[inline(always)]
unsafe fn dots<S: Simd, E: Element, const R: usize, const N: usize, const AHEAD: bool>(
    weight: *const E,
    inputs: &[*const f32],
    len: usize,
    tile: &mut Tile,
    first_row: usize,
) {
    // SAFETY: rows and inputs are readable for `len`, says the caller, and `k + LANES <= len` in the vector loop.
    unsafe {
        // Loops, not closures: a closure is compiled without the CPU's features and then called.
        let weight = weight.add(first_row * len);
        let mut sums = [[S::splat(0.0); N]; R];
        let mut x = [S::splat(0.0); N];
        let mut k = 0;
        while k + S::LANES <= len {
            for i in 0..N {
                x[i] = S::load(inputs[i].add(k));
            }
            for r in 0..R {
                if AHEAD {
                    prefetch(weight.wrapping_add((r + TILE_ROWS) * len + k));
                }
                let w = E::load::<S>(weight.add(r * len + k));
                for i in 0..N {
                    sums[r][i] = S::fma(w, x[i], sums[r][i]);
                }
            }
            k += S::LANES;
        }
        for r in 0..R {
            for i in 0..N {
                let mut sum = S::sum(sums[r][i]);
                for k in k..len {
                    sum += (*weight.add(r * len + k)).to_f32() * *inputs[i].add(k);
                }
                tile[first_row + r][i] = sum;
            }
        }
    }
}

/// Asks for a line of memory that will be read soon. Any address will do; one that is not mapped is ignored.
#[inline(always)]
fn prefetch<E>(at: *const E) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing that the program can see and never faults.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
