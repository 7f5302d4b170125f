//! Products of a few rows with a matrix of each head's own, on the CPU: what DeepSeek's absorbed attention does before and
//! after it reads the cache. As batched products of libtorch the matrices are rearranged anew in every call; here they
//! are read once, as they lie, the heads shared out over a [`Crew`].
use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::Crew;
use crate::cpu_products::{Dots, Inputs, Sink, Tile, Writer, multiply, prefetch, rows_per_chunk, write};
use crate::simd::{Bf16, Element, Isa, Portable, Simd, for_each_isa};
use crate::views::{Rows3, ShapeError, check_cpu, ensure};

#[cfg(test)]
mod tests;

/// Matrices `[heads, rows, columns]`, checked once. Keeps their memory alive.
#[derive(Debug)]
pub struct StoredHeads {
    first: *const u8,
    kind: Kind,
    heads: usize,
    rows: usize,
    columns: usize,
    /// From one head's matrix to the next one's, elements.
    stride: usize,
    _owner: Tensor,
}

// SAFETY: the pointer is into memory that the tensor beside it keeps alive, wherever the two go together.
unsafe impl Send for StoredHeads {}

impl StoredHeads {
    /// Of a tensor `[heads, rows, columns]`, each head's matrix contiguous; on the CPU, f32 or bf16.
    ///
    /// # Errors
    /// [`ShapeError`] says what does not fit.
    pub fn new(weight: &Tensor) -> Result<Self, ShapeError> {
        let (kind, size) = (weight.kind(), weight.size());
        ensure!(matches!(kind, Kind::Float | Kind::BFloat16), "weight: {kind:?}; f32 and bf16 are served");
        check_cpu("weight", weight, kind)?;
        ensure!(size.len() == 3, "weight: shape {size:?}, expected [heads, rows, columns]");
        let stride = weight.stride();
        ensure!(stride[2] == 1 && stride[1] == size[2], "weight: a head's matrix is not contiguous");
        Ok(Self {
            first: weight.data_ptr().cast_const().cast(),
            kind,
            heads: size[0] as usize,
            rows: size[1] as usize,
            columns: size[2] as usize,
            stride: stride[0] as usize,
            _owner: weight.shallow_clone(),
        })
    }
}

/// Weights that several threads read.
struct Shared<E>(*const E);

impl<E> Shared<E> {
    fn get(&self) -> *const E {
        self.0
    }
}

// SAFETY: only read through, and the matrices that it is of are borrowed by the functions of this module, which end no
// sooner than every thread's work on this.
unsafe impl<E: Element> Sync for Shared<E> {}

/// `x[row][head] · weight[head]`: `x` is `[num_rows, heads, weight rows]`, strided or not, the result
/// `[num_rows, heads, weight columns]`, both of the weights' dtype. Sums are in f32.
///
/// # Errors
/// [`ShapeError`] when something does not fit.
pub fn into_columns(x: &Tensor, weight: &StoredHeads, crew: &Crew) -> Result<Tensor, ShapeError> {
    match weight.kind {
        Kind::Float => columns_of::<f32>(x, weight, crew),
        _ => columns_of::<Bf16>(x, weight, crew),
    }
}

fn columns_of<E: Element>(x: &Tensor, weight: &StoredHeads, crew: &Crew) -> Result<Tensor, ShapeError> {
    let &StoredHeads { kind, heads, rows, columns, stride, .. } = weight;
    let from = Rows3::<E>::new("x", x, kind)?;
    ensure!(
        from.heads == heads && from.len == rows,
        "x: {} heads of {}, expected {heads} of {rows}",
        from.heads,
        from.len
    );
    let shape = [from.rows, heads, columns].map(|size| size as i64);
    let out = Tensor::f_empty(shape, (kind, Device::Cpu)).map_err(torch)?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let to = Rows3::<E>::new("result", &out, kind)?;
    let (job, isa) = (Columns { weight: Shared(weight.first.cast::<E>()), from, to }, Isa::best());
    crew.run(heads, &|head| {
        // SAFETY: the shapes were compared above; no other chunk has this head.
        unsafe { head_columns(isa, &job, job.weight.get().add(head * stride), head, rows, columns) }
    });
    Ok(out)
}

/// What the threads share.
struct Columns<E> {
    weight: Shared<E>,
    from: Rows3<E>,
    to: Rows3<E>,
}

// SAFETY: threads only read through `weight` and `from`, and write heads of their own of `to`, which nobody else knows yet.
unsafe impl<E: Element> Sync for Columns<E> {}

/// Rows of the matrix that are added to a sum at once.
const DEPTH: usize = 8;

for_each_isa! {
    /// # Safety
    /// `weight` is readable for `[rows, columns]`, `job.from` has `rows` elements a head and `job.to` `columns`, and nobody
    /// else touches this head of `job.to`.
    fn head_columns(job: &Columns<E>, weight: *const E, head: usize, rows: usize, columns: usize) = head_columns_with
}

/// # Safety
/// As for [`head_columns`], and the CPU has the instructions of `S`.
#[inline(always)]
unsafe fn head_columns_with<S: Simd, E: Element>(
    job: &Columns<E>,
    weight: *const E,
    head: usize,
    rows: usize,
    columns: usize,
) {
    let num_rows = job.from.rows;
    // A multiple of `DEPTH`, the rest zero.
    let depth = rows.next_multiple_of(DEPTH);
    let mut inputs = vec![0.0f32; num_rows * depth];
    let mut sums = vec![0.0f32; num_rows * columns];
    for (row, inputs) in inputs.chunks_exact_mut(depth.max(1)).enumerate() {
        // SAFETY: row and head are within the shape, the last dimension is contiguous; nothing writes it meanwhile.
        let from = unsafe { std::slice::from_raw_parts(job.from.at(row, head).cast_const(), rows) };
        for (to, from) in inputs.iter_mut().zip(from) {
            *to = from.to_f32();
        }
    }
    let mut first = 0;
    while first < rows {
        // SAFETY: rows first.. of the matrix, at most `DEPTH` and no more than there are; inputs and sums were made for
        // `num_rows`.
        unsafe {
            let (inputs, weight) = (inputs.as_ptr().add(first), weight.add(first * columns));
            add_rows::<S, E>(
                weight,
                DEPTH.min(rows - first),
                columns,
                (inputs, depth),
                num_rows,
                sums.as_mut_ptr(),
            );
        }
        first += DEPTH;
    }
    for (row, sums) in sums.chunks_exact(columns.max(1)).enumerate() {
        // SAFETY: row and head are within the shape; this head is this call's alone.
        let to = unsafe { std::slice::from_raw_parts_mut(job.to.at(row, head), columns) };
        for (to, sum) in to.iter_mut().zip(sums) {
            *to = E::from_f32(*sum);
        }
    }
}

/// `sums[i] += Σ_r inputs[i][r] * weight[r]` for `count` rows, at most [`DEPTH`], and `num_inputs` inputs.
///
/// # Safety
/// `weight` is readable for `[count, columns]`; each input, so many elements after the one before, for [`DEPTH`], zero
/// beyond `count`; `sums` are `[num_inputs, columns]`; the CPU has the instructions of `S`.
#[inline(always)]
unsafe fn add_rows<S: Simd, E: Element>(
    weight: *const E,
    count: usize,
    columns: usize,
    (inputs, stride): (*const f32, usize),
    num_inputs: usize,
    sums: *mut f32,
) {
    // SAFETY: `c + LANES <= columns` in the vector loop, then `c < columns`; the rest is the caller's promise.
    unsafe {
        let mut c = 0;
        while count == DEPTH && c + S::LANES <= columns {
            let mut w = [S::splat(0.0); DEPTH];
            for (r, w) in w.iter_mut().enumerate() {
                prefetch(weight.wrapping_add((r + DEPTH) * columns + c));
                *w = E::load::<S>(weight.add(r * columns + c));
            }
            for i in 0..num_inputs {
                let (x, to) = (inputs.add(i * stride), sums.add(i * columns + c));
                // Two chains, so that one product does not wait for the one before.
                let (mut even, mut odd) = (S::load(to), S::splat(0.0));
                let mut r = 0;
                while r < DEPTH {
                    even = S::fma(S::splat(*x.add(r)), w[r], even);
                    odd = S::fma(S::splat(*x.add(r + 1)), w[r + 1], odd);
                    r += 2;
                }
                S::store(to, S::fma(odd, S::splat(1.0), even));
            }
            c += S::LANES;
        }
        while c < columns {
            for i in 0..num_inputs {
                for r in 0..count {
                    *sums.add(i * columns + c) +=
                        *inputs.add(i * stride + r) * (*weight.add(r * columns + c)).to_f32();
                }
            }
            c += 1;
        }
    }
}

/// `x[head][row] · weight[head]ᵀ`: `x` is `[heads, num_rows, weight columns]`, contiguous, the result
/// `[num_rows, heads * weight rows]`, both of the weights' dtype. Sums are in f32.
///
/// # Errors
/// [`ShapeError`] when something does not fit.
pub fn into_rows(x: &Tensor, weight: &StoredHeads, crew: &Crew) -> Result<Tensor, ShapeError> {
    match weight.kind {
        Kind::Float => rows_of::<f32>(x, weight, crew),
        _ => rows_of::<Bf16>(x, weight, crew),
    }
}

fn rows_of<E: Element>(x: &Tensor, weight: &StoredHeads, crew: &Crew) -> Result<Tensor, ShapeError> {
    let &StoredHeads { kind, heads, rows, columns, stride, .. } = weight;
    let from = Rows3::<E>::new("x", x, kind)?;
    ensure!(
        from.rows == heads && from.len == columns,
        "x: {} heads of {}, expected {heads} of {columns}",
        from.rows,
        from.len
    );
    ensure!(x.is_contiguous(), "x: not contiguous");
    let (num_rows, width) = (from.heads, heads * rows);
    let out = Tensor::f_empty([num_rows as i64, width as i64], (kind, Device::Cpu)).map_err(torch)?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let inputs: Vec<Inputs<'_>> = (0..heads)
        .map(|head| {
            // SAFETY: `x` is contiguous, so a head's rows lie one after the other; nothing writes them during this call.
            let items = unsafe { std::slice::from_raw_parts(head_of(&from, head), num_rows * columns) };
            Inputs::all(items, num_rows, columns, Dots::WhereTheyAre)
        })
        .collect();
    let (first, out_first) = (Shared(weight.first.cast::<E>()), Writer::<E>::new(out.data_ptr().cast()));
    let per_chunk = rows_per_chunk(columns * size_of::<E>());
    let chunks_each = rows.div_ceil(per_chunk);
    crew.run(heads * chunks_each, &|index| {
        let (head, chunk) = (index / chunks_each, index % chunks_each);
        let part: Range<usize> = chunk * per_chunk..rows.min((chunk + 1) * per_chunk);
        // SAFETY: the shapes were compared above: the head's matrix has these rows of as many elements as an input, its
        // columns of the result begin at head * rows, and no other chunk has these.
        unsafe {
            let sink = Store { out: Writer::new(out_first.get().add(head * rows)), width };
            multiply([first.get().add(head * stride)], part, &inputs[head], &sink);
        }
    });
    Ok(out)
}

/// # Safety
/// `head` is within bounds and has rows.
unsafe fn head_of<E>(rows: &Rows3<E>, head: usize) -> *const E {
    // SAFETY: the caller's promise.
    unsafe { rows.at(head, 0).cast_const() }
}

/// `out[input][row] = product`; `out` is `[inputs, width]`.
struct Store<T> {
    out: Writer<T>,
    width: usize,
}

impl<T: Element> Sink<1> for Store<T> {
    #[inline(always)]
    unsafe fn put(&self, row: usize, count: usize, from: usize, num: usize, [tile]: &[Tile; 1]) {
        for (i, products) in tile.iter().enumerate().take(num) {
            // SAFETY: within `[inputs, width]`, says the caller, and these elements are this call's alone.
            unsafe {
                let to = self.out.get().add((from + i) * self.width + row);
                write(to, products.map(T::from_f32), count);
            }
        }
    }
}

fn torch(error: tch::TchError) -> ShapeError {
    ShapeError(error.to_string())
}
