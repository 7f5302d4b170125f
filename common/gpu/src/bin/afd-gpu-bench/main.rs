//! Checks and measures this crate on the machine at hand: operations on one GPU, channels between two.
//!
//! `afd-gpu-bench [--out DIR] SECTION...` runs the sections in order and prints their tables last, also into
//! `DIR/results.txt`. Checks come before times; a section that fails is reported and the others go on.
use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Instant;

use afd_gpu::Device;

mod contract;
mod hops;
mod layer;
mod loss;
mod machine;
mod mla;
mod moe;
mod moe_check;
mod peer;
mod products;
mod rows;
mod sample;
mod shared;
mod table;
mod timing;
mod waits;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const USAGE: &str = "afd-gpu-bench [--out DIR] (machine | rows | products | sample | layer | moe | shared | waits | mla | contract | hops | loss | tune | profile)...";

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1).peekable();
    if arguments.peek().map(String::as_str) == Some("peer") {
        let port = arguments.nth(1).and_then(|p| p.parse().ok()).unwrap_or(0);
        return match peer::serve(port) {
            Ok(()) => ExitCode::SUCCESS,
            Err(e) => {
                eprintln!("peer: {e}");
                ExitCode::FAILURE
            }
        };
    }
    let (mut out, mut sections) = (None, Vec::new());
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--out" => out = arguments.next(),
            _ => sections.push(argument),
        }
    }
    if sections.is_empty() {
        eprintln!("{USAGE}");
        return ExitCode::FAILURE;
    }
    let (mut text, mut failed) = (String::new(), false);
    for section in sections {
        let begin = Instant::now();
        eprintln!("== {section}");
        // A mistake in one section must not cost the others their turn on a borrowed machine.
        let outcome = std::panic::catch_unwind(|| run(&section)).unwrap_or_else(|_| Err("panicked".into()));
        match outcome {
            Ok(part) => {
                let _ = writeln!(text, "{part}");
            }
            Err(e) => {
                failed = true;
                let _ = writeln!(text, "{section}: FAILED: {e}\n");
            }
        }
        eprintln!("== {section}: {:.1} s", begin.elapsed().as_secs_f64());
        // After every section: a later one may take the machine with it.
        if let Some(dir) = &out
            && let Err(e) = std::fs::write(format!("{dir}/results.txt"), &text)
        {
            eprintln!("{dir}/results.txt: {e}");
        }
    }
    println!("{text}");
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn run(section: &str) -> Result<String> {
    let device = Device::open(0)?;
    match section {
        "machine" => machine::run(&device),
        "rows" => rows::run(&device),
        "products" => products::run(&device),
        "sample" => sample::run(&device),
        "layer" => layer::run(&device),
        "moe" => moe::run(&device),
        "shared" => shared::run(&device),
        "waits" => waits::run(&device),
        "mla" => mla::run(&device),
        "profile" => moe::profile(&device).and_then(|_| mla::profile(&device)),
        "tune" => Ok(mla::tune(&device)? + &moe::tune(&device)?),
        "contract" => contract::run(&device),
        "hops" => hops::run(&device),
        "loss" => loss::run(),
        _ => Err(format!("no section {section}: {USAGE}").into()),
    }
}
