//! A placement as people write it: JSON (by the file's name) or TOML.
//!
//! ```toml
//! # One list a shard, for every layer that has no entry of its own. Expert 3 has a copy on each.
//! experts = [[0, 1, 2, 3], [3, 4, 5, 6, 7]]
//!
//! [layers]
//! 5 = [[0, 2, 4, 6], [1, 3, 5, 7]]
//! ```
//!
//! Written it is JSON with a line for each shard, so that what two files say can be compared by eye and by diff.
use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{LayerPlacement, Placement, PlacementError};
use crate::config::model::ModelConfig;

/// See the module's head.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlacementFile {
    /// Experts of each shard, in layers that are not listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<Vec<Vec<usize>>>,
    /// Experts of each shard by layer.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub layers: BTreeMap<String, Vec<Vec<usize>>>,
}

impl PlacementFile {
    /// Reads a file.
    ///
    /// # Errors
    /// What is wrong with it, without its name.
    pub fn read(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
        if path.extension().is_some_and(|extension| extension == "json") {
            return serde_json::from_str(&text).map_err(|error| error.to_string());
        }
        toml::from_str(&text).map_err(|error| error.to_string().trim_end().replace('\n', " "))
    }

    /// As JSON: one shard's experts a line, layers by number.
    pub fn to_json(&self) -> String {
        let mut fields = Vec::new();
        if let Some(shards) = &self.experts {
            fields.push(format!("  \"experts\": {}", shards_json(shards, "  ")));
        }
        if !self.layers.is_empty() {
            let mut layers: Vec<_> = self.layers.iter().collect();
            // What is no number stays where its text puts it.
            layers.sort_by_key(|(name, _)| name.parse::<usize>().unwrap_or(usize::MAX));
            let layer = |(name, shards): (&String, &Vec<Vec<usize>>)| {
                format!("    {}: {}", serde_json::Value::from(name.as_str()), shards_json(shards, "    "))
            };
            let layers: Vec<_> = layers.into_iter().map(layer).collect();
            fields.push(format!("  \"layers\": {{\n{}\n  }}", layers.join(",\n")));
        }
        match fields.is_empty() {
            true => "{}\n".to_owned(),
            false => format!("{{\n{}\n}}\n", fields.join(",\n")),
        }
    }

    /// Compares it with a model and, where it is known, with the number of shards of the deployment.
    ///
    /// # Errors
    /// The first [`PlacementError`], layer by layer.
    pub fn placement(
        &self,
        config: &ModelConfig,
        num_shards: Option<u32>,
    ) -> Result<Placement, PlacementError> {
        self.check_layers(config)?;
        let listed = self.experts.as_ref().or_else(|| self.layers.values().next()).map(Vec::len);
        let expected = num_shards.map(|count| count as usize).or(listed).unwrap_or(1);
        let place = |layer: usize| {
            let Some(moe) = config.moe(layer) else { return Ok(None) };
            let own = self.layers.get(&layer.to_string()).map(|lists| (format!("layers.{layer}"), lists));
            let default = || self.experts.as_ref().map(|lists| ("experts".to_owned(), lists));
            let Some((field, lists)) = own.or_else(default) else {
                return Err(PlacementError::Missing { layer, num_experts: moe.num_experts });
            };
            if lists.len() != expected {
                return Err(PlacementError::Shards { field, found: lists.len(), expected });
            }
            LayerPlacement::checked(lists, moe.num_experts, &field, layer).map(Some)
        };
        let layers = (0..config.num_layers()).map(place).collect::<Result<_, _>>()?;
        Ok(Placement { num_shards: expected as u32, layers })
    }

    fn check_layers(&self, config: &ModelConfig) -> Result<(), PlacementError> {
        for name in self.layers.keys() {
            let what = match name.parse::<usize>() {
                // "07" would never be looked up.
                Ok(layer) if layer.to_string() == *name && config.moe(layer).is_some() => continue,
                Ok(layer) if layer.to_string() != *name => format!("is not written plainly: `{layer}`"),
                Ok(layer) if layer < config.num_layers() => "is a dense layer of this model".to_owned(),
                _ => format!("is no layer; the model has {}", config.num_layers()),
            };
            return Err(PlacementError::Layer { layer: name.clone(), what });
        }
        Ok(())
    }
}

/// A list of lists whose inner ones have a line each, behind an indentation that the closing bracket has too.
fn shards_json(shards: &[Vec<usize>], indent: &str) -> String {
    if shards.is_empty() {
        return "[]".to_owned();
    }
    // A list of numbers looks alike in Rust and in JSON.
    let lines: Vec<_> = shards.iter().map(|experts| format!("{indent}  {experts:?}")).collect();
    format!("[\n{}\n{indent}]", lines.join(",\n"))
}
