//! A Python with pinned packages, installed once below `.deps`, for tests that ask programs of others.
use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, ensure};

const INSTALL_LIMIT_S: u32 = 300;

/// See the module's head.
pub struct Python {
    program: PathBuf,
}

impl Python {
    /// One in `.deps/<name>` with the packages of a requirements file. `None` where they cannot be had (no Python, no venv, no
    /// registry): said on standard error with `what` is missing, for whoever reads that a test was left out.
    pub fn with(name: &str, what: &str, requirements: &Path) -> Option<Self> {
        match Self::install(name, requirements) {
            Ok(python) => Some(python),
            Err(error) => {
                // The test runner keeps what a passing test prints to itself; this goes past it.
                let _ = writeln!(std::io::stderr(), "LEFT OUT: {what} cannot be installed: {error:#}");
                None
            }
        }
    }

    fn install(name: &str, requirements: &Path) -> anyhow::Result<Self> {
        let venv = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.deps").join(name);
        let python = Self { program: venv.join("bin/python") };
        let (installed, pinned) = (venv.join("installed.txt"), std::fs::read_to_string(requirements)?);
        if std::fs::read_to_string(&installed).is_ok_and(|found| found == pinned) {
            return Ok(python);
        }
        let venv = ["-m".as_ref(), "venv".as_ref(), "--clear".as_ref(), venv.as_os_str()];
        let pip = ["-m", "pip", "install", "-q", "-r"].map(OsStr::new);
        let pip = [&pip[..], &[requirements.as_os_str()]].concat();
        for (program, arguments) in [("python3".as_ref(), &venv[..]), (python.program.as_os_str(), &pip)] {
            let output = run(INSTALL_LIMIT_S, program, arguments)?;
            let words = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "{}: {}: {words}", program.display(), output.status);
        }
        std::fs::write(installed, pinned)?;
        Ok(python)
    }

    /// What a script says that ends within `limit_s` seconds.
    ///
    /// # Errors
    /// When it takes longer, or is not there.
    pub fn run<S: AsRef<OsStr>>(
        &self,
        limit_s: u32,
        script: &Path,
        arguments: &[S],
    ) -> anyhow::Result<Output> {
        let arguments: Vec<&OsStr> =
            std::iter::once(script.as_os_str()).chain(arguments.iter().map(AsRef::as_ref)).collect();
        run(limit_s, self.program.as_os_str(), &arguments)
    }
}

fn run(limit_s: u32, program: &OsStr, arguments: &[&OsStr]) -> anyhow::Result<Output> {
    // coreutils' timeout ends the children as well.
    let mut command = Command::new("timeout");
    command.arg("--kill-after=5").arg(limit_s.to_string()).arg(program).args(arguments);
    let output = command.output().context("coreutils' timeout")?;
    ensure!(output.status.code() != Some(124), "{} took longer than {limit_s} s", program.display());
    Ok(output)
}
