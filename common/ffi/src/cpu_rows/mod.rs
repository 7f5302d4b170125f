//! What happens to each row between the projections and attention, on the CPU, in one pass: norm, clip, rotary
//! embedding, and the write into the paged cache. As libtorch operations these are a dozen passes per layer, each
//! dearer than the arithmetic when a step has few rows.
//!
//! Arithmetic is in f32 whatever the dtype, rounded once. The loops are plain; they are compiled once per kind of CPU so
//! that the compiler can use its vectors.
mod gqa;
mod mla;
#[cfg(test)]
mod tests;

use tch::{Kind, Tensor};

pub use self::gqa::{GqaRows, GqaShape, QkNorms, gqa_rows};
pub use self::mla::{MlaRows, mla_rows};

use crate::simd::{Bf16, Element, Isa, Portable, Simd, for_each_isa};
use crate::views::{Rows3, ShapeError, check_cpu, ensure};

/// Which elements of a head the rotary embedding turns together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// `i` and `i + half`.
    Halves,
    /// `2i` and `2i + 1`.
    Neighbours,
}

/// Rotary embedding of the rows of a stage.
#[derive(Clone, Copy)]
pub struct RopeRows<'a> {
    /// `[num_rows, half]`
    pub cos: &'a [f32],
    /// `[num_rows, half]`
    pub sin: &'a [f32],
    /// Half of the elements that turn.
    pub half: usize,
    /// Which turn together.
    pub pairing: Pairing,
}

impl RopeRows<'_> {
    fn check(&self, num_rows: usize, dim: usize) -> Result<(), ShapeError> {
        ensure!(2 * self.half == dim, "rope over {} elements, {dim} expected", 2 * self.half);
        ensure!(
            self.cos.len() == num_rows * self.half && self.sin.len() == num_rows * self.half,
            "rope for {} rows, {num_rows} expected",
            self.cos.len() / self.half.max(1)
        );
        Ok(())
    }

    /// Turns the `2 * half` elements of `x`.
    #[inline(always)]
    fn turn(&self, row: usize, x: &mut [f32]) {
        let range = row * self.half..(row + 1) * self.half;
        let angles = self.cos[range.clone()].iter().zip(&self.sin[range]);
        match self.pairing {
            Pairing::Halves => {
                let (first, second) = x.split_at_mut(self.half);
                for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(angles) {
                    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                }
            }
            Pairing::Neighbours => {
                for (pair, (cos, sin)) in x.as_chunks_mut::<2>().0.iter_mut().zip(angles) {
                    let [a, b] = *pair;
                    *pair = [a * cos - b * sin, b * cos + a * sin];
                }
            }
        }
    }
}

/// RMSNorm of each row of `x` (`[num_rows, weight.len()]`, rows may be strided) as a new contiguous tensor.
///
/// # Errors
/// [`ShapeError`] when something does not fit.
pub fn rms_norm(x: &Tensor, weight: &[f32], eps: f64) -> Result<Tensor, ShapeError> {
    match x.kind() {
        Kind::Float => norm::<f32>(x, weight, eps),
        Kind::BFloat16 => norm::<Bf16>(x, weight, eps),
        other => Err(ShapeError(format!("rows of {other:?}; f32 and bf16 are served"))),
    }
}

fn norm<E: Element>(x: &Tensor, weight: &[f32], eps: f64) -> Result<Tensor, ShapeError> {
    let size = x.size();
    ensure!(size.len() == 2 && size[1] == weight.len() as i64, "shape {size:?}, a norm of {}", weight.len());
    let torch = |error: tch::TchError| ShapeError(error.to_string());
    let out = Tensor::f_empty(&size[..], (x.kind(), x.device())).map_err(torch)?;
    let from = Rows3::<E>::new("rows", &unsqueezed("rows", x)?, x.kind())?;
    let to = Rows3::<E>::new("normed rows", &unsqueezed("normed rows", &out)?, x.kind())?;
    // SAFETY: the tensors have the same shape; `to` was made here, nobody else knows it yet.
    unsafe { norm_rows(Isa::best(), &from, &to, weight, eps) };
    Ok(out)
}

for_each_isa! {
    /// # Safety
    /// Both have the same rows of `weight.len()` elements; nothing else refers to those of `to`, and nothing writes those
    /// of `from`, during this call.
    fn norm_rows(from: &Rows3<E>, to: &Rows3<E>, weight: &[f32], eps: f64) = norm_rows_with
}

/// # Safety
/// As for [`norm_rows`].
#[inline(always)]
unsafe fn norm_rows_with<S: Simd, E: Element>(from: &Rows3<E>, to: &Rows3<E>, weight: &[f32], eps: f64) {
    let mut scratch = vec![0.0f32; weight.len()];
    for row in 0..from.rows {
        // SAFETY: the row is within the tensor's shape and contiguous; nothing writes it, says the caller.
        load(unsafe { std::slice::from_raw_parts(from.at(row, 0).cast_const(), from.len) }, &mut scratch);
        rms_norm_in_place(&mut scratch, weight, eps);
        // SAFETY: as above, for writing.
        store(&scratch, unsafe { std::slice::from_raw_parts_mut(to.at(row, 0), to.len) });
    }
}

/// The rows of a paged cache, by slot.
struct Slots<E> {
    first: *mut E,
    len: usize,
}

impl<E: Element> Slots<E> {
    /// Checks every slot.
    fn new(
        what: &str,
        cache: &Tensor,
        kind: Kind,
        len: usize,
        slots: &[i64],
        rows: usize,
    ) -> Result<Self, ShapeError> {
        check_cpu(what, cache, kind)?;
        let size = cache.size();
        ensure!(cache.is_contiguous() && size.len() >= 3, "{what}: shape {size:?}, expected whole blocks");
        ensure!(
            size[2..].iter().product::<i64>() == len as i64,
            "{what}: shape {size:?}, {len} a token expected"
        );
        ensure!(slots.len() == rows, "{} slots for {rows} rows", slots.len());
        let num_slots = size[0] * size[1];
        if let Some(slot) = slots.iter().find(|slot| !(0..num_slots).contains(*slot)) {
            return Err(ShapeError(format!("{what}: slot {slot} of {num_slots}")));
        }
        Ok(Self { first: cache.data_ptr().cast(), len })
    }

    /// A slot that `new` has checked.
    #[inline(always)]
    fn at(&mut self, slot: i64) -> &mut [E] {
        // SAFETY: `new` found the slot within the contiguous tensor; one slice is handed out at a time, and nothing else
        // refers to the cache while the engine's thread is in this call.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(slot as usize * self.len), self.len) }
    }
}

/// `[rows, len]` as `[rows, 1, len]`.
fn unsqueezed(what: &str, rows: &Tensor) -> Result<Tensor, ShapeError> {
    rows.f_unsqueeze(1).map_err(|error| ShapeError(format!("{what}: {error}")))
}

#[inline(always)]
fn load<E: Element>(from: &[E], to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = from.to_f32();
    }
}

#[inline(always)]
fn store<E: Element>(from: &[f32], to: &mut [E]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = E::from_f32(*from);
    }
}

/// Norms every `weight.len()` elements of `x`.
#[inline(always)]
fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f64) {
    for x in x.chunks_exact_mut(weight.len()) {
        let mut squares = [0.0f32; 16];
        let (chunks, rest) = x.as_chunks::<16>();
        for chunk in chunks {
            for (sum, x) in squares.iter_mut().zip(chunk) {
                *sum += x * x;
            }
        }
        let sum: f32 = squares.iter().sum::<f32>() + rest.iter().map(|x| x * x).sum::<f32>();
        let scale = 1.0 / (sum / x.len() as f32 + eps as f32).sqrt();
        for (x, weight) in x.iter_mut().zip(weight) {
            *x = *x * scale * weight;
        }
    }
}
