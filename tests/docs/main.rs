//! README.md is part of the product: what it links to exists, its tables of options are what `--help` says, the
//! metrics and architectures it names are those of the code.
mod options;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use afd_common::config::model::{Architecture, ModelConfig};
use afd_common::placement::PlacementFile;
use afd_tests::fixtures;
use anyhow::{Context, ensure};

const RENEW: &str = "cargo test -p afd-tests --test docs -- --ignored";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn readme() -> anyhow::Result<String> {
    Ok(std::fs::read_to_string(root().join("README.md"))?)
}

/// What stands between `<!-- begin: name -->` and `<!-- end: name -->`, without the line breaks around it.
fn section<'a>(text: &'a str, name: &str) -> anyhow::Result<&'a str> {
    let (_, rest) =
        text.split_once(&format!("<!-- begin: {name} -->")).context("the section does not begin")?;
    let (section, _) =
        rest.split_once(&format!("<!-- end: {name} -->")).context("the section does not end")?;
    Ok(section.trim_matches('\n'))
}

#[test]
fn every_relative_link_leads_somewhere() -> anyhow::Result<()> {
    let text = readme()?;
    let targets: Vec<&str> =
        text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target).collect();
    ensure!(targets.len() > 20, "only {} links were found", targets.len());
    let headings: BTreeSet<String> = text
        .lines()
        .filter(|line| line.starts_with('#'))
        .map(|line| anchor(line.trim_start_matches('#')))
        .collect();
    let broken: Vec<&str> = targets
        .into_iter()
        .filter(|target| !target.contains("://"))
        .filter(|target| match target.split_once('#') {
            Some(("", heading)) => !headings.contains(heading),
            Some((path, _)) => !root().join(path).exists(),
            None => !root().join(target).exists(),
        })
        .collect();
    ensure!(broken.is_empty(), "README.md links to what is not there: {broken:?}");
    Ok(())
}

/// A heading's anchor as GitHub makes it.
fn anchor(heading: &str) -> String {
    let kept = |c: char| match c {
        ' ' => Some('-'),
        c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c.to_ascii_lowercase()),
        _ => None,
    };
    heading.trim().chars().filter_map(kept).collect()
}

#[test]
fn the_tables_of_options_are_what_help_says() -> anyhow::Result<()> {
    let text = readme()?;
    for (name, table) in options::tables() {
        let found = section(&text, name).with_context(|| name.to_owned())?;
        ensure!(found == table, "README.md, section `{name}` is old; to renew it: {RENEW}\n\n{table}\n");
    }
    Ok(())
}

#[test]
fn the_limits_of_the_phases_are_those_of_the_options() -> anyhow::Result<()> {
    let text = readme()?;
    let [(_, options), ..] = options::tables();
    let rows: Vec<Vec<&str>> = section(&text, "phases")?
        .lines()
        .skip(2)
        .map(|row| row.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    for row in &rows {
        let [phase, option, default, _] = row[..] else { anyhow::bail!("not four columns: {row:?}") };
        let begins = format!("| {} TIME` |", option.trim_end_matches('`'));
        let listed = options.lines().find(|line| line.starts_with(&begins));
        let listed = listed.with_context(|| format!("{phase}: there is no {option}"))?;
        ensure!(listed.ends_with(&format!("| {default} |")), "{phase}: {default} is not that of {listed}");
    }
    let phases: Vec<&str> = rows.iter().map(|row| row[0]).collect();
    ensure!(phases == ["join", "open links", "warm-up", "hop"], "{phases:?}");
    Ok(())
}

/// Every command of both services takes times alike, and says so alike.
#[test]
fn every_option_that_takes_a_time_takes_it_with_a_unit() -> anyhow::Result<()> {
    let times = options::times();
    ensure!(times.len() > 18, "only {} options take times", times.len());
    for (command, arg) in times {
        let (name, help) = (arg.get_long().unwrap_or_default(), arg.get_help().map(ToString::to_string));
        let option = format!("{command} --{name}");
        let alone = clap::Command::new("alone").arg(arg.clone().required(false));
        for time in ["900ms", "0.9s", "0.9"] {
            let parsed = alone.clone().try_get_matches_from(["alone", &format!("--{name}"), time]);
            ensure!(parsed.is_ok(), "{option} {time}: {}", parsed.unwrap_err());
        }
        let value = arg.get_value_names().and_then(<[_]>::first).map_or("", |value| value.as_str());
        let is_said = help.unwrap_or_default().contains(": milliseconds)");
        let begins = if name.ends_with("-ms") { "MS" } else { "TIME" };
        ensure!(value.starts_with(begins), "{option} takes {value}, expected {begins}");
        ensure!(is_said == name.ends_with("-ms"), "{option}: what a bare number is");
    }
    Ok(())
}

/// A placement as the page shows it is one as `ffn-svc place` writes it.
#[test]
fn the_placement_that_is_shown_is_written_and_read_like_that() -> anyhow::Result<()> {
    let text = readme()?;
    let block = |name: &str, language: &str| -> anyhow::Result<&str> {
        let text = section(&text, name)?.strip_prefix(&format!("```{language}\n"));
        text.and_then(|text| text.strip_suffix("```"))
            .with_context(|| format!("{name}: no block of {language}"))
    };
    let folder = tempfile::tempdir()?;
    let read = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text)?;
        PlacementFile::read(&path).map_err(anyhow::Error::msg)
    };
    let shown = block("placement", "json")?;
    let mut file = read("placement.json", shown)?;
    ensure!(file.to_json() == shown, "it would be written so:\n{}", file.to_json());
    let by_hand = read("placement.toml", block("placement in toml", "toml")?)?;
    // The layers that the page leaves out.
    file.experts.clone_from(&by_hand.experts);
    let config = ModelConfig::load(&fixtures::checkpoint("tiny-mixtral"))?;
    for file in [file, by_hand] {
        file.placement(&config, Some(2)).with_context(|| file.to_json())?;
    }
    Ok(())
}

#[test]
#[ignore = "writes README.md"]
fn renew_the_tables_of_options() -> anyhow::Result<()> {
    let mut text = readme()?;
    for (name, table) in options::tables() {
        let (begin, end) = (format!("<!-- begin: {name} -->"), format!("<!-- end: {name} -->"));
        let (before, rest) = text.split_once(&begin).context("the section does not begin")?;
        let (_, after) = rest.split_once(&end).context("the section does not end")?;
        text = format!("{before}{begin}\n{table}\n{end}{after}");
    }
    Ok(std::fs::write(root().join("README.md"), text)?)
}

#[test]
fn every_metric_that_is_named_is_counted_somewhere() -> anyhow::Result<()> {
    let mut sources = String::new();
    for folder in ["attention-svc/src", "ffn-svc/src", "common/src"] {
        read_sources(&root().join(folder), &mut sources)?;
    }
    let text = readme()?;
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'));
    let names: BTreeSet<&str> =
        words.filter(|word| word.starts_with("afd_") || word.starts_with("vllm:")).collect();
    ensure!(names.len() > 10, "only {} metrics were found", names.len());
    let unknown: Vec<_> =
        names.into_iter().filter(|name| !sources.contains(&format!("\"{name}\""))).collect();
    ensure!(unknown.is_empty(), "README.md names metrics that nobody makes: {unknown:?}");
    Ok(())
}

fn read_sources(folder: &Path, all: &mut String) -> anyhow::Result<()> {
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            read_sources(&path, all)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            all.push_str(&std::fs::read_to_string(&path)?);
        }
    }
    Ok(())
}

#[test]
fn the_architectures_are_those_of_the_registry() -> anyhow::Result<()> {
    let text = readme()?;
    let section = section(&text, "architectures")?;
    let named: BTreeSet<&str> = section.split('`').filter(|word| word.ends_with("ForCausalLM")).collect();
    let served: BTreeSet<&str> = Architecture::ALL.iter().map(|architecture| architecture.name()).collect();
    ensure!(named == served, "README.md names {named:?}, served are {served:?}");
    Ok(())
}
