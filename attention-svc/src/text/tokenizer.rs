//! `tokenizer.json` of a checkpoint: text to ids, ids to text or bytes.
//!
//! `tokenizer.json` is trusted for everything but the beginning-of-text token, where an explicit `add_bos_token` in
//! `tokenizer_config.json` wins. Its truncation and padding are never applied.
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use tokenizers::decoders::DecoderWrapper;

use super::TextError;
use super::least_tokens::LeastTokens;
use super::settings::TextSettings;
use super::utf8::byte_level_bytes;

/// Whether text gets the tokenizer's own special tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// A beginning-of-text token, where the tokenizer asks for one.
    Add,
    /// None: the text (a rendered chat) has its own.
    AsWritten,
}

/// How ids become text, as far as the incremental detokenizer must know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    /// Each token is a string of bytes (GPT-2's alphabet); the text is their concatenation.
    ByteLevel,
    /// Tokens are text; `<0xE4>` and the like are bytes, and a run of them is decoded as a whole.
    ByteFallback,
    /// Anything else: only the tokenizer knows.
    Other,
    /// No tokenizer: the text of a token is its number.
    Numbers,
}

/// A checkpoint's tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    /// Absent for [`Scheme::Numbers`].
    inner: Option<Box<tokenizers::Tokenizer>>,
    pub(super) scheme: Scheme,
    special: HashSet<u32>,
    bos: BosRule,
    /// Absent when a text of any length may be few tokens.
    least: Option<LeastTokens>,
}

/// What is done to the ids that `tokenizer.json` gives when it may add special tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BosRule {
    AsGiven,
    Prepend(u32),
    DropFirst,
}

impl Tokenizer {
    /// Reads `tokenizer.json`.
    ///
    /// # Errors
    /// [`TextError::File`] names the file.
    pub fn load(folder: &Path, settings: &TextSettings) -> Result<Self, TextError> {
        let path = folder.join("tokenizer.json");
        let failed = |what: String| TextError::File { path: path.display().to_string(), what };
        let bytes = std::fs::read(&path).map_err(|e| failed(e.to_string()))?;
        // The library panics on some files where it should refuse them; what it was building is gone then.
        let loaded = catch_unwind(AssertUnwindSafe(|| Self::parse(&bytes, settings)));
        loaded.unwrap_or_else(|_| Err("the tokenizers library cannot read it".into())).map_err(failed)
    }

    fn parse(bytes: &[u8], settings: &TextSettings) -> Result<Self, String> {
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| e.to_string())?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| e.to_string())?;
        let special =
            inner.get_added_tokens_decoder().iter().filter(|(_, t)| t.special).map(|(id, _)| *id).collect();
        let scheme = inner.get_decoder().map_or(Scheme::Other, scheme_of);
        // Parts that cannot work show with any text, rather here than in a request.
        drop(inner.encode_fast("a", true));
        let bos = bos_rule(&inner, settings);
        let least = LeastTokens::new(&inner);
        Ok(Self { inner: Some(Box::new(inner)), scheme, special, bos, least })
    }

    /// For weights without a tokenizer: text cannot be read, and the text of token 7 is `" 7"`.
    pub fn none() -> Self {
        let (scheme, special) = (Scheme::Numbers, HashSet::new());
        Self { inner: None, scheme, special, bos: BosRule::AsGiven, least: None }
    }

    /// Text to ids. Takes time proportional to the text: not for the engine's thread, nor, when long, for a task.
    ///
    /// # Errors
    /// [`TextError::NoTokenizer`], or what the tokenizer said.
    pub fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, TextError> {
        let inner = self.inner.as_ref().ok_or(TextError::NoTokenizer)?;
        let add = special == SpecialTokens::Add;
        let encoding = inner.encode_fast(text, add).map_err(|e| TextError::Tokenizer(e.to_string()))?;
        let mut ids = encoding.get_ids().to_vec();
        match (self.bos, special) {
            (BosRule::Prepend(bos), SpecialTokens::Add) => ids.insert(0, bos),
            (BosRule::DropFirst, SpecialTokens::Add) => drop(ids.drain(..1)),
            _ => {}
        }
        Ok(ids)
    }

    /// Tokens that a text has at least, told without tokenizing it; 0 where that cannot be told.
    pub fn least_tokens(&self, text: &str) -> usize {
        self.least.as_ref().map_or(0, |least| least.of(text))
    }

    /// Ids to text, all at once. Ids that the tokenizer does not know have no text.
    ///
    /// # Errors
    /// What the tokenizer said.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, TextError> {
        match &self.inner {
            Some(inner) => {
                inner.decode(ids, skip_special_tokens).map_err(|e| TextError::Tokenizer(e.to_string()))
            }
            None => Ok(ids.iter().map(number_text).collect()),
        }
    }

    /// Whether it is left out of the text when special tokens are skipped.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// The token as it is written in the vocabulary; `None` for an id the tokenizer does not know.
    pub(super) fn token(&self, id: u32) -> Option<String> {
        match &self.inner {
            Some(inner) => inner.id_to_token(id),
            None => Some(number_text(&id)),
        }
    }

    /// What one token contributes to the text, special or not; half a character is possible. Empty for an id that
    /// the tokenizer does not know.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        let Some(token) = self.token(id) else { return Vec::new() };
        match self.scheme {
            Scheme::ByteLevel => byte_level_bytes(&token),
            Scheme::ByteFallback => match fallback_byte(&token) {
                Some(byte) => vec![byte],
                None => token.replace('\u{2581}', " ").into_bytes(),
            },
            Scheme::Other => self.decode(&[id], false).unwrap_or_default().into_bytes(),
            Scheme::Numbers => token.into_bytes(),
        }
    }
}

fn number_text(id: &u32) -> String {
    format!(" {id}")
}

fn scheme_of(decoder: &DecoderWrapper) -> Scheme {
    let steps: &[DecoderWrapper] = match decoder {
        DecoderWrapper::Sequence(sequence) => sequence.get_decoders(),
        single => std::slice::from_ref(single),
    };
    let byte_level_only =
        |d: &DecoderWrapper| matches!(d, DecoderWrapper::ByteLevel(_) | DecoderWrapper::Fuse(_));
    if steps.iter().any(|d| matches!(d, DecoderWrapper::ByteFallback(_))) {
        Scheme::ByteFallback
    } else if steps.iter().all(byte_level_only)
        && steps.first().is_some_and(|d| matches!(d, DecoderWrapper::ByteLevel(_)))
    {
        Scheme::ByteLevel
    } else {
        Scheme::Other
    }
}

/// Compares what `tokenizer.json` does with what `add_bos_token` wants.
fn bos_rule(inner: &tokenizers::Tokenizer, settings: &TextSettings) -> BosRule {
    let bos = settings.special_token("bos_token").and_then(|text| inner.token_to_id(text));
    let (Some(bos), Some(wanted)) = (bos, settings.add_bos_token) else { return BosRule::AsGiven };
    let first = |add| inner.encode_fast("a", add).ok().and_then(|e| e.get_ids().first().copied());
    let given = first(true) == Some(bos) && first(false) != Some(bos);
    match (given, wanted) {
        (false, true) => BosRule::Prepend(bos),
        (true, false) => BosRule::DropFirst,
        _ => BosRule::AsGiven,
    }
}

/// The byte that a token such as `<0xE4>` stands for.
pub(super) fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
}
