//! `attention-svc probe` and `ffn-svc probe`: a sentence about whatever is there.
use std::io::{Read, Write};
use std::net::TcpListener;

use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn, output};
use anyhow::ensure;

/// Whether the probe found what it looked for, and its one line.
async fn probe(binary: &'static str, address: String) -> anyhow::Result<(bool, String)> {
    let ran =
        tokio::task::spawn_blocking(move || output(binary, &["probe", &address, "--timeout-ms", "20000"]));
    let output = ran.await??;
    let said = String::from_utf8([output.stdout, output.stderr].concat())?;
    ensure!(said.lines().count() == 1, "{said}");
    for raw in ["Status {", "code: '", "grpc-status", "MetadataMap"] {
        ensure!(!said.contains(raw), "a raw status: {said}");
    }
    Ok((output.status.success(), said))
}

#[tokio::test]
async fn a_probe_says_what_is_there_whichever_role_it_looks_for() -> anyhow::Result<()> {
    let spec =
        DeploymentSpec::new(fixtures::checkpoint("tiny-mixtral"), Ffn::Remote { shards: 1, replicas: 1 });
    let deployment = Deployment::start(spec).await?;
    let (attention, ffn) =
        (deployment.attention_addresses[0].to_string(), deployment.ffn_addresses[0].to_string());
    for (binary, address, good, words) in [
        ("attention-svc", &attention, true, &["is ready"][..]),
        ("ffn-svc", &ffn, true, &["is ready", "MixtralForCausalLM", "shard 0 of 1"]),
        ("ffn-svc", &attention, false, &["is an attention rank", "`attention-svc probe`"]),
        ("attention-svc", &ffn, false, &["is an FFN rank", "`ffn-svc probe`"]),
    ] {
        let (found, said) = probe(binary, address.clone()).await?;
        ensure!(found == good, "{binary} of {address}: {said}");
        for word in words.iter().chain(&[address.as_str()]) {
            ensure!(said.contains(word), "{binary}: `{word}` is not in: {said}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_probe_of_a_stranger_says_so() -> anyhow::Result<()> {
    // A server of an older time: whatever it is asked, it answers in HTTP/1.1.
    let web = TcpListener::bind("127.0.0.1:0")?;
    let of_web = web.local_addr()?.to_string();
    std::thread::spawn(move || {
        for mut client in web.incoming().flatten() {
            let _ = client.read(&mut [0; 1024]);
            let _ = client.write_all(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n");
        }
    });
    // One that listens and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0")?;
    let of_silent = silent.local_addr()?.to_string();
    let free = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
    for binary in ["attention-svc", "ffn-svc"] {
        let (found, said) = probe(binary, of_web.clone()).await?;
        ensure!(!found && said.contains("without HTTP/2"), "{said}");
        let (found, said) = probe(binary, free.clone()).await?;
        ensure!(!found && said.contains("refused"), "{said}");
        let address = of_silent.clone();
        let ran =
            tokio::task::spawn_blocking(move || output(binary, &["probe", &address, "--timeout-ms", "300"]));
        let output = ran.await??;
        let said = String::from_utf8(output.stderr)?;
        ensure!(output.status.code() == Some(1) && said.contains("300ms"), "{said}");
    }
    Ok(())
}
