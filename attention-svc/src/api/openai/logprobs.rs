//! Log probabilities in OpenAI's two shapes, and vLLM's for prompts.
use serde_json::{Map, Value, json};

use crate::request::{ChosenToken, TokenLogprobs};
use crate::text::Tokenizer;

/// What JSON has instead of minus infinity, as OpenAI writes it.
const LOWEST: f64 = -9999.0;

fn number(logprob: f32) -> Value {
    let logprob = f64::from(logprob);
    json!(if logprob.is_finite() { logprob } else { LOWEST })
}

/// A token as text; one that is no text by itself as its bytes, so that different tokens look different.
fn label(tokenizer: &Tokenizer, id: u32) -> String {
    String::from_utf8(tokenizer.token_bytes(id)).unwrap_or_else(|error| {
        let hex = error.as_bytes().iter().map(|byte| format!("\\x{byte:02x}"));
        format!("bytes:{}", hex.collect::<String>())
    })
}

fn chat_entry(tokenizer: &Tokenizer, id: u32, logprob: f32) -> Map<String, Value> {
    let bytes = tokenizer.token_bytes(id);
    let mut entry = Map::new();
    entry.insert("token".into(), String::from_utf8_lossy(&bytes).into());
    entry.insert("logprob".into(), number(logprob));
    entry.insert("bytes".into(), bytes.into());
    entry
}

/// `choices[].logprobs` of a chat completion.
pub(super) fn chat(tokenizer: &Tokenizer, tokens: &[ChosenToken]) -> Value {
    let content: Vec<Value> = tokens
        .iter()
        .filter_map(|token| {
            let logprobs = token.logprobs.as_ref()?;
            let mut entry = chat_entry(tokenizer, token.id, logprobs.chosen);
            let top =
                logprobs.top.iter().map(|(id, logprob)| Value::Object(chat_entry(tokenizer, *id, *logprob)));
            entry.insert("top_logprobs".into(), top.collect());
            Some(Value::Object(entry))
        })
        .collect();
    json!({"content": content, "refusal": null})
}

/// `choices[].logprobs` of a text completion, as its tokens come.
#[derive(Default)]
pub(super) struct TextLogprobs {
    /// Characters of the tokens so far.
    offset: usize,
}

impl TextLogprobs {
    /// The object for these tokens; a token without log probabilities (the first of a prompt) has nulls.
    pub(super) fn take(&mut self, tokenizer: &Tokenizer, tokens: &[(u32, Option<&TokenLogprobs>)]) -> Value {
        let labels: Vec<String> = tokens.iter().map(|(id, _)| label(tokenizer, *id)).collect();
        let offsets: Vec<usize> = tokens
            .iter()
            .map(|(id, _)| {
                let at = self.offset;
                // A character belongs to the token with its first byte.
                self.offset += tokenizer.token_bytes(*id).iter().filter(|byte| **byte & 0xc0 != 0x80).count();
                at
            })
            .collect();
        let chosen: Vec<Value> =
            tokens.iter().map(|(_, l)| l.map_or(Value::Null, |l| number(l.chosen))).collect();
        let top: Vec<Value> = tokens
            .iter()
            .map(|(id, logprobs)| {
                let Some(logprobs) = logprobs else { return Value::Null };
                let mut entries = Map::new();
                for (id, logprob) in &logprobs.top {
                    entries.insert(label(tokenizer, *id), number(*logprob));
                }
                // The chosen one is always there, even when it is none of the best.
                entries.insert(label(tokenizer, *id), number(logprobs.chosen));
                Value::Object(entries)
            })
            .collect();
        json!({"tokens": labels, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets})
    }
}

/// `choices[].prompt_logprobs`: per prompt token null or an object from token id to what is known of it.
pub(super) fn prompt(tokenizer: &Tokenizer, ids: &[u32], logprobs: &[Option<TokenLogprobs>]) -> Value {
    let entry = |id: u32, logprob: f32, rank: usize| {
        let text = String::from_utf8_lossy(&tokenizer.token_bytes(id)).into_owned();
        (id.to_string(), json!({"logprob": number(logprob), "rank": rank, "decoded_token": text}))
    };
    ids.iter()
        .zip(logprobs)
        .map(|(id, logprobs)| {
            let Some(logprobs) = logprobs else { return Value::Null };
            let top = logprobs.top.iter().enumerate().map(|(i, (id, logprob))| entry(*id, *logprob, i + 1));
            let mut entries: Map<String, Value> = top.collect();
            let (key, value) = entry(*id, logprobs.chosen, logprobs.rank as usize);
            entries.insert(key, value);
            Value::Object(entries)
        })
        .collect()
}
