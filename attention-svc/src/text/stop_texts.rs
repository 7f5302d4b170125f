//! Stop texts: the first one that is completed ends the text. They may span tokens and pieces; only what could still
//! become a stop text is held back.

/// Watches the text of one sequence for its stop texts. Pure.
#[derive(Clone, Debug)]
pub struct StopTexts {
    patterns: Vec<Pattern>,
    /// Text seen and not released: what could still become a stop text.
    held: String,
    keep: KeepStopText,
}

/// Whether the stop text stays in the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepStopText {
    /// The text ends before it.
    No,
    /// The text ends with it.
    Yes,
}

/// What became of a piece of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watched {
    /// Text that may be shown now.
    pub text: String,
    /// A stop text was completed: nothing more may be shown.
    pub stopped: bool,
}

/// One stop text, matched byte by byte (Knuth, Morris, Pratt). UTF-8 is self-synchronising: a match never begins or
/// ends inside a character.
#[derive(Clone, Debug)]
struct Pattern {
    bytes: Vec<u8>,
    /// `fallback[i]`: length of the longest proper border of the first `i + 1` bytes.
    fallback: Vec<usize>,
    /// Bytes matched so far.
    matched: usize,
}

impl StopTexts {
    /// Watches for these texts; empty ones are ignored.
    pub fn new(texts: &[String], keep: KeepStopText) -> Self {
        let patterns = texts.iter().filter(|t| !t.is_empty()).map(|t| Pattern::new(t)).collect();
        Self { patterns, held: String::new(), keep }
    }

    /// Takes the next piece of text.
    pub fn push(&mut self, piece: &str) -> Watched {
        if self.patterns.is_empty() {
            return Watched { text: piece.to_owned(), stopped: false };
        }
        let start = self.held.len();
        self.held.push_str(piece);
        for (offset, byte) in piece.bytes().enumerate() {
            // Of several completed by the same byte the longest began first.
            let completed = self.patterns.iter_mut().filter_map(|p| p.step(byte)).max();
            if let Some(length) = completed {
                let end = start + offset + 1;
                self.held.truncate(match self.keep {
                    KeepStopText::No => end - length,
                    KeepStopText::Yes => end,
                });
                return Watched { text: std::mem::take(&mut self.held), stopped: true };
            }
        }
        let undecided = self.patterns.iter().map(|p| p.matched).max().unwrap_or(0);
        // A border may begin inside the last character; show whole characters only.
        let mut certain = self.held.len() - undecided;
        while !self.held.is_char_boundary(certain) {
            certain -= 1;
        }
        let rest = self.held.split_off(certain);
        Watched { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }

    /// Takes a piece in which stop texts do not count (before `min_tokens`).
    pub fn pass(&mut self, piece: &str) -> String {
        self.patterns.iter_mut().for_each(|p| p.matched = 0);
        std::mem::take(&mut self.held) + piece
    }

    /// The sequence ended otherwise: returns what was held back.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

impl Pattern {
    fn new(text: &str) -> Self {
        let bytes = text.as_bytes().to_vec();
        let mut fallback = vec![0; bytes.len()];
        let mut border = 0;
        for i in 1..bytes.len() {
            while border > 0 && bytes[i] != bytes[border] {
                border = fallback[border - 1];
            }
            border += usize::from(bytes[i] == bytes[border]);
            fallback[i] = border;
        }
        Self { bytes, fallback, matched: 0 }
    }

    /// Takes one byte; the pattern's length when this byte completes it.
    fn step(&mut self, byte: u8) -> Option<usize> {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.fallback[self.matched - 1];
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        (self.matched == self.bytes.len()).then(|| {
            self.matched = 0;
            self.bytes.len()
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(pieces: &[&str], stops: &[&str], keep: KeepStopText) -> (Vec<String>, bool) {
        let stops: Vec<String> = stops.iter().map(|s| (*s).to_owned()).collect();
        let mut watch = StopTexts::new(&stops, keep);
        let mut shown = Vec::new();
        for piece in pieces {
            let watched = watch.push(piece);
            shown.push(watched.text);
            if watched.stopped {
                return (shown, true);
            }
        }
        shown.push(watch.finish());
        (shown, false)
    }

    #[test]
    fn a_stop_text_may_span_three_pieces() {
        let (shown, stopped) = run(&["one ST", "O", "P two"], &["STOP"], KeepStopText::No);
        assert_eq!((shown.concat().as_str(), stopped), ("one ", true));
        let (shown, _) = run(&["one ST", "O", "P two"], &["STOP"], KeepStopText::Yes);
        assert_eq!(shown.concat(), "one STOP");
    }

    #[test]
    fn only_what_could_become_a_stop_text_is_held_back() {
        let (shown, stopped) = run(&["ab", "ax", "aab"], &["aac"], KeepStopText::No);
        assert_eq!(shown, ["ab", "ax", "aab", ""]);
        assert!(!stopped);
        let (shown, _) = run(&["xaa", "ab"], &["aac"], KeepStopText::No);
        assert_eq!(shown, ["x", "aaab", ""]);
    }

    #[test]
    fn the_earliest_completed_one_wins() {
        assert_eq!(run(&["xabcd"], &["bcd", "ab"], KeepStopText::No).0.concat(), "x");
        assert_eq!(run(&["xabcd"], &["bc", "abc"], KeepStopText::No).0.concat(), "x");
        assert_eq!(run(&["日本語"], &["本"], KeepStopText::No).0.concat(), "日");
    }

    #[test]
    fn nothing_stops_before_the_minimum() {
        let mut watch = StopTexts::new(&["ab".into()], KeepStopText::No);
        assert_eq!(watch.pass("xab a"), "xab a");
        assert_eq!(watch.push("b"), Watched { text: "b".into(), stopped: false });
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(
            pieces in prop::collection::vec("[abé]{0,4}", 0..8),
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
        ) {
            let stop_refs: Vec<&str> = stops.iter().map(String::as_str).collect();
            let piece_refs: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let whole = pieces.concat();
            let (shown, stopped) = run(&piece_refs, &stop_refs, KeepStopText::No);
            let (at_once, stopped_at_once) = run(&[&whole], &stop_refs, KeepStopText::No);
            prop_assert_eq!(shown.concat(), at_once.concat());
            prop_assert_eq!(stopped, stopped_at_once);
            // Against a plain search: the match that ends first, of those the one that begins first.
            let first = stops.iter()
                .filter_map(|s| whole.find(s.as_str()).map(|at| (at + s.len(), at)))
                .min();
            prop_assert_eq!(stopped, first.is_some());
            if let Some((_, at)) = first {
                prop_assert_eq!(shown.concat(), &whole[..at]);
            }
        }
    }
}
