//! Groups of options that `serve` of both roles has, described once. Each role flattens them among its own, on the command line
//! as in a file.
use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};

use super::choices::LoadFormat;
use super::device::DeviceChoice;
use super::idle::{Idle, Rule, idle};
use crate::identity::{GatePlacement, SharedExpertPlacement, Sides};
use crate::routing::Routing;

/// Where tensors come from, and where they live.
#[derive(Clone, Debug, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct TensorOptions {
    /// Where tensors live: cpu, or a GPU as cuda:0, whose libraries are loaded when it is asked for [default: cpu]
    #[arg(long, value_name = "DEVICE", help_heading = "Model")]
    pub device: Option<DeviceChoice>,
    /// Where weights come from: auto (the checkpoint) or dummy (random, for benchmarks); the same on both roles
    /// [default: auto]
    #[arg(long, value_name = "FORMAT", help_heading = "Model")]
    pub load_format: Option<LoadFormat>,
    /// Seed of dummy weights; the same on both roles [default: 0]
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub seed: Option<u64>,
}

/// Who chooses experts, who computes them, and where they are.
#[derive(Clone, Debug, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ExpertOptions {
    /// Which side computes the router of a mixture of experts: ffn or attention; the same on both roles [default: ffn]
    #[arg(long, value_name = "SIDE", help_heading = "Experts")]
    pub gate: Option<GatePlacement>,
    /// Which side computes the shared experts of a mixture: ffn, or attention, while the FFN computes the routed ones; the
    /// same on both roles [default: ffn]
    #[arg(long, value_name = "SIDE", help_heading = "Experts")]
    pub shared_experts: Option<SharedExpertPlacement>,
    /// File that says which shard has which experts (JSON or TOML), as ffn-svc place makes it; the same on both roles
    /// [default: contiguous parts]
    #[arg(long, value_name = "FILE", help_heading = "Experts")]
    pub placement: Option<PathBuf>,
    /// Who chooses experts: model, or balanced, a cycle over all of them (benchmarks only: what comes out is
    /// meaningless); the same on both roles [default: model]
    #[arg(long, value_name = "WHO", help_heading = "Experts")]
    pub routing: Option<Routing>,
}

impl TensorOptions {
    /// Whether tensors live on the CPU.
    pub fn on_cpu(&self) -> bool {
        self.device.unwrap_or_default() == DeviceChoice::Cpu
    }

    /// Whether weights are made up.
    pub fn is_dummy(&self) -> bool {
        self.load_format.unwrap_or_default() == LoadFormat::Dummy
    }
}

impl ExpertOptions {
    /// Which side computes what, as given or by default.
    pub fn sides(&self) -> Sides {
        Sides { gate: self.gate.unwrap_or_default(), shared_experts: self.shared_experts.unwrap_or_default() }
    }

    /// Those that were given, all of which have no effect on a model without experts.
    pub fn idle_on_dense(&self) -> Vec<Idle> {
        idle(&[
            Rule {
                holds: true,
                because: "on a dense model (--model): it has no experts",
                options: &[
                    ("--gate", self.gate.is_some()),
                    ("--shared-experts", self.shared_experts.is_some()),
                    ("--routing", self.routing.is_some()),
                ],
            },
            Rule {
                holds: true,
                because: "on a dense model (--model): it has no experts, and the file is not read",
                options: &[("--placement", self.placement.is_some())],
            },
        ])
    }
}
