//! Prompts on their way to token ids. Long ones are tokenized on a thread of their own kind, never on a task's.
use std::sync::Arc;

use super::Api;
use super::error::ApiError;
use super::validate::{FieldError, ModelLimits, check_least, check_prompt};
use crate::text::tokenizer::SpecialTokens;
use crate::text::{ChatMessage, Text};

/// Text up to this is tokenized in place: it takes less than moving it elsewhere would.
const INLINE_BYTES: usize = 2048;

/// What is to be continued, as the caller gave it.
#[derive(Clone, Debug, PartialEq)]
pub enum PromptSource {
    /// Any text; special tokens are added as the tokenizer does.
    Text(String),
    /// Used as they are.
    Ids(Vec<u32>),
    /// Rendered with the chat template.
    Chat {
        /// Oldest first, at least one.
        messages: Vec<ChatMessage>,
        /// Open the assistant's turn.
        add_generation_prompt: bool,
        /// Further variables of the template.
        extra: serde_json::Map<String, serde_json::Value>,
    },
}

impl PromptSource {
    fn bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Ids(_) => 0,
            Self::Chat { messages, .. } => messages.iter().map(|m| m.content.len()).sum(),
        }
    }

    /// With `limits`, what is too long for certain is refused before it costs anything.
    fn ids(
        self,
        text: &Text,
        special: SpecialTokens,
        limits: Option<&ModelLimits>,
        param: &str,
    ) -> Result<Vec<u32>, ApiError> {
        let (prompt, special) = match self {
            Self::Text(prompt) => (prompt, special),
            Self::Ids(ids) => return Ok(ids),
            Self::Chat { messages, add_generation_prompt, extra } => {
                let rendered = text.render(&messages, add_generation_prompt, &extra);
                (rendered.map_err(|e| ApiError::text(&e, param))?, SpecialTokens::AsWritten)
            }
        };
        if let Some(limits) = limits {
            check_least(text.tokenizer.least_tokens(&prompt), limits, param)?;
        }
        text.tokenizer.encode(&prompt, special).map_err(|e| ApiError::text(&e, param))
    }
}

impl Api {
    /// Token ids of a prompt, unchecked.
    pub(super) async fn tokenize(
        &self,
        prompt: PromptSource,
        special: SpecialTokens,
        param: &str,
    ) -> Result<Vec<u32>, ApiError> {
        self.tokenize_within(None, prompt, special, param).await
    }

    async fn tokenize_within(
        &self,
        limits: Option<&ModelLimits>,
        prompt: PromptSource,
        special: SpecialTokens,
        param: &str,
    ) -> Result<Vec<u32>, ApiError> {
        if prompt.bytes() <= INLINE_BYTES {
            return prompt.ids(&self.text, special, limits, param);
        }
        let (text, limits, param) = (Arc::clone(&self.text), limits.cloned(), param.to_owned());
        self.tokenizing.run(move || prompt.ids(&text, special, limits.as_ref(), &param)).await?
    }

    /// Text of token ids, special tokens included unless they are to be skipped.
    pub(super) async fn detokenize(
        &self,
        ids: &[i64],
        skip_special: bool,
        param: &str,
    ) -> Result<String, ApiError> {
        let vocab_size = self.model.limits.vocab_size;
        let ids: Vec<u32> = ids
            .iter()
            .map(|id| {
                u32::try_from(*id).ok().filter(|id| *id < vocab_size).ok_or_else(|| {
                    FieldError::new(param, format!("must have ids from 0 to {}, got {id}", vocab_size - 1))
                })
            })
            .collect::<Result<_, _>>()?;
        let text = Arc::clone(&self.text);
        tokio::task::spawn_blocking(move || text.tokenizer.decode(&ids, skip_special))
            .await
            .map_err(ApiError::internal)?
            .map_err(ApiError::internal)
    }

    /// Token ids of a prompt that fits the model. An empty text is refused even where it would become a lone
    /// beginning-of-text token.
    pub(super) async fn prompt_ids(&self, prompt: PromptSource, param: &str) -> Result<Arc<[u32]>, ApiError> {
        if matches!(&prompt, PromptSource::Text(text) if text.is_empty()) {
            return Ok(check_prompt(Vec::new(), &self.model.limits, param)?);
        }
        let limits = &self.model.limits;
        let ids = self.tokenize_within(Some(limits), prompt, SpecialTokens::Add, param).await?;
        Ok(check_prompt(ids, limits, param)?)
    }
}
