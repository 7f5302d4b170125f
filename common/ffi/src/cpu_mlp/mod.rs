//! Gated MLPs, `down(silu(gate(x)) * up(x))`, of a few rows on the CPU: what the FFN does in decode.
//!
//! With few rows the work is to read the weights once. As libtorch operations a mixture of experts is five calls an
//! expert, each with its own start of threads, and bf16 products on a CPU without bf16 instructions are several times
//! slower than reading the weights. Here all MLPs of a layer are two loops shared out over a [`Crew`]: gate and up, then
//! down; sums are in f32 and rounded never. Gate and up are multiplied in bf16 where the CPU does that itself. With many
//! rows libtorch's blocked products win.
//!
//! This file checks shapes and shares out the work, `kernel` has the loops.
use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::cpu_attention::simd::{Bf16, Element, Isa};
use crate::cpu_attention::{ShapeError, check_cpu, ensure};
use crate::{Crew, memory};

mod kernel;
#[cfg(test)]
mod tests;

use kernel::Rows;

/// Bytes of weights in one chunk of work: some microseconds of reading.
const CHUNK_BYTES: usize = 64 << 10;

/// Weights of one MLP as checkpoints store them, checked once. Keeps their memory alive.
#[derive(Debug)]
pub struct StoredMlp {
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    kind: Kind,
    hidden: usize,
    intermediate: usize,
}

#[derive(Debug)]
struct Matrix {
    first: *const u8,
    _owner: Tensor,
}

// SAFETY: the pointer is into memory that the tensor beside it keeps alive, wherever the two go together.
unsafe impl Send for Matrix {}

impl StoredMlp {
    /// `gate` and `up` are `[intermediate, hidden]`, `down` is `[hidden, intermediate]`; contiguous, on the CPU, all f32
    /// or all bf16.
    ///
    /// # Errors
    /// [`ShapeError`] says what does not fit.
    pub fn new(gate: &Tensor, up: &Tensor, down: &Tensor) -> Result<Self, ShapeError> {
        let (kind, size) = (gate.kind(), gate.size());
        ensure!(matches!(kind, Kind::Float | Kind::BFloat16), "gate: {kind:?}; f32 and bf16 are served");
        ensure!(size.len() == 2, "gate: shape {size:?}, expected [intermediate, hidden]");
        let (intermediate, hidden) = (size[0], size[1]);
        let matrix = |what: &str, tensor: &Tensor, expected: [i64; 2]| {
            check_cpu(what, tensor, kind)?;
            let size = tensor.size();
            ensure!(size == expected, "{what}: shape {size:?}, expected {expected:?}");
            ensure!(tensor.is_contiguous(), "{what}: not contiguous");
            Ok(Matrix { first: tensor.data_ptr().cast_const().cast(), _owner: tensor.shallow_clone() })
        };
        Ok(Self {
            gate: matrix("gate", gate, [intermediate, hidden])?,
            up: matrix("up", up, [intermediate, hidden])?,
            down: matrix("down", down, [hidden, intermediate])?,
            kind,
            hidden: hidden as usize,
            intermediate: intermediate as usize,
        })
    }
}

/// One MLP's part of a layer: the rows it gets, and what its result is multiplied by for each.
#[derive(Clone, Copy, Debug)]
pub struct MlpRows<'a> {
    /// Its weights.
    pub mlp: &'a StoredMlp,
    /// Indices into the layer's rows; any may occur.
    pub rows: &'a [i64],
    /// As many as `rows`.
    pub scales: &'a [f32],
}

/// `out[row] = Σ scale * mlp(x[row])` over all MLPs that have the row. `x` is `[rows, hidden]` of the weights' dtype;
/// returns `[rows, hidden]` f32.
///
/// # Errors
/// [`ShapeError`] when something does not fit.
pub fn gated_mlps(x: &Tensor, mlps: &[MlpRows<'_>], crew: &Crew) -> Result<Tensor, ShapeError> {
    gated(x, mlps, crew, Dots::WhereTheyAre)
}

fn gated(x: &Tensor, mlps: &[MlpRows<'_>], crew: &Crew, dots: Dots) -> Result<Tensor, ShapeError> {
    match x.kind() {
        Kind::Float => run::<f32>(x, mlps, crew, dots),
        Kind::BFloat16 => run::<Bf16>(x, mlps, crew, dots),
        other => Err(ShapeError(format!("x: {other:?}; f32 and bf16 are served"))),
    }
}

/// One MLP's part as the threads see it: no tensors, which must not be shared.
struct Part<'a, E> {
    gate: *const E,
    up: *const E,
    down: *const E,
    intermediate: usize,
    rows: &'a [i64],
    scales: &'a [f32],
}

// SAFETY: the pointers are only read through, and the tensors they are of are borrowed by `run`, which ends no sooner
// than every thread's work on this.
unsafe impl<E: Element> Sync for Part<'_, E> {}

fn run<E: Element>(x: &Tensor, mlps: &[MlpRows<'_>], crew: &Crew, dots: Dots) -> Result<Tensor, ShapeError> {
    let size = x.size();
    ensure!(size.len() == 2, "x: shape {size:?}, expected [rows, hidden]");
    let (num_rows, hidden) = (size[0] as usize, size[1] as usize);
    check(x.kind(), num_rows, hidden, mlps)?;
    let torch = |error: tch::TchError| ShapeError(error.to_string());
    let wide = x.f_to_kind(Kind::Float).and_then(|x| x.f_contiguous()).map_err(torch)?;
    let wide = memory::f32s(&wide).map_err(|error| ShapeError(error.to_string()))?;
    let out = Tensor::f_zeros([num_rows as i64, hidden as i64], (Kind::Float, Device::Cpu)).map_err(torch)?;
    if num_rows == 0 {
        return Ok(out);
    }
    let parts: Vec<Part<'_, E>> = mlps
        .iter()
        .filter(|part| !part.rows.is_empty())
        .map(|&MlpRows { mlp, rows, scales }| Part {
            gate: mlp.gate.first.cast(),
            up: mlp.up.first.cast(),
            down: mlp.down.first.cast(),
            intermediate: mlp.intermediate,
            rows,
            scales,
        })
        .collect();
    let activations = activate(&parts, wide, hidden, crew, dots);
    add_down(&parts, &activations, Writer(out.data_ptr().cast()), hidden, crew);
    Ok(out)
}

/// `silu(gate(x)) * up(x)` of every part, `[its rows, its intermediate rows]`.
fn activate<E: Element>(
    parts: &[Part<'_, E>],
    x: &[f32],
    hidden: usize,
    crew: &Crew,
    dots: Dots,
) -> Vec<Vec<f32>> {
    let inputs: Vec<Rows> = parts.iter().map(|part| Rows::gathered(x, hidden, part.rows)).collect();
    let mut outputs: Vec<Vec<f32>> =
        parts.iter().map(|part| vec![0.0; part.rows.len() * part.intermediate]).collect();
    let writers: Vec<Writer> = outputs.iter_mut().map(|items| Writer(items.as_mut_ptr())).collect();
    let pieces = pieces(parts, hidden);
    let ways: Vec<Way> = inputs.into_iter().map(|rows| Way::new::<E>(rows, dots)).collect();
    crew.run(pieces.len(), &|index| {
        let (at, rows) = &pieces[index];
        let part = &parts[*at];
        // SAFETY: `check` compared the shapes; these are rows of the MLP; its outputs were made for all its rows and
        // inputs, and no other piece has these columns of them.
        unsafe { ways[*at].activate(part, hidden, rows.clone(), writers[*at].get()) }
    });
    outputs
}

/// Adds `scale * down(activations)` of every part to its rows of the sum, `[rows, hidden]`.
fn add_down<E: Element>(
    parts: &[Part<'_, E>],
    activations: &[Vec<f32>],
    sum: Writer,
    hidden: usize,
    crew: &Crew,
) {
    let inputs: Vec<Rows> = parts
        .iter()
        .zip(activations)
        .map(|(part, items)| Rows::consecutive(items, part.intermediate, part.rows.len()))
        .collect();
    let row_bytes: usize = parts.iter().map(|part| part.intermediate * size_of::<E>()).sum();
    let per_chunk = rows_per_chunk(row_bytes);
    let isa = Isa::best();
    crew.run(hidden.div_ceil(per_chunk), &|index| {
        let columns = index * per_chunk..hidden.min((index + 1) * per_chunk);
        for (part, input) in parts.iter().zip(&inputs) {
            let (len, columns) = (part.intermediate, columns.clone());
            // SAFETY: `check` compared the shapes and every row index with the rows of the sum; these are rows of the
            // MLP, and no other chunk has these columns of the sum.
            unsafe {
                let (rows, scales, out) = (part.rows, part.scales, sum.get());
                kernel::add_down(isa, part.down, len, columns, input, rows, scales, out, hidden);
            }
        }
    });
}

/// How gate and up of one part are computed, with its inputs as that takes them.
enum Way {
    /// Weights are widened to f32.
    Wide(Isa, Rows),
    /// The CPU multiplies bf16 itself.
    #[cfg(target_arch = "x86_64")]
    Dot(kernel::dot::Bf16Rows),
}

impl Way {
    /// The best one of this CPU for weights of `E` and rows that came as such; `dots` may be ruled out.
    fn new<E: Element>(inputs: Rows, dots: Dots) -> Self {
        #[cfg(target_arch = "x86_64")]
        if E::IS_BF16 && dots == Dots::WhereTheyAre && kernel::dot::is_here() {
            return Self::Dot(kernel::dot::Bf16Rows::new(&inputs));
        }
        let _ = dots;
        Self::Wide(Isa::best(), inputs)
    }

    /// # Safety
    /// As for [`kernel::activate`], for the part's inputs and rows.
    unsafe fn activate<E: Element>(
        &self,
        part: &Part<'_, E>,
        hidden: usize,
        rows: Range<usize>,
        out: *mut f32,
    ) {
        let (gate_up, width) = ([part.gate, part.up], part.intermediate);
        // SAFETY: the caller's promise is the same; a dot's weights are bf16, and the CPU has it: `new` has asked.
        unsafe {
            match self {
                Self::Wide(isa, inputs) => kernel::activate(*isa, gate_up, hidden, rows, inputs, out, width),
                #[cfg(target_arch = "x86_64")]
                Self::Dot(inputs) => {
                    kernel::dot::activate(gate_up.map(<*const E>::cast), rows, inputs, out, width)
                }
            }
        }
    }
}

/// Whether instructions that multiply bf16 are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dots {
    WhereTheyAre,
    /// For tests of the other loops on CPUs that have them.
    #[cfg(test)]
    Never,
}

fn check(kind: Kind, num_rows: usize, hidden: usize, mlps: &[MlpRows<'_>]) -> Result<(), ShapeError> {
    for MlpRows { mlp, rows, scales } in mlps {
        ensure!(mlp.kind == kind, "weights of {:?}, rows of {kind:?}", mlp.kind);
        ensure!(mlp.hidden == hidden, "weights for rows of {}, got {hidden}", mlp.hidden);
        ensure!(rows.len() == scales.len(), "{} rows, {} scales", rows.len(), scales.len());
        if let Some(row) = rows.iter().find(|&&row| !usize::try_from(row).is_ok_and(|row| row < num_rows)) {
            return Err(ShapeError(format!("row {row} of {num_rows}")));
        }
    }
    Ok(())
}

/// Gate and up of all parts in pieces of [`CHUNK_BYTES`]: which part, which of its intermediate rows.
fn pieces<E>(parts: &[Part<'_, E>], hidden: usize) -> Vec<(usize, Range<usize>)> {
    let per_chunk = rows_per_chunk(2 * hidden * size_of::<E>());
    let cut = |all: usize| (0..all).step_by(per_chunk).map(move |from| from..all.min(from + per_chunk));
    let of_part = |(at, part): (usize, &Part<'_, E>)| cut(part.intermediate).map(move |rows| (at, rows));
    parts.iter().enumerate().flat_map(of_part).collect()
}

/// A multiple of the kernel's tile.
fn rows_per_chunk(row_bytes: usize) -> usize {
    (CHUNK_BYTES / row_bytes.max(1)).next_multiple_of(kernel::TILE_ROWS)
}

/// Where threads write, each its own elements.
struct Writer(*mut f32);

impl Writer {
    fn get(&self) -> *mut f32 {
        self.0
    }
}

// SAFETY: the pointer is only written through by the kernels, each chunk of work in elements of its own.
unsafe impl Sync for Writer {}
