//! How tokens are chosen, checked.
use super::{FieldError, ModelLimits, whole};
use crate::request::SamplingParams;

/// Below this a temperature is greedy: dividing by it would leave the range of f32, and no other token than the best
/// one could be chosen anyway.
const GREEDY_BELOW: f32 = 1e-5;
/// Most entries of `logit_bias`.
const MAX_BIASES: usize = 1024;

/// Sampling fields as the caller wrote them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingSpec {
    /// 0 is greedy.
    pub temperature: Option<f64>,
    /// Nucleus.
    pub top_p: Option<f64>,
    /// 0 and -1 are all.
    pub top_k: Option<i64>,
    /// Relative to the best one.
    pub min_p: Option<f64>,
    /// Of tokens seen.
    pub repetition_penalty: Option<f64>,
    /// Of tokens generated.
    pub presence_penalty: Option<f64>,
    /// Of tokens generated, each time.
    pub frequency_penalty: Option<f64>,
    /// Repeatable.
    pub seed: Option<u64>,
    /// Token id and what is added to its logit.
    pub logit_bias: Vec<(u64, f64)>,
}

impl SamplingSpec {
    /// Checks every field; `prefix` goes before their names in errors.
    pub(super) fn check(self, limits: &ModelLimits, prefix: &str) -> Result<SamplingParams, FieldError> {
        let defaults = &limits.defaults;
        let number = |name: &str, value: Option<f64>, default: f32, bounds: Bounds| match value {
            None => Ok(default),
            Some(value) => bounds.check(&format!("{prefix}{name}"), value),
        };
        let temperature =
            number("temperature", self.temperature, defaults.temperature, Bounds::closed(0.0, 100.0))?;
        Ok(SamplingParams {
            temperature: if temperature < GREEDY_BELOW { 0.0 } else { temperature },
            top_p: number("top_p", self.top_p, defaults.top_p, Bounds::above(0.0, 1.0))?,
            top_k: top_k(&format!("{prefix}top_k"), self.top_k, limits)?,
            min_p: number("min_p", self.min_p, defaults.min_p, Bounds::closed(0.0, 1.0))?,
            repetition_penalty: number(
                "repetition_penalty",
                self.repetition_penalty,
                defaults.repetition_penalty,
                Bounds::above(0.0, 2.0),
            )?,
            presence_penalty: number(
                "presence_penalty",
                self.presence_penalty,
                0.0,
                Bounds::closed(-2.0, 2.0),
            )?,
            frequency_penalty: number(
                "frequency_penalty",
                self.frequency_penalty,
                0.0,
                Bounds::closed(-2.0, 2.0),
            )?,
            seed: self.seed,
            logit_bias: logit_bias(&format!("{prefix}logit_bias"), &self.logit_bias, limits)?,
        })
    }
}

fn top_k(name: &str, value: Option<i64>, limits: &ModelLimits) -> Result<Option<u32>, FieldError> {
    match value {
        None => Ok(limits.defaults.top_k.map(|k| k.min(limits.vocab_size))),
        Some(-1 | 0) => Ok(None),
        Some(k) => {
            let vocab_size = u64::from(limits.vocab_size);
            let k = whole(name, k, 1, vocab_size).map_err(|_| {
                FieldError::new(name, format!("must be from 1 to {vocab_size}, or 0 or -1 for all, got {k}"))
            })?;
            Ok(u32::try_from(k).ok())
        }
    }
}

fn logit_bias(
    name: &str,
    biases: &[(u64, f64)],
    limits: &ModelLimits,
) -> Result<Vec<(u32, f32)>, FieldError> {
    if biases.len() > MAX_BIASES {
        return Err(FieldError::new(
            name,
            format!("must have at most {MAX_BIASES} entries, got {}", biases.len()),
        ));
    }
    biases
        .iter()
        .map(|(id, bias)| match u32::try_from(*id).ok().filter(|id| *id < limits.vocab_size) {
            Some(id) => Ok((id, Bounds::closed(-100.0, 100.0).check(name, *bias)?)),
            None => {
                Err(FieldError::new(name, format!("must have ids below {}, got {id}", limits.vocab_size)))
            }
        })
        .collect()
}

/// An interval; NaN is in none.
#[derive(Clone, Copy)]
struct Bounds {
    low: f64,
    low_is_in: bool,
    high: f64,
}

impl Bounds {
    fn closed(low: f64, high: f64) -> Self {
        Self { low, low_is_in: true, high }
    }

    fn above(low: f64, high: f64) -> Self {
        Self { low, low_is_in: false, high }
    }

    fn check(self, name: &str, value: f64) -> Result<f32, FieldError> {
        let above = if self.low_is_in { value >= self.low } else { value > self.low };
        if above && value <= self.high {
            let narrow = value as f32;
            // A value too small for f32 must not become the bound that it is not.
            return Ok(if self.low_is_in || narrow > 0.0 { narrow } else { f32::MIN_POSITIVE });
        }
        let open = if self.low_is_in { '[' } else { '(' };
        Err(FieldError::new(name, format!("must be in {open}{}, {}], got {value}", self.low, self.high)))
    }
}
