//! `config.json` of a checkpoint, both dialects of it, as one typed [`ModelConfig`].
//!
//! Everything after this module works with these types alone; no other place reads `config.json`. A field that would
//! change the result and is not understood is refused by name; fields that cannot change it (initialisers, dropout,
//! losses: [`harmless`]) are ignored; a field that nobody knows is reported. In reading order: `types` (the result),
//! `fields` (typed access to the JSON), `families` (what each architecture means by its fields), `rope`, `moe`.
use std::path::Path;

mod families;
mod fields;
mod harmless;
mod moe;
mod rope;
#[cfg(test)]
mod tests;
mod types;

pub use types::*;

use fields::{Asked, Fields};

/// Why a checkpoint's configuration is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read or is not JSON.
    #[error("{path}: {what}")]
    File {
        /// Which file.
        path: String,
        /// Why.
        what: String,
    },
    /// A field is absent.
    #[error("config.json: `{field}` is missing")]
    Missing {
        /// Its name.
        field: String,
    },
    /// A field has a value that is not served.
    #[error("config.json: `{field}`: {what}")]
    Field {
        /// Its name.
        field: String,
        /// The value and what would be accepted.
        what: String,
    },
    /// The architecture is not in the registry.
    #[error("architecture `{found}` is not served; known: {known}")]
    Architecture {
        /// As in `architectures`.
        found: String,
        /// The registry, comma separated.
        known: String,
    },
}

impl ModelConfig {
    /// Reads `config.json` (and `generation_config.json`, for the EOS ids) of a checkpoint folder. Fields that nobody knows
    /// are logged, all of them once.
    ///
    /// # Errors
    /// [`ConfigError`] names the field; a retry does not help.
    pub fn load(folder: &Path) -> Result<Self, ConfigError> {
        let config = read_object(&folder.join("config.json"))?;
        let generation_path = folder.join("generation_config.json");
        let generation = generation_path.exists().then(|| read_object(&generation_path)).transpose()?;
        let (read, unknown) = Self::read(&config, generation.as_ref())?;
        if !unknown.is_empty() {
            tracing::warn!(
                fields = unknown.join(", "),
                "config.json has fields that are not known here and not used: if one of them changes what the model computes, \
                 its answers are wrong"
            );
        }
        Ok(read)
    }

    /// The same from parsed files.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn from_json(
        config: &serde_json::Map<String, serde_json::Value>,
        generation: Option<&serde_json::Map<String, serde_json::Value>>,
    ) -> Result<Self, ConfigError> {
        Self::read(config, generation).map(|(read, _)| read)
    }

    /// The same, with the names of the fields that nobody knows.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn read(
        config: &serde_json::Map<String, serde_json::Value>,
        generation: Option<&serde_json::Map<String, serde_json::Value>>,
    ) -> Result<(Self, Vec<String>), ConfigError> {
        let (asked, of_generation) = (Asked::default(), Asked::default());
        let fields = Fields::new(config, "", &asked);
        let generation = generation.map(|map| Fields::new(map, "generation_config.", &of_generation));
        let read = families::read(&fields, generation)?;
        Ok((read, fields.unknown()))
    }

    /// Everything that decides what the layers compute, in a form that is equal exactly when that is: the part of a
    /// model's fingerprint that comes from its configuration. Token ids are left out; they steer requests, not layers.
    pub fn canonical_json(&self) -> String {
        let computed = Self { bos_token_id: None, eos_token_ids: Vec::new(), ..self.clone() };
        serde_json::to_string(&computed).unwrap_or_else(|error| format!("not serialisable: {error}"))
    }

    /// Number of decoder layers.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// The mixture of experts of a layer, if it is one.
    pub fn moe(&self, layer: usize) -> Option<&MoeConfig> {
        match self.layers.get(layer) {
            Some(FfnConfig::Moe(moe)) => Some(moe),
            _ => None,
        }
    }

    /// Whether some layer is a mixture of experts.
    pub fn has_experts(&self) -> bool {
        (0..self.num_layers()).any(|layer| self.moe(layer).is_some())
    }

    /// Whether some layer has shared experts.
    pub fn has_shared_experts(&self) -> bool {
        (0..self.num_layers()).filter_map(|layer| self.moe(layer)).any(|moe| moe.shared_intermediate_size > 0)
    }
}

fn read_object(path: &Path) -> Result<serde_json::Map<String, serde_json::Value>, ConfigError> {
    let fail = |what: String| ConfigError::File { path: path.display().to_string(), what };
    let text = std::fs::read(path).map_err(|error| fail(error.to_string()))?;
    match serde_json::from_slice(&text).map_err(|error| fail(error.to_string()))? {
        serde_json::Value::Object(map) => Ok(map),
        _ => Err(fail("not a JSON object".into())),
    }
}
