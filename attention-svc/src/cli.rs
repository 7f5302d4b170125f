//! The command line of attention-svc.
use afd_common::config;
use afd_common::process::exit;
use clap::{Parser, Subcommand};

use crate::bench::BenchArgs;
use crate::config::ServeArgs;
use crate::doctor::DoctorArgs;
use crate::plan::cli::PlanArgs;
use crate::probe::ProbeArgs;
use crate::profile::ProfileArgs;

/// The attention role of a disaggregated language model: requests, KV cache, attention, sampling
#[derive(Debug, Parser)]
#[command(name = "attention-svc", version, max_term_width = 110, propagate_version = true, after_help = exit::help())]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model: OpenAI's HTTP API and gRPC on one port
    #[command(after_help = config::after_help())]
    Serve(Box<ServeArgs>),
    /// Measure a running server, this one or any that speaks OpenAI's API, or the links of this machine
    #[command(after_help = config::after_help())]
    Bench(Box<BenchArgs>),
    /// Check a running deployment from outside, and say in sentences what is wrong with it
    #[command(after_help = config::after_help())]
    Doctor(Box<DoctorArgs>),
    /// Ask a running rank whether it is ready, as a container's health check does
    #[command(after_help = config::after_help())]
    Probe(Box<ProbeArgs>),
    /// Work out how many attention and FFN ranks, how many stages, or whether to disaggregate at all
    #[command(after_help = config::after_help())]
    Plan(Box<PlanArgs>),
    /// Record some steps of a running rank and its FFN ranks as one timeline, for Perfetto
    #[command(after_help = config::after_help())]
    Profile(ProfileArgs),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
