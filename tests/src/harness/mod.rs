//! Real processes on loopback: builds both binaries once, starts them on free ports, and ends them with the test.
mod certificates;
mod deployment;
mod process;
mod proxy;

pub use certificates::Authority;
pub use deployment::{Deployment, DeploymentSpec, Ffn, Pass, greedy, metric};
pub use process::{Process, output, run};
pub use proxy::{Harm, Network, Way};
