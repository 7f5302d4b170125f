//! What deploy/ hands to others' programs: manifests fit Kubernetes' schemas, and the services understand how they are
//! started there.
//!
//! The schemas come with a Python package, installed once, pinned, into `.deps/kubernetes`. Where that cannot be had the test
//! says so on standard error and passes.
use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use clap::Parser;
use serde::Deserialize;

/// How a container is started.
#[derive(Deserialize)]
struct Line {
    r#where: String,
    role: String,
    words: Vec<String>,
}

#[derive(Parser)]
struct Ffn {
    #[command(flatten)]
    _options: ffn_svc::config::ServeOptions,
}

/// A Python with the pinned package.
fn python(here: &Path) -> anyhow::Result<PathBuf> {
    let venv = here.join("../../.deps/kubernetes");
    let (python, wanted) = (venv.join("bin/python"), here.join("requirements.txt"));
    let (installed, pinned) = (venv.join("installed.txt"), std::fs::read_to_string(&wanted)?);
    if std::fs::read_to_string(&installed).is_ok_and(|found| found == pinned) {
        return Ok(python);
    }
    let steps: [&[&OsStr]; 2] = [
        &["python3".as_ref(), "-m".as_ref(), "venv".as_ref(), "--clear".as_ref(), venv.as_ref()],
        &[
            python.as_ref(),
            "-m".as_ref(),
            "pip".as_ref(),
            "install".as_ref(),
            "-q".as_ref(),
            "-r".as_ref(),
            wanted.as_ref(),
        ],
    ];
    for step in steps {
        let output = Command::new("timeout").arg("300").args(step).output()?;
        ensure!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    std::fs::write(installed, pinned)?;
    Ok(python)
}

#[test]
fn manifests_fit_the_schemas_and_the_services_understand_them() -> anyhow::Result<()> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy");
    let python = match python(&here) {
        Ok(python) => python,
        Err(error) => {
            // The test runner keeps what a passing test prints to itself; this goes past it.
            writeln!(std::io::stderr(), "LEFT OUT: Kubernetes' schemas cannot be installed: {error:#}")?;
            return Ok(());
        }
    };
    let output =
        Command::new(python).arg(here.join("manifests.py")).arg(here.join("../../deploy")).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines: Vec<Line> = serde_json::from_slice(&output.stdout)?;
    ensure!(lines.len() > 8, "only {} containers", lines.len());
    for Line { r#where, role, words } in lines {
        let (program, words): (_, Vec<&str>) = ("svc", words.iter().map(String::as_str).collect());
        let parsed = match role.as_str() {
            "attention" => {
                let all = std::iter::once(program).chain(words);
                attention_svc::cli::Cli::try_parse_from(all).map(|_| ())
            }
            _ => {
                ensure!(words.first() == Some(&"serve"), "{}: {words:?}", r#where);
                Ffn::try_parse_from(std::iter::once(program).chain(words.into_iter().skip(1))).map(|_| ())
            }
        };
        parsed.with_context(|| r#where)?;
    }
    Ok(())
}
