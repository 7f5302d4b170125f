//! Real processes on loopback: builds both binaries once, starts them on free ports, and ends them with the test.
mod deployment;
mod process;

pub use deployment::{Deployment, DeploymentSpec, Ffn};
pub use process::Process;
