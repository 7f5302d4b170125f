//! Options of `ffn-svc serve`, as they are written on the command line or, under the same names, in a `--config` file.
//! Everything may be absent here; [`Config`](super::Config) has the defaults.
use std::net::SocketAddr;
use std::path::PathBuf;

use afd_common::config::dtype::DtypeChoice;
use afd_common::config::shared::{ExpertOptions, TensorOptions};
use afd_common::config::units::{Millis, Span};
use afd_common::ids::Shard;
use afd_common::telemetry::LogFormat;

/// Options as given; what is absent here may be in the file, else a default applies. In the file the names are the
/// same, without dashes in front: `max-tokens-per-stage = 4096`.
#[derive(Clone, Debug, Default, PartialEq, clap::Args, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ServeOptions {
    /// Checkpoint folder: config.json, safetensors (required)
    #[arg(long, value_name = "DIR", help_heading = "Model")]
    pub model: Option<PathBuf>,
    /// Element type of weights and activations: auto (as the checkpoint), float32 or bfloat16; the same on both roles
    /// [default: auto]
    #[arg(long, value_name = "TYPE", help_heading = "Model")]
    pub dtype: Option<DtypeChoice>,
    /// Where tensors come from, and where they live.
    #[command(flatten)]
    #[serde(flatten)]
    pub tensors: TensorOptions,

    /// Where to listen, for gRPC, links and HTTP alike; port 0 is any free one [default: 127.0.0.1:7001]
    #[arg(long, value_name = "ADDR", help_heading = "Addresses")]
    pub listen: Option<SocketAddr>,
    /// host:port that others reach this rank by, where it differs from where it listens
    #[arg(long, value_name = "HOST:PORT", help_heading = "Addresses")]
    pub advertise: Option<String>,
    /// Write host:port and a line break here once it is ready
    #[arg(long, value_name = "FILE", help_heading = "Addresses")]
    pub address_file: Option<PathBuf>,

    /// Which part of every layer this rank owns, for example 0/2 [default: 0/1]
    #[arg(long, value_name = "I/N", value_parser = parse_shard, help_heading = "Place")]
    #[serde(with = "shard_text")]
    pub shard: Option<Shard>,
    /// Index of this process among the FFN ranks [default: 0]
    #[arg(long, value_name = "N", help_heading = "Place")]
    pub rank: Option<u32>,
    /// Deployment that this rank belongs to [default: default]
    #[arg(long, value_name = "NAME", help_heading = "Place")]
    pub deployment: Option<String>,
    /// Attention ranks to announce this rank to, so that they need not name it in --ffn: addresses or DNS names with ports,
    /// comma-separated
    #[arg(long, value_name = "ADDR[,ADDR…]", value_delimiter = ',', help_heading = "Place")]
    pub announce: Option<Vec<String>>,
    /// CA of those attention ranks' certificates, PEM: they are dialled under TLS, showing --tls-cert where they ask for one
    #[arg(long, value_name = "FILE", help_heading = "Place")]
    pub announce_tls_ca: Option<PathBuf>,

    /// Who chooses experts, who computes them, and where they are.
    #[command(flatten)]
    #[serde(flatten)]
    pub experts: ExpertOptions,

    /// File with the token that attention ranks must present to join, and everybody else as a bearer token [default: none]
    #[arg(long, value_name = "FILE", help_heading = "Safety")]
    pub join_token_file: Option<PathBuf>,
    /// Certificate of this port, PEM, with what lies between it and its CA: gRPC and links under TLS, read again when
    /// it changes
    #[arg(long, value_name = "FILE", help_heading = "Safety")]
    pub tls_cert: Option<PathBuf>,
    /// Key of --tls-cert, PEM
    #[arg(long, value_name = "FILE", help_heading = "Safety")]
    pub tls_key: Option<PathBuf>,
    /// CA of the attention ranks' certificates, PEM: whoever shows none is answered about health only
    #[arg(long, value_name = "FILE", help_heading = "Safety")]
    pub tls_client_ca: Option<PathBuf>,
    /// Listen where other machines reach it though nothing guards it
    #[arg(
        long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL",
        hide_possible_values = true, help_heading = "Safety"
    )]
    pub insecure: Option<bool>,

    /// Tensor threads [default: the number of cores]
    #[arg(long, value_name = "N", help_heading = "Capacity")]
    pub threads: Option<usize>,
    /// Most rows of one stage that an attention rank may send [default: 8192]
    #[arg(long, value_name = "N", help_heading = "Capacity")]
    pub max_tokens_per_stage: Option<u32>,
    /// Most stages in flight per attention rank, 1 to 4 [default: 4]
    #[arg(long, value_name = "N", help_heading = "Capacity")]
    pub max_stages: Option<u32>,
    /// While this rank is the bottleneck, hops wait at most so long (a bare number: milliseconds) for those of other attention
    /// ranks, so that weights are read once for all; 0: never [default: 0]
    #[arg(long, value_name = "MS", help_heading = "Capacity")]
    pub board_ms: Option<Millis>,

    /// A session with an attention rank in which one side says nothing for so long (a bare number: milliseconds) is over;
    /// each says something three times as often [default: 5000]
    #[arg(long, value_name = "MS", help_heading = "Timeouts")]
    pub lease_ms: Option<Millis>,
    /// Time to finish what is queued when the process is told to end (SIGTERM) [default: 30s]
    #[arg(long, value_name = "TIME", help_heading = "Timeouts")]
    pub drain_timeout: Option<Span>,

    /// How log lines look, on standard error: text or json [default: text]
    #[arg(long, value_name = "FORMAT", help_heading = "Logs")]
    pub log_format: Option<LogFormat>,
    /// A level, or levels by module, such as info or warn,ffn_svc=debug [default: info]
    #[arg(long, value_name = "FILTER", help_heading = "Logs")]
    pub log_level: Option<String>,

    /// For looking at a slow rank, never for use: every batch takes so much longer, for example 5ms [default: 0]
    #[arg(long, value_name = "TIME", help_heading = "Tests")]
    pub inject_delay: Option<Span>,

    /// TOML file with these options under the same names; the command line wins
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
}

fn parse_shard(text: &str) -> Result<Shard, String> {
    text.split_once('/')
        .and_then(|(index, count)| Shard::new(index.trim().parse().ok()?, count.trim().parse().ok()?))
        .ok_or_else(|| format!("{text:?} is no shard; expected I/N with I < N, for example 0/2"))
}

/// A shard in a file: the same text as on the command line.
mod shard_text {
    use afd_common::ids::Shard;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(shard: &Option<Shard>, serializer: S) -> Result<S::Ok, S::Error> {
        shard.map(|shard| format!("{}/{}", shard.index(), shard.count())).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Shard>, D::Error> {
        let text = Option::<String>::deserialize(deserializer)?;
        text.as_deref().map(super::parse_shard).transpose().map_err(serde::de::Error::custom)
    }
}
