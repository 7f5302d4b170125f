//! The prompt, once it is token ids.
use std::sync::Arc;

use super::{FieldError, ModelLimits};

/// Most prompts of one request.
pub const MAX_PROMPTS: usize = 256;

/// Turns the ids of a prompt into what the engine takes.
///
/// # Errors
/// [`FieldError`] with this `param`: empty, too long for the model, or with ids it does not know.
pub fn check_prompt(ids: Vec<u32>, limits: &ModelLimits, param: &str) -> Result<Arc<[u32]>, FieldError> {
    let refuse = |what: String| Err(FieldError::new(param, what));
    if ids.is_empty() {
        return refuse("must not be empty".into());
    }
    let longest = limits.max_model_len.saturating_sub(1) as usize;
    if ids.len() > longest {
        let (found, length) = (ids.len(), limits.max_model_len);
        return refuse(format!(
            "is too long: {found} tokens, at most {longest} (the model's length is {length}, and one token is to be generated)"
        ));
    }
    if let Some((at, id)) = ids.iter().enumerate().find(|(_, id)| **id >= limits.vocab_size) {
        return refuse(format!("must have ids below {}, got {id} at position {at}", limits.vocab_size));
    }
    Ok(ids.into())
}
