//! Layers that both roles use: a linear map, the residual stream's norm, the router of a mixture of experts (on the FFN,
//! or on attention when the gate is placed there), and the names under which a family stores its FFN.
mod linear;
mod names;
mod norm;
mod router;
#[cfg(test)]
mod tests;

pub use linear::Linear;
pub use names::FfnNames;
pub use norm::RmsNorm;
pub use router::{NO_EXPERT, Router, Selected, Selector};
