//! What a new connection speaks, by its first bytes. HTTP/2's preface is waited for in full, so that no later stage waits
//! for it without a deadline.
use std::io;

use tokio::io::{AsyncRead, AsyncReadExt};

use crate::link::attach::MAGIC;

const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// What a connection speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Speaks {
    /// HTTP/2, by its preface.
    Http2,
    /// HTTP/1.1, or nothing that is known here: refusing that is hyper's business.
    Http1,
    /// A link wants to be attached.
    Link,
}

/// Reads until it is clear. A link's magic is consumed; of HTTP, what was read has to be read again.
pub(super) async fn first_bytes(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<(Speaks, Vec<u8>)> {
    let mut read = Vec::with_capacity(HTTP2_PREFACE.len());
    loop {
        match classify(&read) {
            Verdict::Known(speaks) => return Ok((speaks, read)),
            Verdict::Needs(more) => {
                let mut buf = [0; HTTP2_PREFACE.len()];
                match stream.read(&mut buf[..more]).await? {
                    0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                    count => read.extend_from_slice(&buf[..count]),
                }
            }
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Known(Speaks),
    /// At most this many bytes may be read next: never one that belongs to a link's handshake.
    Needs(usize),
}

fn classify(read: &[u8]) -> Verdict {
    if read.starts_with(&MAGIC) {
        Verdict::Known(Speaks::Link)
    } else if MAGIC.starts_with(read) {
        Verdict::Needs(MAGIC.len() - read.len())
    } else if read.len() < HTTP2_PREFACE.len() && HTTP2_PREFACE.starts_with(read) {
        Verdict::Needs(HTTP2_PREFACE.len() - read.len())
    } else if read == HTTP2_PREFACE {
        Verdict::Known(Speaks::Http2)
    } else {
        Verdict::Known(Speaks::Http1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_bytes_decide() {
        assert_eq!(classify(b""), Verdict::Needs(8));
        assert_eq!(classify(b"AFDLIN"), Verdict::Needs(2));
        assert_eq!(classify(b"AFDLINK1"), Verdict::Known(Speaks::Link));
        assert_eq!(classify(b"AFDLINK2"), Verdict::Known(Speaks::Http1));
        assert_eq!(classify(b"PRI * "), Verdict::Needs(18));
        assert_eq!(classify(HTTP2_PREFACE), Verdict::Known(Speaks::Http2));
        assert_eq!(classify(b"POST /v1"), Verdict::Known(Speaks::Http1));
    }
}
