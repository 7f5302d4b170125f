//! What a process is told: options and files ([`option`], [`idle`], [`file`], [`choices`], [`units`], [`dtype`], [`device`],
//! [`threads`]), and what a checkpoint says about itself ([`model`]); as types that cannot be wrong.
pub mod choices;
pub mod device;
pub mod dtype;
pub mod file;
pub mod idle;
pub mod model;
pub mod option;
pub mod threads;
pub mod units;
