//! `--address-file`: where a process says that it can be reached, and at which address.
use std::io;
use std::path::{Path, PathBuf};

/// The file cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("--address-file {}: {source}", path.display())]
pub struct AddressFileError {
    /// Which file.
    pub path: PathBuf,
    /// The system's own words.
    pub source: io::Error,
}

/// Writes `host:port` and a line break, whole or not at all: whoever waits for the file never reads half an address.
///
/// # Errors
/// [`AddressFileError`].
pub fn write(path: &Path, address: &str) -> Result<(), AddressFileError> {
    let unfinished = path.with_added_extension(format!("{}.unfinished", std::process::id()));
    std::fs::write(&unfinished, format!("{address}\n"))
        .and_then(|()| std::fs::rename(&unfinished, path))
        .map_err(|source| AddressFileError { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_whole_and_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("address");
        write(&path, "127.0.0.1:1").unwrap();
        write(&path, "127.0.0.1:2").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "127.0.0.1:2\n");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        let error = write(Path::new("/nowhere/at/all"), "x").unwrap_err().to_string();
        assert!(error.starts_with("--address-file /nowhere/at/all: "), "{error}");
    }
}
