//! Products of stored weights with a few rows: a few weight rows and a few inputs at a time are held in registers, so that
//! each weight is loaded once per four inputs. What becomes of the products is a [`Sink`]'s business.
//!
//! With few rows the work is to read the weights, so the next ones are asked for while these are multiplied. Sums are in
//! f32; bf16 weights are widened as they are loaded ([`wide`]), or multiplied as they are where the CPU does that and the
//! inputs are bf16 too ([`dot`]).
#![allow(clippy::needless_range_loop)] // Indices of register tiles are the maths here, as on paper.
use std::borrow::Cow;
use std::ops::Range;

use crate::simd::{Bf16, Element, Isa};

#[cfg(target_arch = "x86_64")]
mod dot;
mod wide;

/// Weight rows that share a load of an input.
pub(crate) const TILE_ROWS: usize = 4;

/// Inputs that share a load of a weight.
pub(crate) const TILE_INPUTS: usize = 4;

/// `[input][row]` products of up to [`TILE_INPUTS`] inputs and [`TILE_ROWS`] weight rows.
pub(crate) type Tile = [[f32; TILE_ROWS]; TILE_INPUTS];

/// Bytes of weights in one chunk of work: some microseconds of reading.
const CHUNK_BYTES: usize = 32 << 10;

/// How many weight rows of so many bytes are one chunk of work for a thread: a multiple of a tile's.
pub(crate) fn rows_per_chunk(row_bytes: usize) -> usize {
    (CHUNK_BYTES / row_bytes.max(1)).max(1).next_multiple_of(TILE_ROWS)
}

/// Whether the CPU multiplies bf16 itself, as far as can be told. Where it does not, libtorch's bf16 products are several
/// times slower than the same in f32.
pub fn multiplies_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    return dot::is_here();
    #[cfg(not(target_arch = "x86_64"))]
    true
}

/// Takes the products of `N` matrices of the same shape with the same inputs.
pub(crate) trait Sink<const N: usize> {
    /// `tiles[n][i][r]` is row `row + r` of matrix `n` times input `from + i`, for `r < count` and `i < num`. The rest of a
    /// tile is zero.
    ///
    /// # Safety
    /// What the sink was made for has these rows and inputs, and nobody else puts them.
    unsafe fn put(&self, row: usize, count: usize, from: usize, num: usize, tiles: &[Tile; N]);
}

/// Rows `[count, len]` to multiply with, as this CPU takes them.
pub(crate) struct Inputs<'a> {
    items: Items<'a>,
    count: usize,
    len: usize,
}

enum Items<'a> {
    /// Weights are widened to f32.
    Wide(Isa, Cow<'a, [f32]>),
    /// The CPU multiplies bf16 itself.
    #[cfg(target_arch = "x86_64")]
    Dot(Cow<'a, [Bf16]>),
}

/// Whether instructions that multiply bf16 are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dots {
    WhereTheyAre,
    /// For tests of the other loops on CPUs that have them.
    #[cfg(test)]
    Never,
}

impl<'a> Inputs<'a> {
    /// All of `[count, len]`. Panics when that is not what there is.
    pub(crate) fn all<E: Element>(items: &'a [E], count: usize, len: usize, dots: Dots) -> Self {
        assert_eq!(items.len(), count * len, "{count} inputs of {len}");
        #[cfg(target_arch = "x86_64")]
        if let Some(bf16) = E::as_bf16(items).filter(|_| dots == Dots::WhereTheyAre && dot::is_here()) {
            return Self { items: Items::Dot(Cow::Borrowed(bf16)), count, len };
        }
        let _ = dots;
        let wide = match E::as_f32(items) {
            Some(wide) => Cow::Borrowed(wide),
            None => items.iter().map(|item| item.to_f32()).collect(),
        };
        Self { items: Items::Wide(Isa::best(), wide), count, len }
    }

    /// Some rows of `[_, len]`, by index. Panics when one is beyond the slice.
    pub(crate) fn gathered<E: Element>(from: &[E], len: usize, rows: &[i64], dots: Dots) -> Self {
        let rows_of = rows.iter().map(|&row| &from[row as usize * len..][..len]);
        #[cfg(target_arch = "x86_64")]
        if E::IS_BF16 && dots == Dots::WhereTheyAre && dot::is_here() {
            let items = rows_of.flat_map(|row| E::as_bf16(row).unwrap_or_default()).copied().collect();
            return Self { items: Items::Dot(Cow::Owned(items)), count: rows.len(), len };
        }
        let _ = dots;
        let items = rows_of.flatten().map(|item| item.to_f32()).collect();
        Self { items: Items::Wide(Isa::best(), Cow::Owned(items)), count: rows.len(), len }
    }
}

/// Multiplies rows `rows` of each matrix with every input.
///
/// # Safety
/// `weights` are readable for `rows.end` rows of as many elements as an input has, and `sink` takes these rows of every
/// input, from this call alone. Inputs were made for rows of `E`, or are f32.
pub(crate) unsafe fn multiply<E: Element, K: Sink<N>, const N: usize>(
    weights: [*const E; N],
    rows: Range<usize>,
    inputs: &Inputs<'_>,
    sink: &K,
) {
    let (count, len) = (inputs.count, inputs.len);
    // SAFETY: the caller's promise; `Isa` is only made after the CPU was asked, and so is `Items::Dot`, of bf16 rows.
    unsafe {
        match &inputs.items {
            Items::Wide(isa, items) => {
                wide::multiply(*isa, items.as_ptr(), weights, len, count, rows, sink);
            }
            #[cfg(target_arch = "x86_64")]
            Items::Dot(items) => {
                dot::multiply(items.as_ptr(), weights.map(<*const E>::cast), len, count, rows, sink);
            }
        }
    }
}

/// Products of a tile of weight rows with a tile of inputs.
trait Products {
    type Weight: Copy;

    /// [`TILE_ROWS`] weight rows against `num` inputs from `from` on, at most [`TILE_INPUTS`]. `ahead`: which of the rows of
    /// the next tile are asked for on the way.
    ///
    /// `tile` is zero before; it is written in place, for a copy would wait for its parts to leave the store buffer.
    ///
    /// # Safety
    /// `weight` is readable for [`TILE_ROWS`] rows of `len`, the inputs named for `len`, the CPU has the instructions.
    unsafe fn tile(
        &self,
        weight: *const Self::Weight,
        len: usize,
        from: usize,
        num: usize,
        ahead: Range<usize>,
        tile: &mut Tile,
    );

    /// One weight row times input `of`.
    ///
    /// # Safety
    /// `weight` and the input are readable for `len`, the CPU has the instructions.
    unsafe fn dot(&self, weight: *const Self::Weight, len: usize, of: usize) -> f32;
}

/// # Safety
/// As for [`multiply`]; the CPU has the instructions of `P`, which has `count` inputs.
#[inline(always)]
unsafe fn tiles<P: Products, K: Sink<N>, const N: usize>(
    products: &P,
    weights: [*const P::Weight; N],
    len: usize,
    num_inputs: usize,
    rows: Range<usize>,
    sink: &K,
) {
    let passes = num_inputs.div_ceil(TILE_INPUTS);
    let mut row = rows.start;
    while row < rows.end {
        let count = TILE_ROWS.min(rows.end - row);
        let mut pass = 0;
        while pass < passes {
            let from = pass * TILE_INPUTS;
            let num = TILE_INPUTS.min(num_inputs - from);
            // Shared out over the passes, so that memory is busy in all of them.
            let ahead = TILE_ROWS * pass / passes..TILE_ROWS * (pass + 1) / passes;
            let mut found = [[[0.0; TILE_ROWS]; TILE_INPUTS]; N];
            for n in 0..N {
                // SAFETY: rows row..row + count are within `rows`, inputs from..from + num among all.
                unsafe {
                    let weight = weights[n].add(row * len);
                    if count == TILE_ROWS {
                        products.tile(weight, len, from, num, ahead.clone(), &mut found[n]);
                        continue;
                    }
                    // The last rows of a matrix whose height is not a multiple of the tile's.
                    for i in 0..num {
                        for r in 0..count {
                            found[n][i][r] = products.dot(weight.add(r * len), len, from + i);
                        }
                    }
                }
            }
            // SAFETY: as above; the sink takes them, says the caller.
            unsafe { sink.put(row, count, from, num, &found) };
            pass += 1;
        }
        row += count;
    }
}

/// Of a line of memory.
const LINE_BYTES: usize = 64;

/// Asks for a line of memory that will be read soon. Any address will do; one that is not mapped is ignored.
#[inline(always)]
pub(crate) fn prefetch<E>(at: *const E) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing that the program can see and never faults.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Writes the first `count` of a tile's row.
///
/// # Safety
/// `to` is writable for `count` elements, at most [`TILE_ROWS`].
#[inline(always)]
pub(crate) unsafe fn write<T: Copy>(to: *mut T, from: [T; TILE_ROWS], count: usize) {
    // SAFETY: the caller's promise; nearly always all of them, in one store.
    unsafe {
        match count {
            TILE_ROWS => to.cast::<[T; TILE_ROWS]>().write_unaligned(from),
            _ => std::ptr::copy_nonoverlapping(from.as_ptr(), to, count),
        }
    }
}

/// Where threads write, each its own elements.
pub(crate) struct Writer<T>(*mut T);

impl<T> Writer<T> {
    pub(crate) fn new(first: *mut T) -> Self {
        Self(first)
    }

    pub(crate) fn get(&self) -> *mut T {
        self.0
    }
}

// SAFETY: the pointer is only written through by sinks, each chunk of work in elements of its own.
unsafe impl<T> Sync for Writer<T> {}
