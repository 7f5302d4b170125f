//! What a request may say, checked once for both faces. Pure: in goes what the caller wrote, out come the engine's
//! types or the name of the field that is wrong.
mod defaults;
mod prompt;
mod sampling;
mod stop;

pub use defaults::SamplingDefaults;
pub use prompt::{MAX_PROMPTS, check_least, check_prompt};
pub use sampling::SamplingSpec;
pub use stop::StopSpec;

use afd_common::spelling::shown;

use crate::request::{SamplingParams, StopRules};
use crate::text::OutputRules;

/// Most continuations of one prompt.
pub const MAX_N: u64 = 128;
/// Most log probabilities per token.
pub const MAX_LOGPROBS: u64 = 20;

/// A field that is wrong, and how.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{param}` {what}")]
pub struct FieldError {
    /// Name of the field, as the caller wrote it, cut where that is long.
    pub param: String,
    /// What is wrong and what would be right; reads on from the name.
    pub what: String,
}

impl FieldError {
    /// A field and what is wrong with it.
    pub fn new(param: impl Into<String>, what: impl Into<String>) -> Self {
        Self { param: shown(&param.into()), what: what.into() }
    }
}

/// What the served model allows.
#[derive(Clone, Debug)]
pub struct ModelLimits {
    /// Ids are below this.
    pub vocab_size: u32,
    /// Most tokens of prompt and continuation together.
    pub max_model_len: u32,
    /// Tokens that end a continuation.
    pub eos_token_ids: Vec<u32>,
    /// For what a request leaves out.
    pub defaults: SamplingDefaults,
}

/// Names of fields that differ between the faces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldNames {
    /// Before sampling fields.
    pub sampling: &'static str,
    /// Before stop fields.
    pub stop: &'static str,
    /// The output limit, without the prefix.
    pub max_tokens: &'static str,
    /// Number of log probabilities.
    pub logprobs: &'static str,
}

impl FieldNames {
    /// `/v1/completions`
    pub const COMPLETIONS: Self =
        Self { sampling: "", stop: "", max_tokens: "max_tokens", logprobs: "logprobs" };
    /// `/v1/chat/completions`
    pub const CHAT: Self = Self { logprobs: "top_logprobs", ..Self::COMPLETIONS };
    /// `/v1/chat/completions` with the newer name of the output limit
    pub const CHAT_NEW: Self = Self { max_tokens: "max_completion_tokens", ..Self::CHAT };
    /// `InferenceService.Generate`
    pub const GRPC: Self = Self { sampling: "sampling.", stop: "stop.", ..Self::COMPLETIONS };

    fn max_tokens(&self) -> String {
        format!("{}{}", self.stop, self.max_tokens)
    }
}

/// A request as its caller wrote it, but for the prompt; what is absent takes its default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationSpec {
    /// How to choose tokens.
    pub sampling: SamplingSpec,
    /// When to stop.
    pub stop: StopSpec,
    /// Continuations per prompt.
    pub n: Option<i64>,
    /// Log probabilities per generated token.
    pub logprobs: Option<i64>,
    /// Log probabilities per prompt token.
    pub prompt_logprobs: Option<i64>,
}

/// A request that is right, but for the length of its prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Checked {
    /// How to choose tokens.
    pub sampling: SamplingParams,
    /// What of the tokens becomes text.
    pub output: OutputRules,
    /// Continuations per prompt, at least 1.
    pub n: usize,
    /// Log probabilities per generated token.
    pub logprobs: Option<u8>,
    /// Log probabilities per prompt token.
    pub prompt_logprobs: Option<u8>,
    /// The output limit, if the request has one.
    max_tokens: Option<u32>,
    /// The output limit when it has none; `None`: what fits.
    default_max_tokens: Option<u32>,
    /// For errors that show only once the prompt is known.
    names: FieldNames,
}

impl GenerationSpec {
    /// Checks every field.
    ///
    /// # Errors
    /// The first [`FieldError`].
    pub fn check(self, limits: &ModelLimits, names: FieldNames) -> Result<Checked, FieldError> {
        let sampling = self.sampling.check(limits, names.sampling)?;
        let stop = self.stop.check(limits, names)?;
        let n = whole("n", self.n.unwrap_or(1), 1, MAX_N)?;
        let count = |name: &str, value: Option<i64>| -> Result<Option<u8>, FieldError> {
            let value = value.map(|v| whole(name, v, 0, MAX_LOGPROBS)).transpose()?;
            Ok(value.and_then(|v| u8::try_from(v).ok()))
        };
        Ok(Checked {
            sampling,
            output: stop.output,
            n: usize::try_from(n).unwrap_or(1),
            logprobs: count(names.logprobs, self.logprobs)?,
            prompt_logprobs: count("prompt_logprobs", self.prompt_logprobs)?,
            max_tokens: stop.max_tokens,
            default_max_tokens: stop.default_max_tokens,
            names,
        })
    }
}

impl Checked {
    /// The output limit, if the request has one.
    pub fn max_tokens(&self) -> Option<u32> {
        self.max_tokens
    }

    /// The output limit for a prompt of this length.
    ///
    /// # Errors
    /// [`FieldError`] when prompt and output do not fit the model's length together, or the minimum exceeds the limit.
    pub fn stop_rules(&self, prompt_tokens: usize, limits: &ModelLimits) -> Result<StopRules, FieldError> {
        let room = (limits.max_model_len as usize).saturating_sub(prompt_tokens);
        let room = u32::try_from(room).unwrap_or(u32::MAX);
        let max_tokens = match self.max_tokens {
            Some(max) if max > room => {
                let what = format!(
                    "is too large: the prompt has {prompt_tokens} tokens and the model's length is {}, which leaves {room}, got {max}",
                    limits.max_model_len
                );
                return Err(FieldError::new(self.names.max_tokens(), what));
            }
            Some(max) => max,
            None => self.default_max_tokens.unwrap_or(room).min(room),
        };
        let min_tokens = self.output.min_tokens;
        if min_tokens > max_tokens {
            let what = format!("must be at most {} ({max_tokens}), got {min_tokens}", self.names.max_tokens);
            return Err(FieldError::new(format!("{}min_tokens", self.names.stop), what));
        }
        Ok(StopRules { max_tokens, min_tokens, stop_token_ids: self.output.stop_token_ids.clone() })
    }

    /// Sampling of one of the n continuations: with a seed each has its own.
    pub fn sampling_of(&self, continuation: usize) -> SamplingParams {
        let mut sampling = self.sampling.clone();
        sampling.seed = sampling.seed.map(|seed| seed.wrapping_add(continuation as u64));
        sampling
    }
}

/// A whole number within bounds.
pub(crate) fn whole(name: &str, value: i64, min: u64, max: u64) -> Result<u64, FieldError> {
    u64::try_from(value).ok().filter(|v| (min..=max).contains(v)).ok_or_else(|| {
        let what = match max {
            u64::MAX => format!("must be at least {min}, got {value}"),
            _ => format!("must be from {min} to {max}, got {value}"),
        };
        FieldError::new(name, what)
    })
}
