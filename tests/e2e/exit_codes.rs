//! The same mistake ends both services with the same exit code, and one line that names it.
use std::path::PathBuf;

use afd_common::process::exit::Exit;
use afd_tests::fixtures;
use afd_tests::harness::output;
use anyhow::{Context, ensure};

const ROLES: [&str; 2] = ["attention-svc", "ffn-svc"];

/// A mistake: what it is, the options that make it, how the process ends, and what its line names.
struct Mistake {
    what: &'static str,
    args: Vec<String>,
    exit: Exit,
    words: Vec<String>,
}

fn mistake(what: &'static str, args: &[&str], exit: Exit, words: &[&str]) -> Mistake {
    let own = |all: &[&str]| all.iter().map(|one| (*one).to_owned()).collect();
    Mistake { what, args: own(args), exit, words: own(words) }
}

/// Checkpoints that are wrong in one way each.
struct Wrong {
    folder: tempfile::TempDir,
}

impl Wrong {
    fn copy(&self, name: &str) -> anyhow::Result<PathBuf> {
        let to = self.folder.path().join(name);
        std::fs::create_dir(&to)?;
        for file in std::fs::read_dir(fixtures::checkpoint("tiny-mixtral"))? {
            let file = file?;
            std::fs::copy(file.path(), to.join(file.file_name()))?;
        }
        Ok(to)
    }

    fn file(&self, name: &str, text: &str) -> anyhow::Result<String> {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text)?;
        Ok(path.display().to_string())
    }

    fn truncated(&self) -> anyhow::Result<String> {
        let folder = self.copy("truncated")?;
        let file = std::fs::File::options().write(true).open(folder.join("model.safetensors"))?;
        file.set_len(file.metadata()?.len() / 2)?;
        Ok(folder.display().to_string())
    }

    /// Without a tensor: its name is another one of the same length.
    fn without(&self, name: &str, tensor: &str) -> anyhow::Result<String> {
        let folder = self.copy(name)?;
        let path = folder.join("model.safetensors");
        let mut bytes = std::fs::read(&path)?;
        let at = bytes.windows(tensor.len()).position(|window| window == tensor.as_bytes());
        bytes[at.context("the fixture has no such tensor")? + tensor.len() - 1] = b'!';
        std::fs::write(path, bytes)?;
        Ok(folder.display().to_string())
    }

    fn of_architecture(&self, name: &str) -> anyhow::Result<String> {
        let folder = self.copy("unknown")?;
        let path = folder.join("config.json");
        let config = std::fs::read_to_string(&path)?.replace("MixtralForCausalLM", name);
        std::fs::write(path, config)?;
        Ok(folder.display().to_string())
    }
}

/// Runs `serve` to its end: its code and what it said.
fn serve(role: &str, args: &[String]) -> anyhow::Result<(i32, String)> {
    let mut all = vec!["serve"];
    if role == "attention-svc" && !args.iter().any(|arg| arg == "--ffn") {
        all.extend(["--ffn", "local"]);
    }
    all.extend(args.iter().map(String::as_str));
    let output = output(role, &all)?;
    Ok((output.status.code().unwrap_or(-1), String::from_utf8_lossy(&output.stderr).into_owned()))
}

fn check(role: &str, mistake: &Mistake) -> anyhow::Result<()> {
    let Mistake { what, args, exit, words } = mistake;
    let (code, said) = serve(role, args).with_context(|| format!("{role}: {what}"))?;
    ensure!(code == *exit as i32, "{role}: {what}: exit code {code}, expected {}:\n{said}", *exit as i32);
    ensure!(!said.contains("panicked"), "{role}: {what}:\n{said}");
    let lines =
        said.lines().filter(|line| line.starts_with(&format!("{role}: ")) || line.starts_with("error: "));
    let lines: Vec<_> = lines.collect();
    ensure!(lines.len() == 1, "{role}: {what}: not one line:\n{said}");
    for word in words {
        ensure!(lines[0].contains(word.as_str()), "{role}: {what}: `{word}` is not named: {}", lines[0]);
    }
    Ok(())
}

#[test]
fn the_same_mistake_ends_both_services_alike() -> anyhow::Result<()> {
    let good = fixtures::checkpoint("tiny-mixtral").display().to_string();
    let wrong = Wrong { folder: tempfile::tempdir()? };
    let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
    let address = taken.local_addr()?.to_string();
    let unknown_field = wrong.file("unknown.toml", "thread = 3\n")?;
    let no_toml = wrong.file("no.toml", "threads = \n")?;
    let placement = wrong.file("placement.json", "{\"layers\": 7}")?;
    let (truncated, novel) = (wrong.truncated()?, wrong.of_architecture("NovelForCausalLM")?);
    let no_folder = format!("{good}/config.json");
    let unwritable = "/nowhere/at/all/address";
    let (bad, later) = (Exit::Unusable, Exit::Failed);
    let all = [
        mistake("an unknown option", &["--modle", &good], bad, &["--modle"]),
        mistake("a value that is none", &["--model", &good, "--dtype", "int4"], bad, &["--dtype", "int4"]),
        mistake("a value out of range", &["--model", &good, "--threads", "0"], bad, &["--threads is 0"]),
        mistake("no model", &[], bad, &["--model is missing"]),
        mistake("a model that is not there", &["--model", "/nowhere"], bad, &["--model /nowhere"]),
        mistake("a model that is a file", &["--model", &no_folder], bad, &["--model", "no folder"]),
        mistake("a folder without a model", &["--model", "/usr"], bad, &["--model", "/usr/config.json"]),
        mistake(
            "no such configuration file",
            &["--config", "/nowhere.toml"],
            bad,
            &["--config /nowhere.toml"],
        ),
        mistake("a configuration file that is none", &["--config", &no_toml], bad, &["no.toml", "line 1"]),
        mistake("an unknown field", &["--config", &unknown_field], bad, &["unknown.toml", "`thread`"]),
        mistake("an architecture that is not served", &["--model", &novel], bad, &["NovelForCausalLM"]),
        mistake("a file that is cut off", &["--model", &truncated], bad, &["model.safetensors"]),
        mistake(
            "no such token",
            &["--model", &good, "--join-token-file", "/nowhere"],
            bad,
            &["--join-token-file /nowhere"],
        ),
        mistake("half a certificate", &["--model", &good, "--tls-cert", "/nowhere"], bad, &["--tls-key"]),
        mistake(
            "open to strangers",
            &["--model", &good, "--listen", "0.0.0.0:0"],
            bad,
            &["--listen", "--insecure"],
        ),
        mistake("no filter", &["--model", &good, "--log-level", "a=b=c"], bad, &["--log-level", "a=b=c"]),
        mistake(
            "no place for the address",
            &["--model", &good, "--listen", "127.0.0.1:0", "--address-file", unwritable],
            bad,
            &["--address-file", unwritable],
        ),
        mistake(
            "a GPU that is not there",
            &["--model", &good, "--listen", "127.0.0.1:0", "--device", "cuda:99"],
            bad,
            &["--device cuda:99"],
        ),
        mistake("a port in use", &["--model", &good, "--listen", &address], later, &[&address, "in use"]),
    ];
    for role in ROLES {
        for mistake in &all {
            check(role, mistake)?;
        }
    }
    // With one shard alone no placement is read.
    for (role, several) in [("attention-svc", ["--ffn", "127.0.0.1:1"]), ("ffn-svc", ["--shard", "0/2"])] {
        for (what, file) in [("no such placement", "/nowhere.json"), ("a placement that is none", &placement)]
        {
            let args = [&["--model", &good, "--placement", file][..], &several].concat();
            check(role, &mistake(what, &args, bad, &["--placement", file]))?;
        }
    }
    // Each role reads its own tensors only.
    for (role, tensor) in [
        ("attention-svc", "model.layers.0.self_attn.q_proj.weight"),
        ("ffn-svc", "model.layers.1.block_sparse_moe.gate.weight"),
    ] {
        let model = wrong.without(role, tensor)?;
        check(role, &mistake("a missing tensor", &["--model", &model], bad, &["--model", tensor]))?;
    }
    Ok(())
}

#[test]
fn an_ffn_that_does_not_come_may_come_another_time() -> anyhow::Result<()> {
    let good = fixtures::checkpoint("tiny-mixtral").display().to_string();
    let free = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
    let args = ["--model", &good, "--listen", "127.0.0.1:0", "--ffn", &free, "--join-timeout", "1s"];
    let mistake = mistake("an FFN that is not there", &args, Exit::Failed, &["--join-timeout", &free]);
    check("attention-svc", &mistake)
}

#[test]
fn commands_beside_serve_end_by_the_same_table() -> anyhow::Result<()> {
    let free = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
    let no_ca = ["--tls-ca", "/nowhere/ca.pem"];
    let profile = |more: &[&'static str]| [&["profile", "--url", "http://127.0.0.1:1"], more].concat();
    for (role, args, exit, word) in [
        ("ffn-svc", vec!["probe", &free], Exit::Failed, free.as_str()),
        ("attention-svc", vec!["probe", &free], Exit::Failed, &free),
        ("ffn-svc", [&["probe", &free][..], &no_ca].concat(), Exit::Unusable, "--tls-ca /nowhere/ca.pem"),
        (
            "attention-svc",
            [&["probe", &free][..], &no_ca].concat(),
            Exit::Unusable,
            "--tls-ca /nowhere/ca.pem",
        ),
        ("attention-svc", [&["doctor"][..], &no_ca].concat(), Exit::Unusable, "--tls-ca /nowhere/ca.pem"),
        ("attention-svc", vec!["doctor", "--tls-cert", "a", "--tls-key", "b"], Exit::Unusable, "--tls-ca"),
        ("attention-svc", vec!["probe", &free, "--timeout-ms", "0"], Exit::Unusable, "--timeout-ms"),
        ("ffn-svc", vec!["probe", &free, "--timeout-ms", "0"], Exit::Unusable, "--timeout-ms"),
        ("attention-svc", vec!["bench", "--url", "http://127.0.0.1:1"], Exit::Failed, "127.0.0.1:1"),
        (
            "attention-svc",
            vec!["bench", "--url", "http://127.0.0.1:1", "--concurrency", "0"],
            Exit::Unusable,
            "--concurrency",
        ),
        (
            "attention-svc",
            vec!["profile", "--url", "http://127.0.0.1:1"],
            Exit::Failed,
            "http://127.0.0.1:1 cannot be reached: Connection refused",
        ),
        ("attention-svc", vec!["bench", "--url", "127.0.0.1:1"], Exit::Unusable, "http://127.0.0.1:8000"),
        ("attention-svc", vec!["profile", "--url", "127.0.0.1:1"], Exit::Unusable, "http://127.0.0.1:8000"),
        ("attention-svc", profile(&["--steps", "0"]), Exit::Unusable, "--steps"),
        ("attention-svc", profile(&["--steps", "1001"]), Exit::Unusable, "--steps"),
        ("attention-svc", profile(&["--timeout", "0"]), Exit::Unusable, "--timeout"),
        ("attention-svc", vec!["bench", "links", "--rows", "8,0"], Exit::Unusable, "--rows"),
        ("attention-svc", vec!["bench", "links", "--rows", "abc"], Exit::Unusable, "--rows"),
        ("attention-svc", vec!["bench", "links", "--columns", "65537"], Exit::Unusable, "--columns"),
        ("attention-svc", vec!["bench", "links", "--time", "0s"], Exit::Unusable, "--time"),
        ("attention-svc", vec!["doctor", "--timeout", "0s"], Exit::Unusable, "--timeout"),
        ("ffn-svc", vec!["probe", "localhost"], Exit::Unusable, "host:port"),
        ("attention-svc", vec!["probe", "localhost"], Exit::Unusable, "host:port"),
        ("attention-svc", vec!["doctor", "--attention", "localhost"], Exit::Unusable, "host:port"),
        ("attention-svc", vec!["doctor", "--attention", "a:1,b:1,a:1"], Exit::Unusable, "given twice"),
        (
            "attention-svc",
            vec!["doctor", "--attention", "a:1", "--ffn", "a:1"],
            Exit::Unusable,
            "--ffn \"a:1\" is in --attention too",
        ),
        ("attention-svc", vec!["plan", "check", "/nowhere.json"], Exit::Unusable, "/nowhere.json"),
        (
            "ffn-svc",
            vec!["place", "--counts", "/nowhere", "--shards", "2"],
            Exit::Unusable,
            "--counts /nowhere",
        ),
        ("attention-svc", vec!["plan", "list"], Exit::Done, ""),
    ] {
        let output = output(role, &args)?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(exit as i32), "{role} {args:?}: {}: {said}", output.status);
        ensure!(said.contains(word), "{role} {args:?}: `{word}` is not named: {said}");
        ensure!(!said.contains(" { "), "{role} {args:?}: written for whoever made it: {said}");
    }
    Ok(())
}

#[test]
fn help_has_the_table() -> anyhow::Result<()> {
    for (role, commands) in [
        ("attention-svc", &["", "serve", "bench", "doctor", "probe", "plan", "profile"][..]),
        ("ffn-svc", &["", "serve", "probe", "place"]),
    ] {
        for command in commands {
            let args: Vec<&str> = [*command, "--help"].into_iter().filter(|arg| !arg.is_empty()).collect();
            let output = output(role, &args)?;
            let help = String::from_utf8(output.stdout)?;
            ensure!(output.status.success() && help.contains("Exit codes:"), "{role} {command}: {help}");
        }
    }
    Ok(())
}
