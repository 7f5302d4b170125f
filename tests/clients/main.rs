//! Clients that are not ours to write: example programs in four languages, generated from `proto/` and run against a live
//! pair, and what general tools rely on (reflection, health, buf).
//!
//! A client is built by `deploy/clients.sh`. Where a language's tools are missing its test says so on standard error and
//! passes; Go, Java and buf take long to build the first time and wait for `AFD_TEST_FULL=1` (`deploy/test.sh --full`).
mod buf;
mod built;
mod health;
mod languages;
mod reflection;

use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn};

const MODEL: &str = "tiny-mixtral";

/// One attention rank and one FFN rank.
async fn pair() -> anyhow::Result<Deployment> {
    let ffn = Ffn::Remote { shards: 1, replicas: 1 };
    Deployment::start(DeploymentSpec::new(fixtures::checkpoint(MODEL), ffn)).await
}
