//! An engine with the FFN in its own thread, and requests to it.
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use afd_common::config::model::ModelConfig;
use afd_common::identity::Sides;
use afd_common::link::Doorbell;
use afd_common::weights::Weights;
use attention_svc::engine::{CachedAttention, EngineConfig, EngineDeath, EngineHandle, EngineMetrics, spawn};
use attention_svc::model::{AttentionModel, KvCache};
use attention_svc::request::{SamplingParams, SequenceEvent, SequenceRequest, StopRules};
use tch::Kind;
use tokio::sync::mpsc;

use crate::direct_ffn::DirectFfn;

/// A request's events.
pub(crate) type Events = mpsc::UnboundedReceiver<SequenceEvent>;

/// A running engine in f32.
pub(crate) struct Running {
    pub(crate) handle: EngineHandle,
    thread: JoinHandle<Result<(), EngineDeath>>,
}

impl Running {
    pub(crate) fn start(
        model: &ModelConfig,
        weights: &Weights,
        config: EngineConfig,
        num_shards: u32,
        sides: impl Into<Sides>,
    ) -> Self {
        let sides = sides.into();
        let mut attention = AttentionModel::load(model, weights, config.max_model_len).unwrap();
        attention.take_on(sides, weights).unwrap();
        let cache = KvCache::new(model, config.num_blocks as usize, config.block_size, Kind::Float).unwrap();
        let attention = CachedAttention::new(attention, cache).unwrap();
        let ffn = Box::new(DirectFfn::load(model, weights, num_shards, sides));
        let (handle, thread) = spawn(config, attention, ffn, Doorbell::default(), Arc::default()).unwrap();
        Self { handle, thread }
    }

    /// Continues a prompt past the model's end tokens.
    pub(crate) fn submit(
        &self,
        name: &str,
        prompt: &[u32],
        max_tokens: u32,
        sampling: SamplingParams,
    ) -> Events {
        self.submit_with(name, prompt, max_tokens, sampling, None)
    }

    /// The same, with log probabilities of the prompt.
    pub(crate) fn submit_with(
        &self,
        name: &str,
        prompt: &[u32],
        max_tokens: u32,
        sampling: SamplingParams,
        prompt_logprobs: Option<u8>,
    ) -> Events {
        let (events, receiver) = mpsc::unbounded_channel();
        let request = SequenceRequest {
            request_id: name.into(),
            prompt: prompt.into(),
            sampling,
            stop: StopRules { max_tokens, min_tokens: 0, stop_token_ids: vec![] },
            logprobs: None,
            prompt_logprobs,
            deadline: None,
            trace: None,
            events,
        };
        self.handle.submit(request).unwrap();
        receiver
    }

    /// Lets what runs finish; nothing may be held then.
    pub(crate) fn end(self) -> Arc<EngineMetrics> {
        self.handle.drain(Instant::now() + Duration::from_secs(60));
        self.thread.join().unwrap().unwrap();
        assert_eq!(self.handle.metrics().kv_blocks_used.get(), 0);
        Arc::clone(self.handle.metrics())
    }
}

/// Tokens until the sequence is finished; panics when it fails.
pub(crate) fn tokens(mut events: Events) -> Vec<u32> {
    let mut tokens = Vec::new();
    loop {
        match events.blocking_recv().expect("a last event") {
            SequenceEvent::Token(token) => tokens.push(token.id),
            SequenceEvent::PromptLogprobs(_) => {}
            SequenceEvent::Finished { .. } => return tokens,
            SequenceEvent::Failed(error) => panic!("{error}"),
        }
    }
}
