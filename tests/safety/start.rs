//! Nobody is open to a network by accident.
use std::process::{Command, Stdio};
use std::time::Duration;

use afd_tests::fixtures;
use afd_tests::harness::Process;
use anyhow::ensure;

use crate::{MODEL, text};

const LIMIT: Duration = Duration::from_secs(30);

#[test]
fn a_public_address_needs_a_guard_or_the_word_insecure() -> anyhow::Result<()> {
    let (folder, model) = (tempfile::tempdir()?, text(&fixtures::checkpoint(MODEL)));
    for (binary, more) in [("attention-svc", &["--ffn", "local"][..]), ("ffn-svc", &[])] {
        let start = |name: &str, guard: &[&str]| {
            let words =
                [&["serve", "--model", &model, "--listen", "0.0.0.0:0", "--threads", "1"], more, guard];
            let words: Vec<String> = words.concat().into_iter().map(str::to_owned).collect();
            Process::start(binary, &format!("{binary}-{name}"), &words, folder.path())
        };
        let mut open = start("open", &[])?;
        let (status, said) = (open.wait(LIMIT)?, open.log());
        ensure!(status.code() == Some(2), "{binary}: {status}\n{said}");
        for part in ["--listen", "0.0.0.0:0", "-token-file", "--tls-client-ca", "--insecure"] {
            ensure!(said.contains(part), "{binary} does not name {part}:\n{said}");
        }
        let mut insecure = start("insecure", &["--insecure"])?;
        insecure.address(LIMIT)?;
        ensure!(insecure.log().contains("INSECURE"), "{binary} does not warn:\n{}", insecure.log());
    }
    Ok(())
}

#[test]
fn certificates_that_do_not_fit_are_a_usage_error() -> anyhow::Result<()> {
    let (folder, model) = (tempfile::tempdir()?, text(&fixtures::checkpoint(MODEL)));
    let empty = folder.path().join("empty.pem");
    std::fs::write(&empty, "")?;
    let empty = text(&empty);
    let words = ["serve", "--model", &model, "--tls-cert", &empty, "--tls-key", &empty].map(str::to_owned);
    let mut process = Process::start("ffn-svc", "F0", &words, folder.path())?;
    let (status, said) = (process.wait(LIMIT)?, process.log());
    ensure!(status.code() == Some(2) && said.contains("--tls-cert") && said.contains(&empty), "{said}");
    Ok(())
}

/// A role's own probe, as a container's health check calls it.
pub(crate) fn probe(binary: &str, arguments: &[&str]) -> anyhow::Result<(bool, String)> {
    let output =
        Command::new(Process::binary(binary)?).arg("probe").args(arguments).stdin(Stdio::null()).output()?;
    let said = [output.stdout, output.stderr].concat();
    Ok((output.status.success(), String::from_utf8_lossy(&said).into_owned()))
}
