//! What a checkpoint says about itself, as types that cannot be wrong.
pub mod dtype;
pub mod model;
