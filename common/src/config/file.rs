//! Configuration files: TOML with the names of the options. What the command line says wins.
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Why a configuration file cannot be used; one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("--config {path}: {what}")]
pub struct FileError {
    /// Which file.
    pub path: String,
    /// Why; names the field and, where it is unknown, those that are known.
    pub what: String,
}

/// Reads options from a file and lays `command_line` over them: what is `None` there comes from the file. `T` refuses
/// unknown fields.
///
/// # Errors
/// [`FileError`] names the file and the field.
pub fn overlay<T: Serialize + DeserializeOwned>(path: &Path, command_line: &T) -> Result<T, FileError> {
    let failed = |what: String| FileError { path: path.display().to_string(), what: what.replace('\n', " ") };
    let text = std::fs::read_to_string(path).map_err(|e| failed(e.to_string()))?;
    // By itself first, so that errors are about the file.
    toml::from_str::<T>(&text).map_err(|e| failed(at(&text, &e)))?;
    let mut options: toml::Table = toml::from_str(&text).map_err(|e| failed(at(&text, &e)))?;
    let given = toml::Table::try_from(command_line).map_err(|e| failed(e.to_string()))?;
    options.extend(given);
    options.try_into().map_err(|e: toml::de::Error| failed(e.message().to_owned()))
}

fn at(text: &str, error: &toml::de::Error) -> String {
    match error.span() {
        Some(span) => {
            let line = text[..span.start.min(text.len())].matches('\n').count() + 1;
            format!("line {line}: {}", error.message())
        }
        None => error.message().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
    struct Options {
        max_queue: Option<u32>,
        listen: Option<String>,
    }

    fn read(text: &str, command_line: &Options) -> Result<Options, FileError> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        overlay(file.path(), command_line)
    }

    #[test]
    fn the_command_line_wins_over_the_file() {
        let given = Options { max_queue: Some(1), listen: None };
        let both = read("max-queue = 5\nlisten = \"a:1\"", &given).unwrap();
        assert_eq!(both, Options { max_queue: Some(1), listen: Some("a:1".into()) });
    }

    #[test]
    fn an_unknown_field_is_named_with_the_file_and_the_known_ones() {
        let error = read("listen = \"a:1\"\nmax-queu = 5", &Options::default()).unwrap_err().to_string();
        assert!(error.starts_with("--config /"), "{error}");
        for part in ["line 2", "`max-queu`", "`max-queue`", "`listen`"] {
            assert!(error.contains(part), "{error}");
        }
        let error = read("max-queue = \"x\"", &Options::default()).unwrap_err().to_string();
        assert!(error.contains("line 1") && !error.contains('\n'), "{error}");
    }
}
