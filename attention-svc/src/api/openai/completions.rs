//! `POST /v1/completions`: texts or token ids are continued.
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Value, json};

use super::super::error::ApiError;
use super::super::generation::{Generation, Update, reason_name};
use super::super::json::{Fields, brief};
use super::super::plan::Plan;
use super::super::prompt::PromptSource;
use super::super::validate::{FieldError, FieldNames, GenerationSpec, MAX_PROMPTS};
use super::super::{Api, ids};
use super::fields::{Delivery, shared};
use super::frame::{Finished, Frame, Writer};
use super::logprobs::{self, TextLogprobs};
use super::respond::respond;
use super::{Received, receive};
use crate::request::{FinishReason, TokenLogprobs};

/// OpenAI's default.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// The endpoint.
pub(crate) async fn handle(State(api): State<Arc<Api>>, request: Request) -> Result<Response, ApiError> {
    let Received { fields, deadline, trace } = receive(&api, request).await?;
    let request = CompletionRequest::read(fields)?;
    api.check_model(request.model.as_deref())?;
    let checked = request.spec.check(&api.model.limits, FieldNames::COMPLETIONS)?;
    let n = checked.n;
    let with_logprobs = checked.logprobs.is_some();
    let echo = if request.echo { echoes(&api, &request.prompts)? } else { Vec::new() };
    let plan = Plan {
        request_id: ids::new_id("cmpl"),
        prompts: request.prompts,
        prompt_param: "prompt",
        checked,
        deadline,
        trace,
        operation: "text_completion",
    };
    let generation = Generation::start(Arc::clone(&api), plan).await?;
    let writer = TextWriter {
        frame: Frame::new(&api, &generation, "text_completion", request.delivery, n),
        choices: (0..generation.prompts().len() * n).map(|_| Choice::default()).collect(),
        prompts: generation.prompts().to_vec(),
        echo,
        with_logprobs,
        asked_prompt_logprobs: request.asked_prompt_logprobs,
        api,
    };
    respond(generation, writer).await
}

struct CompletionRequest {
    model: Option<String>,
    prompts: Vec<PromptSource>,
    echo: bool,
    spec: GenerationSpec,
    /// Whether the caller asked for `prompt_logprobs` itself, not through `echo`.
    asked_prompt_logprobs: bool,
    delivery: Delivery,
}

impl CompletionRequest {
    fn read(mut fields: Fields) -> Result<Self, FieldError> {
        let model = fields.string("model")?;
        let prompts = prompts(fields.take("prompt"))?;
        let (mut spec, delivery) = shared(&mut fields)?;
        spec.stop.max_tokens = fields.integer("max_tokens")?;
        spec.stop.default_max_tokens = Some(DEFAULT_MAX_TOKENS);
        spec.logprobs = fields.integer("logprobs")?;
        let echo = fields.boolean("echo")?.unwrap_or(false);
        let asked_prompt_logprobs = spec.prompt_logprobs.is_some();
        if echo && !asked_prompt_logprobs {
            spec.prompt_logprobs = spec.logprobs;
        }
        let n = spec.n.unwrap_or(1);
        fields.unsupported("best_of", |best_of| best_of.as_i64() == Some(n))?;
        fields.unsupported("suffix", |suffix| suffix == "")?;
        fields.unsupported("add_special_tokens", |v| *v == true)?;
        fields.finish()?;
        Ok(Self { model, prompts, echo, spec, asked_prompt_logprobs, delivery })
    }
}

/// A text, a list of texts, a list of ids or a list of lists of ids.
fn prompts(value: Option<Value>) -> Result<Vec<PromptSource>, FieldError> {
    let refuse = |what: String| FieldError::new("prompt", what);
    let wrong = |found: &Value| {
        refuse(format!(
            "must be a string, a list of strings, a list of token ids or a list of such lists, got {}",
            brief(found)
        ))
    };
    let value = value.ok_or_else(|| refuse("is missing".into()))?;
    match value {
        Value::String(text) => Ok(vec![PromptSource::Text(text)]),
        Value::Array(items) if items.is_empty() => Err(refuse("must not be empty".into())),
        Value::Array(items) if items[0].is_number() => Ok(vec![PromptSource::Ids(token_ids(&items)?)]),
        Value::Array(items) if items.len() > MAX_PROMPTS => {
            Err(refuse(format!("must have at most {MAX_PROMPTS} prompts, got {}", items.len())))
        }
        Value::Array(items) => {
            let texts = items[0].is_string();
            items
                .into_iter()
                .map(|item| match item {
                    Value::String(text) if texts => Ok(PromptSource::Text(text)),
                    Value::Array(ids) if !texts => Ok(PromptSource::Ids(token_ids(&ids)?)),
                    other => Err(wrong(&other)),
                })
                .collect()
        }
        other => Err(wrong(&other)),
    }
}

fn token_ids(values: &[Value]) -> Result<Vec<u32>, FieldError> {
    values
        .iter()
        .enumerate()
        .map(|(at, value)| {
            value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
                FieldError::new(
                    "prompt",
                    format!("must have token ids, got {} at position {at}", brief(value)),
                )
            })
        })
        .collect()
}

/// Text of each prompt.
fn echoes(api: &Api, prompts: &[PromptSource]) -> Result<Vec<String>, ApiError> {
    prompts
        .iter()
        .map(|prompt| match prompt {
            PromptSource::Text(text) => Ok(text.clone()),
            PromptSource::Ids(ids) => api.text.tokenizer.decode(ids, true).map_err(ApiError::internal),
            PromptSource::Chat { .. } => Ok(String::new()),
        })
        .collect()
}

/// Writes choices, whole or in chunks.
struct TextWriter {
    api: Arc<Api>,
    frame: Frame,
    prompts: Vec<Arc<[u32]>>,
    /// Per prompt, when asked for.
    echo: Vec<String>,
    with_logprobs: bool,
    asked_prompt_logprobs: bool,
    choices: Vec<Choice>,
}

/// What has been written of a choice.
#[derive(Default)]
struct Choice {
    logprobs: TextLogprobs,
    begun: bool,
}

impl TextWriter {
    /// A choice, or the next part of it.
    fn part(
        &mut self,
        index: usize,
        text: String,
        tokens: &[(u32, Option<&TokenLogprobs>)],
        prompt_logprobs: Option<&[Option<TokenLogprobs>]>,
        reason: Option<FinishReason>,
    ) -> Value {
        let tokenizer = &self.api.text.tokenizer;
        let prompt = &self.prompts[index / self.frame.n];
        let choice = &mut self.choices[index];
        let first = !std::mem::replace(&mut choice.begun, true);
        let echo = self.echo.get(index / self.frame.n).filter(|_| first);

        let echoed = match (echo, prompt_logprobs) {
            (Some(_), Some(logprobs)) => {
                prompt.iter().copied().zip(logprobs.iter().map(Option::as_ref)).collect()
            }
            _ => Vec::new(),
        };
        let tokens_with_echo: Vec<_> = echoed.into_iter().chain(tokens.iter().copied()).collect();
        let logprobs = self.with_logprobs.then(|| choice.logprobs.take(tokenizer, &tokens_with_echo));

        let text = echo.cloned().unwrap_or_default() + &text;
        let mut value = json!({
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason.map(reason_name),
        });
        if let (Some(logprobs), true) = (prompt_logprobs, self.asked_prompt_logprobs) {
            value["prompt_logprobs"] = logprobs::prompt(tokenizer, prompt, logprobs);
        }
        if self.frame.delivery.token_ids {
            value["token_ids"] = tokens.iter().map(|(id, _)| *id).collect();
            if first {
                value["prompt_token_ids"] = prompt.iter().copied().collect();
            }
        }
        value
    }
}

impl Writer for TextWriter {
    fn frame(&mut self) -> &mut Frame {
        &mut self.frame
    }

    fn choice(&mut self, index: usize, sequence: Finished) -> Value {
        let tokens: Vec<_> = sequence.tokens.iter().map(|t| (t.id, t.logprobs.as_ref())).collect();
        self.part(index, sequence.text, &tokens, sequence.prompt_logprobs.as_deref(), sequence.reason)
    }

    fn chunks(&mut self, update: Update) -> Vec<Value> {
        let shows_token = update.token.is_some() && (self.with_logprobs || self.frame.delivery.token_ids);
        let shows_echo = !self.echo.is_empty() && !self.choices[update.index].begun;
        if let Some((_, usage)) = update.finished {
            self.frame.add(update.index, usage);
        }
        let shows = !update.text.is_empty()
            || update.finished.is_some()
            || update.prompt_logprobs.is_some()
            || shows_token
            || shows_echo;
        if !shows {
            return Vec::new();
        }
        let tokens: Vec<_> = update.token.iter().map(|t| (t.id, t.logprobs.as_ref())).collect();
        let reason = update.finished.map(|(reason, _)| reason);
        let prompt_logprobs = update.prompt_logprobs.as_deref();
        let choice = self.part(update.index, update.text, &tokens, prompt_logprobs, reason);
        vec![self.frame.chunk(choice)]
    }
}
