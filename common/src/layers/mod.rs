//! Layers that both roles use: a linear map, the residual stream's norm, the router of a mixture of experts (on the FFN,
//! or on attention when the gate is placed there), a gated MLP (on the FFN, or on attention where it is shared experts that
//! are placed there) with the short cut for few rows of it, and the names under which a family stores its FFN.
mod few_rows;
mod gated_mlp;
mod linear;
mod names;
mod norm;
mod router;
#[cfg(test)]
mod tests;

pub use few_rows::{FewRows, MlpError};
pub use gated_mlp::{GateUp, GatedMlp, halves, transposed};
pub use linear::Linear;
pub use names::FfnNames;
pub use norm::RmsNorm;
pub use router::{NO_EXPERT, Router, Selected, Selector};
