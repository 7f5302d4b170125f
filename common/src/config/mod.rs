//! What a process is told: options and files ([`file`], [`units`], [`dtype`]), and what a checkpoint says about itself
//! ([`model`]); as types that cannot be wrong.
pub mod dtype;
pub mod file;
pub mod model;
pub mod units;
