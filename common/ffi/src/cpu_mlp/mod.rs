//! Gated MLPs, `down(silu(gate(x)) * up(x))`, of a few rows on the CPU: what the FFN does in decode.
//!
//! With few rows the work is to read the weights once. As libtorch operations a mixture of experts is five calls an
//! expert, each with its own start of threads, and bf16 products on a CPU without bf16 instructions are several times
//! slower than reading the weights. Here all MLPs of a layer are two loops shared out over a [`Crew`]: gate and up, then
//! down; sums are in f32 and what lies between the loops is never rounded, so that gate and up can be multiplied in bf16
//! where the CPU does that, and down cannot. With many rows libtorch's blocked products win.
//!
//! This file checks shapes and shares out the work, [`cpu_products`](crate::cpu_products) has the loops.
use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::Crew;
use crate::cpu_products::{
    Dots, Inputs, Sink, TILE_INPUTS, TILE_ROWS, Tile, Writer, multiply, rows_per_chunk, write,
};
use crate::exp::silu;
use crate::simd::{Bf16, Element};
use crate::views::{Rows3, ShapeError, check_cpu, ensure};

#[cfg(test)]
mod tests;

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
    let x = x.f_contiguous().map_err(torch)?;
    let rows = x.f_unsqueeze(1).map_err(torch)?;
    let rows = Rows3::<E>::new("x", &rows, x.kind())?;
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
    // SAFETY: the tensor is contiguous, so its rows lie one after the other; nothing writes it during this call.
    let x = unsafe { std::slice::from_raw_parts(rows.at(0, 0).cast_const(), num_rows * hidden) };
    let activations = activate(&parts, x, hidden, crew, dots);
    add_down(&parts, &activations, &Writer::new(out.data_ptr().cast()), hidden, crew);
    Ok(out)
}

/// `silu(gate(x)) * up(x)` of every part, `[its rows, its intermediate rows]`.
fn activate<E: Element>(
    parts: &[Part<'_, E>],
    x: &[E],
    hidden: usize,
    crew: &Crew,
    dots: Dots,
) -> Vec<Vec<f32>> {
    let inputs: Vec<Inputs<'_>> = parts
        .iter()
        .map(|part| match is_every_row(part.rows, x.len() / hidden.max(1)) {
            true => Inputs::all(x, part.rows.len(), hidden, dots),
            false => Inputs::gathered(x, hidden, part.rows, dots),
        })
        .collect();
    let mut outputs: Vec<Vec<f32>> =
        parts.iter().map(|part| vec![0.0; part.rows.len() * part.intermediate]).collect();
    let sinks: Vec<Gated> = parts
        .iter()
        .zip(&mut outputs)
        .map(|(part, items)| Gated { out: Writer::new(items.as_mut_ptr()), width: part.intermediate })
        .collect();
    let pieces = pieces(parts, hidden);
    crew.run(pieces.len(), &|index| {
        let (at, rows) = &pieces[index];
        let part = &parts[*at];
        // SAFETY: `check` compared the shapes; these are rows of the MLP; its outputs were made for all its rows and
        // inputs, and no other piece has these columns of them.
        unsafe { multiply([part.gate, part.up], rows.clone(), &inputs[*at], &sinks[*at]) }
    });
    outputs
}

/// Whether these are 0, 1, 2, .. up to `count`.
fn is_every_row(rows: &[i64], count: usize) -> bool {
    rows.len() == count && rows.iter().zip(0..).all(|(&row, index)| row == index)
}

/// Adds `scale * down(activations)` of every part to its rows of the sum, `[rows, hidden]`.
fn add_down<E: Element>(
    parts: &[Part<'_, E>],
    activations: &[Vec<f32>],
    sum: &Writer<f32>,
    hidden: usize,
    crew: &Crew,
) {
    let inputs: Vec<Inputs<'_>> = parts
        .iter()
        .zip(activations)
        .map(|(part, items)| Inputs::all(items, part.rows.len(), part.intermediate, Dots::WhereTheyAre))
        .collect();
    let row_bytes: usize = parts.iter().map(|part| part.intermediate * size_of::<E>()).sum();
    let per_chunk = rows_per_chunk(row_bytes);
    crew.run(hidden.div_ceil(per_chunk), &|index| {
        let columns = index * per_chunk..hidden.min((index + 1) * per_chunk);
        for (part, input) in parts.iter().zip(&inputs) {
            let sink = AddScaled { row_of: part.rows, scales: part.scales, out: sum, width: hidden };
            // SAFETY: `check` compared the shapes and every row index with the rows of the sum; these are rows of the
            // MLP, and no other chunk has these columns of the sum.
            unsafe { multiply([part.down], columns.clone(), input, &sink) }
        }
    });
}

/// `out[input][row] = silu(gate) * up`; `out` is `[inputs, width]`.
struct Gated {
    out: Writer<f32>,
    width: usize,
}

impl Sink<2> for Gated {
    #[inline(always)]
    unsafe fn put(&self, row: usize, count: usize, from: usize, num: usize, [gate, up]: &[Tile; 2]) {
        let mut products = [[0.0; TILE_ROWS]; TILE_INPUTS];
        // All of the tile, whatever is in use of it: one vector.
        for i in 0..TILE_INPUTS {
            for r in 0..TILE_ROWS {
                products[i][r] = silu(gate[i][r]) * up[i][r];
            }
        }
        for (i, products) in products.iter().enumerate().take(num) {
            // SAFETY: within `[inputs, width]`, says the caller, and these elements are this call's alone.
            unsafe {
                let to = self.out.get().add((from + i) * self.width + row);
                write(to, *products, count);
            }
        }
    }
}

/// `out[row_of[input]][row] += scales[input] * product`; `out` is `[_, width]`.
struct AddScaled<'a> {
    row_of: &'a [i64],
    scales: &'a [f32],
    out: &'a Writer<f32>,
    width: usize,
}

impl Sink<1> for AddScaled<'_> {
    #[inline(always)]
    unsafe fn put(&self, row: usize, count: usize, from: usize, num: usize, [tile]: &[Tile; 1]) {
        for (i, products) in tile.iter().enumerate().take(num) {
            let (to, scale) = (self.row_of[from + i] as usize * self.width + row, self.scales[from + i]);
            // SAFETY: within `[max(row_of) + 1, width]`, says the caller, and these elements are this call's alone.
            let to = unsafe { std::slice::from_raw_parts_mut(self.out.get().add(to), count) };
            for (sum, product) in to.iter_mut().zip(products) {
                *sum += scale * product;
            }
        }
    }
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
