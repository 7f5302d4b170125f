//! From chosen tokens to what the caller of one sequence sees: detokenized, ended at stop tokens and stop texts. Both
//! the streaming and the unary answers are made of these pieces, so they cannot differ.
use std::sync::Arc;

use super::stop_texts::{KeepStopText, StopTexts};
use super::{Detokenizer, TextError, Tokenizer};

/// What a request says about its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputRules {
    /// Texts that end the sequence.
    pub stop_texts: Vec<String>,
    /// Tokens that end the sequence (the engine knows the same ones).
    pub stop_token_ids: Vec<u32>,
    /// Whether the stop text or token is shown.
    pub keep_stop: KeepStopText,
    /// Stop texts that are complete before this many tokens do not count.
    pub min_tokens: u32,
    /// Leave special tokens out.
    pub skip_special_tokens: bool,
}

/// What one token added to the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Text that became final; may be empty.
    pub text: String,
    /// A stop text was completed: the sequence is over, whatever the engine goes on to say.
    pub stopped: bool,
}

/// Text of one sequence as it grows.
#[derive(Debug)]
pub struct OutputText {
    rules: OutputRules,
    detokenizer: Detokenizer,
    stops: StopTexts,
    num_tokens: u32,
}

impl OutputText {
    /// Nothing generated yet.
    pub fn new(tokenizer: Arc<Tokenizer>, rules: OutputRules) -> Self {
        Self {
            detokenizer: Detokenizer::new(tokenizer, rules.skip_special_tokens),
            stops: StopTexts::new(&rules.stop_texts, rules.keep_stop),
            rules,
            num_tokens: 0,
        }
    }

    /// Takes the next token.
    ///
    /// # Errors
    /// What the tokenizer said; the sequence cannot go on.
    pub fn push(&mut self, id: u32) -> Result<Piece, TextError> {
        self.num_tokens += 1;
        let hidden = self.rules.keep_stop == KeepStopText::No && self.rules.stop_token_ids.contains(&id);
        if hidden {
            return Ok(Piece { text: String::new(), stopped: false });
        }
        let text = self.detokenizer.push(id)?;
        Ok(self.watch(&text))
    }

    /// The engine ended the sequence: returns what was held back.
    ///
    /// # Errors
    /// What the tokenizer said.
    pub fn finish(&mut self) -> Result<Piece, TextError> {
        let text = self.detokenizer.finish()?;
        let mut last = self.watch(&text);
        if !last.stopped {
            last.text.push_str(&self.stops.finish());
        }
        Ok(last)
    }

    /// Tokens taken so far.
    pub fn num_tokens(&self) -> u32 {
        self.num_tokens
    }

    fn watch(&mut self, text: &str) -> Piece {
        if self.num_tokens < self.rules.min_tokens {
            return Piece { text: self.stops.pass(text), stopped: false };
        }
        let watched = self.stops.push(text);
        Piece { text: watched.text, stopped: watched.stopped }
    }
}
