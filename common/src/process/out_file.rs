//! Files that a command writes at its end, tried before it begins: what takes minutes is not lost to a path that was never
//! any good. Until then nothing of a file that is there changes, and of one that is not nothing is there.
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// A file that can be written.
#[derive(Debug)]
pub struct OutFile {
    path: PathBuf,
    /// The one that was there; held, because a pipe's reader would take its being closed for the end.
    there: Option<File>,
}

impl OutFile {
    /// Tries `path`.
    ///
    /// # Errors
    /// The system's own words, without the path.
    pub fn open(path: &Path) -> io::Result<Self> {
        let there = match File::create_new(path) {
            Ok(_) => std::fs::remove_file(path).map(|()| None)?,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                Some(File::options().write(true).open(path)?)
            }
            Err(error) => return Err(error),
        };
        Ok(Self { path: path.to_owned(), there })
    }

    /// Makes `text` all that is in it. One that was not there is there whole or not at all.
    ///
    /// # Errors
    /// The system's own words, without the path.
    pub fn write(self, text: &str) -> io::Result<()> {
        match self.there {
            Some(mut file) => {
                if file.metadata()?.is_file() {
                    file.set_len(0)?;
                }
                file.write_all(text.as_bytes())
            }
            None => {
                let written = File::create_new(&self.path)?.write_all(text.as_bytes());
                // Half of it is of no use to anybody.
                written.inspect_err(|_| drop(std::fs::remove_file(&self.path)))
            }
        }
    }
}

/// Where a command's `--json` goes.
#[derive(Debug)]
pub enum JsonOut {
    /// Nobody asked for it.
    Nowhere,
    /// `-`: there instead of what people read.
    Stdout,
    /// Beside that.
    File(OutFile),
}

impl JsonOut {
    /// As the option says.
    ///
    /// # Errors
    /// As [`OutFile::open`].
    pub fn open(path: Option<&Path>) -> io::Result<Self> {
        match path {
            None => Ok(Self::Nowhere),
            Some(path) if path.as_os_str() == "-" => Ok(Self::Stdout),
            Some(path) => OutFile::open(path).map(Self::File),
        }
    }

    /// Writes it, and says whether what people read is to be printed too.
    ///
    /// # Errors
    /// As [`OutFile::write`].
    pub fn write(self, json: &serde_json::Value) -> io::Result<bool> {
        match self {
            Self::Nowhere => Ok(true),
            Self::Stdout => {
                println!("{json:#}");
                Ok(false)
            }
            Self::File(file) => file.write(&format!("{json:#}\n")).map(|()| true),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trying_a_file_changes_nothing_and_writing_it_everything() {
        let folder = tempfile::tempdir().unwrap();
        let (new, old) = (folder.path().join("new"), folder.path().join("old"));
        std::fs::write(&old, "what was there before").unwrap();
        let opened = [&new, &old].map(|path| OutFile::open(path).unwrap());
        assert!(!new.exists(), "left behind");
        assert_eq!(std::fs::read_to_string(&old).unwrap(), "what was there before");
        opened.into_iter().for_each(|file| file.write("short").unwrap());
        let read = [&new, &old].map(|path| std::fs::read_to_string(path).unwrap());
        assert_eq!(read, ["short", "short"]);
    }

    #[test]
    fn what_cannot_be_written_is_known_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let nowhere = folder.path().join("nowhere").join("file");
        assert_eq!(OutFile::open(&nowhere).unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(OutFile::open(folder.path()).unwrap_err().kind(), ErrorKind::IsADirectory);
        assert!(matches!(JsonOut::open(Some(Path::new("-"))), Ok(JsonOut::Stdout)));
        assert!(JsonOut::open(Some(&nowhere)).is_err());
    }
}
