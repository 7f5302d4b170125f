//! A checkpoint's chat template: a conversation becomes the one text that the model was trained to continue.
//!
//! Templates are Jinja as Hugging Face renders it: blocks trimmed, Python's string methods, `raise_exception`,
//! `strftime_now` and `tojson`. The text writes its own special tokens: encode it with
//! [`SpecialTokens::AsWritten`](super::tokenizer::SpecialTokens::AsWritten).
use std::error::Error as _;
use std::time::SystemTime;

use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind};
use serde::Serialize;

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
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: Vec<(String, String)>,
}

const NAME: &str = "chat_template";
/// Steps of a rendering: the longest conversation that a body may hold takes a hundredth of it, an endless template is
/// refused within a second.
const FUEL: u64 = 20_000_000;
/// Most bytes of a rendering: more than any body has.
const MAX_RENDERED_BYTES: usize = 64 << 20;
/// Most bytes of one `tojson`.
const MAX_JSON_BYTES: usize = 16 << 20;

/// What `raise_exception` was called with.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl ChatTemplate {
    /// Compiles the checkpoint's template.
    ///
    /// # Errors
    /// A sentence, when there is none or it does not compile.
    pub fn new(settings: &TextSettings) -> Result<Self, String> {
        let source = settings.chat_template.clone().ok_or("this model has no chat template")?;
        let mut environment = Environment::new();
        environment.set_fuel(Some(FUEL));
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Raised(message)))
        });
        environment.add_function("strftime_now", |format: String| strftime(&format, SystemTime::now()));
        environment.add_filter("tojson", to_json);
        environment
            .add_template_owned(NAME, source)
            .map_err(|e| format!("this model's chat template cannot be used: {e:#}"))?;
        Ok(Self { environment, special_tokens: settings.special_tokens.clone() })
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
        let mut context: std::collections::BTreeMap<&str, Value> = std::collections::BTreeMap::new();
        context.extend(extra.iter().map(|(name, value)| (name.as_str(), Value::from_serialize(value))));
        context.extend(
            self.special_tokens.iter().map(|(name, text)| (name.as_str(), Value::from(text.as_str()))),
        );
        context.insert("messages", Value::from_serialize(messages));
        context.insert("add_generation_prompt", Value::from(add_generation_prompt));
        context.insert("tools", Value::from(()));
        context.insert("documents", Value::from(()));
        let template = self.environment.get_template(NAME).map_err(|e| TextError::Template(e.to_string()))?;
        let mut out = Bounded(Vec::new());
        template.render_captured_to(Value::from_iter(context), &mut out).map_err(|e| match raised(&e) {
            Some(message) => TextError::Refused(message),
            None => TextError::Template(format!("{e:#}")),
        })?;
        String::from_utf8(out.0).map_err(|e| TextError::Template(e.to_string()))
    }
}

/// Takes so much and no more: a template may be endless in what it writes, too.
struct Bounded(Vec<u8>);

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_RENDERED_BYTES {
            return Err(std::io::Error::other(format!(
                "a rendering of more than {MAX_RENDERED_BYTES} bytes"
            )));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
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

/// `tojson` as Python writes it: a space after `,` and `:`, characters as they are, nothing escaped for HTML.
fn to_json(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let _: Option<bool> = kwargs.get("ensure_ascii")?;
    kwargs.assert_all_used()?;
    let value = serde_json::to_value(value)
        .map_err(|e| Error::new(ErrorKind::BadSerialization, "tojson").with_source(e))?;
    let mut text = String::new();
    write_json(&mut text, &value, indent, 0);
    if text.len() > MAX_JSON_BYTES {
        // JSON of JSON of JSON doubles each time.
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("tojson of more than {MAX_JSON_BYTES} bytes"),
        ));
    }
    Ok(Value::from_safe_string(text))
}

fn write_json(out: &mut String, value: &serde_json::Value, indent: Option<usize>, depth: usize) {
    use serde_json::Value as Json;
    let newline = |out: &mut String, depth: usize| {
        if let Some(width) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', width * depth));
        }
    };
    let separator = if indent.is_some() { "," } else { ", " };
    match value {
        Json::Array(items) if !items.is_empty() => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i > 0 { separator } else { "" });
                newline(out, depth + 1);
                write_json(out, item, indent, depth + 1);
            }
            newline(out, depth);
            out.push(']');
        }
        Json::Object(fields) if !fields.is_empty() => {
            out.push('{');
            for (i, (name, item)) in fields.iter().enumerate() {
                out.push_str(if i > 0 { separator } else { "" });
                newline(out, depth + 1);
                out.push_str(&Json::from(name.as_str()).to_string());
                out.push_str(": ");
                write_json(out, item, indent, depth + 1);
            }
            newline(out, depth);
            out.push('}');
        }
        simple => out.push_str(&simple.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn template(source: &str) -> ChatTemplate {
        let settings = TextSettings {
            special_tokens: vec![("bos_token".into(), "<s>".into())],
            chat_template: Some(source.into()),
            ..TextSettings::default()
        };
        ChatTemplate::new(&settings).unwrap()
    }

    fn render(source: &str, extra: serde_json::Value) -> Result<String, TextError> {
        let messages = [ChatMessage { role: "user".into(), content: " Hi <b> ".into(), name: None }];
        template(source).render(&messages, true, extra.as_object().unwrap())
    }

    #[test]
    fn python_methods_and_blocks_work_as_in_hugging_face() {
        let source = "{{ bos_token }}{% for m in messages %}\n  {% if m['content'].strip().startswith('Hi') %}\n[{{ m.content | trim }}]{% endif %}\n{% endfor %}{{ missing }}";
        assert_eq!(render(source, json!({})).unwrap(), "<s>[Hi <b>]");
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let extra = json!({"x": {"b": [1, "ü<>&'"], "a": null, "e": []}});
        assert_eq!(
            render("{{ x | tojson }}", extra.clone()).unwrap(),
            r#"{"b": [1, "ü<>&'"], "a": null, "e": []}"#
        );
        assert_eq!(
            render("{{ x | tojson(indent=2) }}", extra).unwrap(),
            "{\n  \"b\": [\n    1,\n    \"ü<>&'\"\n  ],\n  \"a\": null,\n  \"e\": []\n}"
        );
    }

    #[test]
    fn a_template_may_refuse_in_its_own_words() {
        let source =
            "{% macro check(m) %}{{ raise_exception('No ' + m.role) }}{% endmacro %}{{ check(messages[0]) }}";
        assert!(matches!(render(source, json!({})), Err(TextError::Refused(m)) if m == "No user"));
        assert!(matches!(render("{{ 1 + messages }}", json!({})), Err(TextError::Template(_))));
    }

    #[test]
    fn a_template_that_does_not_compile_is_named() {
        let settings = TextSettings { chat_template: Some("{% if %}".into()), ..TextSettings::default() };
        assert!(ChatTemplate::new(&settings).unwrap_err().contains("chat template cannot be used"));
        assert!(ChatTemplate::new(&TextSettings::default()).unwrap_err().contains("no chat template"));
    }
}
