//! `POST /tokenize` and `POST /detokenize`: the tokenizer by itself.
use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use serde_json::{Map, Value, json};

use super::super::Api;
use super::super::error::ApiError;
use super::super::prompt::PromptSource;
use super::super::validate::FieldError;
use super::{chat, receive};
use crate::text::tokenizer::SpecialTokens;

/// `{prompt}` or `{messages}` to `{tokens, count, max_model_len}`.
pub(crate) async fn tokenize(State(api): State<Arc<Api>>, request: Request) -> Result<Json<Value>, ApiError> {
    let mut fields = receive(&api, request).await?.fields;
    api.check_model(fields.string("model")?.as_deref())?;
    let add = fields.boolean("add_special_tokens")?;
    let (prompt, param) = if fields.has("messages") {
        let messages = chat::messages(fields.take("messages"))?;
        let add_generation_prompt = fields.boolean("add_generation_prompt")?.unwrap_or(true);
        (PromptSource::Chat { messages, add_generation_prompt, extra: Map::new() }, "messages")
    } else {
        let text = fields.string("prompt")?.ok_or_else(|| FieldError::new("prompt", "is missing"))?;
        (PromptSource::Text(text), "prompt")
    };
    fields.finish()?;
    let special = if add.unwrap_or(true) { SpecialTokens::Add } else { SpecialTokens::AsWritten };
    let tokens = api.tokenize(prompt, special, param).await?;
    let max_model_len = api.model.limits.max_model_len;
    Ok(Json(json!({"count": tokens.len(), "max_model_len": max_model_len, "tokens": tokens})))
}

/// `{tokens}` to `{prompt}`.
pub(crate) async fn detokenize(
    State(api): State<Arc<Api>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let mut fields = receive(&api, request).await?.fields;
    api.check_model(fields.string("model")?.as_deref())?;
    if !fields.has("tokens") {
        return Err(FieldError::new("tokens", "is missing").into());
    }
    let ids = fields.integers("tokens")?;
    let skip = fields.boolean("skip_special_tokens")?.unwrap_or(false);
    fields.finish()?;
    let text = api.detokenize(&ids, skip, "tokens").await?;
    Ok(Json(json!({"prompt": text})))
}
