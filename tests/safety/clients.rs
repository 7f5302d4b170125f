//! Clients that are not ours, against a port under TLS with a token: curl over HTTP/1.1 and HTTP/2, Python's gRPC, and the
//! probe that containers use. Where a program is not here, the test says so on standard error and passes.
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};

use afd_tests::harness::{Authority, Deployment, Pass};
use anyhow::{Context, ensure};

use crate::start::probe;
use crate::{HOST, mutual, pair, text};

const TOKEN: &str = "a-token";

fn left_out(what: &str) -> anyhow::Result<()> {
    // The test runner keeps what a passing test prints to itself; this goes past it.
    Ok(writeln!(std::io::stderr(), "LEFT OUT: {what}")?)
}

fn run(program: impl AsRef<std::ffi::OsStr>, arguments: &[&str]) -> anyhow::Result<Output> {
    // coreutils' timeout ends the children as well.
    let mut command = Command::new("timeout");
    command.arg("--kill-after=5").arg("60").arg(program).args(arguments);
    command.output().context("coreutils' timeout")
}

/// TLS and a token on the API; the FFN in the same process.
async fn guarded(folder: &Path) -> anyhow::Result<(Deployment, Authority)> {
    let authority = Authority::new(folder)?;
    let (identity, tokens) = (authority.issue("server", &[HOST])?, folder.join("tokens"));
    std::fs::write(&tokens, TOKEN)?;
    let spec = pair()
        .attention_args(&["--tls-cert", &text(&identity.certificate), "--tls-key", &text(&identity.key)])
        .attention_args(&["--api-token-file", &text(&tokens)])
        .pass(Pass { ca: Some(authority.ca()), token: Some(TOKEN.into()), identity: None });
    Ok((Deployment::start(spec).await?, authority))
}

#[tokio::test]
async fn curl_over_http_1_and_2() -> anyhow::Result<()> {
    if !run("curl", &["--version"])?.status.success() {
        return left_out("curl is not here");
    }
    let folder = tempfile::tempdir()?;
    let (deployment, authority) = guarded(folder.path()).await?;
    let (url, ca) = (deployment.url(0, "/v1/models"), text(&authority.ca()));
    let bearer = format!("authorization: Bearer {TOKEN}");
    for (version, said) in [("--http1.1", "1.1"), ("--http2", "2")] {
        let show = [
            "--silent",
            "--cacert",
            &ca,
            version,
            "--output",
            "-",
            "--write-out",
            "%{http_code} %{http_version}",
        ];
        let asked = |header: &str| {
            let output = run("curl", &[&show[..], &["--header", header, &url]].concat())?;
            ensure!(
                output.status.success(),
                "{}: {}",
                output.status,
                String::from_utf8_lossy(&output.stderr)
            );
            anyhow::Ok(String::from_utf8(output.stdout)?)
        };
        let answer = asked(&bearer)?;
        ensure!(answer.contains("\"id\":\"test\"") && answer.ends_with(&format!("200 {said}")), "{answer}");
        let answer = asked("authorization: Bearer wrong")?;
        ensure!(answer.ends_with(&format!("401 {said}")), "{answer}");
    }
    // Nothing of an answer without the CA.
    ensure!(!run("curl", &["--silent", &url])?.status.success());
    Ok(())
}

#[tokio::test]
async fn grpc_of_another_language() -> anyhow::Result<()> {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.deps/clients/python/venv/bin/python");
    if !python.exists() {
        return left_out("Python's gRPC is not here: bash deploy/clients.sh python");
    }
    let folder = tempfile::tempdir()?;
    let (deployment, authority) = guarded(folder.path()).await?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("safety/grpc_over_tls.py");
    let (address, ca) = (deployment.attention_addresses[0].to_string(), text(&authority.ca()));
    let output = run(&python, &[&text(&script), &address, TOKEN, &ca])?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

#[tokio::test]
async fn the_probes_see_both_ranks_under_mutual_tls() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let authority = Authority::new(folder.path())?;
    let deployment = Deployment::start(mutual(&authority)?).await?;
    let (ca, client) = (text(&authority.ca()), authority.issue("probe", &["probe"])?);
    let address = deployment.ffn_addresses[0].to_string();
    let (good, said) = probe("ffn-svc", &[&address])?;
    ensure!(!good && said.contains("this port speaks TLS"), "{said}");
    let (good, said) = probe("ffn-svc", &[&address, "--tls-ca", &ca])?;
    ensure!(good && said.contains("is ready; it tells more"), "{said}");
    let (certificate, key) = (text(&client.certificate), text(&client.key));
    let (good, said) =
        probe("ffn-svc", &[&address, "--tls-ca", &ca, "--tls-cert", &certificate, "--tls-key", &key])?;
    ensure!(good && said.contains("LlamaForCausalLM"), "{said}");
    let address = deployment.attention_addresses[0].to_string();
    let (good, said) = probe("attention-svc", &[&address, "--tls-ca", &ca])?;
    ensure!(good && said.contains("is ready"), "{said}");
    let (good, said) = probe("attention-svc", &[&address])?;
    ensure!(!good && said.contains("this port speaks TLS"), "{said}");
    Ok(())
}
