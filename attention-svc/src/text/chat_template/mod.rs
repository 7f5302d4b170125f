//! A checkpoint's chat template: a conversation becomes the one text that the model was trained to continue.
//!
//! Templates are Jinja as Hugging Face renders it: blocks trimmed, Python's string methods, `raise_exception`,
//! `strftime_now` and `tojson`. The text writes its own special tokens: encode it with
//! [`SpecialTokens::AsWritten`](super::tokenizer::SpecialTokens::AsWritten).
//!
//! A template comes with a checkpoint and may be anything; it always ends, soon, and with bounded memory: see `bounds`.
use std::error::Error as _;
use std::fmt;
use std::time::SystemTime;

use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind};
use serde::Serialize;

mod bounds;
mod json;
mod operations;
mod program;
#[cfg(test)]
mod tests;

use bounds::{FUEL, is_excess};
use json::to_json;
use program::Program;

use super::TextError;
use super::settings::TextSettings;
use super::strftime::strftime;

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChatMessage {
    /// Who speaks.
    pub role: String,
    /// What was said.
    pub content: String,
    /// Who of those who have the role.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A compiled chat template with the checkpoint's special tokens.
pub struct ChatTemplate {
    environment: Environment<'static>,
    program: Program,
    special_tokens: Vec<(String, String)>,
}

/// Longest template: the longest of known models has a tenth of it.
const MAX_TEMPLATE_BYTES: usize = 256 << 10;
/// For as many operators as fit into the longest template.
const COMPILER_STACK_BYTES: usize = 256 << 20;

/// What `raise_exception` was called with.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl ChatTemplate {
    /// Compiles the checkpoint's template and tries it on one short message. Its text stays in memory for the life of the
    /// process: a process has one.
    ///
    /// # Errors
    /// A sentence, when there is none, it does not compile, or even that message is too much for it.
    pub fn new(settings: &TextSettings) -> Result<Self, String> {
        let text = settings.chat_template.clone().ok_or("this model has no chat template")?;
        let unusable = |what| format!("this model's chat template cannot be used: {what}");
        let program = compile(text).map_err(unusable)?;
        let template =
            Self { environment: environment(), program, special_tokens: settings.special_tokens.clone() };
        let hello = [ChatMessage { role: "user".into(), content: "Hello".into(), name: None }];
        match template.run(&hello, true, &serde_json::Map::new()) {
            Err(error) if is_excess(&error) => Err(unusable(format!("{error:#}"))),
            // Whatever else it has against this message, it may like others.
            _ => Ok(template),
        }
    }

    /// Renders a conversation; `extra` are further variables, such as `enable_thinking`.
    ///
    /// # Errors
    /// [`TextError::Refused`] with the template's own words, or [`TextError::Template`].
    pub fn render(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        extra: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<String, TextError> {
        self.run(messages, add_generation_prompt, extra).map_err(|e| match raised(&e) {
            Some(message) => TextError::Refused(message),
            None => TextError::Template(format!("{e:#}")),
        })
    }

    fn run(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        extra: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<String, Error> {
        let mut context: std::collections::BTreeMap<&str, Value> = std::collections::BTreeMap::new();
        context.extend(extra.iter().map(|(name, value)| (name.as_str(), Value::from_serialize(value))));
        context.extend(
            self.special_tokens.iter().map(|(name, text)| (name.as_str(), Value::from(text.as_str()))),
        );
        context.insert("messages", Value::from_serialize(messages));
        context.insert("add_generation_prompt", Value::from(add_generation_prompt));
        context.insert("tools", Value::from(()));
        context.insert("documents", Value::from(()));
        self.program.run(&self.environment, Value::from_iter(context))
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("special_tokens", &self.special_tokens).finish_non_exhaustive()
    }
}

/// On a thread of its own: minijinja descends into a long expression as deep as it has operators.
fn compile(text: String) -> Result<Program, String> {
    if text.len() > MAX_TEMPLATE_BYTES {
        return Err(format!("it has {} bytes, more than {MAX_TEMPLATE_BYTES}", text.len()));
    }
    let on_thread = || Program::compile(text.leak()).map_err(|error| format!("{error:#}"));
    let thread = std::thread::Builder::new().stack_size(COMPILER_STACK_BYTES).spawn(on_thread);
    thread.map_err(|error| error.to_string())?.join().map_err(|_| "its compiler panicked".to_owned())?
}

/// Jinja as Hugging Face has it, within bounds.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(FUEL));
    // Errors name the line, and hold nothing of the conversation.
    environment.set_debug(false);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Raised(message)))
    });
    environment.add_function("strftime_now", |format: String| strftime(&format, SystemTime::now()));
    operations::add_bounded(&mut environment);
    environment.add_filter("tojson", to_json);
    program::add_questions(&mut environment);
    environment
}

/// The message of `raise_exception`, however deep in the template it was called.
fn raised(error: &Error) -> Option<String> {
    let mut source = error.source();
    while let Some(error) = source {
        if let Some(Raised(message)) = error.downcast_ref() {
            return Some(message.clone());
        }
        source = error.source();
    }
    None
}
