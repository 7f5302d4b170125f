//! `/metrics` of both services: well formed, named by the rules of Prometheus, and all that dashboard and alerts ask for.
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn};
use anyhow::{Context, bail, ensure};
use serde_json::Value;

use super::requests::MODEL;

/// A metric: what it is, and the labels and values of its samples.
#[derive(Debug, Default)]
struct Family {
    help: String,
    kind: String,
    samples: BTreeMap<String, f64>,
}

/// Reads the text format as strictly as Prometheus does, and a little more.
fn parse(text: &str) -> anyhow::Result<BTreeMap<String, Family>> {
    ensure!(text.ends_with('\n'), "no line end at the end");
    let mut families = BTreeMap::<String, Family>::new();
    let mut current = String::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').context(line.to_owned())?;
            ensure!(!families.contains_key(name), "{name} occurs twice");
            ensure!(help.ends_with('.') && help.len() > 5, "{name} has no sentence for help: {help:?}");
            families.insert(name.into(), Family { help: help.into(), ..Family::default() });
            current = name.into();
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').context(line.to_owned())?;
            ensure!(name == current, "TYPE of {name} after HELP of {current}");
            families.get_mut(name).context(line.to_owned())?.kind = kind.into();
        } else {
            let (series, value) = line.rsplit_once(' ').context(line.to_owned())?;
            let name = series.split('{').next().unwrap_or(series);
            let family = families.get_mut(&current).with_context(|| format!("{line} before any HELP"))?;
            let suffix = name.strip_prefix(&*current).with_context(|| format!("{name} among {current}"))?;
            let allowed: &[&str] =
                if family.kind == "histogram" { &["_bucket", "_sum", "_count"] } else { &[""] };
            ensure!(allowed.contains(&suffix), "{name} is no part of a {}", family.kind);
            let value = value.parse().with_context(|| line.to_owned())?;
            ensure!(family.samples.insert(series.into(), value).is_none(), "{series} occurs twice");
        }
    }
    Ok(families)
}

/// What `promtool check metrics` asks of names, and that histograms add up.
fn check(families: &BTreeMap<String, Family>) -> anyhow::Result<()> {
    for (name, family) in families {
        let is_counter = family.kind == "counter";
        ensure!(["counter", "gauge", "histogram"].contains(&&*family.kind), "{name} is a {:?}", family.kind);
        ensure!(name.ends_with("_total") == is_counter, "{name} is a {}", family.kind);
        ensure!(name.starts_with("afd_") || name.starts_with("vllm:"), "{name} is nobody's");
        let base = name.trim_end_matches("_total");
        for unit in ["_us", "_ms", "_ns", "_milliseconds", "_microseconds", "_kb", "_mb", "_kib", "_mib"] {
            ensure!(!base.ends_with(unit), "{name} is not in seconds or bytes");
        }
        ensure!(!family.samples.is_empty(), "{name} ({}) has no samples", family.help);
        if family.kind == "histogram" {
            check_histogram(name, family)?;
        }
    }
    Ok(())
}

fn check_histogram(name: &str, family: &Family) -> anyhow::Result<()> {
    let count = family.samples.iter().filter(|(series, _)| series.starts_with(&format!("{name}_count")));
    let counts: f64 = count.map(|(_, count)| count).sum();
    let of_bound = |series: &str| series.split("le=\"").nth(1)?.split('"').next().map(str::to_owned);
    let infinite: f64 = family
        .samples
        .iter()
        .filter(|(series, _)| of_bound(series).is_some_and(|bound| bound == "+Inf"))
        .map(|(_, count)| count)
        .sum();
    ensure!(counts == infinite, "{name}: {counts} samples, {infinite} below infinity");
    Ok(())
}

/// Both services' metrics of a pair that has served a request.
async fn of_a_pair() -> anyhow::Result<[BTreeMap<String, Family>; 2]> {
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 2, replicas: 1 });
    let deployment = Deployment::start(spec).await?;
    let prompt = fixtures::expected(MODEL)?.prompts.remove(0);
    deployment.greedy(0, &prompt.input_ids, 8).await?;
    let ffn = format!("http://{}/metrics", deployment.ffn_addresses[0]);
    let mut both = Vec::new();
    for url in [deployment.url(0, "/metrics"), ffn] {
        let text = deployment.client().get(&url).send().await?.text().await?;
        let families = parse(&text).with_context(|| url.clone())?;
        check(&families).with_context(|| url.clone())?;
        both.push(families);
    }
    both.try_into().map_err(|_| anyhow::anyhow!("two answers"))
}

#[tokio::test]
async fn metrics_are_well_formed_and_all_that_dashboard_and_alerts_ask_for() -> anyhow::Result<()> {
    let [attention, ffn] = of_a_pair().await?;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/observability");
    let dashboard = std::fs::read_to_string(folder.join("dashboard.json"))?;
    let mut expressions = Vec::new();
    let dashboard: Value = serde_json::from_str(&dashboard)?;
    gather(&dashboard, &mut expressions);
    let sources = std::fs::read_to_string(folder.join("grafana/datasources.yaml"))?;
    check_dashboard(&dashboard, &sources)?;
    let alerts = std::fs::read_to_string(folder.join("alerts.yaml"))?;
    ensure!(expressions.len() > 30 && alerts.matches("- alert:").count() > 5, "nothing to check");
    ensure!(
        alerts.matches("summary:").count() == alerts.matches("- alert:").count(),
        "an alert says nothing"
    );
    expressions.push(alerts);
    let mut used = BTreeSet::new();
    for expression in &expressions {
        for (name, labels) in selectors(expression) {
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix));
            let base =
                base.filter(|base| attention.contains_key(*base) || ffn.contains_key(*base)).unwrap_or(name);
            let Some(family) = attention.get(base).or_else(|| ffn.get(base)) else {
                bail!("no service has {name}, used in {expression}");
            };
            for label in labels {
                let has = |series: &String| series.contains(&format!("{label}=\""));
                ensure!(family.samples.keys().any(has), "{name} has no label {label}, used in {expression}");
            }
            used.insert(base.to_owned());
        }
    }
    ensure!(used.len() > 30, "only {used:?} are used");
    Ok(())
}

/// What Grafana's schema requires and its importer does not supply: without `showLegend` a panel shows no legend, and a
/// data source that nobody has makes every panel ask who has one.
fn check_dashboard(dashboard: &Value, sources: &str) -> anyhow::Result<()> {
    let panels = dashboard["panels"].as_array().context("panels")?;
    for (panel, legend) in panels.iter().map(|panel| (panel, &panel["options"]["legend"])) {
        let complete = legend["showLegend"].is_boolean() && legend["calcs"].is_array();
        ensure!(legend.is_null() || complete, "{}: legend lacks showLegend or calcs", panel["title"]);
    }
    for variable in dashboard["templating"]["list"].as_array().context("templating.list")? {
        let chosen = variable["current"]["value"].as_str().context("a variable without a value")?;
        ensure!(sources.contains(&format!("uid: {chosen},")), "no data source has the uid {chosen}");
    }
    Ok(())
}

fn gather(value: &Value, expressions: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            expressions.extend(fields.get("expr").and_then(Value::as_str).map(str::to_owned));
            fields.values().for_each(|value| gather(value, expressions));
        }
        Value::Array(values) => values.iter().for_each(|value| gather(value, expressions)),
        _ => {}
    }
}

/// Metrics in an expression, with the labels that are asked of each.
fn selectors(expression: &str) -> Vec<(&str, Vec<&str>)> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let mut found = Vec::new();
    let mut rest = expression;
    while let Some(at) = ["afd_", "vllm:"].iter().filter_map(|prefix| rest.find(prefix)).min() {
        let end = rest[at..].find(|c| !is_part(c)).map_or(rest.len(), |length| at + length);
        let (name, behind) = (&rest[at..end], &rest[end..]);
        let selector = behind.strip_prefix('{').and_then(|inner| inner.split('}').next()).unwrap_or_default();
        let label = |matcher: &'_ str| matcher.find(['=', '!']);
        let labels =
            selector.split(',').filter_map(|matcher| Some(matcher[..label(matcher)?].trim())).collect();
        found.push((name, labels));
        rest = behind;
    }
    found
}

#[test]
fn selectors_are_found_with_their_labels() {
    let found = selectors("sum by (x) (rate(afd_a_total{part=\"step\", kind!=\"y\"}[5m])) / vllm:b_bucket");
    assert_eq!(found, [("afd_a_total", vec!["part", "kind"]), ("vllm:b_bucket", vec![])]);
}

#[test]
fn a_bad_exposition_is_refused() {
    let good = "# HELP afd_a_total Some things.\n# TYPE afd_a_total counter\nafd_a_total{x=\"1\"} 3\n";
    assert!(parse(good).is_ok_and(|families| check(&families).is_ok()));
    for bad in [
        good.replace("counter", "gauge"),
        format!("{good}afd_a_total{{x=\"1\"}} 4\n"),
        format!("{good}{good}"),
        good.replace("afd_a_total", "afd_a_us_total"),
        good.replace("Some things.", "x"),
        good.replace("} 3", "} many"),
    ] {
        assert!(parse(&bad).and_then(|families| check(&families)).is_err(), "{bad}");
    }
}
