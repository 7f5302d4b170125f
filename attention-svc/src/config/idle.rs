//! Options of `serve` that have no effect beside the others.
use afd_common::config::idle::{Idle, Rule, idle};
use afd_common::config::shared::{ExpertOptions, TensorOptions};

use super::{CapacityConfig, FfnTarget, ServeArgs};

/// Those that were given; `args` as the command line and the file have them together.
pub(super) fn of(args: &ServeArgs, capacity: &CapacityConfig) -> Vec<Idle> {
    name_all(args);
    [of_ffn(args), of_stages(args, capacity), of_peers(args), of_device(args)].concat()
}

/// The way to FFN ranks, where there are none.
fn of_ffn(args: &ServeArgs) -> Vec<Idle> {
    let is_local = args.ffn.as_ref() == Some(&FfnTarget::Local);
    idle(&[
        Rule {
            holds: is_local,
            because: "with --ffn local",
            options: &[
                ("--ffn-tls-ca", args.ffn_tls_ca.is_some()),
                ("--ffn-tls-cert", args.ffn_tls_cert.is_some()),
                ("--ffn-tls-key", args.ffn_tls_key.is_some()),
                ("--join-timeout", args.join_timeout.is_some()),
                ("--link-timeout", args.link_timeout.is_some()),
            ],
        },
        Rule {
            holds: is_local,
            because: "with --ffn local: one shard has every expert, and the file is not read",
            options: &[("--placement", args.experts.placement.is_some())],
        },
        Rule {
            holds: is_local && !args.tensors.on_cpu(),
            because: "with --ffn local on a GPU (--device)",
            options: &[
                ("--warmup-timeout", args.warmup_timeout.is_some()),
                ("--hop-timeout", args.hop_timeout.is_some()),
                ("--ffn-loss-timeout", args.ffn_loss_timeout.is_some()),
            ],
        },
    ])
}

/// Where a step is split, where it is not.
fn of_stages(args: &ServeArgs, capacity: &CapacityConfig) -> Vec<Idle> {
    let one_stage = capacity.stages.max_stages == 1;
    let bounds = [
        ("--stage-min-decode", args.stage_min_decode.is_some()),
        ("--stage-min-prefill", args.stage_min_prefill.is_some()),
    ];
    idle(&[
        Rule { holds: one_stage && args.stages.is_some(), because: "with --stages 1", options: &bounds },
        Rule {
            holds: one_stage,
            because: "where steps have one stage, as they have here without --stages",
            options: &bounds,
        },
    ])
}

/// The way to other attention ranks, where there are none.
fn of_peers(args: &ServeArgs) -> Vec<Idle> {
    idle(&[Rule {
        holds: args.peers.as_ref().is_none_or(Vec::is_empty),
        because: "without --peers",
        options: &[
            ("--peers-tls-ca", args.peers_tls_ca.is_some()),
            ("--peer-timeout", args.peer_timeout.is_some()),
        ],
    }])
}

/// What a GPU captures, where there is none; and weights that are made up, where they are read.
fn of_device(args: &ServeArgs) -> Vec<Idle> {
    idle(&[
        Rule {
            holds: args.tensors.on_cpu(),
            because: "on a CPU (--device)",
            options: &[
                ("--graph-mode", args.graph_mode.is_some()),
                ("--capture-sizes", args.capture_sizes.is_some()),
                ("--max-capture-size", args.max_capture_size.is_some()),
            ],
        },
        Rule {
            holds: !args.tensors.is_dummy(),
            because: "without --load-format dummy",
            options: &[("--seed", args.tensors.seed.is_some())],
        },
    ])
}

/// Does nothing. It names every option, so that no new one is forgotten here: it goes to a rule above, or to those that
/// always have an effect. Those about experts have none on a dense model, which is known later.
fn name_all(args: &ServeArgs) {
    let ServeArgs {
        capture_sizes: _,
        ffn: _,
        ffn_loss_timeout: _,
        ffn_tls_ca: _,
        ffn_tls_cert: _,
        ffn_tls_key: _,
        graph_mode: _,
        hop_timeout: _,
        join_timeout: _,
        link_timeout: _,
        max_capture_size: _,
        peer_timeout: _,
        peers: _,
        peers_tls_ca: _,
        stage_min_decode: _,
        stage_min_prefill: _,
        stages: _,
        warmup_timeout: _,
        tensors: TensorOptions { seed: _, device: _, load_format: _ },
        experts: ExpertOptions { placement: _, gate: _, routing: _, shared_experts: _ },
        // Always of effect.
        address_file: _,
        advertise: _,
        api_token_file: _,
        block_size: _,
        body_timeout: _,
        config: _,
        deployment: _,
        drain_timeout: _,
        dtype: _,
        insecure: _,
        join_token_file: _,
        kv_cache_blocks: _,
        kv_cache_memory: _,
        link: _,
        listen: _,
        log_format: _,
        log_level: _,
        max_body: _,
        max_model_len: _,
        max_num_batched_tokens: _,
        max_num_seqs: _,
        max_queue: _,
        model: _,
        no_prefix_cache: _,
        rank: _,
        served_model_name: _,
        threads: _,
        tls_cert: _,
        tls_client_ca: _,
        tls_key: _,
        trace_hops_ratio: _,
    } = args;
}
