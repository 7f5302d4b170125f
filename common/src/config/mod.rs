//! What a process is told: options and files ([`file`], [`units`], [`dtype`], [`device`], [`threads`]), and what a checkpoint says about itself
//! ([`model`]); as types that cannot be wrong.
pub mod device;
pub mod dtype;
pub mod file;
pub mod model;
pub mod threads;
pub mod units;
