//! What the answers of both completion endpoints have in common: the envelope around their choices, and the usage. What
//! a choice looks like is each endpoint's own.
use std::sync::Arc;

use serde_json::{Value, json};

use super::super::generation::{Generation, Update};
use super::super::{Api, unix_seconds};
use super::fields::Delivery;
use crate::request::{ChosenToken, FinishReason, TokenLogprobs, Usage};

/// One finished sequence.
#[derive(Default)]
pub(super) struct Finished {
    pub(super) text: String,
    pub(super) tokens: Vec<ChosenToken>,
    pub(super) prompt_logprobs: Option<Vec<Option<TokenLogprobs>>>,
    pub(super) reason: Option<FinishReason>,
}

/// Writes the choices of one kind of answer.
pub(super) trait Writer: Send + 'static {
    /// What is around them.
    fn frame(&mut self) -> &mut Frame;
    /// A choice, whole.
    fn choice(&mut self, index: usize, sequence: Finished) -> Value;
    /// Events for an update; none when it shows nothing.
    fn chunks(&mut self, update: Update) -> Vec<Value>;
}

/// See the module's head.
pub(super) struct Frame {
    id: Arc<str>,
    object: &'static str,
    created: u64,
    model: String,
    fingerprint: String,
    /// How the answer is to be delivered.
    pub(super) delivery: Delivery,
    /// Continuations of a prompt.
    pub(super) n: usize,
    total: TotalUsage,
}

/// Tokens of all sequences of a request; a prompt counts once, however often it is continued.
#[derive(Default)]
struct TotalUsage {
    prompt: u64,
    completion: u64,
    cached: u64,
}

impl Frame {
    /// Around the answer to a request, of OpenAI's kind `object`.
    pub(super) fn new(
        api: &Api,
        generation: &Generation,
        object: &'static str,
        delivery: Delivery,
        n: usize,
    ) -> Self {
        let fingerprint: String = api.model.identity.fingerprint.chars().take(12).collect();
        Self {
            id: Arc::clone(generation.name()),
            object,
            created: unix_seconds(),
            model: api.model.name.clone(),
            fingerprint: format!("fp_{fingerprint}"),
            delivery,
            n,
            total: TotalUsage::default(),
        }
    }

    /// Around choices.
    pub(super) fn envelope(&self, choices: Vec<Value>) -> Value {
        json!({
            "id": *self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        })
    }

    /// A part of a stream.
    pub(super) fn chunk(&self, choice: Value) -> Value {
        let mut chunk = self.envelope(vec![choice]);
        if self.delivery.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    /// The part of a stream before `[DONE]`, if there is one.
    pub(super) fn last_chunk(&self) -> Option<Value> {
        self.delivery.include_usage.then(|| {
            let mut chunk = self.envelope(Vec::new());
            chunk["usage"] = self.usage();
            chunk
        })
    }

    /// A sequence has ended.
    pub(super) fn add(&mut self, index: usize, usage: Usage) {
        let total = &mut self.total;
        total.completion += u64::from(usage.completion_tokens);
        if index.is_multiple_of(self.n) {
            total.prompt += u64::from(usage.prompt_tokens);
            total.cached += u64::from(usage.cached_tokens);
        }
    }

    /// Of all sequences so far.
    pub(super) fn usage(&self) -> Value {
        let TotalUsage { prompt, completion, cached } = self.total;
        json!({
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        })
    }
}
