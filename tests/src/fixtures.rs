//! Tiny checkpoints under `tests/fixtures/` and the values a reference implementation gave for them.
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Deserialize;

/// All families: the checkpoints that the reference computed hidden states of.
pub const ALL: [&str; 7] = [
    "tiny-llama",
    "tiny-mixtral",
    "tiny-qwen3-moe",
    "tiny-olmoe",
    "tiny-deepseek-v2",
    "tiny-deepseek-v2-group",
    "tiny-deepseek-v3",
];

/// What `expected/<name>.json` holds, as far as tests read it.
#[derive(Debug, Deserialize)]
pub struct Expected {
    /// Prompts and their greedy continuations.
    pub prompts: Vec<Prompt>,
}

/// One prompt and its greedy continuation in fp32.
#[derive(Clone, Debug, Deserialize)]
pub struct Prompt {
    /// "short", "long", ...
    pub id: String,
    /// As text.
    pub text: String,
    /// Conversation it was rendered from, for chat prompts.
    #[serde(default)]
    pub messages: Option<serde_json::Value>,
    /// As tokens.
    pub input_ids: Vec<u32>,
    /// Greedy continuation.
    pub generated_ids: Vec<u32>,
    /// The same as text, special tokens left out.
    pub generated_text: String,
}

/// `tests/fixtures`.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// Folder of a tiny checkpoint.
pub fn checkpoint(name: &str) -> PathBuf {
    root().join("tiny").join(name)
}

/// A copy of a tiny checkpoint in a new folder `to`, to be changed.
///
/// # Errors
/// When it cannot be written.
pub fn copy(name: &str, to: PathBuf) -> anyhow::Result<PathBuf> {
    std::fs::create_dir(&to)?;
    for file in std::fs::read_dir(checkpoint(name))? {
        let file = file?;
        std::fs::copy(file.path(), to.join(file.file_name()))?;
    }
    Ok(to)
}

/// Folder of the real model that `deploy/model.sh` makes, or `None` where it was not made.
pub fn smollm2(name: &str) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.deps/models").join(name);
    folder.join("model.safetensors").exists().then_some(folder)
}

/// Expected values.
///
/// # Errors
/// When the file is not there or not what it was.
pub fn expected(name: &str) -> anyhow::Result<Expected> {
    let path = root().join("expected").join(format!("{name}.json"));
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    serde_json::from_str(&text).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    #[test]
    fn all_families_are_those_with_hidden_states_of_the_reference() {
        let files = std::fs::read_dir(super::root().join("expected")).unwrap();
        let files = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        let names: BTreeSet<_> =
            files.filter_map(|file| Some(file.strip_suffix(".hidden.safetensors")?.to_owned())).collect();
        assert_eq!(names, super::ALL.map(str::to_owned).into());
    }
}
