//! What a server says first. A gRPC client may ask as soon as its connection stands, and a port that closes at once, with
//! a word why, may then have closed it before the question left: the client hears that it was cancelled, and the word is
//! lost. So whoever connects waits for the greeting: HTTP/2's settings and their acknowledgement, or a goodbye.
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;

/// A greeting is short; what is longer is nobody's goodbye.
const MOST_BYTES: usize = 16 << 10;
/// Length, type, flags, stream.
const HEAD_BYTES: usize = 9;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const ACK: u8 = 1;
/// The last stream and the error's number, before the words.
const GOAWAY_HEAD_BYTES: usize = 8;
/// First byte of a TLS record that says what is wrong.
const TLS_ALERT: u8 = 21;

/// HTTP/2's INADEQUATE_SECURITY: it is to be asked under TLS.
const INADEQUATE_SECURITY: u8 = 12;

/// How a server has greeted: it speaks HTTP/2 and takes requests, or not.
pub(super) type Greeted = Result<(), Goodbye>;

/// Why a server takes no requests, in words: its own where it has any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Goodbye {
    /// Not in the clear.
    WantsTls(String),
    /// Not now, or never.
    Other(String),
}

/// What has been heard so far. Pure.
#[derive(Debug, Default)]
struct Greeting {
    heard: Vec<u8>,
}

impl Greeting {
    /// Takes in what came. `None` while that leaves it open.
    fn handle(&mut self, bytes: &[u8]) -> Option<Greeted> {
        let other = |words: &str| Some(Err(Goodbye::Other(words.into())));
        self.heard.extend_from_slice(bytes);
        match self.heard.first()? {
            0 => {}
            b'H' => return other("an HTTP server without HTTP/2 listens there: no gRPC"),
            &TLS_ALERT => return Some(Err(Goodbye::WantsTls("this port speaks TLS".into()))),
            _ => return other("whatever listens there does not speak HTTP/2: no gRPC"),
        }
        let mut rest = &self.heard[..];
        while let Some((head, after)) = rest.split_at_checked(HEAD_BYTES) {
            let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
            match (head[3], head[4]) {
                (SETTINGS, flags) if flags & ACK != 0 => return Some(Ok(())),
                (GOAWAY, _) => {
                    let goodbye = after.get(..length)?;
                    let words = goodbye.get(GOAWAY_HEAD_BYTES..).unwrap_or_default();
                    let words = String::from_utf8_lossy(words).into_owned();
                    return match goodbye.get(GOAWAY_HEAD_BYTES - 1) {
                        Some(&INADEQUATE_SECURITY) => Some(Err(Goodbye::WantsTls(words))),
                        _ if words.is_empty() => other("the server takes no requests any more"),
                        _ => other(&words),
                    };
                }
                _ => rest = after.get(length..)?,
            }
        }
        (self.heard.len() > MOST_BYTES).then_some(Ok(()))
    }
}

/// A connection whose first words are listened to.
pub(super) struct Overheard<S> {
    inner: S,
    /// Until it is over.
    greeting: Option<Greeting>,
    told: watch::Sender<Option<Greeted>>,
}

impl<S> Overheard<S> {
    /// Tells `told` how the server has greeted.
    pub(super) fn new(inner: S, told: watch::Sender<Option<Greeted>>) -> Self {
        Self { inner, greeting: Some(Greeting::default()), told }
    }

    fn tell(&mut self, greeted: Greeted) {
        self.greeting = None;
        self.told.send_replace(Some(greeted));
    }
}

impl<S> Drop for Overheard<S> {
    fn drop(&mut self) {
        if self.greeting.is_some() {
            self.tell(Err(Goodbye::Other("the server closed the connection without a word".into())));
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Overheard<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.inner).poll_read(cx, buf);
        if let (Some(greeting), Poll::Ready(Ok(()))) = (&mut self.greeting, &read)
            && let Some(greeted) = greeting.handle(&buf.filled()[before..])
        {
            self.tell(greeted);
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Overheard<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS_OF_NONE: [u8; 9] = [0, 0, 0, SETTINGS, 0, 0, 0, 0, 0];
    const ACKNOWLEDGED: [u8; 9] = [0, 0, 0, SETTINGS, ACK, 0, 0, 0, 0];

    /// Byte by byte, as the slowest network would bring it.
    fn greeted(bytes: &[u8]) -> Option<Greeted> {
        let mut greeting = Greeting::default();
        bytes.iter().find_map(|byte| greeting.handle(&[*byte]))
    }

    fn goodbye(words: &str, number: u8) -> Vec<u8> {
        let mut frame = vec![0, 0, 8 + words.len() as u8, GOAWAY, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, number];
        frame.extend(words.bytes());
        frame
    }

    #[test]
    fn acknowledged_settings_are_a_greeting() {
        assert_eq!(greeted(&[SETTINGS_OF_NONE, ACKNOWLEDGED].concat()), Some(Ok(())));
        // Settings with one of them, then a window update.
        let others =
            [0, 0, 6, SETTINGS, 0, 0, 0, 0, 0, 0, 4, 0, 0, 1, 0, 0, 0, 4, 8, 0, 0, 0, 0, 0, 0, 0, 0, 9];
        assert_eq!(greeted(&others), None);
        assert_eq!(greeted(&[&others[..], &ACKNOWLEDGED].concat()), Some(Ok(())));
    }

    #[test]
    fn a_goodbye_is_told_in_its_own_words() {
        let said = [&SETTINGS_OF_NONE[..], &goodbye("this port speaks TLS", INADEQUATE_SECURITY)].concat();
        assert_eq!(greeted(&said[..said.len() - 1]), None);
        assert_eq!(greeted(&said), Some(Err(Goodbye::WantsTls("this port speaks TLS".into()))));
        assert_eq!(greeted(&goodbye("too busy", 11)), Some(Err(Goodbye::Other("too busy".into()))));
        assert!(
            matches!(greeted(&goodbye("", 0)), Some(Err(Goodbye::Other(words))) if words.contains("no requests"))
        );
    }

    #[test]
    fn whoever_speaks_something_else_is_named() {
        let said = |bytes: &[u8]| match greeted(bytes) {
            Some(Err(Goodbye::Other(words))) => words,
            other => panic!("{other:?}"),
        };
        assert!(said(b"HTTP/1.1 400 Bad Request\r\n").contains("without HTTP/2"));
        assert!(said(b"SSH-2.0-OpenSSH").contains("does not speak HTTP/2"));
        let alert = greeted(&[TLS_ALERT, 3, 3, 0, 2, 2, 22]);
        assert!(matches!(alert, Some(Err(Goodbye::WantsTls(_)))), "{alert:?}");
    }
}
