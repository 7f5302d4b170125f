//! Who is let in, and what: TLS and certificates on both sides of a real pair, tokens, the refusal to be open by accident,
//! limits.
mod certificates;
mod clients;
mod limits;
mod start;
mod tokens;

use std::path::{Path, PathBuf};

use afd_common::net::tls::Identity;
use afd_tests::fixtures;
use afd_tests::harness::{Authority, DeploymentSpec, Ffn, Pass};

const MODEL: &str = "tiny-llama";
/// Where the tests' servers are.
const HOST: &str = "127.0.0.1";

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn pair() -> DeploymentSpec {
    DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 1, replicas: 1 })
}

/// A pair of which everybody asks everybody for a certificate of one authority.
fn mutual(authority: &Authority) -> anyhow::Result<DeploymentSpec> {
    let ca = text(&authority.ca());
    let options = |prefix: &str, identity: &Identity| {
        let (certificate, key) = (text(&identity.certificate), text(&identity.key));
        [format!("--{prefix}tls-cert"), certificate, format!("--{prefix}tls-key"), key]
    };
    let server = options("", &authority.issue("server", &[HOST])?);
    let attention = options("ffn-", &authority.issue("attention", &["attention"])?);
    let server: Vec<&str> = server.iter().map(String::as_str).chain(["--tls-client-ca", &ca]).collect();
    let attention: Vec<&str> = attention.iter().map(String::as_str).chain(["--ffn-tls-ca", &ca]).collect();
    let identity = Some(authority.issue("client", &["client"])?);
    let pass = Pass { ca: Some(PathBuf::from(&ca)), identity, token: None };
    Ok(pair().attention_args(&server).attention_args(&attention).ffn_args(&server).pass(pass))
}
