//! The checkpoints' tokenizers and chat templates against Hugging Face's own outputs, and the incremental detokenizer
//! against the tokenizer.
use std::path::{Path, PathBuf};
use std::sync::Arc;

use attention_svc::text::stop_texts::KeepStopText;
use attention_svc::text::tokenizer::SpecialTokens;
use attention_svc::text::{
    ChatMessage, Detokenizer, OutputRules, OutputText, Text, TextError, Tokenizer, TokenizerFile,
};
use proptest::prelude::*;
use serde_json::Value;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures")
}

/// Checkpoints whose expected values have Hugging Face's tokenizer cases: those of our own making have none.
fn names() -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(fixtures().join("tiny"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| expected(name)["tokenizer_cases"].is_array())
        .collect();
    names.sort();
    assert!(names.len() >= 7, "{names:?}");
    names
}

fn load(name: &str) -> Text {
    Text::load(&fixtures().join("tiny").join(name), TokenizerFile::Required).unwrap()
}

fn expected(name: &str) -> Value {
    let path = fixtures().join("expected").join(format!("{name}.json"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

fn str_of<'a>(case: &'a Value, field: &str) -> &'a str {
    case[field].as_str().unwrap()
}

/// Texts that become few tokens for their length, and some that vanish.
fn hard_to_bound() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        "[ \\n\\t]{1,40}",
        "(the|ing|abc| the){1,9}",
        "\\PC{1,9}",
        "[\\x00-\\x1f]{1,9}",
        "(\u{212a}\u{327}|\u{3c9}\u{313}\u{300}\u{345}|e\u{301}){1,9}",
        "(<s>|</s>|<unk>|<\\|im_end\\|>|\u{2581}){1,4}",
    ];
    proptest::collection::vec(piece, 0..9).prop_map(|pieces| pieces.concat())
}

#[test]
fn no_text_has_fewer_tokens_than_its_length_says() {
    let tokenizers: Vec<_> = names().into_iter().map(|name| (load(&name).tokenizer, name)).collect();
    proptest!(|(text in hard_to_bound())| {
        for (tokenizer, name) in &tokenizers {
            let ids = tokenizer.encode(&text, SpecialTokens::AsWritten).unwrap();
            prop_assert!(tokenizer.least_tokens(&text) <= ids.len(), "{name}: {text:?}");
        }
    });
}

#[test]
fn length_alone_says_how_many_tokens_a_text_has_at_least() {
    for name in names() {
        let tokenizer = load(&name).tokenizer;
        let least = tokenizer.least_tokens(&"the quick brown fox ".repeat(5000));
        assert!(least > 1000, "{name}: {least}");
        assert_eq!(tokenizer.least_tokens(""), 0);
    }
    // One whose pre-tokenizer drops blanks and whose unknown words are one token each.
    assert_eq!(load("tiny-hash-routed").tokenizer.least_tokens(&" ".repeat(100_000)), 0);
}

#[test]
fn text_becomes_the_ids_of_hugging_face_and_back() {
    for name in names() {
        let tokenizer = load(&name).tokenizer;
        for case in expected(&name)["tokenizer_cases"].as_array().unwrap() {
            let text = str_of(case, "text");
            let encode = |special| tokenizer.encode(text, special).unwrap();
            assert_eq!(encode(SpecialTokens::Add), ids(&case["input_ids"]), "{name}: {text:?}");
            let plain = ids(&case["ids_without_special"]);
            assert_eq!(encode(SpecialTokens::AsWritten), plain, "{name}: {text:?}");
            assert_eq!(
                tokenizer.decode(&plain, true).unwrap(),
                str_of(case, "decoded_skip_special"),
                "{name}"
            );
        }
    }
}

#[test]
fn conversations_are_rendered_as_hugging_face_renders_them() {
    for name in names() {
        let text = load(&name);
        for case in expected(&name)["chat_cases"].as_array().unwrap() {
            let messages: Vec<ChatMessage> = case["messages"]
                .as_array()
                .unwrap()
                .iter()
                .map(|m| ChatMessage {
                    role: str_of(m, "role").into(),
                    content: str_of(m, "content").into(),
                    name: None,
                })
                .collect();
            let prompt = case["add_generation_prompt"].as_bool().unwrap();
            match (text.render(&messages, prompt, &serde_json::Map::new()), case["error"].as_str()) {
                (Ok(rendered), None) => {
                    assert_eq!(rendered, str_of(case, "rendered"), "{name}");
                    let tokens = text.tokenizer.encode(&rendered, SpecialTokens::AsWritten).unwrap();
                    assert_eq!(tokens, ids(&case["input_ids"]), "{name}");
                }
                (Err(TextError::Refused(message)), Some(error)) => assert_eq!(message, error, "{name}"),
                (result, error) => panic!("{name}: {result:?}, expected {error:?}"),
            }
        }
    }
}

fn pieces(tokenizer: &Arc<Tokenizer>, tokens: &[u32], skip_special: bool) -> Vec<String> {
    let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), skip_special);
    let mut pieces: Vec<String> = tokens.iter().map(|id| detokenizer.push(*id).unwrap()).collect();
    pieces.push(detokenizer.finish().unwrap());
    pieces
}

#[test]
fn generated_texts_come_out_piece_by_piece() {
    for name in names() {
        let tokenizer = load(&name).tokenizer;
        for prompt in expected(&name)["prompts"].as_array().unwrap() {
            let pieces = pieces(&tokenizer, &ids(&prompt["generated_ids"]), true);
            assert_eq!(pieces.concat(), str_of(prompt, "generated_text"), "{name}");
        }
    }
}

#[test]
fn no_piece_shows_half_a_character() {
    for name in names() {
        let tokenizer = load(&name).tokenizer;
        for text in ["👩‍👩‍👧‍👦 naïve 你好，世界 🙂🙂 한국어", "a🙂", "  leading", "ქართული\n\n\tx"]
        {
            let tokens = tokenizer.encode(text, SpecialTokens::AsWritten).unwrap();
            let pieces = pieces(&tokenizer, &tokens, true);
            assert_eq!(pieces.concat(), tokenizer.decode(&tokens, true).unwrap(), "{name}");
            assert!(pieces.iter().all(|p| !p.contains('\u{fffd}')), "{name}: {pieces:?}");
        }
    }
}

#[test]
fn an_explicit_add_bos_token_wins() {
    let source = fixtures().join("tiny/tiny-llama");
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(source.join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    let config = r#"{"bos_token": {"content": "<|begin_of_text|>"}, "add_bos_token": false}"#;
    std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
    let tokenizer = Text::load(folder.path(), TokenizerFile::Required).unwrap().tokenizer;
    let with = tokenizer.encode("a", SpecialTokens::Add).unwrap();
    assert_eq!(with, tokenizer.encode("a", SpecialTokens::AsWritten).unwrap());
}

#[test]
fn a_tokenizer_that_cannot_work_is_named_before_anybody_uses_it() {
    let source = std::fs::read_to_string(fixtures().join("tiny/tiny-llama/tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&source).unwrap();
    // A table of one entry, in which the library looks for the entry of every byte.
    tokenizer["normalizer"] =
        serde_json::json!({"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAA="});
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let error = Text::load(folder.path(), TokenizerFile::Required).unwrap_err().to_string();
    assert!(error.ends_with("tokenizer.json: the tokenizers library cannot read it"), "{error}");
}

#[test]
fn a_missing_tokenizer_is_named_unless_weights_are_dummy() {
    let folder = tempfile::tempdir().unwrap();
    let error = Text::load(folder.path(), TokenizerFile::Required).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json"), "{error}");
    let text = Text::load(folder.path(), TokenizerFile::Optional).unwrap();
    assert!(matches!(text.tokenizer.encode("a", SpecialTokens::Add), Err(TextError::NoTokenizer)));
    assert_eq!(text.tokenizer.decode(&[1, 20], true).unwrap(), " 1 20");
}

fn output(
    tokenizer: &Arc<Tokenizer>,
    tokens: &[u32],
    stop: &[&str],
    keep_stop: KeepStopText,
) -> (String, u32) {
    let rules = OutputRules {
        stop_texts: stop.iter().map(|s| (*s).to_owned()).collect(),
        stop_token_ids: vec![],
        keep_stop,
        min_tokens: 0,
        skip_special_tokens: true,
    };
    let mut output = OutputText::new(Arc::clone(tokenizer), rules);
    let mut text = String::new();
    for id in tokens {
        let piece = output.push(*id).unwrap();
        text.push_str(&piece.text);
        if piece.stopped {
            return (text, output.num_tokens());
        }
    }
    text.push_str(&output.finish().unwrap().text);
    (text, output.num_tokens())
}

#[test]
fn stop_texts_may_span_tokens_and_end_before_half_a_character() {
    for name in names() {
        let tokenizer = load(&name).tokenizer;
        let tokens =
            tokenizer.encode("one STOPPING🙂 more words come after", SpecialTokens::AsWritten).unwrap();
        for stop in ["STOPPING", "PING🙂", "🙂", "G🙂 m"] {
            let (text, used) = output(&tokenizer, &tokens, &["never", stop], KeepStopText::No);
            assert_eq!(text, "one STOPPING🙂 more words come after".split(stop).next().unwrap(), "{name}");
            assert!(used < u32::try_from(tokens.len()).unwrap(), "{name}: stopped late");
            let kept = output(&tokenizer, &tokens, &[stop], KeepStopText::Yes).0;
            assert!(kept.ends_with(stop), "{name}: {kept:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn pieces_of_any_tokens_are_the_text_of_all(
        model in 0usize..7,
        tokens in prop::collection::vec(prop_oneof![0u32..840, 0u32..8, 3u32..262], 0..40),
        skip in any::<bool>(),
    ) {
        let name = &names()[model];
        let tokenizer = load(name).tokenizer;
        let whole = tokenizer.decode(&tokens, skip).unwrap();
        prop_assert_eq!(pieces(&tokenizer, &tokens, skip).concat(), whole, "{}", name);
    }
}
