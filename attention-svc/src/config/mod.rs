//! What `attention-svc serve` is told, checked once. Nothing after this module looks at options.
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use afd_common::config::device::DeviceChoice;
use afd_common::config::dtype::DtypeChoice;
use afd_common::config::file::{self, FileError};
use afd_common::config::threads::{cores, tensor_threads};
use afd_common::config::units::{ByteSize, Span};
use afd_common::identity::GatePlacement;
use afd_common::net::tls::{ClientTls, Identity};
use afd_common::net::{Access, AccessError, Gate, TlsFiles, is_address};
use afd_common::routing::Routing;
use afd_common::telemetry::{LogConfig, Sampling, SpanSink};

mod args;
mod choices;
mod kv_memory;

pub use args::ServeArgs;
pub use choices::{FfnTarget, GraphMode, LinkChoice, LoadFormat, StageChoice};
pub use kv_memory::{KvMemory, KvPlan, KvRequest};

use crate::device::{CaptureSizes, GraphSettings, MAX_CAPTURE_SIZE};
use crate::scheduler::{StagePick, StageRules};

/// An option that cannot be used; one line that names it and its value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// A file of options.
    #[error(transparent)]
    File(#[from] FileError),
    /// An option, from the command line or the file.
    #[error("{option}: {what}")]
    Option {
        /// As on the command line.
        option: &'static str,
        /// Found and expected.
        what: String,
    },
}

impl From<AccessError> for OptionError {
    fn from(error: AccessError) -> Self {
        Self::Option { option: error.option, what: error.what }
    }
}

fn refuse<T>(option: &'static str, what: impl Into<String>) -> Result<T, OptionError> {
    Err(OptionError::Option { option, what: what.into() })
}

/// Everything that `serve` is told.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// The checkpoint.
    pub model: ModelSource,
    /// Where it is reached.
    pub address: AddressConfig,
    /// The other attention ranks.
    pub peers: PeersConfig,
    /// The way to the FFN.
    pub ffn: FfnConfig,
    /// How much it takes on.
    pub capacity: CapacityConfig,
    /// How long running requests have when the process is told to end.
    pub drain_timeout: Duration,
    /// Logs.
    pub log: LogConfig,
    /// Traces.
    pub trace: TraceConfig,
}

/// What is recorded, and where it goes: `spans` and `sampling` are the environment's, and `main` sets them.
#[derive(Clone, Debug, Default)]
pub struct TraceConfig {
    /// To a collector, or nowhere.
    pub spans: SpanSink,
    /// Which requests.
    pub sampling: Sampling,
    /// Share of the steps whose every hop is recorded, 0 to 1.
    pub hops_ratio: f64,
}

/// The checkpoint.
#[derive(Clone, Debug)]
pub struct ModelSource {
    /// A folder that exists.
    pub folder: PathBuf,
    /// Name that requests use, not empty.
    pub name: String,
    /// To compute in.
    pub dtype: DtypeChoice,
    /// Where.
    pub device: DeviceChoice,
    /// Where weights come from.
    pub load_format: LoadFormat,
    /// Of dummy weights.
    pub seed: u64,
    /// Asked for by the user, at least 2.
    pub max_model_len: Option<usize>,
}

/// Where the process is reached.
#[derive(Clone, Debug)]
pub struct AddressConfig {
    /// To bind.
    pub listen: SocketAddr,
    /// For others, `host:port`.
    pub advertise: Option<String>,
    /// Where to write the address.
    pub file: Option<PathBuf>,
    /// Who may come.
    pub access: Access,
}

/// The other attention ranks.
#[derive(Clone, Debug, Default)]
pub struct PeersConfig {
    /// `host:port` each; none: nothing is forwarded.
    pub names: Vec<String>,
    /// They are dialled in the clear without.
    pub tls: Option<ClientTls>,
}

/// The way to the FFN.
#[derive(Clone, Debug)]
pub struct FfnConfig {
    /// Where it is.
    pub target: FfnTarget,
    /// This attention rank.
    pub rank: u32,
    /// 1 to 128 characters.
    pub deployment: String,
    /// How rows travel.
    pub link: LinkChoice,
    /// Which side routes.
    pub gate: GatePlacement,
    /// Where experts are, unless in contiguous parts.
    pub placement: Option<PathBuf>,
    /// Who chooses them.
    pub routing: Routing,
    /// Empty when there is none.
    pub join_token: String,
    /// In the clear without.
    pub tls: Option<ClientTls>,
    /// For every shard to have joined.
    pub join_timeout: Duration,
    /// For an answer or progress.
    pub hop_timeout: Duration,
    /// For a replacement.
    pub loss_timeout: Duration,
}

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

impl ServeConfig {
    /// Reads the `--config` file, if there is one, fills in defaults and checks everything.
    ///
    /// # Errors
    /// [`OptionError`] names the option and its value.
    pub fn new(args: ServeArgs) -> Result<Self, OptionError> {
        let args = match &args.config {
            Some(path) => file::overlay(path, &args)?,
            None => args,
        };
        Ok(Self {
            model: ModelSource::new(&args)?,
            address: AddressConfig::new(&args)?,
            peers: PeersConfig::new(&args)?,
            ffn: FfnConfig::new(&args)?,
            capacity: CapacityConfig::new(&args)?,
            drain_timeout: args.drain_timeout.map_or(Duration::from_secs(30), |span| span.0),
            log: LogConfig {
                format: args.log_format.unwrap_or_default(),
                filter: args.log_level.unwrap_or_else(|| "info".into()),
            },
            trace: match args.trace_hops_ratio.unwrap_or(0.01) {
                hops_ratio @ 0.0..=1.0 => TraceConfig { hops_ratio, ..TraceConfig::default() },
                other => return refuse("--trace-hops-ratio", format!("is {other}; must be 0 to 1")),
            },
        })
    }
}

impl ModelSource {
    fn new(args: &ServeArgs) -> Result<Self, OptionError> {
        let Some(folder) = args.model.clone() else {
            return refuse("--model", "is missing: give a checkpoint folder");
        };
        if !folder.is_dir() {
            return refuse("--model", format!("{} is not a folder", folder.display()));
        }
        let folder_name = folder.canonicalize().unwrap_or_else(|_| folder.clone());
        let folder_name = folder_name.file_name().map(|name| name.to_string_lossy().into_owned());
        let name = args.served_model_name.clone().or(folder_name).unwrap_or_else(|| "model".into());
        if name.is_empty() || name.len() > 256 {
            return refuse("--served-model-name", format!("{name:?}: must have 1 to 256 characters"));
        }
        if args.max_model_len.is_some_and(|len| len < 2) {
            return refuse("--max-model-len", "must be at least 2: a token to read and one to write");
        }
        Ok(Self {
            folder,
            name,
            dtype: args.dtype.unwrap_or_default(),
            device: args.device.unwrap_or_default(),
            load_format: args.load_format.unwrap_or_default(),
            seed: args.seed.unwrap_or(0),
            max_model_len: args.max_model_len,
        })
    }
}

impl AddressConfig {
    fn new(args: &ServeArgs) -> Result<Self, OptionError> {
        if let Some(address) = args.advertise.as_deref().filter(|address| !is_address(address)) {
            return refuse("--advertise", format!("{address:?} is no address; write host:port"));
        }
        let listen = args.listen.unwrap_or(SocketAddr::from((Ipv4Addr::LOCALHOST, 8000)));
        let token_option = "--api-token-file";
        let gate = match &args.api_token_file {
            None => Gate::default(),
            Some(file) => match Gate::default().token_file(file) {
                Ok(gate) => gate,
                Err(what) => return refuse(token_option, what),
            },
        };
        // What guards joining guards membership.
        let gate = match args.join_token_file {
            Some(_) => gate.with_own_secret(crate::membership::PATHS),
            None => gate,
        };
        let files = TlsFiles {
            certificate: args.tls_cert.clone(),
            key: args.tls_key.clone(),
            client_ca: args.tls_client_ca.clone(),
        };
        let access = Access::new(listen, files, gate, token_option, args.insecure.unwrap_or(false))?;
        Ok(Self { listen, advertise: args.advertise.clone(), file: args.address_file.clone(), access })
    }
}

impl PeersConfig {
    fn new(args: &ServeArgs) -> Result<Self, OptionError> {
        let names = args.peers.clone().unwrap_or_default();
        if let Some(name) = names.iter().find(|name| !is_address(name)) {
            return refuse("--peers", format!("{name:?} is no address; write host:port"));
        }
        let identity = Identity::of(args.tls_cert.clone(), args.tls_key.clone(), ["--tls-cert", "--tls-key"]);
        let identity = identity.or_else(|(option, what)| refuse(option, what))?;
        let tls = match &args.peers_tls_ca {
            None => None,
            Some(ca) => match ClientTls::load(ca.clone(), identity) {
                Ok(tls) => Some(tls),
                Err(what) => return refuse("--peers-tls-ca", what),
            },
        };
        Ok(Self { names, tls })
    }
}

impl FfnConfig {
    fn new(args: &ServeArgs) -> Result<Self, OptionError> {
        let Some(target) = args.ffn.clone() else {
            return refuse("--ffn", "is missing: give the addresses of FFN ranks, or local");
        };
        if args.link.is_some_and(LinkChoice::needs_gpu)
            && args.device.unwrap_or_default() == DeviceChoice::Cpu
        {
            return refuse("--link", "needs attention on a GPU (--device cuda:0)");
        }
        let deployment = args.deployment.clone().unwrap_or_else(|| "default".into());
        if deployment.is_empty() || deployment.len() > 128 {
            return refuse("--deployment", format!("{deployment:?}: must have 1 to 128 characters"));
        }
        Ok(Self {
            target,
            rank: args.rank.unwrap_or(0),
            deployment,
            link: args.link.unwrap_or_default(),
            gate: args.gate.unwrap_or_default(),
            placement: args.placement.clone(),
            routing: args.routing.unwrap_or_default(),
            join_token: join_token(args.join_token_file.as_deref())?,
            tls: ffn_tls(args)?,
            join_timeout: time("--join-timeout", args.join_timeout, 120)?,
            hop_timeout: time("--hop-timeout", args.hop_timeout, 5)?,
            loss_timeout: time("--ffn-loss-timeout", args.ffn_loss_timeout, 30)?,
        })
    }
}

/// A time that is longer than nothing, `default` in seconds.
fn time(option: &'static str, span: Option<Span>, default: u64) -> Result<Duration, OptionError> {
    match span.map(|span| span.0) {
        Some(Duration::ZERO) => refuse(option, "must be longer than 0"),
        given => Ok(given.unwrap_or(Duration::from_secs(default))),
    }
}

fn ffn_tls(args: &ServeArgs) -> Result<Option<ClientTls>, OptionError> {
    let options = ["--ffn-tls-cert", "--ffn-tls-key"];
    let identity = match Identity::of(args.ffn_tls_cert.clone(), args.ffn_tls_key.clone(), options) {
        Ok(identity) => identity,
        Err((option, what)) => return refuse(option, what),
    };
    match (&args.ffn_tls_ca, identity) {
        (None, None) => Ok(None),
        (None, Some(_)) => {
            refuse("--ffn-tls-ca", "is missing: without it FFN ranks are dialled in the clear")
        }
        (Some(ca), identity) => match ClientTls::load(ca.clone(), identity) {
            Ok(tls) => Ok(Some(tls)),
            Err(what) => refuse("--ffn-tls-ca", what),
        },
    }
}

fn join_token(file: Option<&Path>) -> Result<String, OptionError> {
    let Some(path) = file else { return Ok(String::new()) };
    match std::fs::read_to_string(path) {
        Ok(token) if token.trim().is_empty() => {
            refuse("--join-token-file", format!("{} is empty", path.display()))
        }
        Ok(token) => Ok(token.trim().to_owned()),
        Err(error) => refuse("--join-token-file", format!("{}: {error}", path.display())),
    }
}

impl CapacityConfig {
    fn new(args: &ServeArgs) -> Result<Self, OptionError> {
        let at_least_1 = |option, value: Option<usize>, default: usize| match value {
            Some(0) => refuse(option, "is 0; must be at least 1"),
            value => Ok(value.unwrap_or(default)),
        };
        let threads = match tensor_threads(args.threads, cores()) {
            Ok(threads) => threads,
            Err(expected) => {
                let given = args.threads.unwrap_or_default();
                return refuse("--threads", format!("is {given}; expected {expected}"));
            }
        };
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
            (_, Some(0)) => return refuse("--kv-cache-blocks", "is 0; must be at least 1"),
            (Some(memory), None) => KvRequest::Memory(memory),
            (None, Some(blocks)) => KvRequest::Blocks(blocks),
            (None, None) => KvRequest::Auto,
        };
        let max_body = args.max_body.unwrap_or(ByteSize(8 << 20));
        Ok(Self {
            threads,
            kv_cache,
            block_size: at_least_1("--block-size", args.block_size, 16)?,
            max_num_seqs,
            max_num_batched_tokens,
            max_queue: at_least_1("--max-queue", args.max_queue, 1024)?,
            prefix_cache: !args.no_prefix_cache.unwrap_or(false),
            stages,
            graphs: graphs(args, max_num_seqs, stages)?,
            max_body_bytes: at_least_1(
                "--max-body",
                Some(usize::try_from(max_body.0).unwrap_or(usize::MAX)),
                1,
            )?,
            body_timeout: time("--body-timeout", args.body_timeout, 60)?,
        })
    }
}

fn stage_rules(args: &ServeArgs) -> Result<StageRules, OptionError> {
    let on_cpu = args.device.unwrap_or_default() == DeviceChoice::Cpu;
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
    let at_least_1 = |option, value: Option<usize>, default: usize| match value {
        Some(0) => refuse(option, "is 0; must be at least 1"),
        value => Ok(value.unwrap_or(default)),
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
            return refuse("--max-capture-size", format!("is {other}; must be 1 to {MAX_CAPTURE_SIZE}"));
        }
    };
    let sizes = match &args.capture_sizes {
        None => CaptureSizes::up_to(max),
        Some(sizes) => {
            let wanted: Vec<usize> = sizes.iter().copied().filter(|size| *size <= max).collect();
            let beyond = args.max_capture_size.is_none() && wanted.len() < sizes.len();
            let sizes = CaptureSizes::new(if beyond { sizes } else { &wanted });
            sizes.or_else(|what| refuse("--capture-sizes", what))?
        }
    };
    let capture = args.graph_mode.unwrap_or_default() == GraphMode::Decode;
    Ok(GraphSettings { sizes, capture, max_stages })
}

#[cfg(test)]
mod tests;
