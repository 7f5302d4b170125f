//! Options of `serve` that have no effect beside the others.
use afd_common::config::idle::{Idle, Rule, idle};
use afd_common::config::shared::{ExpertOptions, TensorOptions};

use super::{CapacityConfig, FfnTarget, ServeArgs};

/// Those that were given; `args` as the command line and the file have them together.
pub(super) fn of(args: &ServeArgs, capacity: &CapacityConfig) -> Vec<Idle> {
    // By name, so that no new option is forgotten: it goes to a rule, or to those that always have an effect.
    let ServeArgs {
        capture_sizes,
        ffn,
        ffn_loss_timeout,
        ffn_tls_ca,
        ffn_tls_cert,
        ffn_tls_key,
        graph_mode,
        hop_timeout,
        join_timeout,
        link_timeout,
        max_capture_size,
        peer_timeout,
        peers,
        peers_tls_ca,
        stage_min_decode,
        stage_min_prefill,
        stages,
        warmup_timeout,
        tensors: tensors @ TensorOptions { seed, device: _, load_format: _ },
        experts: ExpertOptions { placement, gate: _, routing: _, shared_experts: _ },
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
    let is_local = ffn.as_ref() == Some(&FfnTarget::Local);
    let on_cpu = tensors.on_cpu();
    let one_stage = capacity.stages.max_stages == 1;
    let stage_bounds = [
        ("--stage-min-decode", stage_min_decode.is_some()),
        ("--stage-min-prefill", stage_min_prefill.is_some()),
    ];
    idle(&[
        Rule {
            holds: is_local,
            because: "with --ffn local",
            options: &[
                ("--ffn-tls-ca", ffn_tls_ca.is_some()),
                ("--ffn-tls-cert", ffn_tls_cert.is_some()),
                ("--ffn-tls-key", ffn_tls_key.is_some()),
                ("--join-timeout", join_timeout.is_some()),
                ("--link-timeout", link_timeout.is_some()),
            ],
        },
        Rule {
            holds: is_local,
            because: "with --ffn local: one shard has every expert, and the file is not read",
            options: &[("--placement", placement.is_some())],
        },
        Rule {
            holds: is_local && !on_cpu,
            because: "with --ffn local on a GPU (--device)",
            options: &[
                ("--warmup-timeout", warmup_timeout.is_some()),
                ("--hop-timeout", hop_timeout.is_some()),
                ("--ffn-loss-timeout", ffn_loss_timeout.is_some()),
            ],
        },
        Rule { holds: one_stage && stages.is_some(), because: "with --stages 1", options: &stage_bounds },
        Rule {
            holds: one_stage,
            because: "where steps have one stage, as they have here without --stages",
            options: &stage_bounds,
        },
        Rule {
            holds: peers.as_ref().is_none_or(Vec::is_empty),
            because: "without --peers",
            options: &[
                ("--peers-tls-ca", peers_tls_ca.is_some()),
                ("--peer-timeout", peer_timeout.is_some()),
            ],
        },
        Rule {
            holds: on_cpu,
            because: "on a CPU (--device)",
            options: &[
                ("--graph-mode", graph_mode.is_some()),
                ("--capture-sizes", capture_sizes.is_some()),
                ("--max-capture-size", max_capture_size.is_some()),
            ],
        },
        Rule {
            holds: !tensors.is_dummy(),
            because: "without --load-format dummy",
            options: &[("--seed", seed.is_some())],
        },
    ])
}
