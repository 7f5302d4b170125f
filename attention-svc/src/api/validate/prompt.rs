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
    if ids.len() > longest(limits) {
        return Err(too_long(&ids.len().to_string(), limits, param));
    }
    if let Some((at, id)) = ids.iter().enumerate().find(|(_, id)| **id >= limits.vocab_size) {
        return refuse(format!("must have ids below {}, got {id} at position {at}", limits.vocab_size));
    }
    Ok(ids.into())
}

/// Refuses a prompt that has not become ids yet, when it has too many for certain.
///
/// # Errors
/// [`FieldError`] with this `param`.
pub fn check_least(least: usize, limits: &ModelLimits, param: &str) -> Result<(), FieldError> {
    if least > longest(limits) {
        return Err(too_long(&format!("at least {least}"), limits, param));
    }
    Ok(())
}

fn longest(limits: &ModelLimits) -> usize {
    limits.max_model_len.saturating_sub(1) as usize
}

fn too_long(found: &str, limits: &ModelLimits, param: &str) -> FieldError {
    let (longest, length) = (longest(limits), limits.max_model_len);
    FieldError::new(
        param,
        format!(
            "is too long: {found} tokens, at most {longest} (the model's length is {length}, and one token is to be generated)"
        ),
    )
}
