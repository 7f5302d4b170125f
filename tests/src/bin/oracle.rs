//! The token oracle as a command: were these the right tokens? `deploy/demo.sh --kill` asks it.
//!
//! Reads `{"prompt_token_ids": […], "token_ids": […]}` from standard input, as the API answers with `return_token_ids`,
//! and prints one line. Exit code 0: the same tokens; 1: not the same, or nothing to judge.
use std::io::Read as _;
use std::path::PathBuf;
use std::process::ExitCode;

use afd_common::config::dtype::DtypeChoice;
use afd_tests::monolith::Monolith;
use afd_tests::oracle;
use anyhow::Context;
use clap::Parser;
use serde::Deserialize;
use tch::Kind;

/// Judges greedily chosen tokens by feeding them through both halves of the model in one plain loop, in fp32
#[derive(Parser)]
#[command(name = "oracle")]
struct Args {
    /// Checkpoint folder
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// What the system under test computed in: auto (as the checkpoint), float32 or bfloat16 [default: auto]
    #[arg(long, value_name = "TYPE", default_value = "auto", hide_default_value = true)]
    dtype: DtypeChoice,
}

/// The part of an answer that is judged.
#[derive(Deserialize)]
struct Answer {
    prompt_token_ids: Vec<u32>,
    token_ids: Vec<u32>,
}

fn main() -> ExitCode {
    match judge(&Args::parse()) {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("oracle: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn judge(args: &Args) -> anyhow::Result<String> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).context("standard input")?;
    let answer: Answer = serde_json::from_str(&text).context("standard input")?;
    let reference = Monolith::load(&args.model, Kind::Float)?;
    let kind = args.dtype.resolve(reference.config.dtype).kind();
    let verdict = oracle::judge(&reference, &answer.prompt_token_ids, &answer.token_ids, kind)?;
    let best = match verdict.worst_gap {
        0.0 => "each is the reference's own choice".to_owned(),
        gap => format!(
            "none further than {gap:.1e} from the best logit (allowed: {:.0e})",
            oracle::allowed_gap(kind)
        ),
    };
    Ok(format!("all {} tokens are right, {best}", verdict.num_tokens))
}
