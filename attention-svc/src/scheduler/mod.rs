//! The scheduler: which tokens of which sequences a step runs. Pure: no clock, no async, no tensors.
mod step;

pub use step::Phase;
