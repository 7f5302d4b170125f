//! What a checkpoint says about itself, as types that cannot be wrong.
pub mod model;
