//! How much the process takes on: sequences, tokens, memory, stages, graphs.
use std::time::Duration;

use afd_common::config::option::{OptionError, at_least, refuse, tensor_threads};
use afd_common::config::units::ByteSize;

use super::{FfnTarget, GraphMode, KvRequest, ServeArgs, StageChoice, time};
use crate::device::{CaptureSizes, GraphSettings, MAX_CAPTURE_SIZE};
use crate::scheduler::{StagePick, StageRules};

/// How much the process takes on. All numbers are at least 1.
#[derive(Clone, Debug)]
pub struct CapacityConfig {
    /// Tensor threads.
    pub threads: usize,
    /// KV cache.
    pub kv_cache: KvRequest,
    /// Tokens of a KV block.
    pub block_size: usize,
    /// Sequences at a time.
    pub max_num_seqs: usize,
    /// Tokens of a step, at least `max_num_seqs`.
    pub max_num_batched_tokens: usize,
    /// Sequences that may wait.
    pub max_queue: usize,
    /// Whether equal beginnings are computed once.
    pub prefix_cache: bool,
    /// How steps are split.
    pub stages: StageRules,
    /// What is captured on a GPU.
    pub graphs: GraphSettings,
    /// Largest body, bytes.
    pub max_body_bytes: usize,
    /// For a body to arrive.
    pub body_timeout: Duration,
}

impl CapacityConfig {
    /// Tokens of a block unless the user says otherwise.
    pub(super) const BLOCK_SIZE: usize = 16;
    /// More than any model's longest sequence needs.
    const MAX_BLOCK_SIZE: usize = 1 << 20;

    pub(super) fn new(args: &ServeArgs) -> Result<Self, OptionError> {
        let max_num_batched_tokens =
            at_least_1("--max-num-batched-tokens", args.max_num_batched_tokens, 2048)?;
        // The default follows a smaller step; what the user says must fit.
        let max_num_seqs = at_least_1("--max-num-seqs", args.max_num_seqs, 256.min(max_num_batched_tokens))?;
        if max_num_seqs > max_num_batched_tokens {
            let what = format!(
                "is {max_num_batched_tokens}, fewer than --max-num-seqs {max_num_seqs}: running requests would starve"
            );
            return refuse("--max-num-batched-tokens", what);
        }
        let stages = stage_rules(args)?;
        let kv_cache = match (args.kv_cache_memory, args.kv_cache_blocks) {
            (Some(_), Some(_)) => {
                return refuse("--kv-cache-blocks", "cannot be given with --kv-cache-memory");
            }
            (_, Some(0)) => return refuse("--kv-cache-blocks", "is 0; expected at least 1"),
            (Some(memory), None) => KvRequest::Memory(memory),
            (None, Some(blocks)) => KvRequest::Blocks(blocks),
            (None, None) => KvRequest::Auto,
        };
        let max_body = args.max_body.unwrap_or(ByteSize(8 << 20));
        Ok(Self {
            threads: tensor_threads(args.threads)?,
            kv_cache,
            block_size: match args.block_size.unwrap_or(Self::BLOCK_SIZE) {
                size @ 1..=Self::MAX_BLOCK_SIZE => size,
                other => {
                    let most = Self::MAX_BLOCK_SIZE;
                    return refuse("--block-size", format!("is {other}; expected 1 to {most}"));
                }
            },
            max_num_seqs,
            max_num_batched_tokens,
            max_queue: at_least_1("--max-queue", args.max_queue, 1024)?,
            prefix_cache: !args.no_prefix_cache.unwrap_or(false),
            stages,
            graphs: graphs(args, max_num_seqs, stages)?,
            max_body_bytes: usize::try_from(at_least("--max-body", ByteSize(1), max_body)?.0)
                .unwrap_or(usize::MAX),
            body_timeout: time("--body-timeout", args.body_timeout, 60)?,
        })
    }
}

fn stage_rules(args: &ServeArgs) -> Result<StageRules, OptionError> {
    let on_cpu = args.tensors.on_cpu();
    // On a GPU decode steps are captured, for every count of stages, and have one: two would read every expert twice. Prompts
    // of a pair have two where the products are long enough that this costs little.
    let is_apart = args.ffn.as_ref().is_some_and(|target| *target != FfnTarget::Local);
    let by_default = match (on_cpu, is_apart) {
        (true, _) => StageChoice::Auto,
        (false, true) => StageChoice::Fixed(2),
        (false, false) => StageChoice::Fixed(1),
    };
    let choice = args.stages.unwrap_or(by_default);
    let (max_stages, pick) = match choice {
        StageChoice::Auto => (2, StagePick::Measured),
        StageChoice::Fixed(count) => (count, StagePick::Most),
    };
    let default = match on_cpu || args.stages.is_some() {
        true => StageRules::default(),
        false => {
            StageRules { min_decode_tokens: usize::MAX, min_prefill_tokens: 4096, ..StageRules::default() }
        }
    };
    Ok(StageRules {
        max_stages,
        pick,
        min_decode_tokens: at_least_1(
            "--stage-min-decode",
            args.stage_min_decode,
            default.min_decode_tokens,
        )?,
        min_prefill_tokens: at_least_1(
            "--stage-min-prefill",
            args.stage_min_prefill,
            default.min_prefill_tokens,
        )?,
    })
}

fn graphs(args: &ServeArgs, max_num_seqs: usize, stages: StageRules) -> Result<GraphSettings, OptionError> {
    // Steps that only decode have a token a sequence.
    let max_stages = if max_num_seqs < stages.min_decode_tokens { 1 } else { stages.max_stages };
    let max = match args.max_capture_size {
        None => max_num_seqs.min(MAX_CAPTURE_SIZE),
        Some(max @ 1..=MAX_CAPTURE_SIZE) => max,
        Some(other) => {
            return refuse("--max-capture-size", format!("is {other}; expected 1 to {MAX_CAPTURE_SIZE}"));
        }
    };
    let sizes = match &args.capture_sizes {
        None => CaptureSizes::up_to(max),
        Some(sizes) => {
            let wanted: Vec<usize> = sizes.iter().copied().filter(|size| *size <= max).collect();
            if wanted.is_empty() && args.max_capture_size.is_some() {
                return refuse("--capture-sizes", format!("has no size up to --max-capture-size {max}"));
            }
            let beyond = args.max_capture_size.is_none() && wanted.len() < sizes.len();
            let sizes = CaptureSizes::new(if beyond { sizes } else { &wanted });
            sizes.or_else(|what| refuse("--capture-sizes", what))?
        }
    };
    let capture = args.graph_mode.unwrap_or_default() == GraphMode::Decode;
    Ok(GraphSettings { sizes, capture, max_stages })
}

fn at_least_1(option: &'static str, given: Option<usize>, default: usize) -> Result<usize, OptionError> {
    at_least(option, 1, given.unwrap_or(default))
}
