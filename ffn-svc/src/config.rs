//! Options of `ffn-svc serve`, from the command line and a file, and the [`Config`] that is left when both agree with
//! themselves. Nothing else of the process reads options; nothing reads the environment.
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use afd_common::config::device::DeviceChoice;
use afd_common::config::dtype::DtypeChoice;
use afd_common::config::file::{self, FileError};
use afd_common::config::threads::{cores, tensor_threads};
use afd_common::config::units::Span;
use afd_common::identity::GatePlacement;
use afd_common::ids::Shard;
use afd_common::net::tls::{ClientTls, Identity};
use afd_common::net::{Access, AccessError, Gate, TlsFiles, is_address};
use afd_common::routing::Routing;
use afd_common::telemetry::{LogConfig, LogFormat, SpanSink};

use crate::hop_queue::MAX_STAGES;
use crate::session::handshake::JoinToken;

/// Options as given; what is absent here may be in the file, else a default applies. In the file the names are the
/// same, without dashes in front: `max-tokens-per-stage = 4096`.
#[derive(Clone, Debug, Default, PartialEq, clap::Args, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct ServeOptions {
    /// Folder of the checkpoint, in Hugging Face layout [required]
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Address to listen on; port 0 takes any free one [default: 127.0.0.1:7001]
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<SocketAddr>,
    /// Address under which others reach this rank [default: the one it listens on]
    #[arg(long, value_name = "HOST:PORT")]
    pub advertise: Option<String>,
    /// File to write host:port to once the rank is ready
    #[arg(long, value_name = "FILE")]
    pub address_file: Option<PathBuf>,
    /// Which part of every layer this rank owns, for example 0/2 [default: 0/1]
    #[arg(long, value_name = "I/N", value_parser = parse_shard)]
    #[serde(with = "shard_text")]
    pub shard: Option<Shard>,
    /// Index of this process within the FFN role [default: 0]
    #[arg(long)]
    pub rank: Option<u32>,
    /// Name of the deployment [default: default]
    #[arg(long, value_name = "NAME")]
    pub deployment: Option<String>,
    /// Which side computes the router: ffn or attention; must be alike on both [default: ffn]
    #[arg(long, value_name = "SIDE", value_parser = parse_gate)]
    pub gate: Option<GatePlacement>,
    /// File that says which shard has which experts (JSON or TOML), as ffn-svc place makes it; alike on both roles
    /// [default: contiguous parts]
    #[arg(long, value_name = "FILE")]
    pub placement: Option<PathBuf>,
    /// Who chooses experts: model, or balanced, a cycle over all of them (benchmarks only: what comes out is meaningless);
    /// alike on both roles [default: model]
    #[arg(long, value_name = "WHO")]
    pub routing: Option<Routing>,
    /// Compute and activation dtype: auto (as the checkpoint), float32 or bfloat16 [default: auto]
    #[arg(long)]
    pub dtype: Option<DtypeChoice>,
    /// Where tensors live: cpu, or a GPU as cuda:0, whose libraries are loaded when it is asked for [default: cpu]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<DeviceChoice>,
    /// Threads of one tensor operation [default: all cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Where weights come from: auto (the checkpoint) or dummy (random, for benchmarks) [default: auto]
    #[arg(long, value_name = "FORMAT")]
    pub load_format: Option<LoadFormat>,
    /// Seed of dummy weights [default: 0]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Most rows of one stage that an attention rank may send [default: 8192]
    #[arg(long, value_name = "N")]
    pub max_tokens_per_stage: Option<u32>,
    /// Most stages in flight per attention rank, 1 to 4 [default: 4]
    #[arg(long, value_name = "N")]
    pub max_stages: Option<u32>,
    /// An attention rank that is silent for this long has left, milliseconds [default: 5000]
    #[arg(long, value_name = "MS")]
    pub lease_ms: Option<u64>,
    /// Time to finish what is queued after SIGTERM, for example 30s [default: 30s]
    #[arg(long, value_name = "TIME")]
    pub drain_timeout: Option<Span>,
    /// File with the secret that attention ranks must present to join, and everybody else as a bearer token
    #[arg(long, value_name = "FILE")]
    pub join_token_file: Option<PathBuf>,
    /// Attention ranks to announce this rank to, so that they need not name it in --ffn: addresses or DNS names with ports,
    /// comma-separated
    #[arg(long, value_name = "ADDR[,ADDR…]", value_delimiter = ',')]
    pub announce: Option<Vec<String>>,
    /// CA of those attention ranks' certificates, PEM: they are dialled under TLS, showing --tls-cert where they ask for one
    #[arg(long, value_name = "FILE")]
    pub announce_tls_ca: Option<PathBuf>,
    /// Certificate of this port, PEM, with what lies between it and its CA: gRPC and links under TLS, read again when it changes
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// Key of --tls-cert, PEM
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// CA of the attention ranks' certificates, PEM: whoever shows none is answered about health only
    #[arg(long, value_name = "FILE")]
    pub tls_client_ca: Option<PathBuf>,
    /// Listen where other machines reach it though nothing guards it
    #[arg(
        long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL",
        hide_possible_values = true
    )]
    pub insecure: Option<bool>,
    /// text or json [default: text]
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,
    /// A level, or levels by module: info, or warn,ffn_svc=debug [default: info]
    #[arg(long, value_name = "FILTER")]
    pub log_level: Option<String>,
    /// While this rank is the bottleneck, hops wait so long at most for those of other attention ranks, so that weights are
    /// read once for all, milliseconds; 0: never [default: 0]
    #[arg(long, value_name = "MS")]
    pub board_ms: Option<f64>,
    /// For looking at a slow rank, never for use: every batch takes so much longer, for example 5ms [default: 0]
    #[arg(long, value_name = "TIME")]
    pub inject_delay: Option<Span>,
    /// TOML file with any of these options; the command line wins
    #[arg(long, value_name = "FILE.toml")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
}

/// Where weights come from.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum LoadFormat {
    /// The checkpoint.
    #[default]
    Auto,
    /// Seeded random numbers.
    Dummy,
}

/// Options that were checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// Folder of the checkpoint.
    pub model: PathBuf,
    /// Address to listen on.
    pub listen: SocketAddr,
    /// Address for others, when it is another one.
    pub advertise: Option<String>,
    /// Where to write the real address.
    pub address_file: Option<PathBuf>,
    /// Part of every layer.
    pub shard: Shard,
    /// Index within the role.
    pub rank: u32,
    /// Deployment's name.
    pub deployment: String,
    /// Who routes.
    pub gate: GatePlacement,
    /// Where experts are, unless in contiguous parts.
    pub placement: Option<PathBuf>,
    /// Who chooses them.
    pub routing: Routing,
    /// Compute dtype.
    pub dtype: DtypeChoice,
    /// Where tensors live.
    pub device: DeviceChoice,
    /// Threads of one tensor operation, at least 1.
    pub threads: usize,
    /// Where weights come from.
    pub load_format: LoadFormat,
    /// Of dummy weights.
    pub seed: u64,
    /// At least 1.
    pub max_tokens_per_stage: u32,
    /// 1 to 4.
    pub max_stages: u32,
    /// At least 100 ms.
    pub lease: Duration,
    /// After SIGTERM.
    pub drain: Duration,
    /// Attention ranks to announce this rank to.
    pub announce: AnnounceConfig,
    /// What callers must present.
    pub join_token: Option<JoinToken>,
    /// Who may come.
    pub access: Access,
    /// How to log.
    pub log: LogConfig,
    /// Longest time that a hop waits for company.
    pub board: Duration,
    /// Added to the time of every batch.
    pub inject_delay: Duration,
    /// Where spans go: the environment's, and `main` sets it.
    pub spans: SpanSink,
}

/// Why options are refused: one line that names the option.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file of options cannot be used.
    #[error(transparent)]
    Options(#[from] FileError),
    /// The file with the secret cannot be used.
    #[error("--join-token-file {path}: {what}")]
    Token {
        /// Which file.
        path: String,
        /// What is wrong with it.
        what: String,
    },
    /// Certificates cannot be used, or nothing guards the port.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// An option is needed.
    #[error("{option} is missing (on the command line or in the file given by --config)")]
    Missing {
        /// Which.
        option: &'static str,
    },
    /// An option is out of range.
    #[error("{option} is {found}; expected {expected}")]
    Range {
        /// Which.
        option: &'static str,
        /// As given.
        found: String,
        /// What would do.
        expected: String,
    },
}

impl ServeOptions {
    /// These options, the rest from `file`, the rest from defaults; checked.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn resolve(self) -> Result<Config, ConfigError> {
        let given = match &self.config {
            Some(path) => file::overlay(path, &self)?,
            None => self,
        };
        let log = LogConfig::default();
        let listen = given.listen.unwrap_or(SocketAddr::from(([127, 0, 0, 1], 7001)));
        let join_token = given.join_token_file.as_deref().map(read_token).transpose()?;
        let files = TlsFiles {
            certificate: given.tls_cert.clone(),
            key: given.tls_key.clone(),
            client_ca: given.tls_client_ca.clone(),
        };
        let announce = announce(&given, listen, files.clone())?;
        let gate = join_token.as_ref().map_or_else(Gate::default, JoinToken::gate);
        let config = Config {
            model: given.model.ok_or(ConfigError::Missing { option: "--model" })?,
            access: Access::new(listen, files, gate, "--join-token-file", given.insecure.unwrap_or(false))?,
            listen,
            advertise: given.advertise.map(address).transpose()?,
            address_file: given.address_file,
            shard: given.shard.unwrap_or(Shard::WHOLE),
            rank: given.rank.unwrap_or(0),
            deployment: given.deployment.unwrap_or_else(|| "default".into()),
            gate: given.gate.unwrap_or_default(),
            placement: given.placement,
            routing: given.routing.unwrap_or_default(),
            dtype: given.dtype.unwrap_or_default(),
            device: given.device.unwrap_or_default(),
            threads: threads(given.threads)?,
            load_format: given.load_format.unwrap_or_default(),
            seed: given.seed.unwrap_or(0),
            max_tokens_per_stage: given.max_tokens_per_stage.unwrap_or(8192),
            max_stages: given.max_stages.unwrap_or(u32::from(MAX_STAGES)),
            lease: Duration::from_millis(given.lease_ms.unwrap_or(5000)),
            drain: given.drain_timeout.map_or(Duration::from_secs(30), |span| span.0),
            announce,
            join_token,
            log: LogConfig {
                format: given.log_format.unwrap_or(log.format),
                filter: given.log_level.unwrap_or(log.filter),
            },
            board: board(given.board_ms.unwrap_or(0.0))?,
            inject_delay: given.inject_delay.map_or(Duration::ZERO, |span| span.0),
            spans: SpanSink::off(),
        };
        config.check()?;
        Ok(config)
    }
}

impl Config {
    fn check(&self) -> Result<(), ConfigError> {
        let lease_ms = self.lease.as_millis();
        let checks: [(bool, &'static str, String, &'static str); 4] = [
            (
                self.max_tokens_per_stage >= 1,
                "--max-tokens-per-stage",
                self.max_tokens_per_stage.to_string(),
                "at least 1",
            ),
            (
                (1..=u32::from(MAX_STAGES)).contains(&self.max_stages),
                "--max-stages",
                self.max_stages.to_string(),
                "1 to 4",
            ),
            (
                (100..=3_600_000).contains(&lease_ms),
                "--lease-ms",
                lease_ms.to_string(),
                "100 to 3600000 (an hour)",
            ),
            (
                (1..=128).contains(&self.deployment.chars().count()),
                "--deployment",
                format!("{:?}", self.deployment),
                "1 to 128 characters",
            ),
        ];
        match checks.into_iter().find(|(good, ..)| !good) {
            Some((_, option, found, expected)) => {
                Err(ConfigError::Range { option, found, expected: expected.into() })
            }
            None => Ok(()),
        }
    }
}

fn threads(asked: Option<usize>) -> Result<usize, ConfigError> {
    tensor_threads(asked, cores()).map_err(|expected| ConfigError::Range {
        option: "--threads",
        found: asked.unwrap_or_default().to_string(),
        expected,
    })
}

fn board(ms: f64) -> Result<Duration, ConfigError> {
    if (0.0..=1000.0).contains(&ms) {
        return Ok(Duration::from_secs_f64(ms / 1e3));
    }
    let expected = "0 to 1000";
    Err(ConfigError::Range { option: "--board-ms", found: ms.to_string(), expected: expected.into() })
}

fn address(text: String) -> Result<String, ConfigError> {
    if is_address(&text) {
        return Ok(text);
    }
    let (found, expected) = (format!("{text:?}"), "host:port".into());
    Err(ConfigError::Range { option: "--advertise", found, expected })
}

/// Attention ranks to announce a rank to.
#[derive(Clone, Debug, Default)]
pub struct AnnounceConfig {
    /// `host:port` each; may be none.
    pub to: Vec<String>,
    /// They are dialled in the clear without.
    pub tls: Option<ClientTls>,
}

fn announce(
    given: &ServeOptions,
    listen: SocketAddr,
    files: TlsFiles,
) -> Result<AnnounceConfig, ConfigError> {
    let range = |option, found: &str, expected: &str| ConfigError::Range {
        option,
        found: found.to_owned(),
        expected: expected.to_owned(),
    };
    let to = given.announce.clone().unwrap_or_default();
    if let Some(name) = to.iter().find(|name| !is_address(name)) {
        return Err(range("--announce", name, "addresses with ports"));
    }
    if !to.is_empty() && given.advertise.is_none() && listen.ip().is_unspecified() {
        return Err(range("--advertise", "missing", "host:port for --announce: --listen is every address"));
    }
    let identity = Identity::of(files.certificate, files.key, ["--tls-cert", "--tls-key"]);
    let identity = identity.map_err(|(option, what)| AccessError { option, what })?;
    let load = |ca: &PathBuf| {
        ClientTls::load(ca.clone(), identity)
            .map_err(|what| AccessError { option: "--announce-tls-ca", what })
    };
    Ok(AnnounceConfig { to, tls: given.announce_tls_ca.as_ref().map(load).transpose()? })
}

fn read_token(path: &Path) -> Result<JoinToken, ConfigError> {
    let failed = |what: String| ConfigError::Token { path: path.display().to_string(), what };
    let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    JoinToken::new(&text).ok_or_else(|| failed("is empty".into()))
}

fn parse_shard(text: &str) -> Result<Shard, String> {
    text.split_once('/')
        .and_then(|(index, count)| Shard::new(index.trim().parse().ok()?, count.trim().parse().ok()?))
        .ok_or_else(|| format!("{text:?} is no shard; expected I/N with I < N, for example 0/2"))
}

fn parse_gate(text: &str) -> Result<GatePlacement, String> {
    match text {
        "ffn" => Ok(GatePlacement::Ffn),
        "attention" => Ok(GatePlacement::Attention),
        other => Err(format!("{other:?} is no place for the gate; known are ffn and attention")),
    }
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

#[cfg(test)]
mod tests {
    use std::io::Write;

    use afd_common::frame::RowType;
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: ServeOptions,
    }

    fn resolve(args: &[&str]) -> Result<Config, ConfigError> {
        Line::try_parse_from(std::iter::once(&"ffn-svc").chain(args)).unwrap().options.resolve()
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn defaults_are_safe_and_the_command_line_wins_over_the_file() {
        let config = resolve(&["--model", "m"]).unwrap();
        assert_eq!(config.listen, "127.0.0.1:7001".parse().unwrap());
        assert_eq!((config.shard, config.max_stages, config.rank), (Shard::WHOLE, 4, 0));
        let file = file(
            "shard = \"1/3\"\nrank = 5\ndtype = \"bfloat16\"\nlog-format = \"json\"\nload-format = \"dummy\"",
        );
        let path = file.path().to_str().unwrap();
        let config =
            resolve(&["--model", "m", "--rank", "2", "--config", path, "--drain-timeout", "1m"]).unwrap();
        assert_eq!(config.drain, Duration::from_secs(60));
        assert_eq!((config.shard, config.rank), (Shard::new(1, 3).unwrap(), 2));
        assert_eq!((config.dtype, config.log.format), (DtypeChoice::Fixed(RowType::Bf16), LogFormat::Json));
        assert_eq!(config.load_format, LoadFormat::Dummy);
    }

    #[test]
    fn what_is_wrong_is_named_in_one_line() {
        let message = |args: &[&str]| resolve(args).unwrap_err().to_string();
        for wrong in ["x y", "ffn-0", "ffn 0:7001", "http://ffn-0:7001", "ffn-0:0", ":7001"] {
            let expected = format!("--advertise is {wrong:?}; expected host:port");
            assert_eq!(message(&["--model", "m", "--advertise", wrong]), expected);
        }
        assert!(resolve(&["--model", "m", "--advertise", "ffn-0:7001"]).is_ok());
        assert!(message(&[]).starts_with("--model is missing"));
        assert!(message(&["--model", "m", "--threads", "0"]).starts_with("--threads is 0; expected 1 to "));
        assert!(
            message(&["--model", "m", "--threads", "99999"])
                .starts_with("--threads is 99999; expected 1 to ")
        );
        assert_eq!(message(&["--model", "m", "--max-stages", "5"]), "--max-stages is 5; expected 1 to 4");
        assert_eq!(message(&["--model", "m", "--board-ms=-1"]), "--board-ms is -1; expected 0 to 1000");
        assert!(message(&["--model", "m", "--lease-ms", "1"]).starts_with("--lease-ms is 1; expected 100"));
        for (text, part) in [
            ("colour = 1", "unknown field `colour`"),
            ("shard = \"2/2\"", "expected I/N"),
            ("rank = \"x\"", "`rank`"),
        ] {
            let file = file(text);
            let message = message(&["--model", "m", "--config", file.path().to_str().unwrap()]);
            assert!(message.starts_with("--config ") && message.contains(part), "{message}");
            assert_eq!(message.lines().count(), 1, "{message}");
        }
        assert!(
            message(&["--model", "m", "--join-token-file", "/nowhere"])
                .contains("--join-token-file /nowhere")
        );
        let empty = file(" \n");
        let path = empty.path().to_str().unwrap();
        assert!(message(&["--model", "m", "--join-token-file", path]).ends_with("is empty"));
    }

    #[test]
    fn values_that_are_no_values_are_refused_by_the_parser() {
        for args in [["--shard", "2/2"], ["--gate", "middle"], ["--dtype", "int4"], ["--listen", "here"]] {
            let error =
                Line::try_parse_from(std::iter::once("ffn-svc").chain(args)).err().unwrap().to_string();
            assert!(error.contains(args[0]) && error.contains(args[1]), "{error}");
        }
    }
}
