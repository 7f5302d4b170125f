//! The short cut for few rows on the CPU: all MLPs of a layer in two loops over the stored weights, instead of several
//! libtorch operations each.
use std::sync::Arc;

use afd_ffi::cpu_mlp::{MlpRows, StoredMlp, gated_mlps};
use afd_ffi::{Crew, ShapeError, multiplies_bf16};
use tch::{Device, Kind, TchError, Tensor};

use super::GatedMlp;

/// Rows of the fullest MLP up to which the loops are faster. Measured on one core with AVX-512 at hidden size 576, MLPs of
/// 192 and 1536: against libtorch in f32 even at 2 rows, 1.2 times as fast at 16, slower at 64; in bf16 2 to 3 times as
/// fast from 1 to 128 on a CPU without bf16 instructions; on one that has them 1.9 times at 1 to 8 rows, 1.4 times at 16,
/// even at 64 (the benchmark `few_rows`).
const MAX_F32: usize = 32;
const MAX_BF16_EMULATED: usize = 128;
const MAX_BF16_NATIVE: usize = 64;

/// Threads for the loops, and constants they need.
#[derive(Debug)]
pub struct FewRows {
    crew: Arc<Crew>,
    max_rows: usize,
    /// Many rows in bf16 are computed in f32, weights widened as they are used.
    widen: bool,
    /// 0, 1, 2, ..
    every_row: Vec<i64>,
    ones: Vec<f32>,
}

/// Why an MLP cannot be computed.
#[derive(Debug, thiserror::Error)]
pub enum MlpError {
    /// Rows do not fit it.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// libtorch refused.
    #[error(transparent)]
    Torch(#[from] TchError),
}

impl FewRows {
    /// Of rows in `kind`, with as many threads as libtorch was told to use.
    ///
    /// # Errors
    /// The system's, when it has no threads to give.
    pub fn new(kind: Kind) -> std::io::Result<Self> {
        let threads = usize::try_from(tch::get_num_threads()).unwrap_or(1);
        Ok(Self::on(Arc::new(Crew::new(threads)?), kind))
    }

    /// The same on threads that others use too.
    pub fn on(crew: Arc<Crew>, kind: Kind) -> Self {
        let max_rows = match kind {
            Kind::BFloat16 if multiplies_bf16() => MAX_BF16_NATIVE,
            Kind::BFloat16 => MAX_BF16_EMULATED,
            _ => MAX_F32,
        };
        Self {
            crew,
            max_rows,
            widen: kind == Kind::BFloat16 && !multiplies_bf16(),
            every_row: (0..max_rows as i64).collect(),
            ones: vec![1.0; max_rows],
        }
    }

    /// The same with other threads.
    pub fn with_crew(self, crew: Arc<Crew>) -> Self {
        Self { crew, ..self }
    }

    /// Whether the loops are the faster way for this many rows of an MLP.
    pub fn are(&self, num_rows: usize) -> bool {
        num_rows <= self.max_rows
    }

    /// An MLP that gets every row, at most as many as [`are`](Self::are) few.
    pub fn all_of<'a>(&'a self, mlp: &'a StoredMlp, num_rows: usize) -> MlpRows<'a> {
        MlpRows { mlp, rows: &self.every_row[..num_rows], scales: &self.ones[..num_rows] }
    }

    /// An MLP that gets some of the rows, at most as many as [`are`](Self::are) few.
    pub fn some_of<'a>(&'a self, mlp: &'a StoredMlp, rows: &'a [i64]) -> MlpRows<'a> {
        MlpRows { mlp, rows, scales: &self.ones[..rows.len()] }
    }

    /// Rows that are not few, in the dtype to compute them in.
    ///
    /// # Errors
    /// libtorch's, when memory cannot be had.
    pub fn else_widened(&self, x: &Tensor) -> Result<Tensor, TchError> {
        if self.widen && x.device() == Device::Cpu { x.f_to_kind(Kind::Float) } else { Ok(x.shallow_clone()) }
    }

    /// The sum of the MLPs' outputs, `[rows, hidden]` f32.
    ///
    /// # Errors
    /// [`ShapeError`] when rows do not fit the weights.
    pub fn forward(&self, x: &Tensor, mlps: &[MlpRows<'_>]) -> Result<Tensor, ShapeError> {
        gated_mlps(x, mlps, &self.crew)
    }

    /// One MLP of all rows of `x`, `[rows, hidden]`, be they few or many: `[rows, hidden]`, f32 or the dtype of `x`.
    ///
    /// # Errors
    /// [`MlpError`] when rows do not fit the weights.
    pub fn forward_one(&self, mlp: &GatedMlp, x: &Tensor) -> Result<Tensor, MlpError> {
        let num_rows = x.size().first().map_or(0, |&rows| rows as usize);
        match mlp.stored() {
            Some(stored) if self.are(num_rows) => Ok(self.forward(x, &[self.all_of(stored, num_rows)])?),
            _ => Ok(mlp.forward(&self.else_widened(x)?)?),
        }
    }
}
