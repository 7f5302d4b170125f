//! `attention-svc plan` and `attention-svc plan calibrate`: options to a request, an answer to the terminal.
use std::io::Write as _;
use std::path::PathBuf;

use afd_common::config::option::OptionError;
use afd_common::config::units::milliseconds;
use afd_common::identity::SharedExpertPlacement;
use anyhow::Context as _;
use clap::{Args, Subcommand};

use super::calibrate;
use super::case::{Case, Exchange, Precision, Workload};
use super::config_reader;
use super::profile::Profile;
use super::report::{self, Plan, Request};
use super::search::{self, Limits};
use super::shape::ElementType;
use super::sweep::{self, RatioCurve};
use super::units::{Tokens, parse_tokens};

/// How many attention and FFN ranks, how many stages, or "don't".
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct PlanArgs {
    #[command(subcommand)]
    command: Option<PlanCommand>,
    #[command(flatten)]
    question: Question,
    /// Print the plan as JSON instead of tables
    #[arg(long)]
    json: bool,
    /// Also draw tokens/s/GPU over the A:F ratio, one line per context (--sweep-context), into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum PlanCommand {
    /// Turn measured points (JSON) into a hardware profile (TOML on standard output)
    Calibrate(CalibrateArgs),
    /// Evaluate a plan printed with --json again and compare
    Check {
        /// The plan
        file: PathBuf,
    },
    /// List the models and profiles that are built in
    List,
}

#[derive(Debug, Args)]
struct CalibrateArgs {
    #[command(flatten)]
    subject: Subject,
    /// Measured points: what `bench --layers --json`, `bench links --json` and `ffn-svc probe --json` wrote, or a file of your
    /// own; may be given several times
    #[arg(long, value_name = "FILE", required = true)]
    points: Vec<PathBuf>,
    /// Name of the new profile [default: the old one's, "calibrated"]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
}

/// What is planned. Required options are optional types: with a subcommand, clap lets them be absent.
#[derive(Debug, Args)]
struct Subject {
    /// A config.json, a folder that holds one, or a built-in name (see `plan list`)
    #[arg(long, value_name = "MODEL", required = true)]
    model: Option<String>,
    /// A profile.toml or a built-in name (see `plan list`)
    #[arg(long, value_name = "PROFILE", required = true)]
    hardware: Option<String>,
    /// Mean length of a sequence while it is decoded, tokens (k = 1024)
    #[arg(long, value_name = "TOKENS", required = true, value_parser = parse_tokens)]
    context: Option<u64>,
    /// How rows find experts
    #[arg(long, value_name = "HOW", value_enum, default_value_t = Exchange::Routed)]
    exchange: Exchange,
    /// Element type of attention weights [default: the checkpoint's]
    #[arg(long, value_name = "TYPE", value_enum)]
    attention_weights: Option<ElementType>,
    /// Element type of FFN weights [default: the checkpoint's]
    #[arg(long, value_name = "TYPE", value_enum, hide_possible_values = true)]
    ffn_weights: Option<ElementType>,
    /// Element type of the KV cache
    #[arg(long, value_name = "TYPE", value_enum, default_value_t = ElementType::Bf16, hide_possible_values = true)]
    kv: ElementType,
    /// Element type of rows towards the FFN
    #[arg(long, value_name = "TYPE", value_enum, default_value_t = ElementType::Bf16, hide_possible_values = true)]
    dispatch: ElementType,
    /// Element type of rows back
    #[arg(long, value_name = "TYPE", value_enum, default_value_t = ElementType::Bf16, hide_possible_values = true)]
    combine: ElementType,
    /// Rows of the busiest FFN rank over the mean, at least 1
    #[arg(long, value_name = "RATIO", default_value_t = 1.0)]
    imbalance: f64,
    /// Tokens a step gives a sequence (above 1 with multi-token prediction)
    #[arg(long, value_name = "N", default_value_t = 1.0)]
    tokens_per_step: f64,
}

#[derive(Debug, Args)]
struct Question {
    #[command(flatten)]
    subject: Subject,
    /// Which side computes the shared experts of a mixture where the two are apart: ffn, or attention, while the FFN computes
    /// the routed ones
    #[arg(long, value_name = "SIDE", default_value = "ffn")]
    shared_experts: SharedExpertPlacement,
    /// Longest time per output token (a bare number: milliseconds)
    #[arg(long, value_name = "MS", required = true, value_parser = milliseconds)]
    tpot_ms: Option<f64>,
    /// Devices there are
    #[arg(long, value_name = "N", default_value_t = 64)]
    gpus: u32,
    /// Sequences to decode in all [default: as many as fit]
    #[arg(long, value_name = "N")]
    concurrency: Option<u32>,
    /// Most stages a step may be split into
    #[arg(long, value_name = "N", default_value_t = 4)]
    max_stages: u32,
    /// Layouts of each kind to show
    #[arg(long, value_name = "N", default_value_t = 5)]
    top: usize,
    /// Also answer for these contexts
    #[arg(long, value_name = "TOKENS,…", value_delimiter = ',', value_parser = parse_tokens)]
    sweep_context: Vec<u64>,
    /// Also answer for these targets (bare numbers: milliseconds)
    #[arg(long, value_name = "MS,…", value_delimiter = ',', value_parser = milliseconds)]
    sweep_tpot_ms: Vec<f64>,
    /// Also answer for these numbers of devices
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    sweep_gpus: Vec<u32>,
    /// Also say what better links, memory or compute would change, and shared experts on the other side
    #[arg(long)]
    sensitivity: bool,
}

/// Answers and prints; whichever answer it is, it is none of the errors.
///
/// # Errors
/// What was wrong with model, profile or limits, with the nearest feasible answer.
pub fn run(args: PlanArgs) -> anyhow::Result<()> {
    // What comes out depends on nothing but what was given.
    let as_given = |error: anyhow::Error| OptionError::Whole(format!("{error:#}"));
    let text = match args.command {
        Some(PlanCommand::Calibrate(calibrate)) => calibrated(calibrate).map_err(as_given)?,
        Some(PlanCommand::Check { file }) => {
            let plan = read_plan(&file).map_err(as_given)?;
            plan.check()?;
            format!("{} layouts give what the plan says\n", plan.afd.len() + plan.colocated.len())
        }
        Some(PlanCommand::List) => listed(),
        None => answered(args).map_err(as_given)?,
    };
    std::io::stdout().lock().write_all(text.as_bytes())?;
    Ok(())
}

impl Subject {
    fn into_case(self) -> anyhow::Result<Case> {
        let at_least_one = |option: &str, value: f64| {
            anyhow::ensure!((1.0..=100.0).contains(&value), "{option} is {value}; expected 1 to 100");
            Ok(())
        };
        at_least_one("--imbalance", self.imbalance)?;
        at_least_one("--tokens-per-step", self.tokens_per_step)?;
        let shape = config_reader::load(&self.model.context("--model is needed")?)?;
        let stored = Precision::of(&shape);
        let precision = Precision {
            attention: self.attention_weights.unwrap_or(stored.attention),
            ffn: self.ffn_weights.unwrap_or(stored.ffn),
            kv: self.kv,
            dispatch: self.dispatch,
            combine: self.combine,
            ..stored
        };
        let workload = Workload {
            context: self.context.context("--context is needed")?,
            exchange: self.exchange,
            imbalance: self.imbalance,
            tokens_per_step: self.tokens_per_step,
            ..Workload::decoding(0)
        };
        Ok(Case {
            shape,
            profile: Profile::load(&self.hardware.context("--hardware is needed")?)?,
            precision,
            workload,
        })
    }
}

impl Question {
    fn into_request(self) -> anyhow::Result<Request> {
        // A sweep would tell of them as of one more point that has no answer.
        self.sweep_gpus.iter().try_for_each(|count| search::check_devices("--sweep-gpus", *count))?;
        self.sweep_tpot_ms.iter().try_for_each(|target| search::check_target("--sweep-tpot-ms", *target))?;
        let mut case = self.subject.into_case()?;
        case.workload.shared_experts = self.shared_experts;
        if self.shared_experts == SharedExpertPlacement::Attention {
            let name = &case.shape.name;
            anyhow::ensure!(
                case.shape.has_shared_experts(),
                "--shared-experts is attention, and {name} has no shared experts"
            );
            let calibration = &case.profile.calibration;
            anyhow::ensure!(
                calibration.ffn.is_none() && calibration.attention.is_none(),
                "--shared-experts is attention, and {} has measured times of attention or the FFN, of which shared experts \
                 cannot be told apart",
                case.profile.name
            );
        }
        Ok(Request {
            case,
            limits: Limits {
                max_devices: self.gpus,
                tpot_ms: self.tpot_ms.context("--tpot-ms is needed")?,
                concurrency: self.concurrency,
                max_stages: self.max_stages,
            },
            top: self.top,
            contexts: self.sweep_context,
            targets_ms: self.sweep_tpot_ms,
            device_counts: self.sweep_gpus,
            sensitivity: self.sensitivity,
        })
    }
}

fn calibrated(args: CalibrateArgs) -> anyhow::Result<String> {
    let case = args.subject.into_case()?;
    let mut measured = calibrate::Measured::default();
    for path in &args.points {
        let named = || format!("--points {}", path.display());
        let text = std::fs::read_to_string(path).with_context(named)?;
        let points = calibrate::parse(&text).with_context(named)?;
        anyhow::ensure!(
            !points.is_empty(),
            "{}: no points in it (`bench` writes them with --layers)",
            named()
        );
        measured = measured.and(points);
    }
    let mut profile = calibrate::calibrate(&case, &measured)?;
    profile.name = args.name.unwrap_or_else(|| format!("{}, calibrated", profile.name));
    profile.notes =
        Some(format!("measured with {} at context {}", case.shape.name, Tokens(case.workload.context)));
    Ok(profile.to_toml()?)
}

fn read_plan(file: &std::path::Path) -> anyhow::Result<Plan> {
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    Ok(Plan::from_json(&text)?)
}

fn answered(args: PlanArgs) -> anyhow::Result<String> {
    let plan = Plan::make(args.question.into_request()?)?;
    if let Some(path) = &args.svg {
        std::fs::write(path, drawn(&plan)).with_context(|| format!("--svg {}", path.display()))?;
    }
    Ok(if args.json { serde_json::to_string_pretty(&plan)? + "\n" } else { report::table(&plan) })
}

fn listed() -> String {
    let (models, profiles) = (config_reader::published_names(), super::profile::built_in_names());
    let lines = |names: Vec<&str>| names.into_iter().map(|name| format!("  {name}\n")).collect::<String>();
    format!("models:\n{}profiles:\n{}", lines(models.collect()), lines(profiles.collect()))
}

/// The picture over the plan's own context and the swept ones. Contexts where nothing fits have no line.
fn drawn(plan: &Plan) -> String {
    let Request { case, limits, contexts, .. } = &plan.request;
    let mut all: Vec<u64> = contexts.iter().copied().chain([case.workload.context]).collect();
    all.sort_unstable();
    all.dedup();
    let curve = |context: &u64| {
        let mut case = case.clone();
        case.workload.context = *context;
        sweep::by_ratio(&case, limits).ok()
    };
    let curves: Vec<RatioCurve> = all.iter().filter_map(curve).collect();
    let title = format!("{} on {}", case.shape.name, case.profile.name);
    let subtitle =
        format!("decode, at most {} ms per token, up to {} GPUs", limits.tpot_ms, limits.max_devices);
    report::picture(&title, &subtitle, &curves)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(Debug, clap::Parser)]
    struct Cli {
        #[command(flatten)]
        plan: PlanArgs,
    }

    fn parse(line: &str) -> Result<PlanArgs, clap::Error> {
        Cli::try_parse_from(line.split_whitespace()).map(|cli| cli.plan)
    }

    #[test]
    fn a_question_and_its_subcommands_parse() {
        let args = parse("plan --model kimi-k2 --hardware h200 --context 16k --tpot-ms 50 --sweep-gpus 8,16")
            .unwrap();
        let request = args.question.into_request().unwrap();
        assert_eq!(request.case.workload.context, 16384);
        assert_eq!(request.device_counts, [8, 16]);
        assert!(parse("plan list").is_ok());
        assert!(parse("plan check plan.json").is_ok());
        assert!(parse("plan calibrate --model kimi-k2 --hardware h200 --context 4k --points p.json").is_ok());
    }

    #[test]
    fn options_may_come_in_any_order() {
        let request = |line: &str| parse(line).unwrap().question.into_request().unwrap();
        assert_eq!(
            request("plan --model kimi-k2 --hardware h200 --context 16k --tpot-ms 50 --kv fp8 --gpus 8"),
            request("plan --gpus 8 --kv fp8 --tpot-ms 50 --context 16384 --hardware h200 --model kimi-k2"),
        );
    }

    #[test]
    fn what_is_left_out_or_wrong_is_named() {
        let left_out = parse("plan --model kimi-k2 --hardware h200 --context 16k").unwrap_err();
        assert!(left_out.to_string().contains("--tpot-ms"), "{left_out}");
        let wrong = parse("plan --model kimi-k2 --hardware h200 --context many --tpot-ms 50").unwrap_err();
        assert!(wrong.to_string().contains("--context"), "{wrong}");
        let args =
            parse("plan --model kimi-k2 --hardware h200 --context 4k --tpot-ms 50 --imbalance 0.5").unwrap();
        assert!(args.question.into_request().unwrap_err().to_string().contains("--imbalance"));
        for (given, said) in [
            ("--imbalance 0.5", "--imbalance is 0.5; expected 1 to 100"),
            ("--gpus 0", "--gpus is 0; expected 1 to 100000"),
            ("--max-stages 9", "--max-stages is 9; expected 1 to 8"),
            ("--concurrency 0", "--concurrency is 0; expected at least 1"),
            ("--sweep-gpus 8,0", "--sweep-gpus is 0; expected 1 to 100000"),
            ("--sweep-tpot-ms 0", "--sweep-tpot-ms is 0; expected 0.001 to 1e7"),
        ] {
            let line = format!("plan --model kimi-k2 --hardware h200 --context 4k --tpot-ms 50 {given}");
            let asked = parse(&line).unwrap().question.into_request();
            let refused = asked.and_then(|request| Ok(Plan::make(request)?)).unwrap_err();
            assert_eq!(refused.to_string(), said);
        }
    }

    #[test]
    fn shared_experts_are_asked_for_where_there_are_some() {
        let request = |model: &str, more: &str| {
            let line = format!("plan --model {model} --hardware h200 --context 4k --tpot-ms 50 {more}");
            parse(&line).unwrap().question.into_request()
        };
        let apart = request("deepseek-v3", "--shared-experts attention --sensitivity").unwrap();
        assert_eq!(apart.case.workload.shared_experts, SharedExpertPlacement::Attention);
        let text = report::table(&Plan::make(apart).unwrap());
        assert!(
            text.contains("shared experts take attention") && text.contains("shared experts on the FFN"),
            "{text}"
        );
        let without = request("mixtral-8x7b", "--shared-experts attention").unwrap_err().to_string();
        assert_eq!(without, "--shared-experts is attention, and mixtral-8x7b has no shared experts");
        assert!(request("mixtral-8x7b", "").is_ok());
        assert!(parse("plan --model a --hardware b --context 4k --tpot-ms 1 --shared-experts both").is_err());
    }

    #[test]
    fn calibrating_writes_a_profile_that_can_be_planned_with() {
        let folder = tempfile::tempdir().unwrap();
        let points = folder.path().join("points.json");
        std::fs::write(
            &points,
            r#"{"links": [{"link": "scale_up", "bytes": 4096, "one_way_us": 3.1},
                          {"link": "scale_up", "bytes": 4194304, "one_way_us": 16.0}],
                "attention": [{"rows": 8, "context": 1024, "layer_us": 30}, {"rows": 64, "context": 1024, "layer_us": 60}]}"#,
        )
        .unwrap();
        let line = format!(
            "plan calibrate --model deepseek-v2-lite --hardware h200 --context 1024 --points {}",
            points.display()
        );
        let Some(PlanCommand::Calibrate(args)) = parse(&line).unwrap().command else { panic!() };
        let profile = Profile::from_toml("calibrated", &calibrated(args).unwrap()).unwrap();
        assert!((profile.links.scale_up.bandwidth.value / 325e9 - 1.0).abs() < 0.01, "{profile:?}");
        assert!(profile.calibration.attention.is_some());
    }
}
