//! Prompts on their way to token ids. Long ones are tokenized on a thread of their own kind, never on a task's.
use std::sync::Arc;

use super::Api;
use super::error::ApiError;
use super::validate::{FieldError, check_prompt};
use crate::text::tokenizer::SpecialTokens;
use crate::text::{ChatMessage, Text, TextError};

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

    fn ids(self, text: &Text, special: SpecialTokens) -> Result<Vec<u32>, TextError> {
        match self {
            Self::Text(prompt) => text.tokenizer.encode(&prompt, special),
            Self::Ids(ids) => Ok(ids),
            Self::Chat { messages, add_generation_prompt, extra } => {
                let rendered = text.render(&messages, add_generation_prompt, &extra)?;
                text.tokenizer.encode(&rendered, SpecialTokens::AsWritten)
            }
        }
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
        let text = Arc::clone(&self.text);
        let ids = if prompt.bytes() <= INLINE_BYTES {
            prompt.ids(&text, special)
        } else {
            tokio::task::spawn_blocking(move || prompt.ids(&text, special))
                .await
                .map_err(ApiError::internal)?
        };
        ids.map_err(|e| ApiError::text(&e, param))
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
        let ids = self.tokenize(prompt, SpecialTokens::Add, param).await?;
        Ok(check_prompt(ids, &self.model.limits, param)?)
    }
}
