//! Told to end, a process ends soon, with code 0, and says why once: while it loads, while it waits, and while it serves.
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use afd_tests::fixtures;
use afd_tests::harness::Process;
use anyhow::ensure;
use serde_json::json;

const LIMIT: Duration = Duration::from_secs(30);
/// For the whole end of a process with nothing to finish.
const SOON: Duration = Duration::from_secs(3);

fn free() -> anyhow::Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

fn serve(binary: &str, args: &[&str], folder: &Path) -> anyhow::Result<Process> {
    let args: Vec<String> =
        ["serve"].iter().chain(args).chain(&["--threads", "1"]).map(|arg| (*arg).to_owned()).collect();
    Process::start(binary, binary, &args, folder)
}

/// Tells it to end, and checks how it does.
fn ends_well(mut process: Process, signal: &str, lines: &[&str], never: &[&str]) -> anyhow::Result<()> {
    let begun = Instant::now();
    process.signal(signal)?;
    let status = process.wait(SOON)?;
    let log = process.log();
    ensure!(status.code() == Some(0), "{status} after {:?}:\n{log}", begun.elapsed());
    for line in lines {
        ensure!(log.matches(line).count() == 1, "`{line}` is not said once:\n{log}");
    }
    for line in never {
        ensure!(!log.contains(line), "`{line}` is said:\n{log}");
    }
    ensure!(log.contains(&format!("why=\"SIG{signal}\"")), "it does not say why:\n{log}");
    Ok(())
}

/// A model whose made-up weights take a while.
fn large_model(folder: &Path) -> anyhow::Result<String> {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000,
        "max_position_embeddings": 2048, "torch_dtype": "bfloat16", "hidden_act": "silu",
    });
    let model = folder.join("large");
    std::fs::create_dir(&model)?;
    std::fs::write(model.join("config.json"), config.to_string())?;
    Ok(model.display().to_string())
}

#[test]
fn a_process_that_loads_ends_at_once() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let model = large_model(folder.path())?;
    for (binary, more) in [("attention-svc", &["--ffn", "local"][..]), ("ffn-svc", &[])] {
        for signal in ["TERM", "INT"] {
            let address = free()?.to_string();
            let args = ["--model", &model, "--load-format", "dummy", "--listen", &address];
            let mut process = serve(binary, &[&args[..], more].concat(), folder.path())?;
            // It takes its port before it loads.
            let deadline = Instant::now() + LIMIT;
            while TcpStream::connect(&address).is_err() {
                ensure!(Instant::now() < deadline && !process.has_ended(), "{}", process.log());
                std::thread::sleep(Duration::from_millis(2));
            }
            let never = ["listening", "ready", "draining", "panicked"];
            ends_well(process, signal, &["stopped before it was loaded"], &never)?;
            std::fs::remove_file(folder.path().join(format!("{binary}.log")))?;
        }
    }
    Ok(())
}

/// Whether the process has come so far that SIGTERM does not end it by itself: its mask or its handlers say so.
fn minds_its_end(process: &Process) -> anyhow::Result<bool> {
    const TERM: u64 = 1 << (15 - 1);
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id()))?;
    let mask = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        u64::from_str_radix(line.unwrap_or_default().trim(), 16).unwrap_or(0)
    };
    Ok((mask("SigBlk:") | mask("SigCgt:")) & TERM != 0)
}

#[test]
fn a_process_told_to_end_in_its_first_moments_ends_well() -> anyhow::Result<()> {
    let (folder, model) = (tempfile::tempdir()?, fixtures::checkpoint("tiny-mixtral").display().to_string());
    for (binary, more) in [("attention-svc", &["--ffn", "local"][..]), ("ffn-svc", &[])] {
        for signal in ["TERM", "INT"] {
            let args = [&["--model", &model, "--listen", "127.0.0.1:0"][..], more].concat();
            let process = serve(binary, &args, folder.path())?;
            // Its program has begun; what begins before that is the system's and the libraries'.
            let deadline = Instant::now() + LIMIT;
            while !minds_its_end(&process)? {
                ensure!(Instant::now() < deadline, "{}", process.log());
                std::thread::sleep(Duration::from_millis(1));
            }
            ends_well(process, signal, &[], &["panicked"])?;
            std::fs::remove_file(folder.path().join(format!("{binary}.log")))?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn an_attention_rank_that_waits_for_its_ffn_ends_at_once_with_its_requests() -> anyhow::Result<()> {
    let (folder, model) = (tempfile::tempdir()?, fixtures::checkpoint("tiny-mixtral").display().to_string());
    let ffn = format!("{},nowhere.invalid:7001", free()?);
    let args = ["--model", &model, "--listen", "127.0.0.1:0", "--ffn", &ffn];
    let mut process = serve("attention-svc", &args, folder.path())?;
    let address = process.address(LIMIT)?;
    let client = reqwest::Client::builder().no_proxy().build()?;
    let body = json!({"prompt": "Hello", "max_tokens": 4});
    let request = client.post(format!("http://{address}/v1/completions")).json(&body).send();
    let waiting = tokio::spawn(request);
    let metrics = format!("http://{address}/metrics");
    let deadline = Instant::now() + LIMIT;
    while !client.get(&metrics).send().await?.text().await?.contains("vllm:num_requests_waiting 1") {
        ensure!(Instant::now() < deadline, "the request does not wait:\n{}", process.log());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let ended = move || {
        ends_well(
            process,
            "TERM",
            &["stopping why=", "stopped took_ms="],
            &["draining", "did not end in time"],
        )
    };
    tokio::task::spawn_blocking(ended).await??;
    let answer = waiting.await??;
    ensure!(answer.status() == 503, "{}", answer.text().await?);
    Ok(())
}

#[test]
fn processes_that_serve_say_why_they_stop_and_how_long_it_took() -> anyhow::Result<()> {
    let (folder, model) = (tempfile::tempdir()?, fixtures::checkpoint("tiny-mixtral").display().to_string());
    for (binary, more) in [("attention-svc", &["--ffn", "local"][..]), ("ffn-svc", &[])] {
        for signal in ["TERM", "INT"] {
            let args = [&["--model", &model, "--listen", "127.0.0.1:0"][..], more].concat();
            let mut process = serve(binary, &args, folder.path())?;
            process.address(LIMIT)?;
            ends_well(process, signal, &["stopping why=", "stopped took_ms="], &["draining"])?;
            std::fs::remove_file(folder.path().join(format!("{binary}.log")))?;
        }
    }
    Ok(())
}
