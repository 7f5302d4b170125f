//! What the library does not do for HTTP/1.1: give a begun head its deadline without closing connections that wait for
//! their next request, and say in words what is wrong with bytes that are no request. Done where bytes pass: on the stream
//! below the library.
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::idle::Activity;

/// A stream under an HTTP/1.1 connection, whose requests are known to `activity`.
pub(super) struct Http1<S> {
    inner: S,
    activity: Activity,
    /// What is written instead of the library's answer, and how much of it has been.
    instead: Option<(Vec<u8>, usize)>,
}

impl<S> Http1<S> {
    pub(super) fn new(inner: S, activity: Activity) -> Self {
        Self { inner, activity, instead: None }
    }
}

impl<S: AsyncWrite + Unpin> Http1<S> {
    /// Writes our words where `first`, of `num_bytes` in all, is an answer of the library's own. `None` where it is not.
    fn poll_instead(
        &mut self,
        cx: &mut Context<'_>,
        first: &[u8],
        num_bytes: usize,
    ) -> Option<Poll<io::Result<usize>>> {
        if self.instead.is_none() && !self.activity.owes_answer() && first.len() == num_bytes {
            self.instead = with_words(first).map(|answer| (answer, 0));
        }
        let (answer, written) = self.instead.as_mut()?;
        while *written < answer.len() {
            match Pin::new(&mut self.inner).poll_write(cx, &answer[*written..]) {
                Poll::Ready(Ok(0)) => return Some(Poll::Ready(Ok(0))),
                Poll::Ready(Ok(count)) => *written += count,
                Poll::Ready(Err(error)) => return Some(Poll::Ready(Err(error))),
                Poll::Pending => return Some(Poll::Pending),
            }
        }
        self.instead = None;
        Some(Poll::Ready(Ok(num_bytes)))
    }

    /// After the inner stream took some bytes that begin with `first`.
    fn note_written(&self, first: &[u8], count: usize) {
        if count > 0 && first.starts_with(b"HTTP/1.") && !first.starts_with(b"HTTP/1.1 100") {
            self.activity.handle_answer_sent();
        }
    }
}

/// The library's answer to what it could not read, which has no body, with one.
fn with_words(answer: &[u8]) -> Option<Vec<u8>> {
    const EMPTY: &str = "content-length: 0\r\n";
    let text = std::str::from_utf8(answer).ok()?;
    let status = text.strip_prefix("HTTP/1.1 ").or_else(|| text.strip_prefix("HTTP/1.0 "))?.get(..3)?;
    let words = match status {
        "400" => "this is no HTTP request: the port speaks HTTP/1.1, HTTP/2 and gRPC\n",
        "414" => "the request's address is too long\n",
        "431" => "the request's headers are too many or too long\n",
        _ => return None,
    };
    let (before, after) = text.split_once(EMPTY)?;
    let length = words.len();
    let head = format!("{before}content-type: text/plain\r\ncontent-length: {length}\r\n{after}");
    head.ends_with("\r\n\r\n").then(|| format!("{head}{words}").into_bytes())
}

impl<S: AsyncRead + Unpin> AsyncRead for Http1<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        if buf.filled().len() > before {
            self.activity.handle_bytes();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Http1<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if let Some(written) = self.poll_instead(cx, buf, buf.len()) {
            return written;
        }
        let count = ready!(Pin::new(&mut self.inner).poll_write(cx, buf))?;
        self.note_written(buf, count);
        Poll::Ready(Ok(count))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let first: &[u8] = bufs.first().map_or(&[], |first| first);
        let num_bytes = bufs.iter().map(|buf| buf.len()).sum();
        if let Some(written) = self.poll_instead(cx, first, num_bytes) {
            return written;
        }
        let count = ready!(Pin::new(&mut self.inner).poll_write_vectored(cx, bufs))?;
        self.note_written(first, count);
        Poll::Ready(Ok(count))
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_empty_answer_to_something_unreadable_gets_words() {
        let answer =
            with_words(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\ndate: today\r\n\r\n").unwrap();
        let answer = String::from_utf8(answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.contains("content-type: text/plain") && head.ends_with("date: today"), "{answer}");
        assert!(
            head.contains(&format!("content-length: {}", body.len())) && body.contains("no HTTP request")
        );
        for other in [
            &b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"[..],
            b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}",
            b"{\"a\": 1}",
        ] {
            assert_eq!(with_words(other), None, "{other:?}");
        }
    }
}
