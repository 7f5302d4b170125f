//! Fields that both completion endpoints share.
use afd_common::spelling::shown;
use serde_json::Value;

use super::super::json::{Fields, brief};
use super::super::validate::{FieldError, GenerationSpec, SamplingSpec, StopSpec};

/// How the answer is to be delivered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Delivery {
    /// As server-sent events.
    pub(super) stream: bool,
    /// With a last event that has the usage.
    pub(super) include_usage: bool,
    /// With the ids of the tokens.
    pub(super) token_ids: bool,
}

/// Fields that cannot change an answer.
const HARMLESS: [&str; 12] = [
    "user",
    "store",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
    "parallel_tool_calls",
    "spaces_between_special_tokens",
    "priority",
    "early_stopping",
];

/// Takes what both endpoints have; log probabilities and the output limit are theirs.
pub(super) fn shared(fields: &mut Fields) -> Result<(GenerationSpec, Delivery), FieldError> {
    let sampling = SamplingSpec {
        temperature: fields.number("temperature")?,
        top_p: fields.number("top_p")?,
        top_k: fields.integer("top_k")?,
        min_p: fields.number("min_p")?,
        repetition_penalty: fields.number("repetition_penalty")?,
        presence_penalty: fields.number("presence_penalty")?,
        frequency_penalty: fields.number("frequency_penalty")?,
        seed: seed(fields)?,
        logit_bias: logit_bias(fields)?,
    };
    let stop = StopSpec {
        min_tokens: fields.integer("min_tokens")?,
        stop: fields.strings("stop")?,
        stop_token_ids: fields.integers("stop_token_ids")?,
        ignore_eos: fields.boolean("ignore_eos")?,
        include_stop: fields.boolean("include_stop_str_in_output")?,
        skip_special_tokens: fields.boolean("skip_special_tokens")?,
        ..StopSpec::default()
    };
    let spec = GenerationSpec {
        sampling,
        stop,
        n: fields.integer("n")?,
        logprobs: None,
        prompt_logprobs: fields.integer("prompt_logprobs")?,
    };
    let delivery = delivery(fields)?;
    fields.unsupported("response_format", |v| v["type"] == "text")?;
    fields.unsupported("use_beam_search", |v| *v == false)?;
    fields.unsupported("length_penalty", |v| v.as_f64() == Some(1.0))?;
    fields.unsupported("return_tokens_as_token_ids", |v| *v == false)?;
    fields.ignore(&HARMLESS);
    Ok((spec, delivery))
}

fn delivery(fields: &mut Fields) -> Result<Delivery, FieldError> {
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let mut include_usage = false;
    if let Some(options) = fields.take("stream_options") {
        if !stream {
            return Err(FieldError::new("stream_options", "may only be set when `stream` is true"));
        }
        let mut options = Fields::nested(options, "stream_options")?;
        include_usage = options.boolean("include_usage")?.unwrap_or(false);
        options.ignore(&["include_obfuscation"]);
        options.finish()?;
    }
    Ok(Delivery { stream, include_usage, token_ids: fields.boolean("return_token_ids")?.unwrap_or(false) })
}

fn seed(fields: &mut Fields) -> Result<Option<u64>, FieldError> {
    let seed = fields.integer("seed")?;
    seed.map(|seed| {
        u64::try_from(seed)
            .map_err(|_| FieldError::new("seed", format!("must be from 0 to 2^63 - 1, got {seed}")))
    })
    .transpose()
}

/// An object from token ids, written as strings, to numbers.
fn logit_bias(fields: &mut Fields) -> Result<Vec<(u64, f64)>, FieldError> {
    let refuse = |what: String| FieldError::new("logit_bias", what);
    match fields.take("logit_bias") {
        None => Ok(Vec::new()),
        Some(Value::Object(map)) => map
            .iter()
            .map(|(id, bias)| {
                let not_an_id = || refuse(format!("must have token ids as keys, got {:?}", shown(id)));
                let not_a_number = || refuse(format!("must have numbers as values, got {}", brief(bias)));
                let id = id.parse().map_err(|_| not_an_id())?;
                let bias = bias.as_f64().ok_or_else(not_a_number)?;
                Ok((id, bias))
            })
            .collect(),
        Some(other) => Err(refuse(format!("must be an object, got {}", brief(&other)))),
    }
}
