//! One product of a few rows with a stored matrix on the CPU: the projections around attention and the head in decode.
//!
//! With few rows the work is to read the weights once, and a call of libtorch spends as long on starting its threads and
//! rearranging the operands. [`cpu_products`](crate::cpu_products) has the loops; with many rows libtorch's win.
use tch::{Device, Kind, Tensor};

use crate::Crew;
use crate::cpu_products::{
    Dots, Inputs, Sink, Tile, Writer, multiplies_bf16, multiply, rows_per_chunk, write,
};
use crate::simd::{Bf16, Element};
use crate::views::{Rows3, ShapeError, check_cpu, ensure};

#[cfg(test)]
mod tests;

/// A matrix `[rows, columns]` as checkpoints store it, checked once. Keeps its memory alive.
#[derive(Debug)]
pub struct StoredMatrix {
    first: *const u8,
    kind: Kind,
    rows: usize,
    columns: usize,
    _owner: Tensor,
}

// SAFETY: the pointer is into memory that the tensor beside it keeps alive, wherever the two go together.
unsafe impl Send for StoredMatrix {}

impl StoredMatrix {
    /// Of a tensor `[rows, columns]`: contiguous, on the CPU, f32 or bf16.
    ///
    /// # Errors
    /// [`ShapeError`] says what does not fit.
    pub fn new(weight: &Tensor) -> Result<Self, ShapeError> {
        let (kind, size) = (weight.kind(), weight.size());
        ensure!(matches!(kind, Kind::Float | Kind::BFloat16), "weight: {kind:?}; f32 and bf16 are served");
        check_cpu("weight", weight, kind)?;
        ensure!(size.len() == 2, "weight: shape {size:?}, expected [rows, columns]");
        ensure!(weight.is_contiguous(), "weight: not contiguous");
        Ok(Self {
            first: weight.data_ptr().cast_const().cast(),
            kind,
            rows: size[0] as usize,
            columns: size[1] as usize,
            _owner: weight.shallow_clone(),
        })
    }
}

/// Rows up to which these loops are faster than libtorch's product, by the benchmark `few_rows`: in bf16 on a CPU that
/// multiplies it twice as fast at 1 to 4 rows, 1.3 times at 8 and 16, even at 32. On other CPUs as for MLPs.
const MAX_F32: usize = 32;
const MAX_BF16_EMULATED: usize = 128;
const MAX_BF16_NATIVE: usize = 32;

/// Whether [`linear`] is the faster way for this many rows of `kind` on this CPU.
pub fn suits(num_rows: usize, kind: Kind) -> bool {
    let max = match kind {
        Kind::BFloat16 if multiplies_bf16() => MAX_BF16_NATIVE,
        Kind::BFloat16 => MAX_BF16_EMULATED,
        _ => MAX_F32,
    };
    num_rows <= max
}

/// `x · weightᵀ`, `[num_rows, weight rows]` of `kind`, f32 or that of `x`; `x` is `[num_rows, weight columns]` of the
/// weight's dtype. With `onto`, of the result's shape and of `x`'s dtype, that is added before the sum is rounded.
///
/// # Errors
/// [`ShapeError`] when something does not fit.
pub fn linear(
    x: &Tensor,
    weight: &StoredMatrix,
    onto: Option<&Tensor>,
    kind: Kind,
    crew: &Crew,
) -> Result<Tensor, ShapeError> {
    linear_with(x, weight, onto, kind, crew, Dots::WhereTheyAre)
}

fn linear_with(
    x: &Tensor,
    weight: &StoredMatrix,
    onto: Option<&Tensor>,
    kind: Kind,
    crew: &Crew,
    dots: Dots,
) -> Result<Tensor, ShapeError> {
    match (x.kind(), kind) {
        (Kind::Float, Kind::Float) => run::<f32, f32>(x, weight, onto, kind, crew, dots),
        (Kind::BFloat16, Kind::BFloat16) => run::<Bf16, Bf16>(x, weight, onto, kind, crew, dots),
        (Kind::BFloat16, Kind::Float) => run::<Bf16, f32>(x, weight, onto, kind, crew, dots),
        (from, to) => Err(ShapeError(format!("rows of {from:?} to {to:?}; f32 and bf16 are served"))),
    }
}

fn run<E: Element, T: Element>(
    x: &Tensor,
    weight: &StoredMatrix,
    onto: Option<&Tensor>,
    kind: Kind,
    crew: &Crew,
    dots: Dots,
) -> Result<Tensor, ShapeError> {
    let size = x.size();
    ensure!(
        size.len() == 2 && size[1] == weight.columns as i64,
        "x: shape {size:?}, expected [rows, {}]",
        weight.columns
    );
    ensure!(weight.kind == x.kind(), "weights of {:?}, rows of {:?}", weight.kind, x.kind());
    let shape = [size[0], weight.rows as i64];
    if let Some(onto) = onto {
        ensure!(onto.size() == shape, "onto: shape {:?}, expected {shape:?}", onto.size());
    }
    let x = Dense::<E>::new("x", x)?;
    let onto = onto.map(|onto| Dense::<E>::new("onto", onto)).transpose()?;
    let out = Tensor::f_empty(shape, (kind, Device::Cpu)).map_err(torch)?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let inputs = Inputs::all(x.elements(), size[0] as usize, weight.columns, dots);
    let sink = Store {
        onto: onto.as_ref().map(Dense::elements),
        out: Writer::<T>::new(out.data_ptr().cast()),
        width: weight.rows,
    };
    let first = Shared(weight.first.cast::<E>());
    let per_chunk = rows_per_chunk(weight.columns * size_of::<E>());
    crew.run(weight.rows.div_ceil(per_chunk), &|index| {
        let rows = index * per_chunk..weight_rows(index + 1, per_chunk, shape);
        // SAFETY: the shapes were compared above: the matrix has these rows of as many elements as an input, and so has
        // the result for every input; no other chunk has these columns of it.
        unsafe { multiply([first.get()], rows, &inputs, &sink) }
    });
    Ok(out)
}

fn weight_rows(chunk: usize, per_chunk: usize, [_, rows]: [i64; 2]) -> usize {
    (chunk * per_chunk).min(rows as usize)
}

fn torch(error: tch::TchError) -> ShapeError {
    ShapeError(error.to_string())
}

/// The elements of a tensor `[rows, columns]`, copied together if they do not lie together.
struct Dense<E> {
    rows: Rows3<E>,
    _owner: Tensor,
}

impl<E: Element> Dense<E> {
    fn new(what: &str, tensor: &Tensor) -> Result<Self, ShapeError> {
        let kind = if E::IS_BF16 { Kind::BFloat16 } else { Kind::Float };
        let owner = tensor.f_contiguous().map_err(torch)?;
        let rows = Rows3::new(what, &owner.f_unsqueeze(1).map_err(torch)?, kind)?;
        Ok(Self { rows, _owner: owner })
    }

    fn elements(&self) -> &[E] {
        let count = self.rows.rows * self.rows.len;
        if count == 0 {
            return &[];
        }
        // SAFETY: the tensor beside it is contiguous and lives as long; nothing writes it while `linear` runs.
        unsafe { std::slice::from_raw_parts(self.rows.at(0, 0).cast_const(), count) }
    }
}

/// Weights that several threads read.
struct Shared<E>(*const E);

impl<E> Shared<E> {
    fn get(&self) -> *const E {
        self.0
    }
}

// SAFETY: only read through, and the matrix that it is of is borrowed by `linear`, which ends no sooner than every
// thread's work on this.
unsafe impl<E: Element> Sync for Shared<E> {}

/// `out[input][row] = product`, plus what is there in `onto`; both are `[inputs, width]`.
struct Store<'a, E, T> {
    onto: Option<&'a [E]>,
    out: Writer<T>,
    width: usize,
}

impl<E: Element, T: Element> Sink<1> for Store<'_, E, T> {
    #[inline(always)]
    unsafe fn put(&self, row: usize, count: usize, from: usize, num: usize, [tile]: &[Tile; 1]) {
        for (i, products) in tile.iter().enumerate().take(num) {
            let (to, mut sums) = ((from + i) * self.width + row, *products);
            if let Some(onto) = self.onto {
                for (sum, onto) in sums.iter_mut().zip(&onto[to..to + count]) {
                    *sum += onto.to_f32();
                }
            }
            // SAFETY: within `[inputs, width]`, says the caller, and these elements are this call's alone.
            unsafe { write(self.out.get().add(to), sums.map(T::from_f32), count) };
        }
    }
}
