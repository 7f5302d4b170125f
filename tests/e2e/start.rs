//! Starting: either side first, and one clear line where it cannot work.
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use afd_common::weights::places;
use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn, Process};
use afd_tests::oracle;
use anyhow::{bail, ensure};

const LIMIT: Duration = Duration::from_secs(30);

fn args(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

pub(crate) fn attention(
    model: &Path,
    ffn: &str,
    more: &[&str],
    folder: &Path,
    name: &str,
) -> anyhow::Result<Process> {
    let model = model.display().to_string();
    let mut words = args(&["serve", "--model", &model, "--listen", "127.0.0.1:0", "--ffn", ffn]);
    words.extend(args(&["--served-model-name", "test", "--dtype", "float32", "--threads", "1"]));
    words.extend(args(more));
    Process::start("attention-svc", name, &words, folder)
}

/// An FFN rank beside those of a deployment, on a free port unless `more` has another.
pub(crate) fn ffn(model: &Path, more: &[&str], folder: &Path, name: &str) -> anyhow::Result<Process> {
    let model = model.display().to_string();
    let mut words = args(&["serve", "--model", &model, "--dtype", "float32", "--threads", "1"]);
    if !more.contains(&"--listen") {
        words.extend(args(&["--listen", "127.0.0.1:0"]));
    }
    words.extend(args(more));
    Process::start("ffn-svc", name, &words, folder)
}

/// A process that must not start: its exit code and its log.
pub(crate) fn refused(mut process: Process) -> anyhow::Result<(i32, String)> {
    let status = process.wait(LIMIT)?;
    Ok((status.code().unwrap_or(-1), process.log()))
}

/// The FFN a minute later with `AFD_TEST_FULL`.
#[tokio::test]
async fn attention_may_start_first_and_says_for_whom_it_waits() -> anyhow::Result<()> {
    let (folder, model) = (tempfile::tempdir()?, fixtures::checkpoint("tiny-mixtral"));
    let free = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let mut waiting = attention(&model, &free.to_string(), &[], folder.path(), "A0")?;
    let address = waiting.address(LIMIT)?;
    let client = reqwest::Client::builder().no_proxy().build()?;
    let health = client.get(format!("http://{address}/health")).send().await?;
    ensure!(health.status() == 503, "not ready was answered with {}", health.status());
    let live = client.get(format!("http://{address}/live")).send().await?;
    ensure!(live.status() == 200, "alive was answered with {}", live.status());
    let deadline = Instant::now() + LIMIT;
    while !(waiting.log().contains("waiting for FFN ranks") && waiting.log().contains("--join-timeout")) {
        ensure!(Instant::now() < deadline, "it does not say for whom it waits:\n{}", waiting.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    ensure!(waiting.log().contains(&free.to_string()), "it does not name the address:\n{}", waiting.log());
    if std::env::var_os("AFD_TEST_FULL").is_some() {
        tokio::time::sleep(Duration::from_secs(60)).await;
    }

    let deadline = Instant::now() + LIMIT;
    let _ffn = ffn(&model, &["--listen", &free.to_string()], folder.path(), "F0")?;
    while client.get(format!("http://{address}/health")).send().await?.status() != 200 {
        ensure!(Instant::now() < deadline, "it is not ready with an FFN:\n{}", waiting.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

#[tokio::test]
async fn attention_gives_up_after_the_join_timeout_and_names_the_option() -> anyhow::Result<()> {
    let (folder, model) = (tempfile::tempdir()?, fixtures::checkpoint("tiny-mixtral"));
    let free = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
    let mut waiting = attention(&model, &free, &["--join-timeout", "2s"], folder.path(), "A0")?;
    let url = format!("http://{}/v1/completions", waiting.address(LIMIT)?);
    let client = reqwest::Client::builder().no_proxy().build()?;
    let body = serde_json::json!({"prompt": [5, 6, 7], "max_tokens": 2});
    let early = tokio::spawn(client.post(url).json(&body).send());
    let (code, log) = tokio::task::spawn_blocking(|| refused(waiting)).await??;
    ensure!(code == 1, "exit code {code}:\n{log}");
    ensure!(log.contains("--join-timeout") && log.contains(&free), "{log}");
    // Whoever waited for them is told why there is no answer.
    let answer = early.await??;
    let (status, text) = (answer.status(), answer.text().await?);
    ensure!(status == 503 && text.contains("--join-timeout") && text.contains(&free), "{status}: {text}");
    Ok(())
}

#[tokio::test]
async fn what_is_missing_at_the_join_timeout_is_told_by_shard_and_address() -> anyhow::Result<()> {
    let (folder, model) = (tempfile::tempdir()?, fixtures::checkpoint("tiny-mixtral"));
    let mut half = ffn(&model, &["--shard", "0/2"], folder.path(), "F0")?;
    let there = half.address(LIMIT)?;
    let free = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
    let both = format!("{there},{free}");
    let (code, log) = refused(attention(&model, &both, &["--join-timeout", "2s"], folder.path(), "A0")?)?;
    ensure!(code == 1, "exit code {code}:\n{log}");
    let last = log.lines().last().unwrap_or_default();
    for part in
        ["--join-timeout", "shard 1/2 has no rank", &format!("{there} is up, shard 0/2"), &free, "refused"]
    {
        ensure!(last.contains(part), "`{part}` is not said: {last}");
    }
    Ok(())
}

/// A fine-tuned sister: every shape is the same, every value a little different.
fn with_other_weights(folder: &Path) -> anyhow::Result<PathBuf> {
    let model = fixtures::copy("tiny-mixtral", folder.join("other-weights"))?;
    let path = model.join("model.safetensors");
    let mut bytes = std::fs::read(&path)?;
    for (_, place) in places(&bytes).map_err(anyhow::Error::msg)? {
        bytes[place].iter_mut().step_by(2).for_each(|lowest| *lowest ^= 1);
    }
    std::fs::write(path, bytes)?;
    Ok(model)
}

#[tokio::test]
async fn another_model_on_one_side_is_refused_with_both_fingerprints() -> anyhow::Result<()> {
    let spec =
        DeploymentSpec::new(fixtures::checkpoint("tiny-mixtral"), Ffn::Remote { shards: 1, replicas: 1 });
    let deployment = Deployment::start(spec).await?;
    let folder = tempfile::tempdir()?;
    let ffn = deployment.ffn_addresses[0].to_string();
    for (name, other) in
        [("A1", fixtures::checkpoint("tiny-qwen3-moe")), ("A2", with_other_weights(folder.path())?)]
    {
        let (code, log) = refused(attention(&other, &ffn, &["--rank", "1"], folder.path(), name)?)?;
        ensure!(code == 1, "{name}: exit code {code}:\n{log}");
        let fingerprints = log
            .split(|c: char| !c.is_ascii_hexdigit())
            .filter(|word| word.len() == 64)
            .collect::<std::collections::BTreeSet<_>>();
        ensure!(log.contains("fingerprint") && fingerprints.len() == 2, "{name}:\n{log}");
        ensure!(log.contains("--model"), "{name}: the option is not named:\n{log}");
    }
    // Whoever was there before is none the worse for it.
    let expected = fixtures::expected("tiny-mixtral")?.prompts.remove(0);
    oracle::same(&expected.generated_ids, &deployment.greedy(0, &expected.input_ids, 32).await?)
}

#[tokio::test]
async fn the_same_rank_twice_is_refused_and_the_first_goes_on() -> anyhow::Result<()> {
    let spec =
        DeploymentSpec::new(fixtures::checkpoint("tiny-mixtral"), Ffn::Remote { shards: 1, replicas: 1 });
    let deployment = Deployment::start(spec).await?;
    let folder = tempfile::tempdir()?;
    let ffn = deployment.ffn_addresses[0].to_string();
    let twin = attention(&deployment.spec.model, &ffn, &["--join-timeout", "2s"], folder.path(), "A0")?;
    let (code, log) = refused(twin)?;
    ensure!(code == 1 && log.contains("incarnation") && log.contains("--rank"), "exit code {code}:\n{log}");
    let last = log.lines().last().unwrap_or_default();
    let there = format!("{ffn} is there, and has not been joined");
    ensure!(last.contains(&there) && !last.contains("is not there"), "{last}");
    let expected = fixtures::expected("tiny-mixtral")?.prompts.remove(0);
    oracle::same(&expected.generated_ids, &deployment.greedy(0, &expected.input_ids, 32).await?)
}

#[test]
fn what_is_wrong_with_a_checkpoint_is_one_line_that_names_it() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let copy = |name: &str| fixtures::copy("tiny-mixtral", folder.path().join(name));
    let truncated = copy("truncated")?;
    let file = std::fs::File::options().write(true).open(truncated.join("model.safetensors"))?;
    file.set_len(file.metadata()?.len() / 2)?;
    let missing = copy("missing")?;
    let bytes = std::fs::read(missing.join("model.safetensors"))?;
    let renamed = String::from_utf8_lossy(&bytes[8..4096]).contains("model.layers.0.self_attn.q_proj.weight");
    ensure!(renamed, "the fixture has another layout than this test was written for");
    let at = bytes.windows(38).position(|window| window == b"model.layers.0.self_attn.q_proj.weight");
    let mut changed = bytes;
    changed[at.expect("just seen") + 25] = b'x';
    std::fs::write(missing.join("model.safetensors"), changed)?;
    let unknown = copy("unknown")?;
    let config = std::fs::read_to_string(unknown.join("config.json"))?
        .replace("MixtralForCausalLM", "NovelForCausalLM");
    std::fs::write(unknown.join("config.json"), config)?;

    for (model, words) in [
        (&truncated, vec!["model.safetensors"]),
        (&missing, vec!["model.layers.0.self_attn.q_proj.weight"]),
        (&unknown, vec!["NovelForCausalLM", "MixtralForCausalLM", "LlamaForCausalLM"]),
    ] {
        let (code, log) = refused(attention(model, "local", &[], folder.path(), "A0")?)?;
        ensure!(code == 2, "exit code {code}:\n{log}");
        for word in words {
            ensure!(log.contains(word), "`{word}` is not named:\n{log}");
        }
        ensure!(!log.contains("panicked"), "{log}");
        if model == &missing {
            continue; // It is attention's tensor: an FFN rank does not read it.
        }
        let (code, log) = refused(ffn(model, &[], folder.path(), "F0")?)?;
        let said = log.lines().filter(|line| line.starts_with("ffn-svc: ")).collect::<Vec<_>>();
        ensure!(code == 2 && said.len() == 1, "exit code {code}:\n{log}");
        // The cause stands behind the option once, however long the chain of errors that brought it.
        let cause = said[0].rsplit(": ").next().unwrap_or_default();
        ensure!(said[0].matches(cause).count() == 1, "said twice: {}", said[0]);
        std::fs::remove_file(folder.path().join("F0.log"))?;
    }
    Ok(())
}

#[tokio::test]
async fn an_ffn_address_that_is_an_attention_rank_is_told_so() -> anyhow::Result<()> {
    let deployment =
        Deployment::start(DeploymentSpec::new(fixtures::checkpoint("tiny-mixtral"), Ffn::Local)).await?;
    let (folder, model) = (tempfile::tempdir()?, fixtures::checkpoint("tiny-mixtral"));
    let ffn = deployment.attention_addresses[0].to_string();
    let (code, log) = refused(attention(&model, &ffn, &[], folder.path(), "A0")?)?;
    ensure!(code == 1 && log.contains("this is attention-svc") && log.contains("--ffn"), "{code}:\n{log}");
    Ok(())
}

#[test]
fn an_ffn_rank_warns_of_whom_it_cannot_serve_and_of_a_token_that_it_does_not_ask_for() -> anyhow::Result<()> {
    let (folder, model) = (tempfile::tempdir()?, fixtures::checkpoint("tiny-mixtral"));
    let token = folder.path().join("token");
    std::fs::write(&token, "secret")?;
    let mut ffn = ffn(&model, &["--max-tokens-per-stage", "8"], folder.path(), "F0")?;
    let (address, token) = (ffn.address(LIMIT)?.to_string(), token.display().to_string());
    let guarded = ["--join-token-file", &token];
    let (code, said) = refused(attention(&model, &address, &guarded, folder.path(), "A0")?)?;
    ensure!(code == 1 && said.contains("--max-tokens-per-stage"), "{code}:\n{said}");
    let log = ffn.log();
    let warnings: Vec<_> = log.lines().filter(|line| line.contains("WARN")).collect();
    let [warning] = warnings[..] else { bail!("{} warnings:\n{log}", warnings.len()) };
    for part in ["asks for none", "--join-token-file", "of 8 tokens", "--max-tokens-per-stage"] {
        ensure!(warning.contains(part), "{part} is not in: {warning}");
    }
    ensure!(!log.contains("secret"), "{log}");
    Ok(())
}

#[test]
fn options_that_cannot_work_are_named() -> anyhow::Result<()> {
    let (folder, model) = (tempfile::tempdir()?, fixtures::checkpoint("tiny-mixtral"));
    let twice = "127.0.0.1:7001,127.0.0.1:7001";
    let (code, log) = refused(attention(&model, twice, &[], folder.path(), "A0")?)?;
    ensure!(code == 2 && log.contains("--ffn") && log.contains("given twice"), "{code}:\n{log}");
    let (code, log) = refused(ffn(&model, &["--shard", "0/99"], folder.path(), "F0")?)?;
    ensure!(code == 2 && log.contains("--shard 0/99") && log.contains("8 parts"), "{code}:\n{log}");
    Ok(())
}

#[test]
fn a_port_in_use_and_an_unknown_configuration_field_are_named() -> anyhow::Result<()> {
    let (folder, model) = (tempfile::tempdir()?, fixtures::checkpoint("tiny-mixtral"));
    let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
    let address = taken.local_addr()?.to_string();
    let config = folder.path().join("afd.toml");
    std::fs::write(&config, "thread = 3\n")?;
    let config = config.display().to_string();
    let model = model.display().to_string();
    for binary in ["attention-svc", "ffn-svc"] {
        let ffn: &[&str] = if binary == "attention-svc" { &["--ffn", "local"] } else { &[] };
        let mut words = args(&["serve", "--model", &model, "--listen", &address]);
        words.extend(args(ffn));
        let (code, log) = refused(Process::start(binary, "taken", &words, folder.path())?)?;
        ensure!(code == 1 && log.contains(&address) && log.contains("in use"), "{binary}: {code}:\n{log}");
        let words = args(&["serve", "--config", &config]);
        let (code, log) = refused(Process::start(binary, "unknown", &words, folder.path())?)?;
        ensure!(
            code == 2 && log.contains("`thread`") && log.contains("afd.toml"),
            "{binary}: {code}:\n{log}"
        );
    }
    Ok(())
}

#[test]
fn a_field_that_nobody_knows_is_warned_about_once_on_both_sides() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let model = fixtures::copy("tiny-mixtral", folder.path().join("model"))?;
    let path = model.join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path)?)?;
    config["swish_limit"] = 7.into();
    config["aux_loss_alpha"] = 0.1.into();
    std::fs::write(&path, config.to_string())?;
    let mut attention = attention(&model, "local", &[], folder.path(), "A0")?;
    let mut ffn = ffn(&model, &[], folder.path(), "F0")?;
    for process in [&mut attention, &mut ffn] {
        process.address(LIMIT)?;
        let log = process.log();
        let warnings: Vec<_> = log.lines().filter(|line| line.contains("WARN")).collect();
        ensure!(warnings.len() == 1 && warnings[0].contains("swish_limit"), "{log}");
        ensure!(!warnings[0].contains("aux_loss_alpha"), "{log}");
    }
    Ok(())
}

/// One replica says no, the other serves the shard: attention starts with that one.
#[tokio::test]
async fn a_replica_that_refuses_keeps_nobody_from_starting() -> anyhow::Result<()> {
    let spec =
        DeploymentSpec::new(fixtures::checkpoint("tiny-deepseek-v2"), Ffn::Remote { shards: 1, replicas: 2 });
    let deployment = Deployment::start(spec.ffn_rank_args(0, &["--shared-experts", "attention"])).await?;
    let expected = fixtures::expected("tiny-deepseek-v2")?.prompts.remove(0);
    oracle::same(&expected.generated_ids, &deployment.greedy(0, &expected.input_ids, 32).await?)?;
    ensure!(deployment.in_use(0).await? == [1], "the one that refuses is in use");
    Ok(())
}

/// One rank says no while the other one has yet to start: attention waits for that one, and ends at once when it says no too.
#[tokio::test]
async fn a_rank_that_refuses_ends_no_start_while_another_one_is_still_to_come() -> anyhow::Result<()> {
    let (folder, model) = (tempfile::tempdir()?, fixtures::checkpoint("tiny-deepseek-v2"));
    let refuses = ["--shared-experts", "attention"];
    let mut no = ffn(&model, &refuses, folder.path(), "F0")?;
    let there = no.address(LIMIT)?;
    let client = reqwest::Client::builder().no_proxy().build()?;
    for (name, comes, is_well) in [("A0", &["--rank", "1"][..], true), ("A1", &refuses, false)] {
        let free = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
        let begun = Instant::now();
        let mut waiting = attention(&model, &format!("{there},{free}"), &[], folder.path(), name)?;
        let url = format!("http://{}/ready", waiting.address(LIMIT)?);
        loop {
            let answer = client.get(&url).send().await?;
            let (status, said) = (answer.status(), answer.text().await?);
            let words = [
                format!("{there} refuses"),
                "shared_expert_placement".into(),
                format!("{free} is not there"),
            ];
            if status == 503 && words.iter().all(|word| said.contains(word)) {
                break;
            }
            ensure!(begun.elapsed() < LIMIT, "{words:?} is not said, but {status}: {said}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let name = format!("F-{name}");
        let _late = ffn(&model, &[&["--listen", &free][..], comes].concat(), folder.path(), &name)?;
        if is_well {
            while client.get(&url).send().await?.status() != 200 {
                ensure!(begun.elapsed() < LIMIT, "it is not ready with the other one:\n{}", waiting.log());
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        } else {
            // Long before --join-timeout.
            let (code, log) = tokio::task::spawn_blocking(|| refused(waiting)).await??;
            ensure!(!log.contains("--drain-timeout") && !log.contains("lost"), "it ends by itself:\n{log}");
            let last = log.lines().last().unwrap_or_default();
            ensure!(
                code == 1 && last.contains("refused") && last.contains("--shared-experts"),
                "{code}:\n{log}"
            );
        }
    }
    Ok(())
}
