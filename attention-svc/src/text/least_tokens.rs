//! How many tokens a text has at least, told without tokenizing it: what cannot fit a model is refused before the
//! memory is spent that its tokens would take. Where a tokenizer may drop or swallow text, nothing is claimed.
use std::collections::HashMap;

use serde::Serialize;
use serde_json::Value;
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::{Model, NormalizedString, Normalizer};

use super::utf8::{byte_level_byte, byte_level_bytes};

/// What NFC makes of a text has at least a quarter of its bytes: the longest sequence that becomes one character has
/// four, and the single characters that become shorter ones (the Kelvin sign) lose two bytes of three.
const NFC_SHRINKS: usize = 4;

/// What one token can stand for.
#[derive(Clone, Debug)]
pub(super) struct LeastTokens {
    /// Most counted bytes of a text that become one token.
    max_bytes: usize,
    /// Bytes that never vanish.
    counted: Box<[bool; 256]>,
}

impl LeastTokens {
    /// `None` unless every token stands for a bounded piece of the text: that is so for byte-pair encodings of bytes,
    /// when no step before them removes anything and no added token swallows the blanks around it.
    pub(super) fn new(inner: &tokenizers::Tokenizer) -> Option<Self> {
        let ModelWrapper::BPE(model) = inner.get_model() else { return None };
        let affix = |affix: &Option<String>| affix.as_ref().is_some_and(|affix| !affix.is_empty());
        if affix(&model.continuing_subword_prefix) || affix(&model.end_of_word_suffix) {
            return None;
        }
        let normalizers = steps(inner.get_normalizer(), "normalizers")?;
        let splits = steps(inner.get_pre_tokenizer(), "pretokenizers")?;
        if !normalizers.iter().all(keeps_bytes) || !splits.iter().all(keeps_text) {
            return None;
        }
        let is_byte_level = |step: &Value| step["type"] == "ByteLevel";
        let byte_level = normalizers.iter().chain(&splits).any(is_byte_level);
        let vocabulary = model.get_vocab();
        let counted = counted(model, &vocabulary, byte_level)?;
        let shrinks = normalizers.iter().any(|step| step["type"] == "NFC");
        if shrinks && !counted.iter().all(|counted| *counted) {
            return None;
        }
        let length = |token: &String| if byte_level { byte_level_bytes(token).len() } else { token.len() };
        let longest = vocabulary.keys().map(length).max().unwrap_or(0).max(longest_added(inner)?).max(1);
        Some(Self { max_bytes: if shrinks { longest * NFC_SHRINKS } else { longest }, counted })
    }

    /// Tokens of a text: at least so many.
    pub(super) fn of(&self, text: &str) -> usize {
        let bytes = text.bytes().filter(|byte| self.counted[usize::from(*byte)]).count();
        bytes.div_ceil(self.max_bytes)
    }
}

/// The parts of a normalizer or a pre-tokenizer, as `tokenizer.json` has them.
fn steps(whole: Option<&impl Serialize>, parts: &str) -> Option<Vec<Value>> {
    let Some(whole) = whole else { return Some(Vec::new()) };
    match serde_json::to_value(whole).ok()? {
        Value::Object(mut step) if step.get("type")? == "Sequence" => match step.remove(parts)? {
            Value::Array(steps) => Some(steps),
            _ => None,
        },
        step => Some(vec![step]),
    }
}

/// Whether a normalizer leaves at least as many bytes as there were, or is NFC.
fn keeps_bytes(step: &Value) -> bool {
    match step["type"].as_str() {
        Some("NFC" | "Prepend" | "ByteLevel") => true,
        Some("Replace") => match (step["pattern"]["String"].as_str(), step["content"].as_str()) {
            (Some(pattern), Some(content)) => content.len() >= pattern.len(),
            _ => false,
        },
        _ => false,
    }
}

/// Whether a pre-tokenizer only cuts.
fn keeps_text(step: &Value) -> bool {
    match step["type"].as_str() {
        Some("ByteLevel" | "Digits" | "Metaspace") => true,
        Some("Split" | "Punctuation") => step["behavior"].as_str().is_some_and(|done| done != "Removed"),
        _ => false,
    }
}

/// Bytes that the vocabulary has tokens for: what it has none for may vanish.
fn counted(model: &BPE, vocabulary: &HashMap<String, u32>, byte_level: bool) -> Option<Box<[bool; 256]>> {
    let mut counted = Box::new([false; 256]);
    if byte_level {
        for token in vocabulary.keys() {
            let mut characters = token.chars();
            if let (Some(character), None) = (characters.next(), characters.next())
                && let Some(byte) = byte_level_byte(character)
            {
                counted[usize::from(byte)] = true;
            }
        }
        return Some(counted);
    }
    let has_byte = |byte: usize| model.token_to_id(&format!("<0x{byte:02X}>")).is_some();
    counted.fill(true);
    (model.byte_fallback && (0..256).all(has_byte)).then_some(counted)
}

/// Bytes of the longest added token; `None` when one of them takes the blanks beside it along.
fn longest_added(inner: &tokenizers::Tokenizer) -> Option<usize> {
    let mut longest = 0;
    for added in inner.get_added_tokens_decoder().values() {
        if added.lstrip || added.rstrip {
            return None;
        }
        longest = longest.max(added.content.len());
        // Looked for after normalization, which may have written it longer.
        if let (true, Some(normalizer)) = (added.normalized, inner.get_normalizer()) {
            let mut normalized = NormalizedString::from(added.content.as_str());
            normalizer.normalize(&mut normalized).ok()?;
            longest = longest.max(normalized.get().len());
        }
    }
    Some(longest)
}
