//! A request's body with deadlines: one that stops coming is an error for whoever reads it, never a wait without end.
use std::error::Error as StdError;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::BoxError;
use axum::body::HttpBody;
use hyper::body::{Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::Status;

/// Bounds of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BodyTimes {
    /// Most time between two pieces of it.
    pub idle: Duration,
    /// Most time for all of it.
    pub whole: Duration,
}

/// The body did not come in time. A gRPC service sees the status that is this error's source.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct BodyTimeout {
    /// For the sender: how long was waited, and for what.
    what: String,
    #[source]
    status: Status,
}

impl BodyTimeout {
    fn new(what: String) -> Self {
        Self { status: Status::deadline_exceeded(what.clone()), what }
    }

    /// The timeout that an error is, or was made of.
    pub fn find<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a Self> {
        let mut next = Some(error);
        while let Some(error) = next {
            if let Some(found) = error.downcast_ref() {
                return Some(found);
            }
            next = error.source();
        }
        None
    }
}

/// See the module's head. The time runs while somebody waits for the body.
pub(super) struct TimedBody<B> {
    inner: B,
    times: BodyTimes,
    /// Of the whole body.
    ends: Instant,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<B> TimedBody<B> {
    pub(super) fn new(inner: B, times: BodyTimes) -> Self {
        Self { inner, times, ends: Instant::now() + times.whole, waiting: None }
    }
}

impl<B> HttpBody for TimedBody<B>
where
    B: HttpBody + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = B::Data;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, BoxError>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.inner).poll_frame(cx) {
            self.waiting = None;
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let (ends, times) = (self.ends, self.times);
        let until = ends.min(Instant::now() + times.idle);
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(sleep_until(until)));
        let deadline = waiting.deadline();
        match waiting.as_mut().poll(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => {
                let what = if deadline >= ends {
                    format!("the body did not come within {} ms", times.whole.as_millis())
                } else {
                    format!("nothing of the body came for {} ms", times.idle.as_millis())
                };
                Poll::Ready(Some(Err(BodyTimeout::new(what).into())))
            }
        }
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
    use axum::body::{Body, Bytes};
    use futures::{StreamExt, stream};
    use http_body_util::BodyExt;

    use super::*;

    const TIMES: BodyTimes =
        BodyTimes { idle: Duration::from_millis(200), whole: Duration::from_millis(500) };

    /// A byte after each pause, then nothing for ever.
    fn dripping(pauses_ms: Vec<u64>) -> TimedBody<Body> {
        let drops = stream::iter(pauses_ms).then(|pause| async move {
            tokio::time::sleep(Duration::from_millis(pause)).await;
            Ok::<_, BoxError>(Bytes::from_static(b"x"))
        });
        TimedBody::new(Body::from_stream(drops.chain(stream::pending())), TIMES)
    }

    async fn failure(body: TimedBody<Body>) -> (Duration, String) {
        let begun = Instant::now();
        let error = axum::Error::new(body.collect().await.unwrap_err());
        let found = BodyTimeout::find(&error).expect("found below what it was wrapped into").to_string();
        let status = Status::from_error(error.into());
        assert_eq!((status.code(), status.message()), (tonic::Code::DeadlineExceeded, found.as_str()));
        (begun.elapsed(), found)
    }

    #[tokio::test]
    async fn a_body_that_stops_ends_after_the_idle_time() {
        let (after, what) = failure(dripping(vec![20, 20])).await;
        assert!(after >= Duration::from_millis(240), "{after:?}");
        assert_eq!(what, "nothing of the body came for 200 ms");
    }

    #[tokio::test]
    async fn a_body_that_drips_ends_after_the_whole_time() {
        let (after, what) = failure(dripping(vec![5; 10_000])).await;
        assert!(after >= TIMES.whole, "{after:?}");
        assert_eq!(what, "the body did not come within 500 ms");
    }

    #[tokio::test]
    async fn a_body_that_comes_in_time_is_passed_on() {
        let whole = TimedBody::new(Body::from("all of it"), TIMES).collect().await.unwrap();
        assert_eq!(whole.to_bytes(), "all of it");
    }
}
