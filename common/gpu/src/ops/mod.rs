//! What a decoder layer needs for few rows, each made of one or a few kernels: made once for its shapes, then enqueued
//! as often as one likes, also into a graph. Nothing here allocates when it is enqueued.
mod ahead;
mod carry;
mod gqa;
mod meanwhile;
mod mla;
mod moe;
mod product;
mod rows;
mod sample;

pub use ahead::Ahead;
pub use carry::Follow;
pub use gqa::{GqaDecode, GqaStep};
pub use meanwhile::{CachePart, Meanwhile};
pub use mla::{Mla, MlaShape, MlaStep};
pub use moe::{
    Moe, MoeMany, MoeOutput, MoeProducts, MoeScoring, MoeShape, MoeTuning, MoeWeights, Places, ProductRooms,
    ProductWeights,
};
pub use product::{GemmShape, MlaSizes, Product, ProductKernels, ProductType, WeightOrder};
pub use rows::{GqaWrite, MlaQueries, MlaWrite, NormRows, RowPlaces, Rows};
pub use sample::{DrawRule, RULE_WORDS, Sample};
