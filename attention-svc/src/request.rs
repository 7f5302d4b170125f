//! What crosses the border between the API (tokio tasks) and the engine (one OS thread): validated requests in, events
//! out. Nothing here knows HTTP, gRPC, text or tensors.
use std::sync::Arc;
use std::time::Instant;

use afd_common::telemetry::TraceContext;
use tokio::sync::mpsc;

/// Names one running sequence; made by the engine's handle, never reused in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u64);

/// One sequence to continue. A request with `n > 1` is n of these.
#[derive(Debug)]
pub struct SequenceRequest {
    /// As in logs, headers and `Abort`.
    pub request_id: Arc<str>,
    /// Prompt, at least one token, every id below the vocabulary size, at most the model's length minus one.
    pub prompt: Arc<[u32]>,
    /// How to choose tokens.
    pub sampling: SamplingParams,
    /// When the engine stops. (Stop texts are the API's: it aborts.)
    pub stop: StopRules,
    /// Best log probabilities to report per generated token; `None`: not even the chosen one's.
    pub logprobs: Option<u8>,
    /// The same for the prompt's tokens.
    pub prompt_logprobs: Option<u8>,
    /// When the caller stops waiting.
    pub deadline: Option<Instant>,
    /// The request's trace, when it is recorded.
    pub trace: Option<Box<SequenceTrace>>,
    /// Where events go. Bounded by what one sequence can produce; a closed receiver aborts the sequence.
    pub events: mpsc::UnboundedSender<SequenceEvent>,
}

/// A recorded request as its sequences see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceTrace {
    /// The request's own span, which the spans of its sequences are children of.
    pub request: TraceContext,
    /// Whether every step that serves it is to be recorded hop by hop.
    pub hops: bool,
}

/// How tokens are chosen; every field checked by the API.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy; finite, >= 0.
    pub temperature: f32,
    /// In (0, 1].
    pub top_p: f32,
    /// `None`: all.
    pub top_k: Option<u32>,
    /// In [0, 1].
    pub min_p: f32,
    /// In (0, 2]; over prompt and output.
    pub repetition_penalty: f32,
    /// In [-2, 2]; over the output.
    pub presence_penalty: f32,
    /// In [-2, 2]; over the output.
    pub frequency_penalty: f32,
    /// Makes the sequence repeatable.
    pub seed: Option<u64>,
    /// Added to logits.
    pub logit_bias: Vec<(u32, f32)>,
}

impl SamplingParams {
    /// Always the best token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: None,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: None,
            logit_bias: Vec::new(),
        }
    }
}

/// When the engine ends a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopRules {
    /// At least 1; prompt + this is at most the model's length.
    pub max_tokens: u32,
    /// Stop tokens are not chosen before this many tokens.
    pub min_tokens: u32,
    /// The model's end tokens (unless ignored) and the request's.
    pub stop_token_ids: Vec<u32>,
}

/// What the engine says about a sequence.
#[derive(Clone, Debug)]
pub enum SequenceEvent {
    /// A token was chosen.
    Token(ChosenToken),
    /// Prompt log probabilities, before the first token, when asked for. The first entry is `None`.
    PromptLogprobs(Vec<Option<TokenLogprobs>>),
    /// The last event of a sequence that ended well.
    Finished {
        /// Why.
        reason: FinishReason,
        /// What it cost.
        usage: Usage,
    },
    /// The last event of a sequence that failed.
    Failed(SequenceError),
}

/// A chosen token.
#[derive(Clone, Debug)]
pub struct ChosenToken {
    /// Its id. A stop token is reported too; the API leaves it out of the text.
    pub id: u32,
    /// When asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// Log probabilities at one position (natural logarithm).
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Of the chosen token.
    pub chosen: f32,
    /// Rank of the chosen token among all, from 1.
    pub rank: u32,
    /// The best ones, most probable first.
    pub top: Vec<(u32, f32)>,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token.
    Stop,
    /// `max_tokens`.
    Length,
    /// Aborted by its caller.
    Cancelled,
}

/// What a sequence cost, tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt.
    pub prompt_tokens: u32,
    /// Generated.
    pub completion_tokens: u32,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: u32,
}

/// Why a sequence failed; `api` maps it to gRPC status and HTTP codes in one place.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SequenceError {
    /// Too many are waiting: retry later.
    #[error(
        "the queue is full: {waiting} sequences are waiting, one for each choice of a request (--max-queue)"
    )]
    QueueFull {
        /// How many.
        waiting: usize,
    },
    /// The sequence can never run here: shorten the prompt or `max_tokens`.
    #[error("{tokens} tokens of prompt and output do not fit: at most {limit} ({option})")]
    TooLarge {
        /// Prompt and most output.
        tokens: usize,
        /// What fits.
        limit: usize,
        /// Which option sets the limit.
        option: &'static str,
    },
    /// An FFN shard was lost and not replaced in time: retry later.
    #[error("{0}")]
    FfnUnavailable(String),
    /// The caller's deadline passed.
    #[error("the request's deadline passed after {waited_ms} ms")]
    DeadlineExceeded {
        /// Since it was submitted.
        waited_ms: u64,
    },
    /// The process is shutting down: retry elsewhere.
    #[error("the service is shutting down")]
    ShuttingDown,
    /// A mistake of this software or its model; the message is for the operator.
    #[error("internal error: {0}")]
    Internal(String),
}
