//! What deploy/ hands to others' programs: manifests fit Kubernetes' schemas, and the services understand how they are
//! started there.
//!
//! The schemas come with a Python package, installed once, pinned, into `.deps/kubernetes`. Where that cannot be had the test
//! says so on standard error and passes.
use std::path::Path;

use afd_tests::harness::Python;
use anyhow::{Context, ensure};
use clap::Parser;
use serde::Deserialize;

const CHECKS_LIMIT_S: u32 = 120;

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

#[test]
fn manifests_fit_the_schemas_and_the_services_understand_them() -> anyhow::Result<()> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy");
    let requirements = here.join("requirements.txt");
    let Some(python) = Python::with("kubernetes", "Kubernetes' schemas", &requirements) else {
        return Ok(());
    };
    let output = python.run(CHECKS_LIMIT_S, &here.join("manifests.py"), &[here.join("../../deploy")])?;
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
