//! Configuration files: TOML with the names of the options. What the command line says wins.
use std::collections::BTreeSet;
use std::path::Path;

use clap::Args;
use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::de::DeTable;

/// The option that names the file, which a file cannot.
const CONFIG: &str = "config";

/// Why a configuration file cannot be used; one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("--config {path}: {what}")]
pub struct FileError {
    /// Which file.
    pub path: String,
    /// Why; names the field and, where it is unknown, those that are known.
    pub what: String,
}

/// Reads options from a file and lays `command_line` over them: what is `None` there comes from the file. Every field of `T`
/// stands in the file under its name on the command line; groups of options that `T` flattens are read like its own.
///
/// # Errors
/// [`FileError`] names the file and the field.
pub fn overlay<T: Args + Serialize + DeserializeOwned>(
    path: &Path,
    command_line: &T,
) -> Result<T, FileError> {
    let failed = |what: String| FileError { path: path.display().to_string(), what: what.replace('\n', " ") };
    let text = std::fs::read_to_string(path).map_err(|e| failed(e.to_string()))?;
    let mut options = read::<T>(&text).map_err(failed)?;
    let given = toml::Table::try_from(command_line).map_err(|e| failed(e.to_string()))?;
    options.extend(given);
    options.try_into().map_err(|e: toml::de::Error| failed(e.message().to_owned()))
}

/// The options of a file, each of which `T` has and can take. They are looked at one by one, so that an error has a name and a
/// line: serde has neither for the fields of a flattened group.
fn read<T: Args + DeserializeOwned>(text: &str) -> Result<toml::Table, String> {
    let line_of = |at: usize| text[..text.floor_char_boundary(at)].matches('\n').count() + 1;
    let not_toml = |e: toml::de::Error| match e.span() {
        Some(span) => format!("line {}: {}", line_of(span.start), e.message()),
        None => e.message().to_owned(),
    };
    let parsed = DeTable::parse(text).map_err(not_toml)?;
    let mut places: Vec<(usize, &str)> =
        parsed.get_ref().keys().map(|name| (name.span().start, name.get_ref().as_ref())).collect();
    places.sort_unstable();
    let options: toml::Table = toml::from_str(text).map_err(not_toml)?;
    let known = names::<T>();
    for (at, name) in places {
        let line = line_of(at);
        if !known.contains(name) {
            let known = known.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
            return Err(format!("line {line}: unknown field `{name}`, expected one of {known}"));
        }
        let alone = toml::Table::from_iter([(name.to_owned(), options[name].clone())]);
        alone.try_into::<T>().map_err(|e| format!("line {line}: `{name}`: {}", e.message()))?;
    }
    Ok(options)
}

/// Of all options of `T`, as on the command line, without dashes in front.
fn names<T: Args>() -> BTreeSet<String> {
    let command = T::augment_args(clap::Command::new(CONFIG));
    let names = command.get_arguments().filter_map(|option| option.get_long().map(str::to_owned));
    names.filter(|name| name != CONFIG).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Default, PartialEq, Args, Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case", default)]
    struct Options {
        #[arg(long)]
        max_queue: Option<u32>,
        #[command(flatten)]
        #[serde(flatten)]
        group: Group,
        #[arg(long)]
        #[serde(skip)]
        config: Option<String>,
    }

    #[derive(Debug, Default, PartialEq, Args, Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case", default)]
    struct Group {
        #[arg(long)]
        listen: Option<String>,
        #[arg(long)]
        num_threads: Option<u32>,
    }

    fn overlaid(text: &str, command_line: &Options) -> Result<Options, FileError> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        overlay(file.path(), command_line)
    }

    #[test]
    fn the_command_line_wins_over_the_file() {
        let group = Group { num_threads: Some(2), ..Group::default() };
        let given = Options { max_queue: Some(1), group, ..Options::default() };
        let both = overlaid("max-queue = 5\nlisten = \"a:1\"\nnum-threads = 9", &given).unwrap();
        let group = Group { listen: Some("a:1".into()), num_threads: Some(2) };
        assert_eq!(both, Options { group, ..given });
    }

    #[test]
    fn an_unknown_field_is_named_with_the_file_and_the_known_ones() {
        let error = overlaid("listen = \"a:1\"\nmax-queu = 5", &Options::default()).unwrap_err().to_string();
        assert!(error.starts_with("--config /"), "{error}");
        for part in ["line 2", "`max-queu`", "`max-queue`", "`listen`"] {
            assert!(error.contains(part), "{error}");
        }
        let error = overlaid("config = \"another\"", &Options::default()).unwrap_err().to_string();
        let known = "expected one of `listen`, `max-queue`, `num-threads`";
        assert!(error.ends_with(&format!("line 1: unknown field `config`, {known}")), "{error}");
    }

    #[test]
    fn a_value_of_the_wrong_type_names_its_field() {
        for (text, place) in [
            ("max-queue = \"x\"", "line 1: `max-queue`: "),
            ("listen = \"a=b\"\n  max-queue=-1", "line 2: `max-queue`: "),
            ("# max-queue = 5\nlisten = [\n \"a\"]", "line 2: `listen`: "),
            ("num-threads = \"x\"\nlisten = \"a\"", "line 1: `num-threads`: "),
            ("listen = \"a\"\nlisten = \"b\"", "line 2: "),
        ] {
            let error = overlaid(text, &Options::default()).unwrap_err().to_string();
            assert!(error.contains(place) && !error.contains('\n'), "{error}");
        }
    }
}
