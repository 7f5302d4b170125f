//! When a continuation ends, checked.
use super::{FieldError, FieldNames, ModelLimits, whole};
use crate::text::OutputRules;
use crate::text::stop_texts::KeepStopText;

/// Most stop texts, and most stop token ids, of a request.
const MAX_STOPS: usize = 16;
const MAX_STOP_TOKENS: usize = 256;
/// Longest stop text, bytes: so much text may be held back.
const MAX_STOP_BYTES: usize = 1024;

/// Stop fields as the caller wrote them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StopSpec {
    /// Most tokens.
    pub max_tokens: Option<i64>,
    /// Most tokens when the caller does not say; `None`: as many as fit.
    pub default_max_tokens: Option<u32>,
    /// Fewest tokens.
    pub min_tokens: Option<i64>,
    /// Texts.
    pub stop: Vec<String>,
    /// Tokens.
    pub stop_token_ids: Vec<i64>,
    /// The model's end tokens do not count.
    pub ignore_eos: Option<bool>,
    /// The stop text stays.
    pub include_stop: Option<bool>,
    /// Special tokens have no text.
    pub skip_special_tokens: Option<bool>,
}

/// Stop fields that are right.
pub(super) struct CheckedStop {
    pub(super) max_tokens: Option<u32>,
    pub(super) default_max_tokens: Option<u32>,
    pub(super) output: OutputRules,
}

impl StopSpec {
    /// Checks every field.
    pub(super) fn check(self, limits: &ModelLimits, names: FieldNames) -> Result<CheckedStop, FieldError> {
        let name = |field: &str| format!("{}{field}", names.stop);
        let tokens = |field: &str, value: i64, min: u64| {
            let value = whole(&name(field), value, min, u64::MAX)?;
            u32::try_from(value).map_err(|_| {
                let length = limits.max_model_len;
                FieldError::new(
                    name(field),
                    format!("is too large: the model's length is {length}, got {value}"),
                )
            })
        };
        let max_tokens = self.max_tokens.map(|v| tokens(names.max_tokens, v, 1)).transpose()?;
        let min_tokens = tokens("min_tokens", self.min_tokens.unwrap_or(0), 0)?;
        check_texts(&name("stop"), &self.stop)?;
        let mut stop_token_ids = stop_tokens(&name("stop_token_ids"), &self.stop_token_ids, limits)?;
        if !self.ignore_eos.unwrap_or(false) {
            stop_token_ids.extend(&limits.eos_token_ids);
        }
        let output = OutputRules {
            stop_texts: self.stop,
            stop_token_ids,
            keep_stop: if self.include_stop.unwrap_or(false) { KeepStopText::Yes } else { KeepStopText::No },
            min_tokens,
            skip_special_tokens: self.skip_special_tokens.unwrap_or(true),
        };
        Ok(CheckedStop { max_tokens, default_max_tokens: self.default_max_tokens, output })
    }
}

fn check_texts(name: &str, texts: &[String]) -> Result<(), FieldError> {
    let refuse = |what: String| Err(FieldError::new(name, what));
    if texts.len() > MAX_STOPS {
        return refuse(format!("must have at most {MAX_STOPS} texts, got {}", texts.len()));
    }
    match texts.iter().find(|t| t.is_empty() || t.len() > MAX_STOP_BYTES) {
        Some(text) if text.is_empty() => refuse("must not have an empty text".into()),
        Some(text) => {
            refuse(format!("must have texts of at most {MAX_STOP_BYTES} bytes, got {}", text.len()))
        }
        None => Ok(()),
    }
}

fn stop_tokens(name: &str, ids: &[i64], limits: &ModelLimits) -> Result<Vec<u32>, FieldError> {
    if ids.len() > MAX_STOP_TOKENS {
        return Err(FieldError::new(
            name,
            format!("must have at most {MAX_STOP_TOKENS} ids, got {}", ids.len()),
        ));
    }
    ids.iter()
        .map(|id| {
            u32::try_from(*id).ok().filter(|id| *id < limits.vocab_size).ok_or_else(|| {
                FieldError::new(name, format!("must have ids from 0 to {}, got {id}", limits.vocab_size - 1))
            })
        })
        .collect()
}
