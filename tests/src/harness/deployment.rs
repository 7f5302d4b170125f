//! Attention ranks and FFN shards of one model as processes, ready when `start` returns.
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use afd_common::proto::v1;
use afd_common::proto::v1::inference_service_client::InferenceServiceClient;
use anyhow::{Context, bail};
use serde_json::Value;
use tonic::transport::Channel;

use super::proxy::Proxy;
use super::{DeploymentSpec, Ffn, Process};

/// Time for a process to listen and for a deployment to be ready, debug builds on two busy cores included.
pub(super) const START_LIMIT: Duration = Duration::from_secs(60);

/// Running processes of one model.
pub struct Deployment {
    /// What was started.
    pub spec: DeploymentSpec,
    /// By rank.
    pub attention: Vec<Process>,
    /// Shard by shard, the replicas of a shard side by side.
    pub ffn: Vec<Process>,
    /// Of the attention ranks.
    pub attention_addresses: Vec<SocketAddr>,
    /// Of the FFN ranks.
    pub ffn_addresses: Vec<SocketAddr>,
    /// In front of the FFN ranks, where there are any.
    proxies: Vec<Proxy>,
    client: reqwest::Client,
    folder: tempfile::TempDir,
}

impl Deployment {
    /// Starts everything and waits until every attention rank is ready.
    ///
    /// # Errors
    /// When something does not start; logs are part of the message.
    pub async fn start(spec: DeploymentSpec) -> anyhow::Result<Self> {
        let mut deployment = Self {
            attention: Vec::new(),
            ffn: Vec::new(),
            attention_addresses: Vec::new(),
            ffn_addresses: Vec::new(),
            proxies: Vec::new(),
            client: spec.pass.http()?,
            folder: tempfile::tempdir()?,
            spec,
        };
        if let Ffn::Remote { shards, replicas } = deployment.spec.ffn {
            for rank in 0..shards * replicas {
                let process = deployment.start_ffn(rank, "127.0.0.1:0")?;
                deployment.ffn.push(process);
            }
            for process in &mut deployment.ffn {
                deployment.ffn_addresses.push(process.address(START_LIMIT)?);
            }
            for (address, network) in deployment.ffn_addresses.iter().zip(&deployment.spec.networks) {
                deployment.proxies.push(Proxy::start(*address, Arc::clone(network)).await?);
            }
        }
        for rank in 0..deployment.spec.attention_ranks {
            let process = deployment.start_attention(rank)?;
            deployment.attention.push(process);
        }
        for process in &mut deployment.attention {
            deployment.attention_addresses.push(process.address(START_LIMIT)?);
        }
        for rank in 0..deployment.attention.len() {
            deployment.wait_ready(rank, START_LIMIT).await?;
        }
        Ok(deployment)
    }

    /// Starts an FFN rank that is to listen on `listen` (also in place of one that was killed).
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_ffn(&self, rank: u32, listen: &str) -> anyhow::Result<Process> {
        let Ffn::Remote { shards, replicas } = self.spec.ffn else {
            bail!("the FFN of this deployment is local")
        };
        let mut args = vec!["serve".to_owned(), "--model".to_owned(), self.spec.model.display().to_string()];
        args.extend(["--listen".to_owned(), listen.to_owned()]);
        args.extend(["--shard".to_owned(), format!("{}/{shards}", rank / replicas)]);
        args.extend(self.compute_args());
        args.extend(self.spec.ffn_args.iter().cloned());
        let own = self.spec.ffn_rank_args.iter().filter(|(of, _)| *of == rank);
        let own: Vec<_> = own.flat_map(|(_, args)| args).cloned().collect();
        // A test may want one rank twice.
        if !own.iter().any(|arg| arg == "--rank") {
            args.extend(["--rank".to_owned(), rank.to_string()]);
        }
        args.extend(own);
        Process::start_in("ffn-svc", &format!("F{rank}"), &args, &self.spec.env, self.folder.path())
    }

    fn start_attention(&self, rank: u32) -> anyhow::Result<Process> {
        let ffn = match self.spec.ffn {
            Ffn::Local => "local".to_owned(),
            Ffn::Remote { .. } => {
                self.dialed().iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(",")
            }
        };
        let mut args = vec!["serve".to_owned(), "--model".to_owned(), self.spec.model.display().to_string()];
        args.extend(
            ["--listen", "127.0.0.1:0", "--served-model-name", "test", "--ffn", &ffn].map(str::to_owned),
        );
        args.extend(["--rank".to_owned(), rank.to_string()]);
        args.extend(self.compute_args());
        args.extend(self.spec.attention_args.iter().cloned());
        Process::start_in("attention-svc", &format!("A{rank}"), &args, &self.spec.env, self.folder.path())
    }

    /// Where attention ranks dial the FFN ranks.
    pub fn dialed(&self) -> Vec<SocketAddr> {
        match self.proxies.as_slice() {
            [] => self.ffn_addresses.clone(),
            proxies => proxies.iter().map(Proxy::address).collect(),
        }
    }

    fn compute_args(&self) -> [String; 4] {
        ["--dtype", &self.spec.dtype, "--threads", "1"].map(str::to_owned)
    }

    /// Waits until an attention rank says that it is ready.
    ///
    /// # Errors
    /// When it does not within `limit`; its log is part of the message.
    pub async fn wait_ready(&mut self, rank: usize, limit: Duration) -> anyhow::Result<()> {
        let url = self.url(rank, "/health");
        let ready = async {
            loop {
                if self.client.get(&url).send().await.is_ok_and(|answer| answer.status().is_success()) {
                    return true;
                }
                if self.attention[rank].has_ended() {
                    return false;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        match tokio::time::timeout(limit, ready).await {
            Ok(true) => Ok(()),
            Ok(false) => bail!("A{rank} ended before it was ready:\n{}", self.attention[rank].log()),
            Err(_) => bail!("A{rank} is not ready after {limit:?}:\n{}", self.attention[rank].log()),
        }
    }

    /// A URL on an attention rank.
    pub fn url(&self, rank: usize, path: &str) -> String {
        let scheme = if self.spec.pass.ca.is_some() { "https" } else { "http" };
        format!("{scheme}://{}{path}", self.attention_addresses[rank])
    }

    /// The HTTP client of the test.
    pub fn client(&self) -> &reqwest::Client {
        &self.client
    }

    /// POSTs JSON to an attention rank: the status and the answer's JSON.
    ///
    /// # Errors
    /// When there is no answer, or none in JSON.
    pub async fn post(&self, rank: usize, path: &str, body: &Value) -> anyhow::Result<(u16, Value)> {
        let answer = self.client.post(self.url(rank, path)).json(body).send().await.context("no answer")?;
        let status = answer.status().as_u16();
        Ok((status, answer.json().await.context("the answer is not JSON")?))
    }

    /// A gRPC client of an attention rank.
    ///
    /// # Errors
    /// When it cannot be reached.
    pub async fn grpc(&self, rank: usize) -> anyhow::Result<InferenceServiceClient<Channel>> {
        Ok(InferenceServiceClient::new(self.spec.pass.grpc(self.attention_addresses[rank]).await?))
    }

    /// A number that an attention rank shows under `/metrics`.
    ///
    /// # Errors
    /// When there is none of this name (with its labels).
    pub async fn metric(&self, rank: usize, name: &str) -> anyhow::Result<f64> {
        metric(&self.client, &self.url(rank, "/metrics"), name).await
    }

    /// The same of an FFN rank.
    ///
    /// # Errors
    /// As above.
    pub async fn ffn_metric(&self, rank: usize, name: &str) -> anyhow::Result<f64> {
        metric(&self.client, &format!("http://{}/metrics", self.ffn_addresses[rank]), name).await
    }

    /// FFN ranks that an attention rank uses, as indices.
    ///
    /// # Errors
    /// When it cannot be asked.
    pub async fn in_use(&self, rank: usize) -> anyhow::Result<Vec<usize>> {
        let info = self.grpc(rank).await?.get_model_info(v1::GetModelInfoRequest {}).await?.into_inner();
        let dialed = self.dialed();
        let at = |peer: v1::FfnPeer| dialed.iter().position(|address| address.to_string() == peer.address);
        Ok(info.ffn_peers.into_iter().filter_map(at).collect())
    }

    /// Waits until an attention rank uses so many FFN ranks.
    ///
    /// # Errors
    /// When it does not within `limit`.
    pub async fn wait_in_use(&self, rank: usize, count: usize, limit: Duration) -> anyhow::Result<()> {
        let deadline = std::time::Instant::now() + limit;
        while self.in_use(rank).await?.len() != count {
            if std::time::Instant::now() >= deadline {
                bail!("A{rank} does not use {count} FFN ranks:\n{}", self.attention[rank].log());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    /// Greedy continuation of token ids on an attention rank, past the model's end tokens, as it comes.
    ///
    /// # Errors
    /// When the request is refused.
    pub async fn stream(
        &self,
        rank: usize,
        prompt: &[u32],
        max_tokens: u32,
    ) -> anyhow::Result<tonic::Streaming<v1::GenerateResponse>> {
        let request = greedy(prompt, max_tokens);
        Ok(self.grpc(rank).await?.generate(self.spec.pass.show(request)).await?.into_inner())
    }

    /// The same, whole, as token ids.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn greedy(&self, rank: usize, prompt: &[u32], max_tokens: u32) -> anyhow::Result<Vec<u32>> {
        let mut stream = self.stream(rank, prompt, max_tokens).await?;
        let mut ids = Vec::new();
        while let Some(piece) = stream.message().await? {
            ids.extend(piece.token_ids);
        }
        Ok(ids)
    }
}

/// A number that a page of metrics shows.
///
/// # Errors
/// When there is none of this name (with its labels).
pub async fn metric(client: &reqwest::Client, url: &str, name: &str) -> anyhow::Result<f64> {
    let text = client.get(url).send().await?.text().await?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
    value.with_context(|| format!("{url} shows no {name}"))
}

/// Asks for the greedy continuation of token ids, past the model's end tokens.
pub fn greedy(prompt: &[u32], max_tokens: u32) -> v1::GenerateRequest {
    v1::GenerateRequest {
        prompt: Some(v1::generate_request::Prompt::TokenIds(v1::TokenIds { ids: prompt.to_vec() })),
        sampling: Some(v1::SamplingParams { temperature: Some(0.0), ..Default::default() }),
        stop: Some(v1::StopConditions {
            max_tokens: Some(max_tokens),
            ignore_eos: Some(true),
            ..Default::default()
        }),
        ..Default::default()
    }
}
