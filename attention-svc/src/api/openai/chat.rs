//! `POST /v1/chat/completions`: a conversation is continued.
use std::sync::Arc;

use afd_common::spelling::shown;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::super::error::ApiError;
use super::super::generation::{Generation, Update, reason_name};
use super::super::json::{Fields, brief};
use super::super::plan::Plan;
use super::super::prompt::PromptSource;
use super::super::validate::{FieldError, FieldNames, GenerationSpec};
use super::super::{Api, ids};
use super::fields::{Delivery, shared};
use super::frame::{Finished, Frame, Writer};
use super::respond::respond;
use super::{Received, logprobs, receive};
use crate::request::{ChosenToken, FinishReason, TokenLogprobs};
use crate::text::ChatMessage;

/// The endpoint.
pub(crate) async fn handle(State(api): State<Arc<Api>>, request: Request) -> Result<Response, ApiError> {
    let Received { fields, deadline, trace } = receive(&api, request).await?;
    let request = ChatRequest::read(fields)?;
    api.check_model(request.model.as_deref())?;
    let checked = request.spec.check(&api.model.limits, request.names)?;
    let n = checked.n;
    let with_logprobs = checked.logprobs.is_some();
    let plan = Plan {
        request_id: ids::new_id("chatcmpl"),
        prompts: vec![request.prompt],
        prompt_param: "messages",
        checked,
        deadline,
        trace,
        operation: "chat",
    };
    let generation = Generation::start(Arc::clone(&api), plan).await?;
    let object = if request.delivery.stream { "chat.completion.chunk" } else { "chat.completion" };
    let frame = Frame::new(&api, &generation, object, request.delivery, n);
    let prompt = Arc::clone(&generation.prompts()[0]);
    let writer = ChatWriter { api, frame, prompt, with_logprobs, begun: vec![false; n] };
    respond(generation, writer).await
}

struct ChatRequest {
    model: Option<String>,
    prompt: PromptSource,
    spec: GenerationSpec,
    names: FieldNames,
    delivery: Delivery,
}

impl ChatRequest {
    fn read(mut fields: Fields) -> Result<Self, FieldError> {
        let model = fields.string("model")?;
        let messages = messages(fields.take("messages"))?;
        let extra = match fields.take("chat_template_kwargs") {
            None => Map::new(),
            Some(Value::Object(map)) => map,
            Some(other) => {
                return Err(FieldError::new(
                    "chat_template_kwargs",
                    format!("must be an object, got {}", brief(&other)),
                ));
            }
        };
        let add_generation_prompt = fields.boolean("add_generation_prompt")?.unwrap_or(true);
        let (mut spec, delivery) = shared(&mut fields)?;
        let newer = fields.integer("max_completion_tokens")?;
        let older = fields.integer("max_tokens")?;
        let names = if newer.is_some() { FieldNames::CHAT_NEW } else { FieldNames::CHAT };
        if newer.is_some() && older.is_some() && newer != older {
            return Err(FieldError::new(
                "max_tokens",
                "contradicts `max_completion_tokens`: send one of them",
            ));
        }
        spec.stop.max_tokens = newer.or(older);
        spec.logprobs = logprobs_asked(&mut fields)?;
        refuse_unsupported(&mut fields)?;
        fields.finish()?;
        let prompt = PromptSource::Chat { messages, add_generation_prompt, extra };
        Ok(Self { model, prompt, spec, names, delivery })
    }
}

/// `logprobs` switches them on, `top_logprobs` says how many besides the chosen one's.
fn logprobs_asked(fields: &mut Fields) -> Result<Option<i64>, FieldError> {
    let on = fields.boolean("logprobs")?.unwrap_or(false);
    match fields.integer("top_logprobs")? {
        Some(_) if !on => Err(FieldError::new("top_logprobs", "may only be set when `logprobs` is true")),
        top => Ok(on.then_some(top.unwrap_or(0))),
    }
}

fn refuse_unsupported(fields: &mut Fields) -> Result<(), FieldError> {
    let is_empty = |v: &Value| v.as_array().is_some_and(Vec::is_empty);
    fields.unsupported("tools", is_empty)?;
    fields.unsupported("tool_choice", |v| v == "none" || v == "auto")?;
    fields.unsupported("functions", is_empty)?;
    fields.unsupported("function_call", |v| v == "none" || v == "auto")?;
    fields.unsupported("modalities", |v| *v == json!(["text"]))?;
    fields.unsupported("audio", |_| false)?;
    fields.unsupported("reasoning_effort", |v| v == "none")?;
    fields.unsupported("verbosity", |v| v == "medium")?;
    fields.unsupported("web_search_options", |_| false)?;
    fields.unsupported("echo", |v| *v == false)?;
    fields.unsupported("continue_final_message", |v| *v == false)?;
    fields.unsupported("add_special_tokens", |v| *v == false)?;
    fields.unsupported("chat_template", |_| false)
}

/// A conversation; every error names the message and the field in it.
pub(super) fn messages(value: Option<Value>) -> Result<Vec<ChatMessage>, FieldError> {
    let refuse = |what: &str| Err(FieldError::new("messages", what));
    match value {
        None => refuse("is missing"),
        Some(Value::Array(items)) if items.is_empty() => refuse("must not be empty"),
        Some(Value::Array(items)) => {
            items.into_iter().enumerate().map(|(i, item)| message(item, &format!("messages[{i}]"))).collect()
        }
        Some(other) => refuse(&format!("must be a list of messages, got {}", brief(&other))),
    }
}

fn message(value: Value, path: &str) -> Result<ChatMessage, FieldError> {
    let mut fields = Fields::nested(value, path)?;
    let role = fields.string("role")?.ok_or_else(|| FieldError::new(fields.path("role"), "is missing"))?;
    let role = check_role(role, &fields.path("role"))?;
    let content = content(fields.take("content"), &fields.path("content"))?;
    let name = fields.string("name")?;
    let is_empty = |v: &Value| v.as_array().is_some_and(Vec::is_empty);
    fields.unsupported("tool_calls", is_empty)?;
    fields.unsupported("function_call", |_| false)?;
    fields.unsupported("audio", |_| false)?;
    fields.ignore(&["refusal", "annotations"]);
    fields.finish()?;
    Ok(ChatMessage { role, content, name })
}

/// Roles that are served; `developer` is the newer word for `system`.
pub(crate) fn check_role(role: String, param: &str) -> Result<String, FieldError> {
    match role.as_str() {
        "system" | "user" | "assistant" => Ok(role),
        "developer" => Ok("system".into()),
        "tool" | "function" => Err(FieldError::new(param, format!("`{role}` is not supported here"))),
        other => Err(FieldError::new(
            param,
            format!("must be system, developer, user or assistant, got {:?}", shown(other)),
        )),
    }
}

/// A text, or a list of text parts, which are joined by line breaks.
fn content(value: Option<Value>, param: &str) -> Result<String, FieldError> {
    let refuse = |what: String| Err(FieldError::new(param, what));
    match value {
        None => refuse("must be a string or a list of text parts, got null".into()),
        Some(Value::String(text)) => Ok(text),
        Some(Value::Array(parts)) if parts.is_empty() => refuse("must not be an empty list".into()),
        Some(Value::Array(parts)) => {
            let text = |(i, part): (usize, &Value)| match (part["type"].as_str(), part["text"].as_str()) {
                (Some("text"), Some(text)) => Ok(text.to_owned()),
                _ => Err(FieldError::new(
                    format!("{param}[{i}]"),
                    format!("must be a text part, {{\"type\": \"text\", \"text\": …}}, got {}", brief(part)),
                )),
            };
            Ok(parts.iter().enumerate().map(text).collect::<Result<Vec<_>, _>>()?.join("\n"))
        }
        Some(other) => refuse(format!("must be a string or a list of text parts, got {}", brief(&other))),
    }
}

/// Writes choices, whole or in chunks.
struct ChatWriter {
    api: Arc<Api>,
    frame: Frame,
    prompt: Arc<[u32]>,
    with_logprobs: bool,
    /// Per continuation: whether its role was sent, or its choice begun.
    begun: Vec<bool>,
}

impl ChatWriter {
    /// A choice, or the next part of it, with its content under `message` or `delta`.
    fn part(
        &mut self,
        index: usize,
        (name, content): (&str, Value),
        tokens: &[ChosenToken],
        prompt_logprobs: Option<&[Option<TokenLogprobs>]>,
        reason: Option<FinishReason>,
    ) -> Value {
        let tokenizer = &self.api.text.tokenizer;
        let first = !std::mem::replace(&mut self.begun[index], true);
        let mut value = json!({
            "index": index,
            name: content,
            "logprobs": self.with_logprobs.then(|| logprobs::chat(tokenizer, tokens)),
            "finish_reason": reason.map(reason_name),
        });
        if let Some(logprobs) = prompt_logprobs {
            value["prompt_logprobs"] = logprobs::prompt(tokenizer, &self.prompt, logprobs);
        }
        if self.frame.delivery.token_ids {
            value["token_ids"] = tokens.iter().map(|t| t.id).collect();
            if first {
                value["prompt_token_ids"] = self.prompt.iter().copied().collect();
            }
        }
        value
    }
}

impl Writer for ChatWriter {
    fn frame(&mut self) -> &mut Frame {
        &mut self.frame
    }

    fn choice(&mut self, index: usize, sequence: Finished) -> Value {
        let Finished { text, tokens, prompt_logprobs, reason } = sequence;
        let message = json!({"role": "assistant", "content": text, "refusal": null});
        self.part(index, ("message", message), &tokens, prompt_logprobs.as_deref(), reason)
    }

    fn chunks(&mut self, update: Update) -> Vec<Value> {
        let index = update.index;
        let mut choices = Vec::new();
        if !self.begun[index] {
            let role = json!({"role": "assistant", "content": ""});
            choices.push(self.part(index, ("delta", role), &[], update.prompt_logprobs.as_deref(), None));
        }
        let shows_token = update.token.is_some() && (self.with_logprobs || self.frame.delivery.token_ids);
        if !update.text.is_empty() || shows_token {
            let delta = json!({"content": update.text});
            let tokens: Vec<ChosenToken> = update.token.into_iter().collect();
            choices.push(self.part(index, ("delta", delta), &tokens, None, None));
        }
        if let Some((reason, usage)) = update.finished {
            self.frame.add(index, usage);
            choices.push(self.part(index, ("delta", json!({})), &[], None, Some(reason)));
        }
        choices.into_iter().map(|choice| self.frame.chunk(choice)).collect()
    }
}
