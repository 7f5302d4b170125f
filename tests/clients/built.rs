//! What `deploy/clients.sh` builds: called here, so that a test never runs a program of yesterday.
use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, bail, ensure};

/// Exit status of `deploy/clients.sh` when tools are missing.
const NO_TOOLS: i32 = 3;
/// A build that fetches everything on a busy machine.
const BUILD_LIMIT_S: u32 = 900;

/// When a test insists on its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effort {
    /// Built in seconds: in every run.
    Quick,
    /// With `AFD_TEST_FULL=1`, and wherever it was built before.
    Long,
}

/// The repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The folder of what is built under this name, or `None` (and a word on standard error) where it is left out.
///
/// # Errors
/// When its tools are here and it does not build.
pub(crate) fn folder(name: &str, effort: Effort) -> anyhow::Result<Option<PathBuf>> {
    let folder = root().join(".deps/clients").join(name);
    let full = std::env::var_os("AFD_TEST_FULL").is_some();
    if effort == Effort::Long && !full && !folder.join(".built").exists() {
        left_out(&format!("{name} is not built: `bash deploy/clients.sh {name}`, or AFD_TEST_FULL=1"));
        return Ok(None);
    }
    let script = root().join("deploy/clients.sh");
    let output = run(BUILD_LIMIT_S, "bash", [script.as_os_str(), OsStr::new(name)])?;
    let words = String::from_utf8_lossy(&output.stderr);
    match output.status.code() {
        Some(0) => Ok(Some(folder)),
        Some(NO_TOOLS) => {
            left_out(words.trim());
            Ok(None)
        }
        _ => bail!("deploy/clients.sh {name}: {}\n{words}", output.status),
    }
}

/// Runs a program to its end, which comes within `limit_s` seconds.
///
/// # Errors
/// When it cannot be started or takes longer.
pub(crate) fn run(
    limit_s: u32,
    program: impl AsRef<OsStr>,
    arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
) -> anyhow::Result<Output> {
    let program = program.as_ref();
    // coreutils' timeout ends the children as well, which `Child::kill` does not.
    let mut command = Command::new("timeout");
    command.arg("--kill-after=5").arg(limit_s.to_string()).arg(program).args(arguments);
    let output = command.output().context("coreutils' timeout")?;
    ensure!(output.status.code() != Some(124), "{} took longer than {limit_s} s", program.display());
    Ok(output)
}

/// The test runner keeps what a passing test prints to itself; this goes past it.
fn left_out(why: &str) {
    let _ = writeln!(std::io::stderr(), "LEFT OUT: {why}");
}
