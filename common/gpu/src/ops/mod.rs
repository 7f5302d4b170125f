//! What a decoder layer needs for few rows, each made of one or a few kernels: made once for its shapes, then enqueued
//! as often as one likes, also into a graph. Nothing here allocates when it is enqueued.
mod gemm;
mod gqa;
mod mla;
mod moe;
mod rows;
mod sample;

pub use gemm::{Blas, Gemm, GemmShape, ProductType, WeightOrder};
pub use gqa::{GqaDecode, GqaStep};
pub use mla::{Mla, MlaShape, MlaStep};
pub use moe::{Moe, MoeOutput, MoeScoring, MoeShape, MoeTuning, MoeWeights};
pub use rows::{GqaWrite, MlaWrite, NormRows, RowPlaces, Rows};
pub use sample::{DrawRule, RULE_WORDS, Sample};
