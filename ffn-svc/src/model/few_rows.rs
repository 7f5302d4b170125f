//! The short cut for few rows on the CPU: all MLPs of a layer in two loops over the stored weights, instead of several
//! libtorch operations each.
use std::sync::Arc;

use afd_common::ids::LayerIdx;
use afd_ffi::cpu_mlp::{MlpRows, StoredMlp, gated_mlps};
use afd_ffi::{Crew, multiplies_bf16};
use tch::{Device, Kind, TchError, Tensor};

use super::error::FfnModelError;

/// Rows of the fullest MLP up to which the loops are faster. Measured on one core with AVX-512 at hidden size 576, MLPs of
/// 192 and 1536: against libtorch in f32 even at 2 rows, 1.2 times as fast at 16, slower at 64; in bf16 2 to 3 times as
/// fast from 1 to 128 on a CPU without bf16 instructions; on one that has them 1.9 times at 1 to 8 rows, 1.4 times at 16,
/// even at 64 (the benchmark `few_rows`).
const MAX_F32: usize = 32;
const MAX_BF16_EMULATED: usize = 128;
const MAX_BF16_NATIVE: usize = 64;

/// Threads for the loops, and constants they need.
#[derive(Debug)]
pub(super) struct FewRows {
    crew: Arc<Crew>,
    max_rows: usize,
    /// Many rows in bf16 are computed in f32, weights widened as they are used.
    widen: bool,
    /// 0, 1, 2, ..
    every_row: Vec<i64>,
    ones: Vec<f32>,
}

impl FewRows {
    /// With as many threads as libtorch was told to use.
    pub(super) fn new(kind: Kind) -> Result<Self, FfnModelError> {
        let threads = usize::try_from(tch::get_num_threads()).unwrap_or(1);
        let max_rows = match kind {
            Kind::BFloat16 if multiplies_bf16() => MAX_BF16_NATIVE,
            Kind::BFloat16 => MAX_BF16_EMULATED,
            _ => MAX_F32,
        };
        Ok(Self {
            crew: Arc::new(Crew::new(threads).map_err(FfnModelError::Threads)?),
            max_rows,
            widen: kind == Kind::BFloat16 && !multiplies_bf16(),
            every_row: (0..max_rows as i64).collect(),
            ones: vec![1.0; max_rows],
        })
    }

    /// The same on threads that others use too.
    pub(super) fn on(self, crew: Arc<Crew>) -> Self {
        Self { crew, ..self }
    }

    /// Whether the loops are the faster way for this many rows of an MLP.
    pub(super) fn are(&self, num_rows: usize) -> bool {
        num_rows <= self.max_rows
    }

    /// An MLP that gets every row, at most as many as [`are`](Self::are) few.
    pub(super) fn all_of<'a>(&'a self, mlp: &'a StoredMlp, num_rows: usize) -> MlpRows<'a> {
        MlpRows { mlp, rows: &self.every_row[..num_rows], scales: &self.ones[..num_rows] }
    }

    /// An MLP that gets some of the rows, at most as many as [`are`](Self::are) few.
    pub(super) fn some_of<'a>(&'a self, mlp: &'a StoredMlp, rows: &'a [i64]) -> MlpRows<'a> {
        MlpRows { mlp, rows, scales: &self.ones[..rows.len()] }
    }

    /// Rows that are not few, in the dtype to compute them in.
    pub(super) fn else_widened(&self, x: &Tensor) -> Result<Tensor, TchError> {
        if self.widen && x.device() == Device::Cpu { x.f_to_kind(Kind::Float) } else { Ok(x.shallow_clone()) }
    }

    /// The sum of the MLPs' outputs, `[rows, hidden]` f32.
    pub(super) fn forward(
        &self,
        layer: LayerIdx,
        x: &Tensor,
        mlps: &[MlpRows<'_>],
    ) -> Result<Tensor, FfnModelError> {
        gated_mlps(x, mlps, &self.crew).map_err(|source| FfnModelError::FewRows { layer, source })
    }
}
