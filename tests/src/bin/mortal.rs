//! Either service as a process of its own whose engine thread dies: everything is the service's own but for the model, which
//! panics instead of running a layer once it has run so many.
//!
//! `mortal 100 attention-svc serve …` and `mortal 100 ffn-svc serve …`, with the service's options behind that.
use std::any::Any;
use std::process::ExitCode;

use afd_common::config::option::OptionError;
use afd_common::ids::LayerIdx;
use afd_common::net::Listener;
use afd_common::process::address_file;
use afd_common::process::exit::Exit;
use afd_common::process::stop::Stop;
use afd_common::telemetry::{Metrics, logs};
use anyhow::{Context, bail};
use attention_svc::cli::{Cli, Command};
use attention_svc::config::ServeConfig;
use attention_svc::engine::{AttentionError, AttentionPort, CachedAttention, SideTensors};
use attention_svc::model::{Attended, StageBatch};
use clap::Parser;
use ffn_svc::config::ServeOptions;
use ffn_svc::engine::{self, StageModel, StageSpec};
use ffn_svc::model::{FfnModel, Side};
use ffn_svc::rank::{self, ShardModel, StartError};
use tch::Tensor;

/// The last words.
const WORDS: &str = "this engine was made to die";

/// A model and the layers that it still runs.
struct Mortal<M> {
    model: M,
    left: u32,
}

impl<M> Mortal<M> {
    fn age(&mut self) {
        self.left = self.left.checked_sub(1).expect(WORDS);
    }
}

impl StageModel for Mortal<FfnModel> {
    fn spec(&self) -> StageSpec {
        StageModel::spec(&self.model)
    }

    fn forward(&mut self, layer: LayerIdx, rows: &Tensor, side: &Side) -> Result<Tensor, String> {
        self.age();
        StageModel::forward(&mut self.model, layer, rows, side)
    }
}

impl AttentionPort for Mortal<CachedAttention> {
    type Prepared = <CachedAttention as AttentionPort>::Prepared;

    fn enter_thread(&mut self) -> Result<Box<dyn Any>, AttentionError> {
        self.model.enter_thread()
    }

    fn num_layers(&self) -> u16 {
        self.model.num_layers()
    }

    fn prepare(&self, batch: &StageBatch) -> Result<Self::Prepared, AttentionError> {
        self.model.prepare(batch)
    }

    fn embed(&self, input_ids: &[u32]) -> Result<Tensor, AttentionError> {
        self.model.embed(input_ids)
    }

    fn attend(
        &mut self,
        layer: LayerIdx,
        x: Tensor,
        stage: &Self::Prepared,
    ) -> Result<Attended, AttentionError> {
        self.age();
        self.model.attend(layer, x, stage)
    }

    fn side_tensors(
        &self,
        layer: LayerIdx,
        ffn_in: &Tensor,
        input_ids: &[u32],
    ) -> Result<SideTensors, AttentionError> {
        self.model.side_tensors(layer, ffn_in, input_ids)
    }

    fn logits(&self, x: &Tensor, rows: &[usize]) -> Result<Tensor, AttentionError> {
        self.model.logits(x, rows)
    }
}

#[derive(Parser)]
struct Args {
    left: u32,
    role: String,
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

#[derive(Parser)]
enum FfnCommand {
    Serve(Box<ServeOptions>),
}

async fn attention(left: u32, command: Vec<String>) -> anyhow::Result<Exit> {
    let Command::Serve(args) = Cli::try_parse_from(command)?.command else {
        bail!("serve, and nothing else")
    };
    let config = ServeConfig::new(*args)?;
    logs::init(&config.log)?;
    let mut stop = Stop::new()?;
    let server = attention_svc::serve::Server::start_around(config, |model| Mortal { model, left }).await?;
    server.run(stop.told()).await?;
    Ok(Exit::Done)
}

async fn ffn(left: u32, command: Vec<String>) -> anyhow::Result<Exit> {
    let FfnCommand::Serve(options) = FfnCommand::try_parse_from(command)?;
    let config = options.resolve()?;
    logs::init(&config.log)?;
    let mut stop = Stop::new()?;
    let listener = Listener::bind(config.listen).await.context("--listen")?;
    let metrics = Metrics::new();
    afd_ffi::process::set_compute_threads(config.threads);
    let loaded = rank::load(&config)?;
    let spawn = |model, options| match model {
        ShardModel::Cpu(model) => engine::spawn(Mortal { model, left }, options),
        ShardModel::Device(_) => Err(std::io::Error::other("on the CPU only")),
    };
    let server = rank::start_with(&config, loaded, listener, &metrics, spawn).await?;
    if let Some(path) = &config.address_file {
        address_file::write(path, &server.address().to_string())?;
    }
    server.run(stop.told(), config.drain).await.map_err(StartError::from)?;
    Ok(Exit::Done)
}

fn main() -> ExitCode {
    afd_ffi::process::hold_end();
    if let Err(error) = afd_ffi::process::reexec_with_passive_wait() {
        eprintln!("mortal: {error}");
    }
    let Args { left, role, mut command } = Args::parse();
    command.insert(0, role.clone());
    let run = async {
        match role.as_str() {
            "attention-svc" => attention(left, command).await,
            "ffn-svc" => ffn(left, command).await,
            other => bail!("{other} is no role"),
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let outcome = runtime.block_on(run);
    runtime.shutdown_background();
    let exit_of = |error: &anyhow::Error| {
        let attention = error.downcast_ref().map(attention_svc::serve::ServeError::exit);
        let ffn = error.downcast_ref().map(StartError::exit);
        let told = error.is::<OptionError>().then_some(Exit::Unusable);
        attention.or(ffn).or(told).unwrap_or(Exit::Failed)
    };
    Exit::end(&role, outcome, exit_of)
}
