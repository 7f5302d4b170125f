//! `tokenizer_config.json` and `chat_template.jinja`: what a checkpoint says about special tokens and chat.
use std::path::Path;

use serde_json::{Map, Value};

use super::TextError;

/// What is used of the two files; everything may be absent.
#[derive(Clone, Debug, Default)]
pub struct TextSettings {
    /// `bos_token` and the like, by name: `("bos_token", "<s>")`.
    pub special_tokens: Vec<(String, String)>,
    /// Whether text gets a beginning-of-text token; absent: as `tokenizer.json` does.
    pub add_bos_token: Option<bool>,
    /// Source of the chat template.
    pub chat_template: Option<String>,
}

impl TextSettings {
    /// Reads both files; a missing one is an empty one.
    ///
    /// # Errors
    /// [`TextError::File`] when a file is there but cannot be read.
    pub fn load(folder: &Path) -> Result<Self, TextError> {
        let config = read(&folder.join("tokenizer_config.json"))?;
        let template = read(&folder.join("chat_template.jinja"))?;
        let mut settings = match config {
            Some(text) => Self::parse(&text).map_err(|what| TextError::File {
                path: folder.join("tokenizer_config.json").display().to_string(),
                what,
            })?,
            None => Self::default(),
        };
        if template.is_some() {
            settings.chat_template = template;
        }
        Ok(settings)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let config: Map<String, Value> = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let special_tokens = config
            .iter()
            .filter(|(name, _)| name.ends_with("_token"))
            .filter_map(|(name, value)| Some((name.clone(), token_text(value)?)))
            .collect();
        Ok(Self {
            special_tokens,
            add_bos_token: config.get("add_bos_token").and_then(Value::as_bool),
            chat_template: config.get("chat_template").and_then(template_text),
        })
    }

    /// Text of a special token, such as `bos_token`.
    pub fn special_token(&self, name: &str) -> Option<&str> {
        self.special_tokens.iter().find(|(n, _)| n == name).map(|(_, text)| text.as_str())
    }
}

fn read(path: &Path) -> Result<Option<String>, TextError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(TextError::File { path: path.display().to_string(), what: e.to_string() }),
    }
}

/// A special token is a string or an object with `content`.
fn token_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
}

/// A chat template is a string or a list of named ones, of which the one named `default` is meant.
fn template_text(value: &Value) -> Option<String> {
    let named = |list: &Vec<Value>| {
        let default = list.iter().find(|entry| entry["name"] == "default").or(list.first())?;
        default["template"].as_str().map(str::to_owned)
    };
    value.as_str().map(str::to_owned).or_else(|| named(value.as_array()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_may_be_objects_and_templates_lists() {
        let settings = TextSettings::parse(
            r#"{"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>", "pad_token": null,
                "add_bos_token": false,
                "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}"#,
        )
        .unwrap();
        assert_eq!(settings.special_token("bos_token"), Some("<s>"));
        assert_eq!(settings.special_token("eos_token"), Some("</s>"));
        assert_eq!(settings.special_token("pad_token"), None);
        assert_eq!(settings.add_bos_token, Some(false));
        assert_eq!(settings.chat_template.as_deref(), Some("D"));
    }
}
