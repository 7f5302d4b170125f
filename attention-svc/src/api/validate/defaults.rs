//! `generation_config.json`: what a checkpoint says about sampling, for requests that do not.
use std::path::Path;

use serde_json::Value;

/// Sampling of a request that says nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingDefaults {
    /// 0 is greedy.
    pub temperature: f32,
    /// Nucleus.
    pub top_p: f32,
    /// `None`: all.
    pub top_k: Option<u32>,
    /// Relative to the best one.
    pub min_p: f32,
    /// Of tokens seen.
    pub repetition_penalty: f32,
}

impl Default for SamplingDefaults {
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0, top_k: None, min_p: 0.0, repetition_penalty: 1.0 }
    }
}

impl SamplingDefaults {
    /// Reads the file of a checkpoint folder; without one the defaults are the built-in ones.
    ///
    /// # Errors
    /// A sentence that names the file and the field, when a value could not be asked for by a request either.
    pub fn load(folder: &Path) -> Result<Self, String> {
        let path = folder.join("generation_config.json");
        let failed = |what: String| format!("{}: {what}", path.display());
        match std::fs::read(&path) {
            Ok(bytes) => {
                let file: Value = serde_json::from_slice(&bytes).map_err(|e| failed(e.to_string()))?;
                Self::parse(&file).map_err(failed)
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(e) => Err(failed(e.to_string())),
        }
    }

    /// An explicit `do_sample: false` means greedy, as it does to the checkpoint's authors.
    fn parse(file: &Value) -> Result<Self, String> {
        let built_in = Self::default();
        let number = |name: &str, default: f32, in_range: fn(f64) -> bool| match &file[name] {
            Value::Null => Ok(default),
            value => match value.as_f64().filter(|v| in_range(*v)) {
                Some(v) => Ok(v as f32),
                None => Err(format!("`{name}` is {value}, which is out of range")),
            },
        };
        let greedy = file["do_sample"] == false;
        let temperature = number("temperature", built_in.temperature, |v| (0.0..=100.0).contains(&v))?;
        let top_k = number("top_k", 0.0, |v| v >= -1.0 && v.fract() == 0.0)?;
        Ok(Self {
            temperature: if greedy { 0.0 } else { temperature },
            top_p: number("top_p", built_in.top_p, |v| v > 0.0 && v <= 1.0)?,
            top_k: (top_k > 0.0).then_some(top_k as u32),
            min_p: number("min_p", built_in.min_p, |v| (0.0..=1.0).contains(&v))?,
            repetition_penalty: number("repetition_penalty", built_in.repetition_penalty, |v| {
                v > 0.0 && v <= 2.0
            })?,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_checkpoint_overrides_what_is_built_in() {
        let file = json!({"do_sample": true, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [1, 2]});
        let expected =
            SamplingDefaults { temperature: 0.6, top_p: 0.95, top_k: Some(20), ..Default::default() };
        assert_eq!(SamplingDefaults::parse(&file), Ok(expected));
        assert_eq!(SamplingDefaults::parse(&json!({"top_k": 0})), Ok(SamplingDefaults::default()));
        assert_eq!(
            SamplingDefaults::parse(&json!({"do_sample": false, "temperature": 0.6})).unwrap().temperature,
            0.0
        );
        assert!(SamplingDefaults::parse(&json!({"top_p": 0})).unwrap_err().contains("top_p"));
    }
}
