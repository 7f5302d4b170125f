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

/// The error with its line, and with the field whose value it is about: the parser says that only of unknown ones.
fn at(text: &str, error: &toml::de::Error) -> String {
    let Some(span) = error.span() else { return error.message().to_owned() };
    let before = &text[..text.floor_char_boundary(span.start)];
    let line = before.matches('\n').count() + 1;
    match field_before(before).filter(|name| !error.message().contains(&format!("`{name}`"))) {
        Some(name) => format!("line {line}: `{name}`: {}", error.message()),
        None => format!("line {line}: {}", error.message()),
    }
}

/// The last `name =` of a text: a value may begin on a later line than its name.
fn field_before(text: &str) -> Option<&str> {
    let mut names = text.lines().rev().filter_map(|line| Some(line.split_once('=')?.0.trim()));
    let is_name = |name: &&str| {
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    };
    names.find(is_name)
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
    }

    #[test]
    fn a_value_of_the_wrong_type_names_its_field() {
        for (text, place) in [
            ("max-queue = \"x\"", "line 1: `max-queue`: "),
            ("listen = \"a=b\"\n  max-queue=-1", "line 2: `max-queue`: "),
            ("# max-queue = 5\nlisten = [\n \"a\"]", "line 2: `listen`: "),
        ] {
            let error = read(text, &Options::default()).unwrap_err().to_string();
            assert!(error.contains(place) && !error.contains('\n'), "{error}");
        }
    }
}
