//! What files say, read again when they change: certificates and tokens are replaced while the process runs.
//!
//! There is no task and no clock of its own: whoever asks looks at the files' stamps, at most once a second. Files that are
//! half replaced (a new certificate, the old key) are refused and looked at again after the next change; until then the
//! last good ones stay.
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const LOOK_EVERY: Duration = Duration::from_secs(1);

type Read<T> = dyn Fn() -> Result<T, String> + Send + Sync;

/// A value made from files.
pub(super) struct Reread<T> {
    files: Vec<PathBuf>,
    read: Box<Read<T>>,
    state: Mutex<State<T>>,
}

struct State<T> {
    value: Arc<T>,
    stamps: Vec<Stamp>,
    looked_at: Instant,
}

/// What differs once a file was written or replaced: seconds, nanoseconds, size and inode; `None` where there is no file.
type Stamp = Option<(i64, i64, u64, u64)>;

impl<T> Reread<T> {
    /// Reads for the first time.
    ///
    /// # Errors
    /// Those of `read`, whose words name the file.
    pub(super) fn new(
        files: Vec<PathBuf>,
        read: impl Fn() -> Result<T, String> + Send + Sync + 'static,
    ) -> Result<Self, String> {
        // Before reading: what changes in between is seen next time.
        let stamps = stamps(&files);
        let value = Arc::new(read()?);
        let state = Mutex::new(State { value, stamps, looked_at: Instant::now() });
        Ok(Self { files, read: Box::new(read), state })
    }

    /// The latest good value.
    pub(super) fn get(&self) -> Arc<T> {
        let mut state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if state.looked_at.elapsed() >= LOOK_EVERY {
            state.looked_at = Instant::now();
            let now = stamps(&self.files);
            if now != state.stamps {
                state.stamps = now;
                match (self.read)() {
                    Ok(value) => {
                        state.value = Arc::new(value);
                        tracing::info!(files = ?self.files, "read again: they have changed");
                    }
                    Err(what) => {
                        tracing::warn!(
                            what,
                            "files have changed and cannot be used: going on with the old ones"
                        )
                    }
                }
            }
        }
        Arc::clone(&state.value)
    }
}

fn stamps(files: &[PathBuf]) -> Vec<Stamp> {
    let stamp = |file: &PathBuf| {
        let found = std::fs::metadata(file).ok()?;
        Some((found.mtime(), found.mtime_nsec(), found.size(), found.ino()))
    };
    files.iter().map(stamp).collect()
}

impl<T> fmt::Debug for Reread<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Reread").field(&self.files).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_seen_and_a_bad_one_is_not_taken() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "1").unwrap();
        let path = file.path().to_owned();
        let read = move || {
            let text = std::fs::read_to_string(&path).map_err(|error| error.to_string())?;
            text.parse::<u32>().map_err(|error| format!("{text}: {error}"))
        };
        let files = Reread::new(vec![file.path().to_owned()], read).unwrap();
        // As if the last look had been long ago.
        let later = |files: &Reread<u32>| {
            files.state.lock().unwrap().looked_at -= LOOK_EVERY;
            *files.get()
        };
        assert_eq!((*files.get(), later(&files)), (1, 1));
        std::fs::write(file.path(), "23").unwrap();
        assert_eq!(*files.get(), 1, "nobody has looked yet");
        assert_eq!(later(&files), 23);
        std::fs::write(file.path(), "half").unwrap();
        assert_eq!(later(&files), 23);
        std::fs::write(file.path(), "4").unwrap();
        assert_eq!(later(&files), 4);
        std::fs::remove_file(file.path()).unwrap();
        assert_eq!(later(&files), 4);
    }
}
