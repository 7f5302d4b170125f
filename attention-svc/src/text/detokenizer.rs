//! Ids to text, one token at a time. The pieces never show half a character, and put together they are byte for byte
//! what [`Tokenizer::decode`] gives for all the ids at once.
use std::sync::Arc;

use super::TextError;
use super::tokenizer::{Scheme, Tokenizer, fallback_byte};
use super::utf8::{Utf8Stream, byte_level_bytes};

/// Incremental detokenizer of one sequence.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special_tokens: bool,
    state: State,
}

#[derive(Debug)]
enum State {
    /// The text is a concatenation of bytes.
    Bytes(Utf8Stream),
    /// The text of a token may depend on its neighbours, so the last emitted piece is decoded again as context.
    Window {
        /// Tokens of the last piece, then those not emitted yet.
        ids: Vec<u32>,
        /// How many of `ids` belong to the last piece.
        emitted: usize,
        /// Length of the text of the last piece when decoded alone, bytes.
        emitted_bytes: usize,
    },
}

impl Detokenizer {
    /// Nothing decoded yet.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special_tokens: bool) -> Self {
        let state = match tokenizer.scheme {
            Scheme::ByteLevel | Scheme::Numbers => State::Bytes(Utf8Stream::default()),
            Scheme::ByteFallback | Scheme::Other => {
                State::Window { ids: Vec::new(), emitted: 0, emitted_bytes: 0 }
            }
        };
        Self { tokenizer, skip_special_tokens, state }
    }

    /// Takes the next token, returns the text that became certain.
    ///
    /// # Errors
    /// What the tokenizer said; the text before it stands.
    pub fn push(&mut self, id: u32) -> Result<String, TextError> {
        if self.skip_special_tokens && self.tokenizer.is_special(id) {
            return Ok(String::new());
        }
        let Some(token) = self.tokenizer.token(id) else { return Ok(String::new()) };
        match &mut self.state {
            State::Bytes(stream) if self.tokenizer.scheme == Scheme::Numbers => {
                Ok(stream.push(token.as_bytes()))
            }
            State::Bytes(stream) => Ok(stream.push(&byte_level_bytes(&token))),
            State::Window { ids, .. } => {
                ids.push(id);
                // A run of byte tokens is decoded as a whole: one that is not UTF-8 turns all of it into U+FFFD, so
                // nothing of it is certain before it ends.
                if self.tokenizer.scheme == Scheme::ByteFallback && fallback_byte(&token).is_some() {
                    return Ok(String::new());
                }
                self.advance(Pending::Hold)
            }
        }
    }

    /// The sequence ended: returns what was still held back.
    ///
    /// # Errors
    /// What the tokenizer said.
    pub fn finish(&mut self) -> Result<String, TextError> {
        match &mut self.state {
            State::Bytes(stream) => Ok(stream.finish()),
            State::Window { .. } => self.advance(Pending::Emit),
        }
    }

    fn advance(&mut self, pending: Pending) -> Result<String, TextError> {
        let State::Window { ids, emitted, emitted_bytes } = &mut self.state else { return Ok(String::new()) };
        let text = self.tokenizer.decode(ids, false)?;
        let incomplete =
            self.tokenizer.scheme == Scheme::Other && text.ends_with(char::REPLACEMENT_CHARACTER);
        if incomplete && pending == Pending::Hold {
            return Ok(String::new());
        }
        let piece = text.get(*emitted_bytes..).unwrap_or_default().to_owned();
        if !piece.is_empty() {
            // This piece is the context of the next: decoders strip a space at the very beginning only, so the
            // context must be there, and its own text is the same whenever it is decoded.
            ids.drain(..*emitted);
            *emitted = ids.len();
            *emitted_bytes = self.tokenizer.decode(ids, false)?.len();
        }
        Ok(piece)
    }
}

/// What to do with text that may not be final.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pending {
    Hold,
    Emit,
}
