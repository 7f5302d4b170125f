//! Whether anything runs on a connection, so that one that only stands there can be closed.
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::HttpBody;
use hyper::body::{Frame, SizeHint};
use tokio::time::{Instant, sleep_until};

/// Requests of one connection, from their headers to the end of their answers. Clones share it.
#[derive(Clone)]
pub(super) struct Activity {
    state: Arc<Mutex<State>>,
}

struct State {
    running: usize,
    /// When the last one ended, or the connection began.
    quiet_since: Instant,
}

/// A request under way.
pub(super) struct Running(Activity);

impl Activity {
    pub(super) fn new() -> Self {
        let state = State { running: 0, quiet_since: Instant::now() };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    pub(super) fn begin(&self) -> Running {
        self.lock().running += 1;
        Running(self.clone())
    }

    /// Returns once nothing has run for `limit`.
    pub(super) async fn idle_for(&self, limit: Duration) {
        loop {
            let until = match *self.lock() {
                State { running: 0, quiet_since } => quiet_since + limit,
                // It will have to be quiet for as long after it has ended.
                _ => Instant::now() + limit,
            };
            if until <= Instant::now() {
                return;
            }
            sleep_until(until).await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.running -= 1;
        state.quiet_since = Instant::now();
    }
}

/// A response's body that keeps something until it has been sent or dropped: whatever stands for the request.
pub struct Watched<B, G> {
    inner: B,
    _kept: G,
}

impl<B, G> Watched<B, G> {
    /// Keeps `kept` as long as `inner`.
    pub fn new(inner: B, kept: G) -> Self {
        Self { inner, _kept: kept }
    }
}

impl<B: HttpBody + Unpin, G: Unpin> HttpBody for Watched<B, G> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.inner).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_connection_is_idle_once_its_last_request_has_ended_for_long_enough() {
        let (activity, begun) = (Activity::new(), Instant::now());
        let running = activity.begin();
        let second = activity.begin();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(100)).await;
            drop(running);
            tokio::time::sleep(Duration::from_millis(50)).await;
            drop(second);
        });
        activity.idle_for(Duration::from_millis(80)).await;
        assert!(begun.elapsed() >= Duration::from_millis(230), "{:?}", begun.elapsed());
    }
}
