//! What `ffn-svc serve` is told, checked once: [`options`](ServeOptions) from the command line and a file, and the
//! [`Config`] that is left when both agree with themselves. Nothing else of the process reads options; nothing reads the
//! environment.
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use afd_common::config::choices::LoadFormat;
use afd_common::config::device::DeviceChoice;
use afd_common::config::dtype::DtypeChoice;
use afd_common::config::file;
use afd_common::config::idle::{self, Idle, Rule};
use afd_common::config::option::{
    OptionError, addresses, at_least, client_tls, deployment, join_token, model_folder, own_certificate,
    refuse, tensor_threads,
};
use afd_common::config::shared::{ExpertOptions, TensorOptions};
use afd_common::config::units::Millis;
use afd_common::identity::Sides;
use afd_common::ids::Shard;
use afd_common::net::tls::ClientTls;
use afd_common::net::{Access, Gate, TlsFiles};
use afd_common::routing::Routing;
use afd_common::telemetry::{LogConfig, SpanSink};

mod options;
#[cfg(test)]
mod tests;

pub use options::ServeOptions;

use crate::hop_queue::MAX_STAGES;
use crate::session::handshake::JoinToken;

/// Options that were checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// Folder of the checkpoint; it exists.
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
    /// Who routes, and who has shared experts.
    pub sides: Sides,
    /// Where experts are, unless in contiguous parts; `None` for the only shard, which has them all.
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
    /// Options that were given and have no effect.
    pub idle: Vec<Idle>,
    /// Options about experts that were given, of no effect where the model turns out to have none.
    pub idle_on_dense: Vec<Idle>,
}

/// Attention ranks to announce a rank to.
#[derive(Clone, Debug, Default)]
pub struct AnnounceConfig {
    /// `host:port` each; may be none.
    pub to: Vec<String>,
    /// They are dialled in the clear without.
    pub tls: Option<ClientTls>,
}

impl ServeOptions {
    /// These options, the rest from `--config`, the rest from defaults; checked.
    ///
    /// # Errors
    /// [`OptionError`] names the option and its value.
    pub fn resolve(self) -> Result<Config, OptionError> {
        let given = match &self.config {
            Some(path) => file::overlay(path, &self)?,
            None => self,
        };
        let model = model_folder(given.model.as_deref())?.to_owned();
        let listen = given.listen.unwrap_or(SocketAddr::from(([127, 0, 0, 1], 7001)));
        addresses("--advertise", &given.advertise)?;
        let join_token =
            join_token(given.join_token_file.as_deref())?.and_then(|token| JoinToken::new(&token));
        let files = TlsFiles {
            certificate: given.tls_cert.clone(),
            key: given.tls_key.clone(),
            client_ca: given.tls_client_ca.clone(),
        };
        let announce = AnnounceConfig::new(&given, listen, &files)?;
        let gate = join_token.as_ref().map_or_else(Gate::default, JoinToken::gate);
        let log = LogConfig::default();
        let idle = without_effect(&given);
        let shard = given.shard.unwrap_or(Shard::WHOLE);
        let placement = given.experts.placement.filter(|_| shard != Shard::WHOLE);
        let experts = ExpertOptions { placement, ..given.experts };
        Ok(Config {
            model,
            access: Access::new(listen, files, gate, "--join-token-file", given.insecure.unwrap_or(false))?,
            listen,
            advertise: given.advertise,
            address_file: given.address_file,
            shard,
            rank: given.rank.unwrap_or(0),
            deployment: deployment(given.deployment.as_deref())?,
            sides: experts.sides(),
            routing: experts.routing.unwrap_or_default(),
            idle_on_dense: experts.idle_on_dense(),
            placement: experts.placement,
            dtype: given.dtype.unwrap_or_default(),
            device: given.tensors.device.unwrap_or_default(),
            threads: tensor_threads(given.threads)?,
            load_format: given.tensors.load_format.unwrap_or_default(),
            seed: given.tensors.seed.unwrap_or(0),
            max_tokens_per_stage: at_least(
                "--max-tokens-per-stage",
                1,
                given.max_tokens_per_stage.unwrap_or(8192),
            )?,
            max_stages: max_stages(given.max_stages)?,
            lease: lease(given.lease_ms)?,
            drain: given.drain_timeout.map_or(Duration::from_secs(30), |span| span.0),
            announce,
            join_token,
            log: LogConfig {
                format: given.log_format.unwrap_or(log.format),
                filter: given.log_level.unwrap_or(log.filter),
            },
            board: board(given.board_ms)?,
            inject_delay: given.inject_delay.map_or(Duration::ZERO, |span| span.0),
            spans: SpanSink::off(),
            idle,
        })
    }
}

impl AnnounceConfig {
    fn new(given: &ServeOptions, listen: SocketAddr, files: &TlsFiles) -> Result<Self, OptionError> {
        let to = given.announce.clone().unwrap_or_default();
        addresses("--announce", &to)?;
        if !to.is_empty() && given.advertise.is_none() && listen.ip().is_unspecified() {
            let what = "is missing: --announce needs a host:port, and --listen is every address";
            return refuse("--advertise", what);
        }
        let (ca, identity) = (given.announce_tls_ca.as_deref(), own_certificate(files)?);
        Ok(Self { to, tls: client_tls("--announce-tls-ca", ca, identity)? })
    }
}

/// Options that were given and have no effect beside the others.
fn without_effect(given: &ServeOptions) -> Vec<Idle> {
    // By name, so that no new option is forgotten: it goes to a rule, or to those that always have an effect.
    let ServeOptions {
        announce,
        announce_tls_ca,
        board_ms,
        inject_delay,
        shard,
        tensors: tensors @ TensorOptions { seed, device: _, load_format: _ },
        experts: ExpertOptions { placement, gate: _, routing: _, shared_experts: _ },
        address_file: _,
        advertise: _,
        config: _,
        deployment: _,
        drain_timeout: _,
        dtype: _,
        insecure: _,
        join_token_file: _,
        lease_ms: _,
        listen: _,
        log_format: _,
        log_level: _,
        max_stages: _,
        max_tokens_per_stage: _,
        model: _,
        rank: _,
        threads: _,
        tls_cert: _,
        tls_client_ca: _,
        tls_key: _,
    } = given;
    idle::idle(&[
        Rule {
            holds: announce.as_ref().is_none_or(Vec::is_empty),
            because: "without --announce",
            options: &[("--announce-tls-ca", announce_tls_ca.is_some())],
        },
        Rule {
            holds: shard.unwrap_or(Shard::WHOLE) == Shard::WHOLE,
            because: "with --shard 0/1: one shard has every expert, and the file is not read",
            options: &[("--placement", placement.is_some())],
        },
        Rule {
            holds: !tensors.is_dummy(),
            because: "without --load-format dummy",
            options: &[("--seed", seed.is_some())],
        },
        Rule {
            holds: !tensors.on_cpu(),
            because: "on what comes over cuda-ipc and nccl (--device)",
            options: &[("--board-ms", board_ms.is_some()), ("--inject-delay", inject_delay.is_some())],
        },
    ])
}

fn max_stages(given: Option<u32>) -> Result<u32, OptionError> {
    match given.unwrap_or(u32::from(MAX_STAGES)) {
        stages if (1..=u32::from(MAX_STAGES)).contains(&stages) => Ok(stages),
        other => refuse("--max-stages", format!("is {other}; expected 1 to {MAX_STAGES}")),
    }
}

fn lease(given: Option<Millis>) -> Result<Duration, OptionError> {
    let lease = given.map_or(Duration::from_secs(5), |given| given.0);
    if (Duration::from_millis(100)..=Duration::from_secs(3600)).contains(&lease) {
        return Ok(lease);
    }
    refuse("--lease-ms", format!("is {}; expected 100ms to 1h", Millis(lease)))
}

fn board(given: Option<Millis>) -> Result<Duration, OptionError> {
    match given.map_or(Duration::ZERO, |given| given.0) {
        board if board <= Duration::from_secs(1) => Ok(board),
        other => refuse("--board-ms", format!("is {}; expected 0 to 1s", Millis(other))),
    }
}
