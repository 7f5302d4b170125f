//! Options of `serve` that have no effect beside the others.
use afd_common::config::choices::LoadFormat;
use afd_common::config::device::DeviceChoice;
use afd_common::config::idle::{Idle, Rule, idle};

use super::{CapacityConfig, FfnTarget, ServeArgs};

/// Those that were given; `args` as the command line and the file have them together.
pub(super) fn of(args: &ServeArgs, capacity: &CapacityConfig) -> Vec<Idle> {
    let is_local = args.ffn == Some(FfnTarget::Local);
    let on_cpu = args.device.unwrap_or_default() == DeviceChoice::Cpu;
    let one_stage = capacity.stages.max_stages == 1;
    let stage_bounds = [
        ("--stage-min-decode", args.stage_min_decode.is_some()),
        ("--stage-min-prefill", args.stage_min_prefill.is_some()),
    ];
    idle(&[
        Rule {
            holds: is_local,
            because: "with --ffn local",
            options: &[
                ("--ffn-tls-ca", args.ffn_tls_ca.is_some()),
                ("--ffn-tls-cert", args.ffn_tls_cert.is_some()),
                ("--ffn-tls-key", args.ffn_tls_key.is_some()),
                ("--placement", args.placement.is_some()),
                ("--join-timeout", args.join_timeout.is_some()),
                ("--link-timeout", args.link_timeout.is_some()),
            ],
        },
        Rule {
            holds: is_local && !on_cpu,
            because: "with --ffn local on a GPU (--device)",
            options: &[
                ("--warmup-timeout", args.warmup_timeout.is_some()),
                ("--hop-timeout", args.hop_timeout.is_some()),
                ("--ffn-loss-timeout", args.ffn_loss_timeout.is_some()),
            ],
        },
        Rule {
            holds: one_stage && args.stages.is_some(),
            because: "with --stages 1",
            options: &stage_bounds,
        },
        Rule {
            holds: one_stage,
            because: "where steps have one stage, as they have here without --stages",
            options: &stage_bounds,
        },
        Rule {
            holds: args.peers.as_ref().is_none_or(Vec::is_empty),
            because: "without --peers",
            options: &[
                ("--peers-tls-ca", args.peers_tls_ca.is_some()),
                ("--peer-timeout", args.peer_timeout.is_some()),
            ],
        },
        Rule {
            holds: on_cpu,
            because: "on a CPU (--device)",
            options: &[
                ("--graph-mode", args.graph_mode.is_some()),
                ("--capture-sizes", args.capture_sizes.is_some()),
                ("--max-capture-size", args.max_capture_size.is_some()),
            ],
        },
        Rule {
            holds: args.load_format.unwrap_or_default() != LoadFormat::Dummy,
            because: "without --load-format dummy",
            options: &[("--seed", args.seed.is_some())],
        },
    ])
}
