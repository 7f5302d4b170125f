//! How many prompts are tokenized at once. The memory of it is many times the prompt's, and it cannot be cut short: so
//! there are no more at a time than cores, the others wait, and who leaves while waiting has cost nothing.
use std::num::NonZero;
use std::sync::Arc;
use std::thread::available_parallelism;

use tokio::sync::Semaphore;

use super::error::ApiError;

/// Where prompts are tokenized.
pub(super) struct Tokenizing {
    free: Arc<Semaphore>,
}

impl Tokenizing {
    /// As many at a time as there are cores.
    pub(super) fn new() -> Self {
        Self::at_once(available_parallelism().map_or(1, NonZero::get))
    }

    fn at_once(most: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(most)) }
    }

    /// Runs `work` on a thread where it may take its time, once there is room for it.
    ///
    /// # Errors
    /// [`ApiError::internal`] when it panics.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let room = Arc::clone(&self.free).acquire_owned().await.map_err(ApiError::internal)?;
        let outcome = tokio::task::spawn_blocking(move || {
            // Held until the work is done, whether or not anybody waits for it still.
            let _room = room;
            work()
        });
        outcome.await.map_err(ApiError::internal)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use futures::FutureExt;

    use super::*;

    #[tokio::test]
    async fn who_leaves_while_waiting_starts_nothing_and_who_leaves_later_keeps_the_room() {
        let tokenizing = Tokenizing::at_once(1);
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let (end, ends) = mpsc::channel::<()>();
        let (did, done) = mpsc::channel();
        let first_did = did.clone();
        let mut first = Box::pin(tokenizing.run(move || {
            let _ = begun.send(());
            let _ = ends.recv();
            first_did.send(1)
        }));
        assert!((&mut first).now_or_never().is_none());
        has_begun.await.unwrap();
        // Its caller is gone, its work is not.
        drop(first);
        let second_did = did.clone();
        assert!(tokenizing.run(move || second_did.send(2)).now_or_never().is_none());
        drop(end);
        tokenizing.run(move || did.send(3)).await.unwrap().unwrap();
        assert_eq!(done.iter().collect::<Vec<_>>(), [1, 3]);
    }
}
