//! Whether anything runs on a connection, so that one that only stands there can be closed, and whether a request has begun
//! whose head does not come to its end.
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
    /// Since when a request has begun whose head is not whole. Of HTTP/1.1 only.
    head_since: Option<Instant>,
    /// Answers that the service has given and the connection has not begun to send. Of HTTP/1.1 only.
    unsent_answers: usize,
}

/// A request under way.
pub(super) struct Running(Activity);

impl Activity {
    pub(super) fn new() -> Self {
        let state = State { running: 0, quiet_since: Instant::now(), head_since: None, unsent_answers: 0 };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// A request's head is whole.
    pub(super) fn begin(&self) -> Running {
        let mut state = self.lock();
        state.running += 1;
        state.head_since = None;
        Running(self.clone())
    }

    /// Bytes have come. Where nothing runs they begin a head.
    pub(super) fn handle_bytes(&self) {
        let mut state = self.lock();
        if state.running == 0 {
            state.head_since.get_or_insert_with(Instant::now);
        }
    }

    /// The service has answered a request.
    pub(super) fn handle_answer(&self) {
        self.lock().unsent_answers += 1;
    }

    /// The connection has begun to send an answer.
    pub(super) fn handle_answer_sent(&self) {
        let mut state = self.lock();
        state.unsent_answers = state.unsent_answers.saturating_sub(1);
    }

    /// Whether what the connection sends next is an answer of the service.
    pub(super) fn owes_answer(&self) -> bool {
        self.lock().unsent_answers > 0
    }

    /// Returns once a head has been under way for `limit`.
    pub(super) async fn head_overdue(&self, limit: Duration) {
        loop {
            let until = self.lock().head_since.unwrap_or_else(Instant::now) + limit;
            if until <= Instant::now() {
                return;
            }
            // A head that begins meanwhile is not due before that.
            sleep_until(until).await;
        }
    }

    /// Returns once nothing has run for `limit`.
    pub(super) async fn idle_for(&self, limit: Duration) {
        loop {
            let until = match *self.lock() {
                State { running: 0, quiet_since, .. } => quiet_since + limit,
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
