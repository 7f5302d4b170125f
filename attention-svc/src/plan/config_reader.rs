//! From `--model` to a [`ModelShape`]: a name from the list, a `config.json`, or a folder that holds one.
//!
//! A checkpoint of a served architecture is read by the one reader everything else uses
//! ([`ModelConfig`](afd_common::config::model::ModelConfig)). For others (gpt-oss, DeepSeek-V3.2 and whatever comes next)
//! this reader looks for sizes alone, under every name that the known dialects give them, and names the field it lacks.
use std::path::Path;

use afd_common::config::model::ModelConfig;
use serde_json::{Map, Value};

use super::shape::{AttentionShape, ElementType, Indexer, ModelShape, MoeShape, StoredAs, Window};

/// Dimensions of published models, as their `config.json` gives them.
const PUBLISHED: [(&str, &str); 9] = [
    ("deepseek-v2-lite", include_str!("models/deepseek-v2-lite.json")),
    ("deepseek-v3", include_str!("models/deepseek-v3.json")),
    ("deepseek-v3.2", include_str!("models/deepseek-v3.2.json")),
    ("kimi-k2", include_str!("models/kimi-k2.json")),
    ("qwen3-30b-a3b", include_str!("models/qwen3-30b-a3b.json")),
    ("qwen3-235b-a22b-fp8", include_str!("models/qwen3-235b-a22b-fp8.json")),
    ("gpt-oss-120b", include_str!("models/gpt-oss-120b.json")),
    ("mixtral-8x7b", include_str!("models/mixtral-8x7b.json")),
    ("mixtral-8x22b", include_str!("models/mixtral-8x22b.json")),
];

/// Why a model cannot be planned for. A retry does not help.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// Not a known name, and not a file or a folder with a `config.json`.
    #[error("model `{given}`: {what}; give a config.json, a folder that holds one, or one of {known}")]
    NotFound {
        /// As given.
        given: String,
        /// What was tried.
        what: String,
        /// The built-in names, comma separated.
        known: String,
    },
    /// The file is there and is not a JSON object.
    #[error("{path}: {what}")]
    NotJson {
        /// Which file.
        path: String,
        /// Why.
        what: String,
    },
    /// A size the arithmetic needs is absent.
    #[error("{model}: `{field}` is missing{alternatives}")]
    Missing {
        /// Which model.
        model: String,
        /// The name it has in the newest dialect.
        field: &'static str,
        /// The other names that were looked for.
        alternatives: String,
    },
    /// A size is there and cannot be right.
    #[error("{model}: `{field}` is {value}; {what}")]
    Absurd {
        /// Which model.
        model: String,
        /// The name under which it was found.
        field: String,
        /// As in the file.
        value: String,
        /// What would be accepted.
        what: String,
    },
}

/// Names that `--model` knows without a file.
pub fn published_names() -> impl Iterator<Item = &'static str> {
    PUBLISHED.iter().map(|(name, _)| *name)
}

/// Resolves `--model`.
///
/// # Errors
/// [`ModelError`] names the file and the field.
pub fn load(given: &str) -> Result<ModelShape, ModelError> {
    if let Some((name, text)) = PUBLISHED.iter().find(|(name, _)| *name == given) {
        return read_object(name, text.as_bytes()).and_then(|object| from_object(name, &object));
    }
    let path = Path::new(given);
    let file = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
    let bytes = std::fs::read(&file).map_err(|error| ModelError::NotFound {
        given: given.into(),
        what: format!("{}: {error}", file.display()),
        known: published_names().collect::<Vec<_>>().join(", "),
    })?;
    let label = file.display().to_string();
    let object = read_object(&label, &bytes)?;
    match ModelConfig::from_json(&object, None) {
        Ok(config) => Ok(ModelShape { name: folder_name(&file), ..ModelShape::from(&config) }),
        Err(_) => from_object(&label, &object),
    }
}

/// The model's folder, which is how people call it.
fn folder_name(file: &Path) -> String {
    let folder = file.parent().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    folder.unwrap_or_else(|| file.display().to_string())
}

fn read_object(label: &str, bytes: &[u8]) -> Result<Map<String, Value>, ModelError> {
    let fail = |what: String| ModelError::NotJson { path: label.into(), what };
    match serde_json::from_slice(bytes).map_err(|error| fail(error.to_string()))? {
        Value::Object(object) => Ok(object),
        _ => Err(fail("not a JSON object".into())),
    }
}

/// Reads sizes out of any dialect. A multimodal configuration is entered through its `text_config`.
///
/// # Errors
/// [`ModelError::Missing`] and [`ModelError::Absurd`] name the field.
pub fn from_object(model: &str, object: &Map<String, Value>) -> Result<ModelShape, ModelError> {
    let object = object.get("text_config").and_then(Value::as_object).unwrap_or(object);
    let sizes = Sizes { model, object };
    let num_layers = sizes.required(&["num_hidden_layers", "n_layer"], 10_000)?;
    let hidden = sizes.required(&["hidden_size", "n_embd"], 1_000_000)?;
    let moe = sizes.moe()?;
    let num_moe_layers = if moe.is_some() { sizes.num_moe_layers(num_layers)? } else { 0 };
    let num_dense_layers = num_layers - num_moe_layers;
    Ok(ModelShape {
        name: model.into(),
        hidden,
        vocab: sizes.required(&["vocab_size"], 100_000_000)?,
        tied_head: object.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(false),
        attention: sizes.attention(num_layers, hidden)?,
        num_moe_layers,
        moe,
        num_dense_layers,
        dense_intermediate: match num_dense_layers {
            0 => 0,
            _ => sizes.required(&["intermediate_size"], 10_000_000)?,
        },
        stored: sizes.stored_as(),
    })
}

/// Access to sizes by any of their names.
struct Sizes<'a> {
    model: &'a str,
    object: &'a Map<String, Value>,
}

impl Sizes<'_> {
    /// `None` when no name is there or all are null.
    fn optional(&self, names: &[&'static str], max: u32) -> Result<Option<u32>, ModelError> {
        let found = names
            .iter()
            .find_map(|name| Some((*name, self.object.get(*name)?)))
            .filter(|(_, v)| !v.is_null());
        let Some((name, value)) = found else { return Ok(None) };
        let number = value.as_u64().filter(|number| *number <= u64::from(max));
        let absurd = || ModelError::Absurd {
            model: self.model.into(),
            field: name.into(),
            value: value.to_string(),
            what: format!("a whole number from 0 to {max} is expected"),
        };
        number.map(|number| Some(number as u32)).ok_or_else(absurd)
    }

    /// At least 1.
    fn required(&self, names: &[&'static str], max: u32) -> Result<u32, ModelError> {
        match self.optional(names, max)? {
            Some(0) => Err(ModelError::Absurd {
                model: self.model.into(),
                field: names[0].into(),
                value: "0".into(),
                what: "at least 1 is expected".into(),
            }),
            Some(number) => Ok(number),
            None => Err(ModelError::Missing {
                model: self.model.into(),
                field: names[0],
                alternatives: match &names[1..] {
                    [] => String::new(),
                    others => format!(" (also looked for {})", others.join(", ")),
                },
            }),
        }
    }

    fn moe(&self) -> Result<Option<MoeShape>, ModelError> {
        let experts = ["num_experts", "n_routed_experts", "num_local_experts"];
        let Some(num_experts) = self.optional(&experts, 100_000)?.filter(|count| *count > 1) else {
            return Ok(None);
        };
        let per_token = ["num_experts_per_tok", "experts_per_token", "moe_topk"];
        let experts_per_token = self.required(&per_token, num_experts)?;
        // Mixtral and gpt-oss have no dense layer and call the expert's size `intermediate_size`.
        let intermediate = self.required(&["moe_intermediate_size", "intermediate_size"], 10_000_000)?;
        let shared_experts = self.optional(&["n_shared_experts", "num_shared_experts"], 1000)?.unwrap_or(0);
        let shared = self.optional(&["shared_expert_intermediate_size"], 10_000_000)?;
        let shared_intermediate = shared.unwrap_or(shared_experts * intermediate);
        Ok(Some(MoeShape { num_experts, experts_per_token, intermediate, shared_intermediate }))
    }

    /// DeepSeek: from `first_k_dense_replace` on, every `moe_layer_freq`-th; Qwen: every `decoder_sparse_step`-th that is
    /// not in `mlp_only_layers`; others: all.
    fn num_moe_layers(&self, num_layers: u32) -> Result<u32, ModelError> {
        let first = self.optional(&["first_k_dense_replace"], num_layers)?.unwrap_or(0);
        let freq = self.optional(&["moe_layer_freq"], num_layers)?.unwrap_or(1).max(1);
        let step = self.optional(&["decoder_sparse_step"], num_layers)?.unwrap_or(1).max(1);
        let only = self.object.get("mlp_only_layers").and_then(Value::as_array);
        let dense =
            |layer: u32| only.is_some_and(|list| list.iter().any(|l| l.as_u64() == Some(u64::from(layer))));
        let sparse = |layer: &u32| {
            *layer >= first
                && layer.is_multiple_of(freq)
                && (layer + 1).is_multiple_of(step)
                && !dense(*layer)
        };
        Ok((0..num_layers).filter(sparse).count() as u32)
    }

    fn attention(&self, num_layers: u32, hidden: u32) -> Result<AttentionShape, ModelError> {
        let heads = self.required(&["num_attention_heads", "n_head"], 100_000)?;
        if let Some(kv_lora_rank) = self.optional(&["kv_lora_rank"], 1_000_000)?.filter(|rank| *rank > 0) {
            return Ok(AttentionShape::Mla {
                heads,
                q_lora_rank: self.optional(&["q_lora_rank"], 1_000_000)?,
                kv_lora_rank,
                qk_nope_head_dim: self.required(&["qk_nope_head_dim"], 100_000)?,
                qk_rope_head_dim: self.required(&["qk_rope_head_dim"], 100_000)?,
                v_head_dim: self.required(&["v_head_dim"], 100_000)?,
                indexer: self.indexer()?,
            });
        }
        let head_dim = self.optional(&["head_dim"], 100_000)?.unwrap_or(hidden / heads);
        let window = self.optional(&["sliding_window"], u32::MAX)?.filter(|tokens| *tokens > 0);
        Ok(AttentionShape::Gqa {
            heads,
            kv_heads: self.optional(&["num_key_value_heads"], heads)?.unwrap_or(heads),
            head_dim,
            window: window.map(|tokens| Window { tokens, num_layers: self.num_window_layers(num_layers) }),
        })
    }

    fn num_window_layers(&self, num_layers: u32) -> u32 {
        let Some(types) = self.object.get("layer_types").and_then(Value::as_array) else { return num_layers };
        types.iter().filter(|layer| layer.as_str() == Some("sliding_attention")).count() as u32
    }

    fn indexer(&self) -> Result<Option<Indexer>, ModelError> {
        let Some(top_k) = self.optional(&["index_topk"], 100_000_000)? else { return Ok(None) };
        Ok(Some(Indexer {
            heads: self.required(&["index_n_heads"], 100_000)?,
            head_dim: self.required(&["index_head_dim"], 100_000)?,
            top_k,
        }))
    }

    /// Quantisation reaches the projections and experts; embedding, head and norms stay as they are. MXFP4 (gpt-oss)
    /// reaches the experts only.
    fn stored_as(&self) -> StoredAs {
        let dtype = self.object.get("dtype").or(self.object.get("torch_dtype")).and_then(Value::as_str);
        let plain = if dtype == Some("float32") { ElementType::F32 } else { ElementType::Bf16 };
        let quantization = self.object.get("quantization_config").and_then(Value::as_object);
        let method = quantization.and_then(|q| q.get("quant_method")).and_then(Value::as_str).unwrap_or("");
        match method {
            "fp8" => StoredAs { attention: ElementType::Fp8, ffn: ElementType::Fp8, head: plain },
            "int8" | "w8a8" => StoredAs { attention: ElementType::Int8, ffn: ElementType::Int8, head: plain },
            "mxfp4" => StoredAs { attention: plain, ffn: ElementType::Mxfp4, head: plain },
            _ => StoredAs { attention: plain, ffn: plain, head: plain },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(name: &str) -> Map<String, Value> {
        let (_, text) = PUBLISHED.iter().find(|(known, _)| *known == name).unwrap();
        read_object(name, text.as_bytes()).unwrap()
    }

    #[test]
    fn published_shapes_have_their_published_sizes() {
        let shape = load("deepseek-v3.2").unwrap();
        assert_eq!((shape.num_dense_layers, shape.num_moe_layers), (3, 58));
        assert_eq!(shape.stored.ffn, ElementType::Fp8);
        let AttentionShape::Mla { indexer: Some(indexer), .. } = shape.attention else { panic!("{shape:?}") };
        assert_eq!(indexer.top_k, 2048);

        let shape = load("gpt-oss-120b").unwrap();
        let AttentionShape::Gqa { head_dim: 64, window: Some(window), .. } = shape.attention else {
            panic!("{shape:?}")
        };
        assert_eq!(window, Window { tokens: 128, num_layers: 18 });
        assert_eq!(shape.stored.ffn, ElementType::Mxfp4);
        assert_eq!(load("kimi-k2").unwrap().moe.unwrap().num_experts, 384);
    }

    #[test]
    fn served_architectures_read_the_same_through_both_readers() {
        for name in ["deepseek-v2-lite", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3"] {
            let strict = ModelConfig::from_json(&object(name), None).unwrap();
            let strict = ModelShape { name: name.into(), ..ModelShape::from(&strict) };
            assert_eq!(strict, from_object(name, &object(name)).unwrap(), "{name}");
        }
    }

    #[test]
    fn a_missing_size_is_named() {
        for field in ["num_hidden_layers", "hidden_size", "num_attention_heads", "v_head_dim", "vocab_size"] {
            let mut object = object("deepseek-v3.2");
            object.remove(field);
            let error = from_object("some model", &object).unwrap_err();
            assert!(error.to_string().contains(field), "{error}");
        }
        let mut object = object("deepseek-v3.2");
        object.insert("hidden_size".into(), Value::from(-4));
        let error = from_object("some model", &object).unwrap_err();
        assert!(matches!(&error, ModelError::Absurd { field, .. } if field == "hidden_size"), "{error}");
    }

    #[test]
    fn a_file_that_is_not_there_is_answered_with_the_names_that_are() {
        let error = load("/no/such/model").unwrap_err();
        assert!(error.to_string().contains("deepseek-v3.2"), "{error}");
    }

    #[test]
    fn a_folder_or_its_config_will_do() {
        let folder = tempfile::tempdir().unwrap();
        let text = PUBLISHED.iter().find(|(name, _)| *name == "qwen3-30b-a3b").unwrap().1;
        std::fs::write(folder.path().join("config.json"), text).unwrap();
        let by_folder = load(folder.path().to_str().unwrap()).unwrap();
        assert_eq!(by_folder, load(folder.path().join("config.json").to_str().unwrap()).unwrap());
        std::fs::write(folder.path().join("config.json"), "[]").unwrap();
        assert!(matches!(load(folder.path().to_str().unwrap()), Err(ModelError::NotJson { .. })));
    }
}
