//! The official `openai` Python package against a live pair: `calls.py` makes every call that is served.
//!
//! The package is installed once, pinned, into `.deps/openai`. Where that cannot be had (no Python, no venv, no registry)
//! the test says so on standard error and passes.
use std::path::Path;

use afd_tests::fixtures;
use afd_tests::harness::{Authority, Deployment, DeploymentSpec, Ffn, Pass, Python};
use anyhow::ensure;

/// Seconds for all calls, debug builds on a busy machine included.
const CALLS_LIMIT_S: u32 = 120;

/// What `calls.py` has to say for itself.
const CALLS: [&str; 9] = [
    "models",
    "completion",
    "completion_of_token_ids",
    "completion_stream",
    "sampling",
    "stop",
    "chat",
    "chat_stream",
    "refusals",
];

/// Makes every call; the message of a failure is what the script said.
fn make_calls(python: &Python, here: &Path, arguments: &[&str]) -> anyhow::Result<()> {
    let output = python.run(CALLS_LIMIT_S, &here.join("calls.py"), arguments)?;
    let (said, words) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{}\n{said}\n{words}", output.status);
    let lines: Vec<String> = CALLS.iter().map(|call| format!("ok {call}")).collect();
    ensure!(said.lines().eq(lines.iter().map(String::as_str)), "{said}");
    Ok(())
}

#[tokio::test]
async fn the_openai_package_makes_every_call_in_the_clear_and_under_tls_with_a_token() -> anyhow::Result<()> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("openai");
    let Some(python) = Python::with("openai", "the openai package", &here.join("requirements.txt")) else {
        return Ok(());
    };
    let spec =
        || DeploymentSpec::new(fixtures::checkpoint("tiny-llama"), Ffn::Remote { shards: 1, replicas: 1 });
    let open = Deployment::start(spec()).await?;
    make_calls(&python, &here, &[&open.url(0, ""), "none"])?;

    let folder = tempfile::tempdir()?;
    let authority = Authority::new(folder.path())?;
    let (identity, tokens) = (authority.issue("server", &["127.0.0.1"])?, folder.path().join("tokens"));
    std::fs::write(&tokens, "a-token\n")?;
    let path = |path: &Path| path.display().to_string();
    let spec = spec()
        .attention_args(&["--tls-cert", &path(&identity.certificate), "--tls-key", &path(&identity.key)])
        .attention_args(&["--api-token-file", &path(&tokens)])
        .pass(Pass { ca: Some(authority.ca()), token: Some("a-token".into()), ..Pass::default() });
    let closed = Deployment::start(spec).await?;
    make_calls(&python, &here, &[&closed.url(0, ""), "a-token", &path(&authority.ca())])
}
