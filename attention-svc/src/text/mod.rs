//! Between text and token ids: the first and the last thing that happens to a request. Nothing here knows HTTP, gRPC,
//! the engine or tensors.
//!
//! On the way in: [`chat_template`] (a conversation becomes one text), [`tokenizer`] (text becomes ids). On the way
//! out: [`detokenizer`] (ids become text, piece by piece), [`stop_texts`] (where the text must end), both joined for
//! one sequence in [`output`].
use std::path::Path;
use std::sync::Arc;

pub mod chat_template;
pub mod detokenizer;
mod least_tokens;
pub mod output;
pub mod settings;
pub mod stop_texts;
mod strftime;
pub mod tokenizer;
mod utf8;

pub use chat_template::{ChatMessage, ChatTemplate};
pub use detokenizer::Detokenizer;
pub use output::{OutputRules, OutputText, Piece};
pub use stop_texts::StopTexts;
pub use tokenizer::Tokenizer;

use settings::TextSettings;

/// Why a checkpoint's text files cannot be used, or a text cannot be turned into tokens.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A file of the checkpoint cannot be read or understood.
    #[error("{path}: {what}")]
    File {
        /// Which file.
        path: String,
        /// Why.
        what: String,
    },
    /// The tokenizer failed on this text.
    #[error("the tokenizer failed: {0}")]
    Tokenizer(String),
    /// There is no tokenizer (dummy weights without a `tokenizer.json`).
    #[error("this model has no tokenizer.json: only token ids can be sent")]
    NoTokenizer,
    /// There is no usable chat template.
    #[error("{0}")]
    NoChatTemplate(String),
    /// The template itself refused the conversation (`raise_exception`).
    #[error("{0}")]
    Refused(String),
    /// The template failed on this conversation.
    #[error("the chat template failed: {0}")]
    Template(String),
}

/// Everything a checkpoint says about text.
#[derive(Debug)]
pub struct Text {
    /// Text to ids and back.
    pub tokenizer: Arc<Tokenizer>,
    /// How a conversation is written; when there is none, why.
    pub chat: Result<ChatTemplate, String>,
}

/// Whether a checkpoint must bring its own tokenizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenizerFile {
    /// `tokenizer.json` must be there.
    Required,
    /// Without it ids stand for themselves (dummy weights).
    Optional,
}

impl Text {
    /// Reads `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` of a checkpoint folder.
    ///
    /// # Errors
    /// [`TextError::File`] names the file. A chat template that does not compile is no error: [`Text::chat`] says why.
    pub fn load(folder: &Path, tokenizer_file: TokenizerFile) -> Result<Self, TextError> {
        let settings = TextSettings::load(folder)?;
        let tokenizer = match (folder.join("tokenizer.json").exists(), tokenizer_file) {
            (false, TokenizerFile::Optional) => Tokenizer::none(),
            _ => Tokenizer::load(folder, &settings)?,
        };
        Ok(Self { tokenizer: Arc::new(tokenizer), chat: ChatTemplate::new(&settings) })
    }

    /// Writes a conversation as the model was trained to read it.
    ///
    /// # Errors
    /// [`TextError::Refused`] when the template refuses the conversation; the others are the checkpoint's fault.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        extra: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<String, TextError> {
        match &self.chat {
            Ok(template) => template.render(messages, add_generation_prompt, extra),
            Err(why) => Err(TextError::NoChatTemplate(why.clone())),
        }
    }
}
