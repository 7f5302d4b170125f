//! Real processes on loopback: builds both binaries once, starts them on free ports, and ends them with the test.
mod certificates;
mod deployment;
mod pass;
mod process;
mod proxy;
mod python;
mod spec;

pub use certificates::Authority;
pub use deployment::{Deployment, greedy, metric};
pub use pass::Pass;
pub use process::{Process, output, run};
pub use proxy::{Harm, Network, Way};
pub use python::Python;
pub use spec::{DeploymentSpec, Ffn};
