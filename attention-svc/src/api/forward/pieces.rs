//! What an answer is made of, so that one that breaks off does so between two pieces: an error can be read after it.
use http::{HeaderMap, header};

/// Kinds of answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pieces {
    /// Server-sent events, each with an empty line after it.
    Events,
    /// gRPC messages: a flag, four bytes of length, and as many of the message.
    Messages,
    /// Only all of it is of use.
    Whole,
}

impl Pieces {
    /// As the answer's headers say.
    pub(super) fn of(headers: &HeaderMap) -> Self {
        match headers.get(header::CONTENT_TYPE).map_or(&[][..], |kind| kind.as_bytes()) {
            kind if kind.starts_with(b"application/grpc") => Self::Messages,
            kind if kind.starts_with(b"text/event-stream") => Self::Events,
            _ => Self::Whole,
        }
    }

    /// Whether nothing that a client reads comes behind these pieces.
    pub(super) fn are_all(self, bytes: &[u8]) -> bool {
        match self {
            Self::Whole => true,
            Self::Events => bytes.ends_with(b"data: [DONE]\n\n"),
            // Their trailers do.
            Self::Messages => false,
        }
    }

    /// How many bytes at the beginning make up whole pieces.
    pub(super) fn complete(self, bytes: &[u8]) -> usize {
        match self {
            Self::Whole => 0,
            Self::Events => bytes.windows(2).rposition(|two| two == b"\n\n").map_or(0, |at| at + 2),
            Self::Messages => {
                let mut end = 0;
                while let Some([_, a, b, c, d]) = bytes.get(end..end + 5) {
                    let length = u32::from_be_bytes([*a, *b, *c, *d]) as usize;
                    match end.checked_add(5 + length).filter(|next| *next <= bytes.len()) {
                        Some(next) => end = next,
                        None => break,
                    }
                }
                end
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_end_with_an_empty_line() {
        let complete = |text: &str| Pieces::Events.complete(text.as_bytes());
        assert_eq!(complete("data: 1\n\ndata: 2\n\n"), 18);
        assert_eq!(complete("data: 1\n\ndata: 2\n"), 9);
        assert_eq!((complete("data: 1"), complete("\n"), complete("")), (0, 0, 0));
        let are_all = |text: &str| Pieces::Events.are_all(text.as_bytes());
        assert!(are_all("data: 1\n\ndata: [DONE]\n\n") && !are_all("data: 1\n\n"));
    }

    #[test]
    fn messages_say_how_long_they_are() {
        let complete = |bytes: &[u8]| Pieces::Messages.complete(bytes);
        let two = [0, 0, 0, 0, 2, 7, 7, 0, 0, 0, 0, 0];
        assert_eq!((complete(&two), complete(&two[..11]), complete(&two[..6])), (12, 7, 0));
        assert_eq!(complete(&[0, 255, 255, 255, 255, 1]), 0);
        assert_eq!(complete(&[]), 0);
    }

    #[test]
    fn other_answers_are_of_one_piece() {
        let of = |kind: &'static str| {
            Pieces::of(&HeaderMap::from_iter([(header::CONTENT_TYPE, kind.parse().unwrap())]))
        };
        assert_eq!(of("text/event-stream; charset=utf-8"), Pieces::Events);
        assert_eq!(of("application/grpc+proto"), Pieces::Messages);
        assert_eq!((of("application/json"), Pieces::of(&HeaderMap::new())), (Pieces::Whole, Pieces::Whole));
        assert_eq!(Pieces::Whole.complete(b"{}\n\n"), 0);
    }
}
