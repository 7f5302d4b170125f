//! What a deployment is to be, before it is started.
use std::path::PathBuf;
use std::sync::Arc;

use super::pass::Pass;
use super::proxy::Network;

/// Where the FFN runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ffn {
    /// In the attention process, over loopback.
    Local,
    /// In `shards` × `replicas` processes of their own.
    Remote {
        /// Parts of every layer.
        shards: u32,
        /// Ranks per part.
        replicas: u32,
    },
}

/// What to start.
#[derive(Clone, Debug)]
pub struct DeploymentSpec {
    /// Checkpoint folder.
    pub model: PathBuf,
    /// Attention ranks.
    pub attention_ranks: u32,
    /// Where the FFN runs.
    pub ffn: Ffn,
    /// Compute dtype of both sides.
    pub dtype: String,
    /// More options for every attention rank.
    pub attention_args: Vec<String>,
    /// More options for every FFN rank.
    pub ffn_args: Vec<String>,
    /// More options for single FFN ranks.
    pub ffn_rank_args: Vec<(u32, Vec<String>)>,
    /// Environment of every process, beside that of the test.
    pub env: Vec<(String, String)>,
    /// What the test shows.
    pub pass: Pass,
    /// The networks between attention and each FFN rank, where they can go wrong.
    pub networks: Vec<Arc<Network>>,
}

impl DeploymentSpec {
    /// One attention rank, in fp32, one compute thread per process.
    pub fn new(model: PathBuf, ffn: Ffn) -> Self {
        Self {
            model,
            attention_ranks: 1,
            ffn,
            dtype: "float32".to_owned(),
            attention_args: Vec::new(),
            ffn_args: Vec::new(),
            ffn_rank_args: Vec::new(),
            env: Vec::new(),
            pass: Pass::default(),
            networks: Vec::new(),
        }
    }

    /// With a proxy in front of every FFN rank, and TCP links: what each rank's network is told happens to what passes.
    pub fn behind(mut self, networks: &[Arc<Network>]) -> Self {
        self.networks = networks.to_vec();
        self.attention_args(&["--link", "tcp"])
    }

    /// Computing in another dtype, on both sides.
    pub fn dtype(mut self, dtype: &str) -> Self {
        dtype.clone_into(&mut self.dtype);
        self
    }

    /// With this many attention ranks.
    pub fn attention_ranks(mut self, ranks: u32) -> Self {
        self.attention_ranks = ranks;
        self
    }

    /// With more options for every attention rank.
    pub fn attention_args(mut self, args: &[&str]) -> Self {
        self.attention_args.extend(args.iter().map(|arg| (*arg).to_owned()));
        self
    }

    /// With more options for every FFN rank.
    pub fn ffn_args(mut self, args: &[&str]) -> Self {
        self.ffn_args.extend(args.iter().map(|arg| (*arg).to_owned()));
        self
    }

    /// With more options for one FFN rank.
    pub fn ffn_rank_args(mut self, rank: u32, args: &[&str]) -> Self {
        self.ffn_rank_args.push((rank, args.iter().map(|arg| (*arg).to_owned()).collect()));
        self
    }

    /// With something to show.
    pub fn pass(mut self, pass: Pass) -> Self {
        self.pass = pass;
        self
    }

    /// With a variable in every process's environment.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }
}
