//! Options of `attention-svc serve`, as they are written on the command line or, under the same names, in a `--config`
//! file. Everything may be absent here; [`ServeConfig`](super::ServeConfig) has the defaults.
use std::net::SocketAddr;
use std::path::PathBuf;

use afd_common::config::dtype::DtypeChoice;
use afd_common::config::shared::{ExpertOptions, TensorOptions};
use afd_common::config::units::{ByteSize, Span};
use afd_common::telemetry::LogFormat;
use clap::Args;
use serde::{Deserialize, Serialize};

use super::choices::{FfnTarget, GraphMode, LinkChoice, StageChoice};

/// Serve a model.
#[derive(Clone, Debug, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ServeArgs {
    /// Checkpoint folder: config.json, safetensors, tokenizer.json (required)
    #[arg(long, value_name = "DIR", help_heading = "Model")]
    pub model: Option<PathBuf>,
    /// Name that requests use [default: the folder's name]
    #[arg(long, value_name = "NAME", help_heading = "Model")]
    pub served_model_name: Option<String>,
    /// Element type of weights, activations and KV cache: auto (as the checkpoint), float32 or bfloat16;
    /// the same on both roles [default: auto]
    #[arg(long, value_name = "TYPE", help_heading = "Model")]
    pub dtype: Option<DtypeChoice>,
    /// Where tensors come from, and where they live.
    #[command(flatten)]
    #[serde(flatten)]
    pub tensors: TensorOptions,
    /// Most tokens of prompt and output together [default: the model's, or what fits the KV cache]
    #[arg(long, value_name = "TOKENS", help_heading = "Model")]
    pub max_model_len: Option<usize>,

    /// Where to listen, for HTTP and gRPC alike; port 0 is any free one [default: 127.0.0.1:8000]
    #[arg(long, value_name = "ADDR", help_heading = "Addresses")]
    pub listen: Option<SocketAddr>,
    /// host:port that others reach this process by, where it differs from where it listens
    #[arg(long, value_name = "HOST:PORT", help_heading = "Addresses")]
    pub advertise: Option<String>,
    /// Write host:port and a line break here once listening
    #[arg(long, value_name = "FILE", help_heading = "Addresses")]
    pub address_file: Option<PathBuf>,

    /// Certificate of this port, PEM, with what lies between it and its CA: HTTP and gRPC under TLS, read again when it changes
    #[arg(long, value_name = "FILE", help_heading = "Safety")]
    pub tls_cert: Option<PathBuf>,
    /// Key of --tls-cert, PEM
    #[arg(long, value_name = "FILE", help_heading = "Safety")]
    pub tls_key: Option<PathBuf>,
    /// CA of clients' certificates, PEM: whoever shows none is answered about health only
    #[arg(long, value_name = "FILE", help_heading = "Safety")]
    pub tls_client_ca: Option<PathBuf>,
    /// Bearer tokens of the API, one a line, read again when they change: whoever has none is answered about health only
    #[arg(long, value_name = "FILE", help_heading = "Safety")]
    pub api_token_file: Option<PathBuf>,
    /// Listen where other machines reach it though nothing guards it
    #[arg(
        long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL",
        hide_possible_values = true, help_heading = "Safety"
    )]
    pub insecure: Option<bool>,
    /// CA of the FFN ranks' certificates, PEM: they are dialled under TLS, and must be named as in --ffn
    #[arg(long, value_name = "FILE", help_heading = "Safety")]
    pub ffn_tls_ca: Option<PathBuf>,
    /// Certificate to show to FFN ranks that ask for one, PEM
    #[arg(long, value_name = "FILE", help_heading = "Safety")]
    pub ffn_tls_cert: Option<PathBuf>,
    /// Key of --ffn-tls-cert, PEM
    #[arg(long, value_name = "FILE", help_heading = "Safety")]
    pub ffn_tls_key: Option<PathBuf>,

    /// Attention ranks of this deployment, itself among them or not: addresses or DNS names with ports, comma-separated;
    /// requests are forwarded to the least loaded of them
    #[arg(long, value_name = "ADDR[,ADDR…]", value_delimiter = ',', help_heading = "Attention ranks")]
    pub peers: Option<Vec<String>>,
    /// CA of the peers' certificates, PEM: they are dialled under TLS, showing --tls-cert where they ask for one
    #[arg(long, value_name = "FILE", help_heading = "Attention ranks")]
    pub peers_tls_ca: Option<PathBuf>,

    /// FFN ranks: addresses or DNS names with ports, comma-separated; announced, for those only that announce themselves;
    /// or local, for the FFN in this process (required)
    #[arg(long, value_name = "local|announced|ADDR[,ADDR…]", help_heading = "FFN")]
    pub ffn: Option<FfnTarget>,
    /// Index of this process among the attention ranks [default: 0]
    #[arg(long, value_name = "N", help_heading = "FFN")]
    pub rank: Option<u32>,
    /// Deployment that the attention ranks belong to; several may share an FFN [default: default]
    #[arg(long, value_name = "NAME", help_heading = "FFN")]
    pub deployment: Option<String>,
    /// How rows travel: auto (the best that both ends offer), between GPUs cuda-ipc or nccl, else shm, tcp or inline (over
    /// gRPC) [default: auto]
    #[arg(long, value_name = "KIND", help_heading = "FFN")]
    pub link: Option<LinkChoice>,
    /// Who chooses experts, who computes them, and where they are.
    #[command(flatten)]
    #[serde(flatten)]
    pub experts: ExpertOptions,
    /// File with the token that guards joining, as given to the FFN ranks; attention ranks (--peers) ask each other for it too
    /// [default: none]
    #[arg(long, value_name = "FILE", help_heading = "FFN")]
    pub join_token_file: Option<PathBuf>,
    /// Microbatches of a step, so that one's FFN runs while another's attention does: at most 1 to 4; or auto, 1 or 2,
    /// whichever is measured to be faster [default: auto; on a GPU 1, and 2 for prompts whose FFN is elsewhere]
    #[arg(long, value_name = "N|auto", help_heading = "FFN")]
    pub stages: Option<StageChoice>,
    /// Steps that only decode are not split below so many tokens [default: 2; never on a GPU without --stages]
    #[arg(long, value_name = "TOKENS", help_heading = "FFN")]
    pub stage_min_decode: Option<usize>,
    /// Steps that read prompts are not split below so many tokens [default: 12; 4096 on a GPU without --stages]
    #[arg(long, value_name = "TOKENS", help_heading = "FFN")]
    pub stage_min_prefill: Option<usize>,

    /// Tensor threads [default: the number of cores]
    #[arg(long, value_name = "N", help_heading = "Capacity")]
    pub threads: Option<usize>,
    /// Memory of the KV cache, such as 1GiB [default: for --max-num-seqs whole sequences, at most 4GiB and a
    /// quarter of the free memory]
    #[arg(long, value_name = "SIZE", help_heading = "Capacity")]
    pub kv_cache_memory: Option<ByteSize>,
    /// The same as a number of blocks
    #[arg(long, value_name = "N", conflicts_with = "kv_cache_memory", help_heading = "Capacity")]
    pub kv_cache_blocks: Option<u32>,
    /// Tokens of a KV block [default: 16]
    #[arg(long, value_name = "TOKENS", help_heading = "Capacity")]
    pub block_size: Option<usize>,
    /// Sequences that run at a time [default: 256]
    #[arg(long, value_name = "N", help_heading = "Capacity")]
    pub max_num_seqs: Option<usize>,
    /// Tokens of a step; longer prompts are read in chunks [default: 2048]
    #[arg(long, value_name = "TOKENS", help_heading = "Capacity")]
    pub max_num_batched_tokens: Option<usize>,
    /// Sequences that may wait before requests are refused with 429 [default: 1024]
    #[arg(long, value_name = "N", help_heading = "Capacity")]
    pub max_queue: Option<usize>,
    /// Compute equal beginnings of prompts every time
    #[arg(
        long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL",
        hide_possible_values = true, help_heading = "Capacity"
    )]
    pub no_prefix_cache: Option<bool>,
    /// Largest body of a request [default: 8MiB]
    #[arg(long, value_name = "SIZE", help_heading = "Capacity")]
    pub max_body: Option<ByteSize>,

    /// What of a GPU's steps is captured and launched as one: none or decode [default: decode]
    #[arg(long, value_name = "MODE", help_heading = "GPU")]
    pub graph_mode: Option<GraphMode>,
    /// Batch sizes that decode steps are captured for; others are padded to the next [default: 1, 2, 4, 8 … to the largest]
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', help_heading = "GPU")]
    pub capture_sizes: Option<Vec<usize>>,
    /// Largest batch size that is captured, at most 256 [default: --max-num-seqs, at most 256]
    #[arg(long, value_name = "N", help_heading = "GPU")]
    pub max_capture_size: Option<usize>,

    /// Time for the body of a request to arrive; 10 s in which nothing of it comes are enough to end it [default: 60s]
    #[arg(long, value_name = "TIME", help_heading = "Timeouts")]
    pub body_timeout: Option<Span>,
    /// Time for every FFN shard to have joined, from the start [default: 120s]
    #[arg(long, value_name = "TIME", help_heading = "Timeouts")]
    pub join_timeout: Option<Span>,
    /// Time for each phase of joining one FFN rank: connecting, Join, opening a link, attaching to it [default: 5s]
    #[arg(long, value_name = "TIME", help_heading = "Timeouts")]
    pub link_timeout: Option<Span>,
    /// Time without an answer or any progress after which an FFN rank is lost that is being warmed up, before it serves
    /// anybody [default: 30s]
    #[arg(long, value_name = "TIME", help_heading = "Timeouts")]
    pub warmup_timeout: Option<Span>,
    /// Time without an answer or any progress after which an FFN rank is lost; grows with the rows sent [default: 5s]
    #[arg(long, value_name = "TIME", help_heading = "Timeouts")]
    pub hop_timeout: Option<Span>,
    /// Time for a lost FFN rank to be replaced before its requests fail [default: 30s]
    #[arg(long, value_name = "TIME", help_heading = "Timeouts")]
    pub ffn_loss_timeout: Option<Span>,
    /// Time without a word from another attention rank after which it is lost: what was forwarded to it is served here, or
    /// ends with an error where its answer has begun [default: 5s]
    #[arg(long, value_name = "TIME", help_heading = "Timeouts")]
    pub peer_timeout: Option<Span>,
    /// Time for running requests when the process is told to end (SIGTERM) [default: 30s]
    #[arg(long, value_name = "TIME", help_heading = "Timeouts")]
    pub drain_timeout: Option<Span>,

    /// How log lines look, on standard error: text or json [default: text]
    #[arg(long, value_name = "FORMAT", help_heading = "Logs")]
    pub log_format: Option<LogFormat>,
    /// A level, or levels by module, such as info or warn,attention_svc=debug [default: info]
    #[arg(long, value_name = "FILTER", help_heading = "Logs")]
    pub log_level: Option<String>,

    /// Share of the steps whose every hop is recorded, 0 to 1, while OTEL_EXPORTER_OTLP_ENDPOINT is set [default: 0.01]
    #[arg(long, value_name = "RATIO", help_heading = "Traces")]
    pub trace_hops_ratio: Option<f64>,

    /// TOML file with these options under the same names; the command line wins
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
}
