//! What a process is told: options and files ([`shared`], [`option`], [`idle`], [`file`], [`choices`], [`units`], [`dtype`],
//! [`device`], [`threads`]), and what a checkpoint says about itself ([`model`]); as types that cannot be wrong.
pub mod choices;
pub mod device;
pub mod dtype;
pub mod file;
pub mod idle;
pub mod model;
pub mod option;
pub mod shared;
pub mod threads;
pub mod units;

/// What stands at the end of a command's `--help` that takes times.
pub fn after_help() -> String {
    format!("{}\n\n{}", units::TIMES, crate::process::exit::help())
}
